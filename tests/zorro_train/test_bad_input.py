"""Whatever is wrong with a call, one sentence says what, where and what to do; the next call is right."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from arctic_platform.rl.zorro_train import Qwen3ModelOncePatcher, _native
from arctic_platform.rl.zorro_train.actor import DeduplicatedActor, packed_ppo_policy_loss
from arctic_platform.rl.zorro_train.seqlen_balancing import rearrange_micro_batches_with_dedup
from arctic_platform.rl.zorro_train.tests import (
    benchmark_performance,
    compare_gradients,
    create_dummy_batch,
)

SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"response_len": -1}, "response_len must not be negative, got -1"),
    ({"temperature": 0}, r"temperature must be > 0 and finite, got 0.0. Greedy decoding"),
    ({"temperature": float("nan")}, "temperature must be > 0"),
    ({"temperature": float("inf")}, "temperature must be > 0 and finite"),
    ({"logits_optimization": "fast"}, "logits_optimization must be one of none, compute, memory, got 'fast'"),
    ({"logits_optimization_peak_mem_size_in_gib": 0}, "logits_optimization_peak_mem_size_in_gib must be > 0, got 0"),
    ({"attn_implementation": "magic"}, "attn_implementation must be None or one of eager, fused, .* got 'magic'"),
    ({"world_size": 0}, "world_size must be >= 1, got 0"),
    ({"world_size": 2}, "world_size 2 with logits_optimization memory needs torch.distributed"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS)
def test_settings(model: Any, patch: Callable[..., Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^\[zorro\] {message}"):
        patch(model, **{"response_len": 3, **settings})
    assert "forward" not in vars(model)


def test_world_size_without_memory_mode_needs_no_process_group(model: Any, patch: Callable[..., Any]) -> None:
    patch(model, 3, world_size=2, logits_optimization="none")


CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"attention_mask": torch.full((2, 6), 2)},
        ValueError,
        "attention_mask must hold 0 and 1, got 2 in row 0, column 0",
    ),
    ({"attention_mask": torch.ones(2, 1, 6, 6)}, ValueError, r"attention_mask must be \[2, 6\] as input_ids"),
    ({"attention_mask": torch.zeros(2, 6)}, ValueError, "attention_mask must keep at least one token"),
    ({"input_ids": torch.ones(6, dtype=torch.long)}, ValueError, r"input_ids must be \[batch, sequence\]"),
    (
        {"input_ids": torch.full((2, 6), 131)},
        ValueError,
        r"input_ids must lie in \[0, 131\), the model's vocabulary, got 131",
    ),
    ({"input_ids": torch.full((2, 6), -1)}, ValueError, "must not be negative, got -1"),
    ({"input_ids": torch.ones(2, 2, dtype=torch.long)}, ValueError, r"response_length must lie in \[0, 2\].*got 3"),
    (
        {"attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)},
        ValueError,
        "the first response token has no predecessor",
    ),
    ({"pixel_values": torch.zeros(1)}, NotImplementedError, "input must be text, got pixel_values"),
    ({"output_attentions": True}, NotImplementedError, "output_attentions has no meaning"),
    ({"output_hidden_states": True}, NotImplementedError, "output_hidden_states has no meaning"),
    ({"logits_to_keep": 3}, NotImplementedError, "logits_to_keep has no meaning"),
    ({"use_cache": True}, ValueError, "calculate_entropy belongs to a call with use_cache=False"),
    ({"labels": torch.ones(2, 6, dtype=torch.long)}, ValueError, "calculate_entropy belongs to a call"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), CALLS)
def test_calls(
    model: Any, patch: Callable[..., Any], arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    patch(model, 3)
    good = {"input_ids": torch.ones(2, 6, dtype=torch.long), "use_cache": False, "calculate_entropy": True}
    with pytest.raises(error, match=message) as raised:
        model(**{**good, **arguments})
    assert "\n" not in str(raised.value)
    assert model(**good).logprobs.shape == (6,)


def test_false_flags_are_no_reason_to_refuse(model: Any, patch: Callable[..., Any]) -> None:
    patch(model, 3)
    scores = model(
        input_ids=torch.ones(2, 6, dtype=torch.long),
        use_cache=False,
        return_dict=False,
        output_attentions=False,
        output_hidden_states=None,
        logits_to_keep=0,
        labels=None,
    )
    assert scores.entropy is None
    assert "entropy" not in scores
    assert "logprobs" in scores


def test_active_dropout(load: Callable[..., Any], patch: Callable[..., Any]) -> None:
    model = load(attention_dropout=0.1)
    patch(model, 3)
    call = {"input_ids": torch.ones(2, 6, dtype=torch.long), "use_cache": False}
    model(**call)  # off in evaluation mode
    model.train()
    with pytest.raises(NotImplementedError, match=r"dropout must be off, got .*self_attn.attention_dropout of 0.1"):
        model(**call)
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(load(), peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.2)).train()
    patch(adapted, 3)
    with pytest.raises(NotImplementedError, match=r"dropout must be off, got .*lora_dropout.* with p=0.2"):
        adapted(**call)


def test_other_models_are_refused_by_name(model: Any, patch: Callable[..., Any], load: Callable[..., Any]) -> None:
    other = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )
    with pytest.raises(NotImplementedError, match=r"model must be one of Qwen3ForCausalLM, .*, got Qwen2ForCausalLM"):
        patch(other, 3)
    sliding = load(use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention"] * 3)
    with pytest.raises(NotImplementedError, match="must not use sliding-window attention"):
        patch(sliding, 3)
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(NotImplementedError, match="rope_type must not depend on the batch, got dynamic"):
        patch(model, 3)


def test_the_actor(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(
            RuntimeError, match=r'device must be there, got cuda without a CUDA device. Pass device="cpu"'
        ):
            DeduplicatedActor("anything")
        with pytest.raises(ValueError, match='Pass device="cpu"'):
            create_dummy_batch()
    for missing in (str(tmp_path / "nothing"), "./nothing", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="model_name_or_path must hold a model, got"):
            DeduplicatedActor(missing, device="cpu")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(FileNotFoundError, match="model_name_or_path must hold a model"):
        DeduplicatedActor(str(tmp_path), device="cpu")
    actor = DeduplicatedActor(
        str(model_folder("tiny-random-Qwen3")), device="cpu", dtype=torch.float32, max_token_len=20
    )
    batch = create_dummy_batch(4, 2, 9, 7, vocab_size=131, device="cpu")
    actor.forward(batch)
    with pytest.raises(
        ValueError, match="batch must hold old_log_probs and advantages for a training step, got no old"
    ):
        actor.compute_policy_loss_and_backward(batch)
    with pytest.raises(ValueError, match="batch must hold responses or response_length, got neither"):
        actor.forward({"input_ids": batch["input_ids"]})
    with pytest.raises(ValueError, match="responses must be at most as wide as input_ids, 16, got 17"):
        actor.forward({"input_ids": batch["input_ids"], "response_length": 17})
    long = create_dummy_batch(2, 1, 19, 2, vocab_size=131, device="cpu")
    with pytest.raises(ValueError, match=r"samples\[0\] must fit the cap of 20 tokens, got 21"):
        actor.forward(long)
    with pytest.raises(ValueError, match="baseline must be replicated or unpatched"):
        benchmark_performance(actor, baseline="none", device="cpu")


def test_helpers() -> None:
    with pytest.raises(ValueError, match=r"num_unique_prompts must lie in \[1, 3\], got 4"):
        create_dummy_batch(3, 4, device="cpu")
    with pytest.raises(ValueError, match="prompt_len must be >= 1"):
        create_dummy_batch(3, 1, prompt_len=0, device="cpu")
    with pytest.raises(ValueError, match=r"advantages must be \[2\] as log_prob, got \[3\]"):
        packed_ppo_policy_loss(torch.zeros(2), torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="response_length must lie in"):
        rearrange_micro_batches_with_dedup({"input_ids": torch.ones(2, 3, dtype=torch.long)}, 4, 100)
    one, two = {"w": torch.ones(3)}, {"w": torch.tensor([1.0, 1.0, 2.0])}
    assert compare_gradients(one, one) == 0
    with pytest.raises(AssertionError, match="the gradient of w must agree within"):
        compare_gradients(one, two)
    assert compare_gradients(one, two, atol=2) == pytest.approx(1 / 6**0.5)
    with pytest.raises(AssertionError, match="w has no gradient on the baseline"):
        compare_gradients(one, {})
    with pytest.raises(AssertionError, match="the gradient of w must be finite"):
        compare_gradients({"w": torch.full((3,), float("nan"))}, one)


def test_a_missing_library_is_an_import_error(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"^\[zorro\] libzorro.so must lie in .*, got none. Run \"make setup\"\.$"):
        _native.find([str(tmp_path)])
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "libzorro.so").touch()
    assert _native.find([str(tmp_path), str(tmp_path / "second")]) == tmp_path / "second" / "libzorro.so"


def test_importing_needs_no_extras() -> None:
    """Neither triton nor flash-attn nor deepspeed is imported, nor what only the tests use."""
    code = (
        "import sys, arctic_platform.rl.zorro_train.seqlen_balancing, arctic_platform.rl.zorro_train.tests\n"
        "print([name for name in ('triton', 'flash_attn', 'deepspeed', 'peft', 'tensordict', 'pytest')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_patcher_without_patching_changes_nothing(model: Any) -> None:
    Qwen3ModelOncePatcher(model, 3, 100, 2, 1.0, "none", 1)
    assert "forward" not in vars(model)

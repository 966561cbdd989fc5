"""A patched model inside what people put around models, and after the patch is gone."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from arctic_platform.rl.zorro_train import Qwen3ModelOncePatcher
from arctic_platform.rl.zorro_train.tests import baseline_scores, compare_gradients, gradients

Patch = Callable[..., Qwen3ModelOncePatcher]
Score = Callable[..., Any]
MakeBatch = Callable[..., dict[str, Any]]
SDPA = {"attn_implementation": "sdpa"}


def loss_of(logprobs: torch.Tensor, entropies: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(2)
    weights = torch.randn(2, logprobs.numel(), dtype=torch.float64).to(logprobs)
    return (weights[0] * logprobs + 0.1 * weights[1] * entropies).sum()


def expected_gradients(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    loss_of(*baseline_scores(model, batch)).backward()
    found = gradients(model)
    model.zero_grad()
    return found


def found_gradients(model: Any, batch: dict[str, Any], score: Score) -> dict[str, torch.Tensor]:
    scores = score(model, batch)
    loss_of(scores.logprobs, scores.entropy).backward()
    found = gradients(model)
    model.zero_grad()
    return found


def check(model: Any, batch: dict[str, Any], expected: dict[str, torch.Tensor], score: Score) -> None:
    assert compare_gradients(found_gradients(model, batch, score), expected, atol=0, rtol=1e-4) < 1e-5


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("settings", [{}, SDPA], ids=["eager", "sdpa"])
def test_gradient_checkpointing(
    load: Callable[..., Any], patch: Patch, score: Score, make_batch: MakeBatch, use_reentrant: bool, settings: Any
) -> None:
    model, batch = load(**settings), make_batch()
    expected = expected_gradients(model, batch)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    patch(model, batch["response_length"])
    calls = []
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    check(model, batch, expected, score)
    assert len(calls) == 2  # once forward, once again in backward


@pytest.mark.parametrize("settings", [{}, SDPA], ids=["eager", "sdpa"])
def test_autocast(load: Callable[..., Any], patch: Patch, score: Score, make_batch: MakeBatch, settings: Any) -> None:
    """bfloat16 autocast: no further from float32 than the unpatched model is under it."""
    model, batch = load(**settings), make_batch(rows=24, prompts=4)
    truth = baseline_scores(model, batch)[0].detach()
    exact = expected_gradients(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        naive = baseline_scores(model, batch)
    loss_of(*naive).backward()
    rough = gradients(model)
    model.zero_grad()
    patch(model, batch["response_length"])
    with torch.autocast("cpu", torch.bfloat16):
        scores = score(model, batch)
    assert scores.logprobs.dtype == torch.float32
    loss_of(scores.logprobs, scores.entropy).backward()
    ours = gradients(model)

    def error(found: dict[str, torch.Tensor]) -> float:
        return float(sum((found[name] - exact[name]).square().sum().item() for name in exact) ** 0.5)

    assert 0 < (scores.logprobs - truth).norm() <= 1.25 * (naive[0] - truth).norm()
    assert 0 < error(ours) <= 1.25 * error(rough)


def test_autocast_leaves_float64_alone(
    load: Callable[..., Any], patch: Patch, score: Score, make_batch: MakeBatch
) -> None:
    model, batch = load(dtype=torch.float64), make_batch()
    patch(model, batch["response_length"])
    with torch.no_grad():
        plain = score(model, batch).logprobs
        with torch.autocast("cpu", torch.bfloat16):
            assert (
                torch.ops.zorro.linear_logprob(
                    torch.zeros(1, 2, dtype=torch.float64),
                    torch.zeros(3, 2, dtype=torch.float64),
                    torch.zeros(1, dtype=torch.long),
                    torch.zeros(1, dtype=torch.long),
                    torch.ones(()),
                    "none",
                    1,
                )[0].dtype
                == torch.float64
            )
    assert plain.dtype == torch.float64


def test_frozen_parameters(model: Any, patch: Patch, score: Score, make_batch: MakeBatch) -> None:
    batch = make_batch()
    for name, weight in model.named_parameters():
        weight.requires_grad = "q_proj" in name or "norm" in name
    expected = expected_gradients(model, batch)
    patch(model, batch["response_length"])
    check(model, batch, expected, score)
    assert model.lm_head.weight.grad is None


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora(model: Any, patch: Patch, score: Score, make_batch: MakeBatch, when: str) -> None:
    """Adapters on the layers, put on before or after the patch, and taken off again."""
    peft = pytest.importorskip("peft")
    batch = make_batch()
    plain = baseline_scores(model, batch)[0].detach()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    if when == "after":
        patch(model, batch["response_length"])
    adapted = peft.get_peft_model(model, config)
    expected = expected_gradients(adapted, batch)
    assert expected
    assert all("lora" in name for name in expected)
    patcher = patch(adapted, batch["response_length"])
    check(adapted, batch, expected, score)
    assert (score(adapted, batch).logprobs - plain).abs().max() > 1e-2
    patcher.unpatch()
    with adapted.disable_adapter():
        torch.testing.assert_close(baseline_scores(adapted, batch)[0], plain)


@pytest.mark.parametrize("kind", ["lora", "modules_to_save"])
def test_adapter_on_the_head(model: Any, patch: Patch, score: Score, make_batch: MakeBatch, kind: str) -> None:
    """The head's own forward runs (mode none), whether the adapter came before or after the patch."""
    peft = pytest.importorskip("peft")
    batch = make_batch()
    patch(model, batch["response_length"], logits_optimization="none")
    targets = ["q_proj", "lm_head"] if kind == "lora" else ["q_proj"]
    save = ["lm_head"] if kind == "modules_to_save" else None
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=targets, modules_to_save=save, init_lora_weights=False)
    )
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "modules_to_save" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    expected = expected_gradients(adapted, batch)
    assert any("lm_head" in name for name in expected)
    check(adapted, batch, expected, score)
    patch(adapted, batch["response_length"], logits_optimization="memory")
    with pytest.raises(ValueError, match="logits_optimization must be none for a head with a bias, an adapter"):
        score(adapted, batch)


def test_a_head_with_a_bias(model: Any, patch: Patch, score: Score, make_batch: MakeBatch) -> None:
    batch = make_batch()
    head = nn.Linear(48, 131)
    head.weight = model.lm_head.weight
    model.lm_head = head
    expected = expected_gradients(model, batch)
    patch(model, batch["response_length"], logits_optimization="none")
    check(model, batch, expected, score)
    patch(model, batch["response_length"], logits_optimization="compute")
    with pytest.raises(ValueError, match="got compute and Linear"):
        score(model, batch)


def test_hooks_of_the_head_fire(model: Any, patch: Patch, score: Score, make_batch: MakeBatch) -> None:
    batch = make_batch()
    patch(model, batch["response_length"])
    seen: list[tuple[int, ...]] = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    model.lm_head.register_forward_hook(lambda *_: seen.append(()))
    score(model, batch)
    assert len(seen) == 2
    assert seen[0][0] == 1
    assert seen[0][1] <= int(batch["attention_mask"][:, -batch["response_length"] :].sum())  # predictors only


@pytest.mark.parametrize("what", ["layers", "model"])
def test_compiled(load: Callable[..., Any], patch: Patch, score: Score, make_batch: MakeBatch, what: str) -> None:
    model, batch = load(**SDPA), make_batch()
    expected = expected_gradients(model, batch)
    patch(model, batch["response_length"])
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    if what == "layers":
        for layer in model.model.layers:
            layer.compile(backend=counter)
        check(model, batch, expected, score)
    else:
        check(torch.compile(model, backend=counter)._orig_mod, batch, expected, score)
        scores = score(torch.compile(model, backend=counter), batch)
        loss_of(scores.logprobs, scores.entropy).backward()
        assert compare_gradients(model, expected, atol=0, rtol=1e-4) < 1e-5
    assert (counter.frame_count > 0) == (what == "layers")  # a compiled model runs as it is
    other = make_batch(seed=9)  # other lengths
    model.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(score(model, other).logprobs, baseline_scores(model, other)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, SDPA], ids=["eager", "sdpa"])
def test_other_calls_go_to_the_original(
    load: Callable[..., Any], patch: Patch, make_batch: MakeBatch, settings: Any
) -> None:
    model, batch = load(**settings), make_batch()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: model(ids, attention_mask=mask).logits,
        "positional": lambda: model(ids, mask).logits,
        "labels": lambda: model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss,
        "embeds": lambda: (
            model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask, use_cache=False).logits
        ),
        "cache": lambda: model(ids, past_key_values=model(ids).past_key_values).logits,
        "generate": lambda: model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False),
        "generate without cache": lambda: model.generate(
            ids, attention_mask=mask, max_new_tokens=4, do_sample=False, use_cache=False
        ),
    }
    with torch.no_grad():
        before = {name: call() for name, call in calls.items()}
        patch(model, batch["response_length"])
        for name, call in calls.items():
            assert torch.equal(call(), before[name]), name


def everything(model: nn.Module) -> dict[str, Any]:
    """Every attribute of every module, by identity of what it holds."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found |= {f"{path}.{name}": (type(value), id(value)) for name, value in vars(module).items()}
        found[f"{path}:class"] = (type(module), id(type(module)))
    return found


@pytest.mark.parametrize("settings", [{}, SDPA], ids=["eager", "sdpa"])
def test_unpatch_leaves_no_trace(
    load: Callable[..., Any], patch: Patch, score: Score, make_batch: MakeBatch, settings: Any
) -> None:
    model, batch = load(**settings), make_batch()
    before, config = everything(model), model.config.to_dict()
    attention = model.config._attn_implementation
    patcher = patch(model, batch["response_length"])
    score(model, batch)
    patch(model, batch["response_length"], temperature=0.5)
    assert everything(model) != before
    patcher.unpatch()
    assert everything(model) == before
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == attention
    patcher.unpatch()  # a second time does nothing
    logits = model(batch["input_ids"], use_cache=False).logits
    assert logits.shape == (*batch["input_ids"].shape, 131)


def test_an_instance_forward_is_put_back(model: Any, patch: Patch, make_batch: MakeBatch) -> None:
    batch = make_batch()
    calls: list[str] = []

    def wrap(module: Any, name: str) -> Callable[..., Any]:
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return inner(*args, **kwargs)

        module.forward = forward
        return forward

    mine = wrap(model, "model")
    patcher = patch(model, batch["response_length"])
    model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    assert calls == ["model"]  # inside a ZoRRo call too: it may set autocast or move weights
    patcher.unpatch()
    assert model.__dict__["forward"] is mine


def test_a_wrapper_over_the_patch_is_not_lost(model: Any, patch: Patch, make_batch: MakeBatch) -> None:
    patcher = patch(model, make_batch()["response_length"])
    ours = model.forward
    model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.raises(RuntimeError, match=r"\[zorro\] model.forward must be the one that the patch installed"):
        patcher.unpatch()
    model.forward = ours
    patcher.unpatch()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_patched_on_its_own(model: Any, patch: Patch, score: Score, make_batch: MakeBatch, how: str) -> None:
    batch = make_batch()
    patcher = patch(model, batch["response_length"])
    expected = score(model, batch).logprobs
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    patcher.unpatch()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert torch.equal(score(other, batch).logprobs, expected)
    patch(other, batch["response_length"]).unpatch()
    assert "forward" not in vars(other)
    assert "forward" not in vars(other.lm_head)


@pytest.mark.parametrize("settings", [{}, SDPA], ids=["eager", "sdpa"])
def test_saving_gives_a_normal_folder(
    load: Callable[..., Any], patch: Patch, score: Score, make_batch: MakeBatch, tmp_path: Path, settings: Any
) -> None:
    model, batch = load(**settings), make_batch()
    model.save_pretrained(tmp_path / "plain")
    patch(model, batch["response_length"])
    score(model, batch)
    model.save_pretrained(tmp_path / "patched")
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert sorted(path.name for path in (tmp_path / "patched").iterdir()) == names
    for name in names:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "patched" / name).read_bytes(), name
    assert "zorro" not in json.dumps(json.loads((tmp_path / "patched" / "config.json").read_text()))
    AutoModelForCausalLM.from_pretrained(tmp_path / "patched")


def step_losses(
    model: Any, batch: dict[str, Any], score: Score | None, steps: int, accelerator: Any = None
) -> list[float]:
    """A trainer's loop: AdamW on the mean log-probability weighted by fixed advantages."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(steps):
        if score is None:
            logprobs, entropies = baseline_scores(model, batch)
        else:
            scores = score(model, batch)
            logprobs, entropies = scores.logprobs, scores.entropy
        loss = loss_of(logprobs, entropies) / logprobs.numel()
        optimizer.zero_grad()
        if accelerator is None:
            loss.backward()
        else:
            accelerator.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("trainer", ["loop", "accelerate"])
def test_twenty_steps_follow_the_unpatched_curve(
    load: Callable[..., Any],
    patch: Patch,
    score: Score,
    make_batch: MakeBatch,
    true_float64: Any,
    trainer: str,
) -> None:
    """In true float64: transformers' own float32 casts would already drive two exact runs apart by 1e-7."""
    batch = make_batch()
    settings = {"dtype": torch.float64, **SDPA}
    plain, model = load(**settings).train(), load(**settings).train()
    patch(model, batch["response_length"], attn_implementation="sdpa")
    accelerator = None
    if trainer == "accelerate":
        accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    with true_float64(modeling_qwen3, plain):
        expected = step_losses(plain, batch, None, 20)
    with true_float64(modeling_qwen3, model):
        found = step_losses(model, batch, score, 20, accelerator)
    assert abs(expected[-1] - expected[0]) > 1e-2  # it moves
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8
    )


def test_data_parallel_wrapper(model: Any, patch: Patch, score: Score, make_batch: MakeBatch, tmp_path: Path) -> None:
    """DDP over one gloo process; mode memory with a process group."""
    batch = make_batch()
    expected = expected_gradients(model, batch)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        patch(wrapped, batch["response_length"], world_size=2)
        scores = score(wrapped, batch)
        loss_of(scores.logprobs, scores.entropy).backward()
        assert compare_gradients(model, expected, atol=0, rtol=1e-4) < 1e-5
    finally:
        torch.distributed.destroy_process_group()


def test_fully_sharded(model: Any, patch: Patch, score: Score, make_batch: MakeBatch, tmp_path: Path) -> None:
    """FSDP2 over one gloo process: the head's weight is gathered by the hooks of its __call__."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    batch = make_batch()
    expected = expected_gradients(model, batch)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fsdp.fully_shard(layer, mesh=mesh)
        fsdp.fully_shard(model.lm_head, mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
        patch(model, batch["response_length"])
        scores = score(model, batch)
        loss_of(scores.logprobs, scores.entropy).backward()
        found = {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}
        assert compare_gradients(found, expected, atol=0, rtol=1e-4) < 1e-5
    finally:
        torch.distributed.destroy_process_group()


def test_heads_take_float32_inputs(load: Callable[..., Any], patch: Patch, score: Score, make_batch: MakeBatch) -> None:
    """logits_compute_from_fp32_inputs holds under autocast too: the head then sees unrounded inputs."""
    model, batch = load(), make_batch()
    valid = batch["attention_mask"][:, -batch["response_length"] :].bool()
    errors = []
    for lifted in (False, True):
        patch(
            model,
            batch["response_length"],
            logits_compute_from_fp32_inputs=lifted,
            logits_compute_in_fp32=True,
            patch_with_local=True,  # a row of the head for every token: no predictor is shared
        )
        seen: list[torch.Tensor] = []
        handle = model.lm_head.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0][0]))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logprobs = score(model, batch).logprobs
        handle.remove()
        exact = (seen[0].float() @ model.lm_head.weight.T).log_softmax(-1)
        labels = batch["input_ids"][:, -batch["response_length"] :][valid]
        errors.append((exact.gather(1, labels[:, None])[:, 0] - logprobs).abs().max().item())
    assert errors[1] < 1e-5 < 1e-3 < errors[0]


def test_the_local_patch_shares_nothing(model: Any, patch: Patch, score: Score, make_batch: MakeBatch) -> None:
    batch = make_batch()
    tokens: list[int] = []
    model.model.layers[0].register_forward_hook(lambda _, inputs, __: tokens.append(inputs[0].size(1)))
    patch(model, batch["response_length"], patch_with_local=True)
    naive = score(model, batch)
    patch(model, batch["response_length"])
    dedup = score(model, batch)
    torch.testing.assert_close(naive.logprobs, dedup.logprobs, rtol=1e-5, atol=1e-5)
    assert tokens[0] == int(batch["attention_mask"].sum())
    assert tokens[1] < tokens[0]


def test_mask_of_the_original_attention_is_kept(load: Callable[..., Any], patch: Patch, make_batch: MakeBatch) -> None:
    """A patched model's ordinary calls still see their padding masks."""
    model, batch = load(**SDPA), make_batch()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    patch(model, batch["response_length"])
    with torch.no_grad():
        masked, unmasked = model(ids, attention_mask=mask).logits, model(ids).logits
    row = int((mask[:, 0] == 0).nonzero()[0])
    assert (masked[row, -1] - unmasked[row, -1]).abs().max() > 1e-3

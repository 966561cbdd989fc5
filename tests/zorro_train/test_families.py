"""What only hybrid and sparse models can get wrong; the numbers are those of docs/testing.md."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from arctic_platform.rl.zorro_train import _attention, _native
from arctic_platform.rl.zorro_train.tests import baseline_scores, compare_gradients, gradients
from tests.tiny_models import FAMILIES

ops = _native.ops
Load = Callable[..., Any]
HYBRIDS = ("tiny-random-Qwen3-Next-MoE", "tiny-random-Qwen3.6", "tiny-random-Qwen3.6-MoE")
SPARSE = ("tiny-random-Qwen3-MoE", "tiny-random-Qwen3-Next-MoE", "tiny-random-Qwen3.6-MoE")
hybrids = pytest.mark.parametrize("name", HYBRIDS)
sparse = pytest.mark.parametrize("name", SPARSE)


def group(prompt: int, responses: list[int], seed: int = 0, pads: int = 0, pad_id: int = 0) -> dict[str, Any]:
    """One prompt with responses of given lengths, left-padded by `pads`."""
    torch.manual_seed(seed)
    width = max(responses)
    start = torch.randint(1, 131, (prompt,))
    ids = torch.full((len(responses), pads + prompt + width), pad_id)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(responses):
        ids[row, pads : pads + prompt] = start
        ids[row, pads + prompt : pads + prompt + length] = torch.randint(1, 131, (length,))
        mask[row, pads : pads + prompt + length] = 1
    return {"input_ids": ids, "attention_mask": mask, "response_length": width}


def check(model: Any, batch: dict[str, Any], patch: Any, score: Any) -> None:
    logprobs, entropies = baseline_scores(model, batch)
    torch.manual_seed(1)
    weights = torch.randn(2, logprobs.numel())
    (weights[0] @ logprobs + 0.1 * weights[1] @ entropies).backward()
    expected = gradients(model)
    model.zero_grad()
    patcher = patch(model, batch["response_length"])
    scores = score(model, batch)
    torch.testing.assert_close(scores.logprobs, logprobs, rtol=2e-5, atol=2e-5)
    (weights[0] @ scores.logprobs + 0.1 * weights[1] @ scores.entropy).backward()
    # Both sides round in float32, transformers in its own chunks; float64 is held in tests/parity.
    assert compare_gradients(model, expected, atol=1e-5, rtol=1e-3) < 1e-3
    model.zero_grad()
    patcher.unpatch()


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 63, 64, 65, 130])
def test_b18_going_on_from_the_prompts_state(load: Load, patch: Any, score: Any, prompt: int) -> None:
    """Prompts below, at and above the convolution's kernel and the chunk; unequal responses."""
    check(load("tiny-random-Qwen3.6"), group(prompt, [1, 2, 3, 70, 64, 65]), patch, score)


@hybrids
def test_b16_rows_of_a_pack_do_not_leak(load: Load, patch: Any, score: Any, name: str) -> None:
    """Rows of 1 to 65 tokens packed together are what they are alone, in any order."""
    model = load(name)
    rows = [group(length, [3], seed=length) for length in (1, 2, 3, 4, 5, 64, 65)]
    width = max(row["input_ids"].size(1) for row in rows)
    pad = [torch.nn.functional.pad(row["input_ids"], (width - row["input_ids"].size(1), 0)) for row in rows]
    mask = [torch.nn.functional.pad(row["attention_mask"], (width - row["input_ids"].size(1), 0)) for row in rows]
    batch = {"input_ids": torch.cat(pad), "attention_mask": torch.cat(mask), "response_length": 3}
    with torch.no_grad():
        expected = baseline_scores(model, batch)[0]
        patch(model, 3)
        for order in (torch.arange(7), torch.arange(6, -1, -1), torch.tensor([3, 0, 6, 1, 5, 2, 4])):
            part = {key: batch[key][order] for key in ("input_ids", "attention_mask")}
            found = score(model, part).logprobs.view(7, 3)
            torch.testing.assert_close(found, expected.view(7, 3)[order], rtol=2e-5, atol=2e-5)


@hybrids
def test_b12_other_groups_are_not_seen(load: Load, patch: Any, score: Any, name: str) -> None:
    """Another first group changes nothing of the second; its loss has no gradient there."""
    model = load(name)
    a, b, c = group(20, [9, 4], seed=1), group(20, [9, 4], seed=2), group(20, [9, 4], seed=3)
    patch(model, 9)

    def joined(first: dict[str, Any]) -> dict[str, Any]:
        return {key: torch.cat([first[key], c[key]]) for key in ("input_ids", "attention_mask")}

    with torch.no_grad():
        one, two = score(model, joined(a)).logprobs, score(model, joined(b)).logprobs
    assert not torch.equal(one[:13], two[:13])
    torch.testing.assert_close(one[13:], two[13:], rtol=1e-6, atol=1e-6)
    score(model, joined(a)).logprobs[13:].sum().backward()
    only_first = set(a["input_ids"].unique().tolist()) - set(c["input_ids"].unique().tolist())
    assert only_first
    assert not model.model.embed_tokens.weight.grad[sorted(only_first)].any()


@hybrids
def test_b17_padding_enters_neither_convolution_nor_state(load: Load, patch: Any, score: Any, name: str) -> None:
    model = load(name)
    values = []
    with torch.no_grad():
        patch(model, 5)
        for pads in (0, 1, 3, 4, 17):
            for pad_id in (0, 50):
                batch = group(6, [5, 3, 5, 1], pads=pads, pad_id=pad_id)
                values.append(score(model, batch).logprobs)
                first = {key: batch[key][:1] for key in ("input_ids", "attention_mask")}
                torch.testing.assert_close(score(model, first).logprobs, values[0][:5], rtol=2e-5, atol=2e-5)
    for found in values[1:]:
        assert torch.equal(found, values[0])


@pytest.mark.parametrize("fault", ["state", "tap"])
def test_a_planted_fault_is_seen(
    load: Load, patch: Any, score: Any, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A response that starts from no state, and a tap taken from the packed neighbour."""
    model, batch = load("tiny-random-Qwen3.6"), group(10, [5, 5, 5])
    with torch.no_grad():
        expected = baseline_scores(model, batch)[0]
        patch(model, 5)
        torch.testing.assert_close(score(model, batch).logprobs, expected, rtol=2e-5, atol=2e-5)
        module = _attention.modeling_module(model)
        name = "torch_chunk_gated_delta_rule" if fault == "state" else "causal_conv1d_fn"
        right = getattr(module, name)

        def wrong(*args: Any, **kwargs: Any) -> Any:
            until, nodes, previous = kwargs["zorro_structure"]
            if fault == "state":
                nodes = nodes.clone()
                nodes[:, 3] = -1
            else:
                previous = torch.arange(-1, len(previous) - 1)
            return right(*args, **{**kwargs, "zorro_structure": (until, nodes, previous)})

        monkeypatch.setattr(module, name, wrong)
        assert (score(model, batch).logprobs - expected).abs().max() > 1e-3


@hybrids
def test_unpatching_gives_the_module_its_functions_back(load: Load, patch: Any, name: str) -> None:
    gc.collect()  # patched models of other tests give them back when they die
    first, second = load(name), load(name)
    module = _attention.modeling_module(first)
    before = (module.causal_conv1d_fn, module.torch_chunk_gated_delta_rule)
    ids = torch.randint(1, 131, (2, 9))
    with torch.no_grad():
        plain = first(ids).logits
        patchers = [patch(model, 3) for model in (first, second)]
        assert module.causal_conv1d_fn is not before[0]
        assert torch.equal(first(ids).logits, plain)  # other calls run what was there
        patchers[0].unpatch()
        assert module.causal_conv1d_fn is not before[0]  # the second model needs it
        patchers[1].unpatch()
    assert (module.causal_conv1d_fn, module.torch_chunk_gated_delta_rule) == before


@sparse
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_b40_recomputation_repeats_the_first_pass(
    load: Load, patch: Any, score: Any, name: str, use_reentrant: bool
) -> None:
    """Bit-equal gradients with and without checkpointing, two batches forwarded before the first backward."""
    model, batches = load(name), [group(9, [4, 5, 2], seed=seed) for seed in (1, 2)]
    patch(model, 5)
    found = []
    for checkpointing in (False, True):
        model.train(checkpointing)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        live = [score(model, batch).logprobs for batch in batches]
        for logprobs in live:
            logprobs.square().sum().backward()
        found.append(gradients(model))
        model.zero_grad()
    for weight in found[0]:
        assert torch.equal(found[0][weight], found[1][weight]), weight


def hf_balance_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """transformers' own loss on the padded batch, by its definition in the modeling module."""
    module = _attention.modeling_module(model)
    out = model(batch["input_ids"], attention_mask=batch["attention_mask"], output_router_logits=True, use_cache=None)
    loss: torch.Tensor = module.load_balancing_loss_func(
        out.router_logits, model.config.num_experts, model.config.num_experts_per_tok, batch["attention_mask"]
    )
    return loss


@sparse
@pytest.mark.parametrize("pads", [0, 20])
def test_b37_the_router_loss_is_the_naive_batchs(load: Load, patch: Any, score: Any, name: str, pads: int) -> None:
    """A shared token counts as often as the naive batch has it; pads never; rows without responses do."""
    model, batch = load(name), group(9, [4, 0, 5, 2], pads=pads)
    expected = hf_balance_loss(model, batch)
    expected.backward()
    truth = gradients(model)
    model.zero_grad()
    patch(model, 5, router_loss=True)
    scores = score(model, batch)
    torch.testing.assert_close(scores.router_loss, expected, rtol=1e-5, atol=1e-6)
    scores.router_loss.backward()
    found = gradients(model)
    for weight, gradient in truth.items():
        if "gate.weight" in weight and "shared" not in weight:
            assert (found[weight] - gradient).norm() <= 1e-4 * gradient.norm(), weight
    # Ignoring the multiplicity would be seen.
    patch(model, 5, router_loss=True)
    counts, total = scores.router_counts
    assert total == batch["attention_mask"].sum() * len([1 for m in model.modules() if hasattr(m, "experts")])
    assert counts.sum() == total * model.config.num_experts_per_tok


@sparse
def test_b37_parts_add_up_with_given_counts(load: Load, patch: Any, score: Any, name: str) -> None:
    model, batch = load(name), group(9, [4, 3, 5, 2])
    patch(model, 5, router_loss=True)
    with torch.no_grad():
        # Each row apart pays the prompt again: the counts are the same as the naive batch's.
        whole = score(model, batch)
        parts = [{key: batch[key][rows] for key in ("input_ids", "attention_mask")} for rows in ([0, 1], [2], [3])]
        counts = [score(model, part).router_counts for part in parts]
        given = (sum(c for c, _ in counts), sum(t for _, t in counts))
        losses = [score(model, part, router_counts=given).router_loss for part in parts]
    torch.testing.assert_close(sum(losses), whole.router_loss, rtol=1e-5, atol=1e-6)


def test_a_router_loss_needs_a_graph_and_experts(load: Load, patch: Any, score: Any) -> None:
    patch(model := load("tiny-random-Qwen3"), 3, router_loss=True)
    batch = group(5, [3, 2])
    with pytest.raises(ValueError, match="router_loss needs a model with experts, got Qwen3ForCausalLM"):
        score(model, batch)
    sparse_model = load("tiny-random-Qwen3-MoE").train()
    sparse_model.gradient_checkpointing_enable({"use_reentrant": True})
    sparse_model.enable_input_require_grads()
    patch(sparse_model, 3, router_loss=True)
    with pytest.raises(RuntimeError, match="router_loss needs gradient checkpointing with use_reentrant=False"):
        score(sparse_model, batch)
    sparse_model.gradient_checkpointing_enable({"use_reentrant": False})
    score(sparse_model, batch).router_loss.backward()


def test_b39_softmax_over_all_experts_comes_first() -> None:
    """By hand: logits (2, 1, 0, -1), top 2."""
    probabilities = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).softmax(-1)
    weight, expert = probabilities.topk(2)
    torch.testing.assert_close(weight, torch.tensor([[0.643914, 0.236883]]), rtol=0, atol=1e-6)
    torch.testing.assert_close(weight / weight.sum(), torch.tensor([[0.731059, 0.268941]]), rtol=0, atol=1e-6)
    assert expert.tolist() == [[0, 1]]
    assert FAMILIES["qwen3-moe"]["norm_topk_prob"]


def test_balance_golden() -> None:
    logits = torch.tensor([[1, 2, 0.5, -1], [0, 0.1, 3, 1], [-1, 0.5, 0.2, 0.3]], dtype=torch.float64)
    assert ops.router_balance_loss([logits], torch.ones(3), 2).item() == pytest.approx(1.97639555, abs=1e-8)
    assert ops.router_balance_loss([logits], torch.tensor([1, 1, 0]), 2).item() == pytest.approx(2.0, abs=1e-8)

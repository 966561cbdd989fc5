"""The patched model against the unpatched one, row by row: every value, every parameter's gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from arctic_platform.rl.zorro_train._forest import Forest
from arctic_platform.rl.zorro_train.tests import baseline_scores, compare_gradients, gradients

MODELS = (
    "tiny-random-Qwen3",
    "tiny-random-Qwen3-tied",
    "tiny-random-Qwen3-MoE",
    "tiny-random-Qwen3-Next-MoE",
    "tiny-random-Qwen3.6",
    "tiny-random-Qwen3.6-MoE",
)
ATTENTION = {"eager": "eager", "flash": "flash_attention_2"}
FACTORS = (MODELS, tuple(ATTENTION), ("padded", "unpadded"), ("split", "whole"), ("none", "compute", "memory"))
Case = tuple[str, ...]


def pairwise(factors: tuple[tuple[str, ...], ...]) -> Iterator[Case]:
    """Few cases in which every two settings of different factors meet."""

    def pairs(case: Case) -> set[tuple[int, str, int, str]]:
        return {(i, case[i], j, case[j]) for i, j in itertools.combinations(range(len(case)), 2)}

    product = list(itertools.product(*factors))
    missing = set().union(*map(pairs, product))
    while missing:
        best = max(product, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        yield best


def cases() -> Iterator[Any]:
    """The whole product; what is not in the pairwise part is marked slow."""
    quick = set(pairwise(FACTORS))
    for case in itertools.product(*FACTORS):
        model, attention, padded, split, mode = case
        arguments = (model, ATTENTION[attention], padded == "padded", split == "split", mode)
        yield pytest.param(*arguments, id="-".join(case), marks=[] if case in quick else pytest.mark.slow)


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
            ],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize(
    ("model_name", "attn_impl", "use_padded_batch", "use_split_attention", "logits_optimization"), list(cases())
)
def test_qwen3_model_once_patcher(
    model_name: str,
    attn_impl: str,
    use_padded_batch: bool,
    use_split_attention: bool,
    logits_optimization: str,
    device: str,
    load: Callable[..., Any],
    patch: Callable[..., Any],
    score: Callable[..., Any],
    make_batch: Callable[..., dict[str, Any]],
) -> None:
    model = load(model_name).to(device)
    batch = make_batch(add_padding=use_padded_batch)
    batch = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    temperature = 0.8

    logprobs, entropies = baseline_scores(model, batch, temperature)
    torch.manual_seed(1)
    of_logprob, of_entropy = torch.randn(2, logprobs.numel(), device=device)
    (logprobs @ of_logprob + 0.1 * entropies @ of_entropy).backward()
    expected = gradients(model)
    model.zero_grad()

    patch(
        model,
        batch["response_length"],
        temperature=temperature,
        logits_optimization=logits_optimization,
        use_unpad=not use_padded_batch,
        use_split_attention=use_split_attention,
        attn_implementation=attn_impl,
    )
    scores = score(model, batch)
    assert scores.logprobs.shape == scores.entropy.shape == logprobs.shape
    torch.testing.assert_close(scores.logprobs, logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.entropy, entropies, rtol=1e-5, atol=1e-5)
    (scores.logprobs @ of_logprob + 0.1 * scores.entropy @ of_entropy).backward()
    found = gradients(model)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert compare_gradients(found, expected, atol=1e-6, rtol=1e-4) < 1e-4


@pytest.mark.parametrize("fault", ["label", "mask", "position"])
def test_a_planted_fault_is_seen(
    fault: str,
    model: Any,
    patch: Callable[..., Any],
    score: Callable[..., Any],
    make_batch: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparison above would catch a wrong label, a leaking mask and a shifted position."""
    build = Forest.build

    def faulty(*arguments: Any) -> Any:
        forest = build(*arguments)
        if fault == "label":
            forest.label[0] = (forest.label[0] + 1) % 131
        elif fault == "mask":  # the first tree's first token is no longer seen by the rest
            forest.visible_until[0] = 1
        else:
            forest.positions[0, 3] += 5
        return forest

    batch = make_batch()
    with torch.no_grad():
        logprobs, _ = baseline_scores(model, batch)
        patch(model, batch["response_length"])
        torch.testing.assert_close(score(model, batch).logprobs, logprobs, rtol=1e-5, atol=1e-5)
        monkeypatch.setattr(Forest, "build", faulty)
        assert (score(model, batch).logprobs - logprobs).abs().max() > 1e-3

"""Operators as Python reaches them."""

from __future__ import annotations

import pytest
import torch

from arctic_platform.rl.zorro_train import _native

ops = _native.ops


def test_logits_and_matrix_heads_agree() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    row, label = torch.tensor([0, 0, 3, 1, 2]), torch.tensor([8, 1, 0, 4, 4])
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7], dtype=torch.float64)
    upstream = torch.randn(2, 5, dtype=torch.float64)
    results = []
    for logprob, entropy in (
        ops.linear_logprob(hidden, weight, row, label, temperature, "none", 1 << 20)[:2],
        ops.logits_logprob(hidden @ weight.T, row, label, temperature),
    ):
        gradients = torch.autograd.grad((logprob * upstream[0] + entropy * upstream[1]).sum(), (hidden, weight))
        results.append((logprob, entropy, *gradients))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_forbidden_token_adds_nothing() -> None:
    logits = torch.tensor([[1.0, float("-inf"), 2.0]], requires_grad=True)
    zero = torch.zeros(1, dtype=torch.long)
    logprob, entropy = ops.logits_logprob(logits, zero, zero, torch.ones(()))
    (logprob + entropy).sum().backward()
    expected = torch.tensor([1.0, 2.0]).log_softmax(0)
    torch.testing.assert_close(logprob[0], expected[0])
    torch.testing.assert_close(entropy[0], -(expected.exp() * expected).sum())
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[0, 1] == 0


def test_autocast_casts_the_inputs() -> None:
    q = torch.randn(5, 2, 8)
    until, nodes, _ = ops.replicated_structure(torch.tensor([2, 3]))
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = ops.forest_attention(q, q, q, until, nodes, 1.0, 0, "fused")
    rounded = q.bfloat16()
    expected, _ = ops.forest_attention(rounded, rounded, rounded, until, nodes, 1.0, 0, "fused")
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert torch.equal(out, expected)


def test_empty_rows_have_no_node() -> None:
    until, nodes, previous = ops.replicated_structure(torch.tensor([2, 0, 3]))
    assert previous.tolist() == [-1, 0, -1, 2, 3]
    assert until.tolist() == [2, 2, 5, 5, 5]
    assert nodes.tolist() == [[0, 2, 2, -1, 0], [2, 5, 5, -1, 0]]


def test_arguments_are_checked() -> None:
    ids = torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="sharing must be none, prompts or prefixes, got all"):
        ops.build_forest(ids, None, None, 2, "all", 64)
    with pytest.raises(ValueError, match="prompt_length and response_length must have one value a sample"):
        ops.plan_micro_batches(torch.zeros(2), torch.zeros(1), torch.zeros(2), 10, 0)
    with pytest.raises(RuntimeError, match="config: is not valid JSON"):
        ops.speedup_bound(ids, None, 2, "{")
    with pytest.raises(ValueError, match=r"logits must be \[U, V\]"):
        ops.logits_logprob(torch.zeros(3), torch.zeros(1), torch.zeros(1), torch.ones(()))

"""The operators of the hybrid and sparse families against their definitions, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from arctic_platform.rl.zorro_train import _native

ops = _native.ops
F64 = torch.float64


def random_forest(lengths: list[int], parents: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(nodes [N, 5], previous [T]) of nodes in depth-first order."""
    begin = 0
    rows: list[list[int]] = []
    previous: list[int] = []
    for length, parent in zip(lengths, parents, strict=True):
        before = -1 if parent < 0 else rows[parent][1] - 1
        previous += [before, *range(begin, begin + length - 1)]
        depth = 0 if parent < 0 else rows[parent][4] + rows[parent][1] - rows[parent][0]
        rows.append([begin, begin + length, 0, parent, depth])
        begin += length
    for node in reversed(range(len(rows))):
        rows[node][2] = max(rows[node][2], rows[node][1])
        if rows[node][3] >= 0:
            rows[rows[node][3]][2] = max(rows[rows[node][3]][2], rows[node][2])
    return torch.tensor(rows), torch.tensor(previous)


FORESTS = {
    "one": ([5], [-1]),
    "chunk": ([64], [-1]),
    "chunks": ([130], [-1]),
    "prompt and responses": ([65, 3, 70, 64, 1], [-1, 0, 0, 0, 0]),
    "two trees": ([3, 2, 66, 1, 63, 64], [-1, 0, 0, -1, 3, 3]),
    "depth three": ([10, 70, 5, 128, 2, 3, 4, 20], [-1, 0, 1, 1, 0, 4, 4, -1]),
    "alone": ([1, 2, 3, 4, 5, 64, 65], [-1] * 7),
}
forests = pytest.mark.parametrize("forest", list(FORESTS.values()), ids=list(FORESTS))


paths = pytest.mark.parametrize("batched", [False, True], ids=["kernel", "batched"])


def delta_inputs(tokens: int, key_heads: int = 2, value_heads: int = 4, dk: int = 6, dv: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(tokens)
    q, k = torch.randn(2, tokens, key_heads, dk, dtype=F64)
    v = torch.randn(tokens, value_heads, dv, dtype=F64)
    g = -torch.rand(tokens, value_heads, dtype=F64) * 1.5
    beta = torch.rand(tokens, value_heads, dtype=F64)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


def recurrent(
    inputs: list[torch.Tensor], previous: torch.Tensor, initial: dict[int, torch.Tensor] | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Token by token, as the rule is defined."""
    q, k, v, g, beta = inputs
    repeats = v.size(1) // q.size(1)
    q, k = (x.repeat_interleave(repeats, 1) for x in (q, k))
    states: list[torch.Tensor] = []
    out = []
    for token, before in enumerate(previous.tolist()):
        if before >= 0:
            state = states[before]
        elif initial and token in initial:
            state = initial[token]
        else:
            state = torch.zeros(v.size(1), q.size(2), v.size(2), dtype=v.dtype)
        state = state * g[token].exp()[:, None, None]
        read = torch.einsum("hkv,hk->hv", state, k[token])
        write = beta[token][:, None] * (v[token] - read)
        state = state + torch.einsum("hk,hv->hkv", k[token], write)
        states.append(state)
        out.append(torch.einsum("hkv,hk->hv", state, q[token]))
    return torch.stack(out), states


def empty_initial(inputs: list[torch.Tensor]) -> torch.Tensor:
    return inputs[2].new_zeros(0, inputs[2].size(1), inputs[0].size(2), inputs[2].size(2))


@paths
@forests
def test_gated_delta_is_its_recurrence(forest: Any, batched: bool) -> None:
    nodes, previous = random_forest(*forest)
    inputs = delta_inputs(len(previous))
    expected, states = recurrent(inputs, previous)
    out, finals, _ = ops.forest_gated_delta(*inputs, nodes, empty_initial(inputs), True, batched)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    ends = (nodes[:, 1] - 1).tolist()
    torch.testing.assert_close(finals, torch.stack([states[end] for end in ends]), rtol=1e-11, atol=1e-11)
    upstream, of_states = torch.randn_like(expected), torch.randn_like(finals)
    theirs = torch.autograd.grad(
        (expected * upstream).sum() + sum((states[end] * of_states[i]).sum() for i, end in enumerate(ends)), inputs
    )
    ours = torch.autograd.grad((out * upstream).sum() + (finals * of_states).sum(), inputs)
    for name, a, b in zip(["q", "k", "v", "g", "beta"], ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=name)


def test_gated_delta_golden() -> None:
    """Two digits of a calculation by hand in pure Python."""
    q = torch.tensor([[1, 2], [0.5, -1], [0, 1]], dtype=F64)[:, None]
    k = torch.tensor([[1, 0], [1, 1], [-1, 2]], dtype=F64)[:, None]
    v = torch.tensor([[1, 2], [3, -1], [0.5, 0.25]], dtype=F64)[:, None]
    g = torch.tensor([[-0.1], [-0.5], [-1.0]], dtype=F64)
    beta = torch.tensor([[0.5], [0.25], [0.9]], dtype=F64)
    nodes, _ = random_forest([3], [-1])
    out, _ = ops.normalized_gated_delta(q, k, v, g, beta, nodes)
    expected = [[0.15811379, 0.31622758], [-0.05981656, 0.27167852], [0.39498456, 0.15704954]]
    torch.testing.assert_close(out[:, 0], torch.tensor(expected, dtype=F64), rtol=0, atol=1e-7)


@paths
def test_a_prefix_may_be_computed_apart(batched: bool) -> None:
    """Nodes before the cut are given by their final states; gradients flow into them."""
    nodes, previous = random_forest([65, 3, 70, 64, 1], [-1, 0, 1, 0, 3])
    inputs = delta_inputs(len(previous))
    expected, _ = recurrent(inputs, previous)
    upstream = torch.randn_like(expected)
    theirs = torch.autograd.grad((expected * upstream).sum(), inputs)
    cut, begin = 2, 68
    first = [x[:begin] for x in inputs]
    rest = [x[begin:] for x in inputs]
    before, finals, _ = ops.forest_gated_delta(*first, nodes[:cut], empty_initial(inputs), True, batched)
    after, _, _ = ops.forest_gated_delta(*rest, nodes, finals, False, batched)
    out = torch.cat([before, after])
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    for a, b in zip(torch.autograd.grad((out * upstream).sum(), inputs), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@paths
def test_strong_decay_and_no_writes_stay_finite(batched: bool) -> None:
    nodes, previous = random_forest([130, 5], [-1, 0])
    inputs = [x.detach().float() for x in delta_inputs(len(previous))]
    inputs[3] = torch.full_like(inputs[3], -80.0)  # exp of the masked half would overflow
    inputs[4][5:9] = 0
    inputs = [x.requires_grad_() for x in inputs]
    out, _, _ = ops.forest_gated_delta(*inputs, nodes, empty_initial(inputs), False, batched)
    expected, _ = recurrent(inputs, previous)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for gradient in torch.autograd.grad(out.square().sum(), inputs):
        assert torch.isfinite(gradient).all()


@paths
def test_gated_delta_in_bfloat16_computes_in_float32(batched: bool) -> None:
    nodes, previous = random_forest([70, 5], [-1, 0])
    inputs = [x.detach() for x in delta_inputs(len(previous))]
    low = [x.bfloat16() for x in inputs[:3]] + [x.float() for x in inputs[3:]]
    out, _, _ = ops.forest_gated_delta(*low, nodes, empty_initial([x.float() for x in inputs]), False, batched)
    lifted = [x.float() for x in low]
    expected, _, _ = ops.forest_gated_delta(*lifted, nodes, empty_initial(lifted), False, batched)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_the_kernel_is_right_on_lesser_machines(capability: str, run_pytest: Callable[..., str]) -> None:
    """The tests above in a process that may use fewer instructions."""
    output = run_pytest({"ATEN_CPU_CAPABILITY": capability}, "-k", "kernel or bfloat16", "-m", "not slow", __file__)
    assert "passed" in output


def conv_by_loop(u: torch.Tensor, weight: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    rows = []
    for token in range(u.size(0)):
        row, at = torch.zeros_like(u[0]), token
        for tap in range(weight.size(1)):
            if at < 0:
                break
            row = row + weight[:, weight.size(1) - 1 - tap] * u[at]
            at = int(previous[at])
        rows.append(row)
    return torch.stack(rows)


@forests
@pytest.mark.parametrize("taps", [1, 4])
def test_short_conv_follows_paths(forest: Any, taps: int) -> None:
    _, previous = random_forest(*forest)
    torch.manual_seed(1)
    u = torch.randn(len(previous), 70, dtype=F64, requires_grad=True)
    weight = torch.randn(70, taps, dtype=F64, requires_grad=True)
    out, expected = ops.forest_short_conv(u, weight, previous, 0), conv_by_loop(u, weight, previous)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    upstream = torch.randn_like(out)
    ours = torch.autograd.grad(out, (u, weight), upstream)
    theirs = torch.autograd.grad(expected, (u, weight), upstream)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    cut = len(previous) // 2
    assert torch.equal(ops.forest_short_conv(u, weight, previous, cut), out[cut:])


def test_short_conv_golden() -> None:
    weight = torch.tensor([[0.1, -0.2, 0.3, 0.4]], dtype=F64)
    u = torch.tensor([1, 2, 3, -1, 0.5], dtype=F64)[:, None]
    out = ops.forest_short_conv(u, weight, torch.arange(-1, 4), 0)
    torch.testing.assert_close(out[:, 0], torch.tensor([0.4, 1.1, 1.6, 0.2, -0.5], dtype=F64))


def experts_by_loop(x: Any, gate_up: Any, down: Any, expert: Any, weight: Any) -> torch.Tensor:
    rows = []
    for token in range(x.size(0)):
        row = torch.zeros_like(x[0])
        for slot, e in enumerate(expert[token].tolist()):
            gate, up = (gate_up[e] @ x[token]).chunk(2)
            row = row + weight[token, slot] * (down[e] @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows) if rows else torch.zeros_like(x)


@given(tokens=st.integers(0, 12), experts=st.integers(2, 9), choices=st.integers(1, 2), seed=st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_experts_are_their_definition(tokens: int, experts: int, choices: int, seed: int) -> None:
    torch.manual_seed(seed)
    shapes = ((tokens, 5), (experts, 6, 5), (experts, 5, 3), (tokens, choices))
    x, gate_up, down, weight = (torch.randn(shape, dtype=F64, requires_grad=True) for shape in shapes)
    expert = torch.stack([torch.randperm(experts)[:choices] for _ in range(tokens)] or [torch.zeros(choices)]).long()
    expert = expert[:tokens]
    arguments = (x, gate_up, down, expert, weight)
    out, _ = ops.expert_mlp(*arguments)
    expected = experts_by_loop(*arguments)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    leaves = (x, gate_up, down, weight)
    upstream = torch.randn_like(out)
    ours = torch.autograd.grad(out, leaves, upstream)
    if tokens == 0:
        assert all(not gradient.any() for gradient in ours)
        return
    for a, b in zip(ours, torch.autograd.grad(expected, leaves, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_an_idle_expert_gets_zeros() -> None:
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(3, 4), torch.randn(3, 4, 4, requires_grad=True), torch.randn(3, 4, 2)
    out, _ = ops.expert_mlp(x, gate_up, down, torch.tensor([[0], [2], [0]]), torch.ones(3, 1))
    out.sum().backward()
    assert gate_up.grad is not None
    assert not gate_up.grad[1].any()
    assert gate_up.grad[0].any()


@pytest.mark.parametrize("op", ["gated_delta", "short_conv", "experts"])
def test_operators_follow_the_rules_of_torch(op: str) -> None:
    """Schema, fake tensors, autograd registration, AOT dispatch."""
    nodes, previous = random_forest([5, 3, 2], [-1, 0, 0])
    inputs = delta_inputs(10)
    cases: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "gated_delta": (ops.forest_gated_delta.default, (*inputs, nodes, empty_initial(inputs), True, False)),
        "short_conv": (
            ops.forest_short_conv.default,
            (torch.randn(10, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True), previous, 0),
        ),
        "experts": (
            ops.expert_mlp.default,
            (
                torch.randn(3, 4, requires_grad=True),
                torch.randn(2, 6, 4, requires_grad=True),
                torch.randn(2, 4, 3, requires_grad=True),
                torch.tensor([[0], [1], [0]]),
                torch.rand(3, 1, requires_grad=True),
            ),
        ),
    }
    function, arguments = cases[op]
    torch.library.opcheck(function, arguments)


def test_arguments_are_checked() -> None:
    nodes, previous = random_forest([5], [-1])
    q, k, v, g, beta = (x.detach() for x in delta_inputs(5))
    initial = empty_initial([q, k, v])
    for arguments, message in (
        ((q[0], k, v, g, beta, nodes, initial), r"q must be \[T, Hk, dk\]"),
        ((q, k[:, :1], v, g, beta, nodes, initial), "k must have size 2 in dimension 1"),
        ((q, k, v[:, :3], g[:, :3], beta[:, :3], nodes, initial), "Hv must be a multiple of Hk, got 3 and 2"),
        ((q, k, v, g[:4], beta, nodes, initial), "g must have size 5 in dimension 0"),
        ((q, k.float(), v, g, beta, nodes, initial), "k must be Double"),
        ((q[:4], k[:4], v[:4], g[:4], beta[:4], nodes, initial), "nodes must cover 4 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.forest_gated_delta(*arguments, False, False)
    with pytest.raises(ValueError, match=r"previous\[2\] must be below 2, got 4"):
        ops.forest_short_conv(torch.ones(5, 2), torch.ones(2, 3), torch.tensor([-1, 0, 4, 2, 3]), 0)
    with pytest.raises(ValueError, match="weight must have size 2 in dimension 0"):
        ops.forest_short_conv(torch.ones(5, 2), torch.ones(3, 3), previous, 0)
    x, gate_up, down = torch.ones(1, 4), torch.ones(2, 6, 4), torch.ones(2, 4, 3)
    with pytest.raises(ValueError, match=r"expert must be in \[0, 2\), got 2"):
        ops.expert_mlp(x, gate_up, down, torch.tensor([[2]]), torch.ones(1, 1))
    with pytest.raises(ValueError, match="gate_up must have size"):
        ops.expert_mlp(x, gate_up[:, :5], down, torch.tensor([[1]]), torch.ones(1, 1))

"""Bugs that others have had, as scenarios; the numbers are those of docs/testing.md."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from arctic_platform.rl.zorro_train import ZoRRoTrain
from arctic_platform.rl.zorro_train.actor import packed_ppo_policy_loss
from arctic_platform.rl.zorro_train.tests import baseline_scores, compare_gradients, gradients

Patch = Callable[..., Any]
Score = Callable[..., Any]
R = 6

# Two prompts of 3 and 5 tokens, rows A B A B A with responses of 4, 6, 1, 0 and 6 tokens.
PROMPTS = ([7, 11, 13], [17, 19, 23, 29, 31])
RESPONSES: tuple[list[int], ...] = ([1, 2, 3, 4], [5, 6, 8, 9, 10, 12], [1], [], [14, 15, 16, 18, 20, 21])


def rows_as(
    prompt_side: str, response_side: str, prompt_width: int = 8, pad: int = 0, owners: tuple[int, ...] = (0, 1, 0, 1, 0)
) -> dict[str, Any]:
    """The five rows in a layout: pads of each block on the left or on the right."""

    def block(tokens: list[int], width: int, side: str) -> tuple[list[int], list[int]]:
        pads = width - len(tokens)
        left, right = (pads, 0) if side == "left" else (0, pads)
        return [pad] * left + tokens + [pad] * right, [0] * left + [1] * len(tokens) + [0] * right

    ids, mask = [], []
    for owner, response in zip(owners, RESPONSES, strict=True):
        prompt_ids, prompt_mask = block(PROMPTS[owner], prompt_width, prompt_side)
        response_ids, response_mask = block(response, R, response_side)
        ids.append(prompt_ids + response_ids)
        mask.append(prompt_mask + response_mask)
    input_ids, attention_mask = torch.tensor(ids), torch.tensor(mask)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "response_length": R}


def alone(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return baseline_scores(model, batch)[0]


# B03: rows given back in the wrong frame, or the last target missing.


@pytest.mark.parametrize(("prompt_side", "response_side"), list(itertools.product(["left", "right"], repeat=2)))
def test_b03_every_layout_gives_the_same_values(
    model: Any, patch: Patch, score: Score, prompt_side: str, response_side: str
) -> None:
    batch = rows_as(prompt_side, response_side)
    with torch.no_grad():
        expected = alone(model, rows_as("left", "right"))
        patch(model, R)
        found = score(model, batch)
    assert found.logprobs.numel() == sum(map(len, RESPONSES))  # no target is missing, the last of a row included
    torch.testing.assert_close(found.logprobs, expected, rtol=1e-5, atol=1e-5)
    # Unpacked to [B, R], a value stands where its token stands.
    grid = torch.zeros(5, R)
    valid = batch["attention_mask"][:, -R:].bool()
    grid[valid] = found.logprobs
    for row, values in enumerate(expected.split([len(response) for response in RESPONSES])):
        torch.testing.assert_close(grid[row][valid[row]], values, rtol=1e-5, atol=1e-5)
    old = expected
    loss, metrics = packed_ppo_policy_loss(found.logprobs, old, torch.ones_like(old), old)
    assert abs(metrics["actor/ppo_kl"]) < 1e-6
    assert abs(metrics["actor/kl_loss"]) < 1e-6
    assert loss.item() == pytest.approx(-1, abs=1e-5)


# B04: padding is told by the mask, never by the id.


def test_b04_a_pad_id_that_is_a_real_token(model: Any, patch: Patch, score: Score) -> None:
    prompt = [7, 0, 13]  # the pad id inside a prompt as well
    responses = [([5, 6, 0], 3), ([5, 6, 8], 3), ([5, 0, 9, 0], 4)]  # ends with a real 0; no eos; a 0 in the middle
    ids = torch.tensor([[0, *prompt, *tokens, *[0] * (R - len(tokens))] for tokens, _ in responses])
    mask = torch.tensor([[0, 1, 1, 1] + [1] * valid + [0] * (R - valid) for _, valid in responses])
    batch = {"input_ids": ids, "attention_mask": mask, "response_length": R}
    with torch.no_grad():
        expected = alone(model, batch)
        patch(model, R)
        found = score(model, batch).logprobs
    assert found.numel() == 10
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    groups, _ = ZoRRoTrain.find_prompt_groups(ids, R, mask)
    assert groups == [[0, 1, 2]]


# B05: rows of one prompt are not neighbours.


def test_b05_any_order_of_rows(model: Any, patch: Patch, score: Score) -> None:
    batch = rows_as("left", "right")
    lengths = torch.tensor([len(response) for response in RESPONSES])
    truth = alone(model, batch)
    tokens: list[int] = []
    model.model.layers[0].register_forward_hook(lambda _, inputs, __: tokens.append(inputs[0].size(1)))
    patch(model, R)
    torch.manual_seed(0)
    weights = torch.randn(int(lengths.sum()))

    def run(order: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        part = {name: batch[name][order] for name in ("input_ids", "attention_mask")}
        logprobs = score(model, part).logprobs
        places = [torch.arange(int(lengths.sum())).split(lengths.tolist())[row] for row in order.tolist()]
        (logprobs * weights[torch.cat(places)]).sum().backward()
        back = torch.empty_like(logprobs)
        back[torch.cat(places)] = logprobs
        return back.detach(), gradients(model)

    expected, expected_gradients = run(torch.arange(5))
    assert (expected - truth).abs().max() < 1e-5
    for _ in range(20):
        values, found = run(torch.randperm(5))
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)
        assert compare_gradients(found, expected_gradients, atol=1e-6, rtol=1e-6) < 1e-5
    assert set(tokens) == {3 + 5 + sum(map(len, RESPONSES))}  # the same packed size in every order


# B13: position ids with left padding, an offset, three axes.


def test_b13_position_ids(model: Any, patch: Patch, score: Score) -> None:
    batch = rows_as("left", "right")
    counted = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    plain = torch.arange(8 + R).expand(5, -1)
    with torch.no_grad():
        expected = alone(model, batch)
        patch(model, R)

        def found(position_ids: torch.Tensor | None) -> torch.Tensor:
            values: torch.Tensor = score(model, {**batch, "position_ids": position_ids}).logprobs
            return values

        absent = found(None)
        torch.testing.assert_close(absent, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(found(counted), absent)  # a = d
        for shifted in (plain, counted + 1000, plain[:1], plain[0]):  # b, c, and two short forms of b (g)
            torch.testing.assert_close(found(shifted), absent, rtol=1e-4, atol=1e-4)
        assert torch.equal(found(counted.expand(3, -1, -1)), absent)  # e
        with pytest.raises(ValueError, match="position_ids must agree on all axes for this text model, got 3 axes"):
            found(torch.stack([counted, counted, counted + 1]))  # f
        # Axes that differ only in pads are the same.
        differing = torch.stack([counted, counted, counted + (1 - batch["attention_mask"])])
        assert torch.equal(found(differing), absent)
        for wrong in (plain[:, :-1], plain[:3], torch.zeros(1, 1, 1, 14, dtype=torch.long)):
            with pytest.raises(ValueError, match=r"\[zorro\] position_ids must be \[14\], \[5, 14\] or"):
                found(wrong)
        with pytest.raises(ValueError, match="position_ids must be integers"):
            found(counted.float())


def test_b13_a_prompt_at_other_positions_is_not_shared(model: Any, patch: Patch, score: Score) -> None:
    """Equal ids at different positions are different tokens: both rows stay right."""
    batch = rows_as("left", "right")
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    positions[2] *= 3  # gaps: not a shift that RoPE would not see
    expected = []
    with torch.no_grad():
        for row, valid in enumerate(batch["attention_mask"].bool()):
            ids = batch["input_ids"][row][valid][None]
            logits = model(input_ids=ids, position_ids=positions[row][valid][None]).logits[0].log_softmax(-1)
            prompt = int(valid[:-R].sum())
            expected.append(logits[prompt - 1 : -1].gather(1, ids[0, prompt:, None])[:, 0])
        patch(model, R)
        found = score(model, {**batch, "position_ids": positions}).logprobs
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=1e-5)


# B45: a second batch through a model that was patched once.


def test_b45_batches_do_not_remember_each_other(model: Any, patch: Patch, score: Score) -> None:
    first = rows_as("left", "right")
    second = rows_as("right", "left", owners=(1, 0, 1, 0, 1))
    same_total = rows_as("left", "right", owners=(0, 0, 1, 0, 1))
    lengths = [int(batch["attention_mask"].sum()) for batch in (first, second, same_total)]
    assert lengths[0] != lengths[1]
    expected = []
    for batch in (first, second, same_total):
        logprobs = alone(model, batch)
        (logprobs * torch.arange(1.0, 1 + logprobs.numel())).sum().backward()
        expected.append((logprobs.detach(), gradients(model)))
        model.zero_grad()
    patch(model, R)
    for batch, (logprobs, _) in zip((first, second, same_total), expected, strict=True):
        torch.testing.assert_close(score(model, batch).logprobs, logprobs, rtol=1e-5, atol=1e-5)
    # Two live graphs: the second forward before the first backward.
    live = [score(model, batch).logprobs for batch in (first, second, same_total)]
    for logprobs, (values, grads) in zip(live, expected, strict=True):
        torch.testing.assert_close(logprobs, values, rtol=1e-5, atol=1e-5)
        (logprobs * torch.arange(1.0, 1 + logprobs.numel())).sum().backward()
        assert compare_gradients(model, grads, atol=0, rtol=1e-4) < 1e-5
        model.zero_grad()


def test_b45_after_an_exception_the_next_call_is_right(model: Any, patch: Patch, score: Score) -> None:
    batch = rows_as("left", "right")
    with torch.no_grad():
        expected = alone(model, batch)
        patch(model, R)

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        handle = model.model.layers[1].register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            score(model, batch)
        handle.remove()
        torch.testing.assert_close(score(model, batch).logprobs, expected, rtol=1e-5, atol=1e-5)
        assert model(batch["input_ids"]).logits.dim() == 3  # no head call is left behind

"""Micro-batches: every row once, never over the cap, groups together, and the packing that goes with each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict

from arctic_platform.rl.zorro_train import ZoRRoTrain
from arctic_platform.rl.zorro_train.seqlen_balancing import rearrange_micro_batches_with_dedup
from arctic_platform.rl.zorro_train.tests import create_dummy_batch

P, R = 16, 8


def batch_of(rows: int, prompts: int, seed: int = 0, add_padding: bool = True) -> TensorDict:
    torch.manual_seed(seed)
    batch = create_dummy_batch(
        rows,
        prompts,
        prompt_len=P,
        response_len=R,
        vocab_size=90,
        device="cpu",
        add_padding=add_padding,
        include_training_fields=True,
        min_valid_response_len=0,
    )
    order = torch.randperm(rows)
    fields = {name: value[order] for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return TensorDict(fields, batch_size=[rows])


def packed_tokens(batch: Any, rows: list[int]) -> int:
    part = {name: batch[name][rows] for name in ("input_ids", "attention_mask")}
    groups, _ = ZoRRoTrain.find_prompt_groups(part["input_ids"], R, part["attention_mask"])
    mask = part["attention_mask"]
    return int(sum(mask[group[0], :-R].sum() for group in groups) + mask[:, -R:].sum())


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 14),
    prompts=st.integers(1, 5),
    cap=st.integers(P + R, 120),
    least=st.one_of(st.none(), st.integers(1, 9)),
    multiple=st.one_of(st.none(), st.integers(1, 4)),
    most=st.one_of(st.none(), st.integers(1, 4)),
)
@settings(max_examples=120, deadline=None)
def test_every_row_once_and_never_over_the_cap(
    seed: int, rows: int, prompts: int, cap: int, least: int | None, multiple: int | None, most: int | None
) -> None:
    batch = batch_of(rows, min(prompts, rows), seed)
    parts, indices = rearrange_micro_batches_with_dedup(
        batch,
        R,
        cap,
        min_num_micro_batch=least,
        num_batches_divided_by=multiple,
        max_group_length_threshold=most,
    )
    assert sorted(row for part in indices for row in part) == list(range(rows))
    assert all(part == sorted(part) for part in indices)
    assert len(parts) == len(indices)
    assert len(parts) >= (least or 1)
    assert len(parts) % (multiple or 1) == 0
    for part, members in zip(parts, indices, strict=True):
        metrics = part["dedup_metrics"]
        assert metrics["dedup_tokens"] == (packed_tokens(batch, members) if members else 0) <= cap
        assert metrics["orig_tokens"] == int(batch["attention_mask"][members].sum())
        assert metrics["tokens_saved"] == metrics["orig_tokens"] - metrics["dedup_tokens"] >= 0
        assert metrics["batch_size"] == len(members)
        assert metrics["num_unique_prompts"] == len(part["prompt_groups"])
        assert part["dedup_input_ids"].shape == (1, metrics["dedup_tokens"])


def groups_of(batch: Any) -> list[list[int]]:
    groups: list[list[int]] = ZoRRoTrain.find_prompt_groups(batch["input_ids"], R, batch["attention_mask"])[0]
    return groups


def test_groups_stay_together_when_they_fit() -> None:
    batch = batch_of(12, 4)
    _, indices = rearrange_micro_batches_with_dedup(batch, R, P + 3 * R)
    owner = {row: part for part, rows in enumerate(indices) for row in rows}
    assert len(indices) > 1
    for group in groups_of(batch):
        assert len({owner[row] for row in group}) == 1


def test_a_group_over_the_cap_is_cut() -> None:
    batch = batch_of(9, 1, add_padding=False)
    _, indices = rearrange_micro_batches_with_dedup(batch, R, P + 2 * R)
    assert [len(rows) for rows in indices] == [2, 2, 2, 2, 1]
    # P + R <= cap < P + 2R: one row each.
    _, indices = rearrange_micro_batches_with_dedup(batch, R, P + 2 * R - 1)
    assert [len(rows) for rows in indices] == [1] * 9


def test_a_row_over_the_cap_is_named() -> None:
    batch = batch_of(3, 3, add_padding=False)
    with pytest.raises(ValueError, match=r"samples\[0\] must fit the cap of 23 tokens, got 24"):
        rearrange_micro_batches_with_dedup(batch, R, P + R - 1)


def test_a_threshold_cuts_groups() -> None:
    batch = batch_of(8, 1, add_padding=False)
    _, indices = rearrange_micro_batches_with_dedup(batch, R, P + 3 * R, max_group_length_threshold=3)
    assert max(len(rows) for rows in indices) == 3


def test_fields_follow_their_rows() -> None:
    batch = batch_of(7, 2)
    as_dict = {name: batch[name] for name in batch.keys()}  # noqa: SIM118 (TensorDict)
    as_dict |= {"uid": [f"row {row}" for row in range(7)], "step": 3}
    parts, indices = rearrange_micro_batches_with_dedup(as_dict, R, P + 2 * R)
    for part, rows in zip(parts, indices, strict=True):
        for name in ("input_ids", "attention_mask", "position_ids", "responses", "advantages", "old_log_probs"):
            assert torch.equal(part[name], as_dict[name][rows])
        assert part["uid"] == [f"row {row}" for row in rows]
        assert part["step"] == 3


def test_packing_leads_back_to_the_rows() -> None:
    batch = batch_of(6, 2)
    (part,), (rows,) = rearrange_micro_batches_with_dedup(batch, R, 10_000)
    assert rows == list(range(6))
    table = torch.randn(90, 4)
    full = ZoRRoTrain.reconstruct_sequences(table[part["dedup_input_ids"]], part["reconstruction_info"])
    valid = batch["attention_mask"].bool()
    assert torch.equal(full[0], table[batch["input_ids"][valid]])
    assert torch.equal(part["adapted_position_ids"][0], batch["position_ids"][valid])


def test_without_mask_and_positions_everything_is_valid() -> None:
    ids = torch.randint(1, 50, (4, P + R))
    parts, _ = rearrange_micro_batches_with_dedup({"input_ids": ids}, R, 1000)
    assert parts[0]["dedup_metrics"]["orig_tokens"] == ids.numel()
    assert parts[0]["adapted_position_ids"][0, : P + R].tolist() == list(range(P + R))


def test_empty_micro_batches_carry_every_key() -> None:
    batch = batch_of(1, 1)
    parts, indices = rearrange_micro_batches_with_dedup(batch, R, 100, min_num_micro_batch=3)
    assert sorted(map(len, indices)) == [0, 0, 1]
    assert len({frozenset(part) for part in parts}) == 1
    empty = parts[indices.index([])]
    assert empty["input_ids"].shape == (0, P + R)
    assert empty["dedup_metrics"]["orig_tokens"] == 0


@pytest.mark.parametrize(
    "argument", ["max_token_len", "num_batches_divided_by", "min_num_micro_batch", "max_group_length_threshold"]
)
def test_an_argument_below_one_is_refused(argument: str) -> None:
    settings: dict[str, Any] = {"max_token_len": 100, argument: 0}
    with pytest.raises(ValueError, match=rf"\[zorro\] {argument} must be >= 1, got 0"):
        rearrange_micro_batches_with_dedup(batch_of(2, 1), R, **settings)


def test_ranks_get_equal_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is the maximum over the group: here another rank needs five."""
    batch = batch_of(6, 3)

    def all_reduce(counts: torch.Tensor, op: Any, group: Any) -> None:
        assert group == "group"
        counts.clamp_min_(5)

    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    call: Callable[..., Any] = rearrange_micro_batches_with_dedup
    assert len(call(batch, R, 1000, dp_group="group")[0]) == 5
    assert len(call(batch, R, 1000, dp_group="group", num_batches_divided_by=3)[0]) == 6
    assert len(call(batch, R, 1000, dp_group="group", same_micro_num_in_dp=False)[0]) == 1

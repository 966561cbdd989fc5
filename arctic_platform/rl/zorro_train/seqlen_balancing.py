"""Micro-batches under a cap on packed tokens, prompt groups kept together."""

from collections.abc import Mapping
from typing import Any

import torch

from arctic_platform.rl.zorro_train._native import ops
from arctic_platform.rl.zorro_train.zorro_train import ZoRRoTrain


def pick_rows(name: str, value: Any, rows: list[int], batch_size: int) -> Any:
    """Some rows of one field: tensors and sequences with one entry a row; anything else is passed on."""
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        index = torch.tensor(rows, dtype=torch.long, device=value.device)
        if name == "position_ids" and value.dim() == 3 and value.size(1) == batch_size:
            return value.index_select(1, index)  # [axes, B, S]
        if value.size(0) == batch_size:
            return value.index_select(0, index)
    elif isinstance(value, list | tuple) and len(value) == batch_size:
        return type(value)(value[row] for row in rows)
    return value


def _largest_over(group: Any, count: int) -> int:
    """The maximum over a process group; on the device that its backend communicates on."""
    backend = torch.distributed.get_backend(group)
    device = "cuda" if backend == "nccl" else "cpu"
    counts = torch.tensor([count], device=device)
    torch.distributed.all_reduce(counts, op=torch.distributed.ReduceOp.MAX, group=group)
    return int(counts)


def _groups_of(numbers: torch.Tensor, most: int | None) -> torch.Tensor:
    """Group numbers in which no group has more than `most` rows."""
    if most is None:
        return numbers
    seen: dict[int, int] = {}
    cut: dict[tuple[int, int], int] = {}
    result = []
    for number in numbers.tolist():
        rank = seen.get(number, 0)
        seen[number] = rank + 1
        result.append(cut.setdefault((number, rank // most), len(cut)))
    return torch.tensor(result)


def _micro_batch(batch: Mapping[str, Any], rows: list[int], response_length: int) -> dict[str, Any]:
    """The fields of some rows, and how they are packed."""
    batch_size = batch["input_ids"].size(0)
    part = {name: pick_rows(name, value, rows, batch_size) for name, value in batch.items()}
    ids, mask = part["input_ids"], part.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    if part.get("position_ids") is None:
        part["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)
    if rows:
        groups, unique = ZoRRoTrain.find_prompt_groups(ids, response_length, mask)
        packed, positions, info = ZoRRoTrain.create_deduplicated_batch(
            ids, part["position_ids"], response_length, groups, unique, mask, use_unpad=True
        )
    else:
        groups, packed, positions, info = [], ids.reshape(1, 0), part["position_ids"].reshape(1, 0), None
    tokens = int(mask.sum())
    saved = tokens - packed.size(1)
    metrics = {
        "orig_tokens": tokens,
        "dedup_tokens": packed.size(1),
        "tokens_saved": saved,
        "tokens_saved_pct": 100.0 * saved / tokens if tokens else 0.0,
        "num_unique_prompts": len(groups),
        "batch_size": len(rows),
    }
    return {
        **part,
        "dedup_input_ids": packed,
        "adapted_position_ids": positions,
        "reconstruction_info": info,
        "prompt_groups": groups,
        "dedup_metrics": metrics,
    }


def plan_rows(
    batch: Mapping[str, Any],
    response_length: int,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    max_group_length_threshold: int | None = None,
) -> list[list[int]]:
    """The rows of each micro-batch, ascending; arguments and errors of `rearrange_micro_batches_with_dedup`."""
    for name, value in (
        ("max_token_len", max_token_len),
        ("num_batches_divided_by", num_batches_divided_by),
        ("min_num_micro_batch", min_num_micro_batch),
        ("max_group_length_threshold", max_group_length_threshold),
    ):
        if value is not None and value < 1:
            raise ValueError(f"[zorro] {name} must be >= 1, got {value}.")
    ids = batch["input_ids"]
    mask = batch["attention_mask"] if "attention_mask" in batch.keys() else None  # noqa: SIM118 (TensorDict)
    numbers = _groups_of(ops.prompt_groups(ids, mask, response_length), max_group_length_threshold)
    valid = torch.ones_like(ids) if mask is None else mask.long()
    boundary = ids.size(1) - response_length
    lengths = (valid[:, :boundary].sum(1), valid[:, boundary:].sum(1))
    part, count = ops.plan_micro_batches(numbers, *lengths, max_token_len, 0)
    wanted = max(count, min_num_micro_batch or 1)
    if dp_group is not None and same_micro_num_in_dp:
        wanted = _largest_over(dp_group, wanted)
    if num_batches_divided_by is not None:
        wanted = -(-wanted // num_batches_divided_by) * num_batches_divided_by
    if wanted > count:
        part, count = ops.plan_micro_batches(numbers, *lengths, max_token_len, wanted)
    indices: list[list[int]] = [[] for _ in range(count)]
    for row, owner in enumerate(part.tolist()):
        indices[owner].append(row)
    return indices


def rearrange_micro_batches_with_dedup(
    batch: Mapping[str, Any],
    response_length: int,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    max_group_length_threshold: int | None = None,
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Cuts a batch into micro-batches of at most `max_token_len` packed tokens (a prompt counts once in each).

    Whole prompt groups stay together unless one alone exceeds the cap.

    Args:
        batch: a TensorDict or any mapping with `input_ids` `[B, S]`, optionally `attention_mask`, `position_ids` and
            other fields with one entry a row.
        response_length: width of the response block.
        max_token_len: hard cap on valid packed tokens.
        dp_group: process group of the data-parallel ranks.
        num_batches_divided_by: the count becomes a multiple of it.
        same_micro_num_in_dp: with `dp_group`, every rank gets the largest count of all ranks.
        min_num_micro_batch: at least this many; empty ones if there are fewer rows.
        max_group_length_threshold: most rollouts of a prompt that one micro-batch keeps together.

    Returns:
        micro_batches: dicts with the batch's fields and `dedup_input_ids` `[1, T]`, `adapted_position_ids` `[1, N]`,
            `reconstruction_info` (None if empty), `prompt_groups`, `dedup_metrics`.
        indices: the rows of each, ascending; every row in exactly one.

    Raises:
        ValueError: a row alone exceeds the cap (it is named), or an argument is out of its range.
    """
    indices = plan_rows(
        batch,
        response_length,
        max_token_len,
        dp_group,
        num_batches_divided_by,
        same_micro_num_in_dp,
        min_num_micro_batch,
        max_group_length_threshold,
    )
    return [_micro_batch(batch, rows, response_length) for rows in indices], indices

"""Rearranging batches by shared prompts: padded, packed and back, bit for bit."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from arctic_platform.rl.zorro_train._checks import need
from arctic_platform.rl.zorro_train._native import ops


class ReconstructionInfo(dict[str, Any]):
    """How a packed batch leads back to its rows; made by `ZoRRoTrain.create_deduplicated_batch`.

    | key | value |
    |---|---|
    | `prompt_groups` | the groups given, lists of rows |
    | `prompt_len`, `response_length` | widths of the two blocks |
    | `original_batch_size`, `original_seq_len` | B and S |
    | `is_unpadded` | whether pads were left out |
    | `original_attention_mask` | the mask given, or None |
    | `cu_seqlens_prompt` | `[groups + 1]` int32, running count of prompt tokens |
    | `cu_seqlens_response` | `[B + 1]` int32, running count of response tokens in packed order |
    | `packed_cells` | `[T]` row * S + column of each packed token |
    | `replicated_to_packed` | `[N]` packed index of every token of every row, in row order |
    | `first_copy` | `[T]` where in the former each packed token stands first |
    | `response_index`, `predictor_index` | `[M]` packed index of each response token, and of the token before it |
    """


def _pick(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """`x.index_select` for every dtype: a few have no kernel and are moved as bytes."""
    if x.dtype.itemsize == 1 and x.dtype.is_floating_point:
        return x.view(torch.uint8).index_select(dim, index).view(x.dtype)
    return x.index_select(dim, index)


class ZoRRoTrain:
    """Prompt groups, the packed batch `[prompt][responses]...`, and the way back. No state: all methods are static.

    Batches are `[B, S]`: `[left pad][prompt][response][right pad]` with a response block of fixed width.
    """

    @staticmethod
    def find_prompt_groups(
        input_ids: torch.Tensor, response_length: int, attention_mask: torch.Tensor | None = None
    ) -> tuple[list[list[int]], torch.Tensor]:
        """Finds the rows that share a prompt, neighbours or not.

        Args:
            input_ids: `[B, S]` integers.
            response_length: width of the response block.
            attention_mask: `[B, S]` of 0 and 1. With it prompts are equal when their valid tokens are, whatever
                stands in the pads; without it when all ids of the prompt block are.

        Returns:
            groups: row numbers, groups and rows in first-seen order.
            unique_prompts: `[groups, S - response_length]`, the prompt block of each group's first row.

        Raises:
            ValueError: a shape, dtype, mask value or response_length is wrong.
        """
        numbers = ops.prompt_groups(input_ids, attention_mask, response_length).tolist()
        groups: list[list[int]] = [[] for _ in range(max(numbers) + 1)]
        for row, group in enumerate(numbers):
            groups[group].append(row)
        first_rows = torch.tensor([group[0] for group in groups], device=input_ids.device)
        return groups, input_ids.index_select(0, first_rows)[:, : input_ids.size(1) - response_length]

    @staticmethod
    def create_deduplicated_batch(
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        response_length: int,
        prompt_groups: Sequence[Sequence[int]],
        unique_prompts: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        use_unpad: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, ReconstructionInfo]:
        """Packs a batch: for each group its prompt once, then the responses of its rows.

        Args:
            input_ids: `[B, S]` integers.
            position_ids: `[B, S]` (or `[axes, B, S]`) integers.
            response_length: width of the response block.
            prompt_groups, unique_prompts: from `find_prompt_groups`; every row in exactly one group.
            attention_mask: `[B, S]` of 0 and 1, needed when `use_unpad` is set and there are pads.
            use_unpad: leave pads out.

        Returns:
            dedup_input_ids: `[1, T]`. With pads T = groups * prompt width + B * response width; without, the valid
                tokens.
            position_ids: unchanged, or with `use_unpad` those of the valid tokens row after row, `[1, N]`
                (`[axes, 1, N]`).
            info: for the methods below.

        Raises:
            ValueError: a group joins unequal prompts, a row is missing or twice, or a shape is wrong.
        """
        rows = [row for group in prompt_groups for row in group]
        sizes = [len(group) for group in prompt_groups]
        need(
            unique_prompts.size(0) == len(sizes),
            f"unique_prompts must have one row a group, {len(sizes)}, got {unique_prompts.size(0)}. "
            "Use both results of find_prompt_groups.",
        )
        batch_size, width = input_ids.shape[0], input_ids.shape[-1]
        need(
            position_ids.dim() in (2, 3) and position_ids.shape[-2:] == (batch_size, width),
            f"position_ids must be [{batch_size}, {width}] as input_ids, got {list(position_ids.shape)}.",
        )
        mask = attention_mask if use_unpad else None
        packed = ops.pack_groups(input_ids, mask, response_length, rows, sizes)
        cells, replicated, first_copy, response, predictor, cu_prompt, cu_response, valid_cells = (
            index.to(input_ids.device) for index in packed
        )
        if use_unpad:
            position_ids = (
                position_ids.reshape(*position_ids.shape[:-2], -1).index_select(-1, valid_cells).unsqueeze(-2)
            )
        info = ReconstructionInfo(
            prompt_groups=[list(group) for group in prompt_groups],
            prompt_len=width - response_length,
            response_length=response_length,
            original_batch_size=batch_size,
            original_seq_len=width,
            is_unpadded=use_unpad,
            original_attention_mask=attention_mask,
            cu_seqlens_prompt=cu_prompt.int(),
            cu_seqlens_response=cu_response.int(),
            packed_cells=cells,
            replicated_to_packed=replicated,
            first_copy=first_copy,
            response_index=response,
            predictor_index=predictor,
        )
        return input_ids.flatten().index_select(0, cells).unsqueeze(0), position_ids, info

    @staticmethod
    def reconstruct_sequences(x: torch.Tensor, info: Mapping[str, Any]) -> torch.Tensor:
        """Packed `[1, T, ...]` of any dtype -> `[B, S, ...]`, or `[1, N, ...]` without pads: the rows' tokens.

        Bit-exact and differentiable: a shared token's gradient is the sum over its copies.

        Raises:
            ValueError: x is not `[1, T, ...]`.
        """
        tokens = info["first_copy"].size(0)
        need(x.dim() >= 2 and tuple(x.shape[:2]) == (1, tokens), f"x must be [1, {tokens}, ...], got {list(x.shape)}.")
        full = _pick(x, 1, info["replicated_to_packed"].to(x.device))
        if info["is_unpadded"]:
            return full
        return full.reshape(info["original_batch_size"], info["original_seq_len"], *x.shape[2:])

    @staticmethod
    def deduplicate_sequences(full: torch.Tensor, info: Mapping[str, Any]) -> torch.Tensor:
        """Left inverse of `reconstruct_sequences`: each packed token from the first row that has it, `[1, T, ...]`.

        Raises:
            ValueError: full has not the shape that `reconstruct_sequences` returns.
        """
        if info["is_unpadded"]:
            expected = (1, info["replicated_to_packed"].size(0))
        else:
            expected = (info["original_batch_size"], info["original_seq_len"])
        need(
            full.dim() >= 2 and tuple(full.shape[:2]) == expected,
            f"full must be [{expected[0]}, {expected[1]}, ...], got {list(full.shape)}.",
        )
        return _pick(full.flatten(0, 1), 0, info["first_copy"].to(full.device)).unsqueeze(0)

    @staticmethod
    def extract_unpadded_responses_from_deduped_packed_ids(
        packed: torch.Tensor, info: Mapping[str, Any], offset: int = 0
    ) -> torch.Tensor:
        """Packed `[T, ...]` -> `[M, ...]`: each row's response tokens, row after row in packed order.

        Args:
            packed: ids, hidden states or anything else with one entry a packed token.
            info: from `create_deduplicated_batch`.
            offset: 0 for the tokens, -1 for their predictors: the token before each on its row's path, so the first
                token of every response of a group is predicted by the one last prompt token.

        Raises:
            ValueError: another offset, a wrong shape, or offset -1 with a response that has no prompt.
        """
        tokens = info["first_copy"].size(0)
        need(offset in (0, -1), f"offset must be 0 or -1, got {offset}.")
        need(
            packed.dim() >= 1 and packed.size(0) == tokens, f"packed must be [{tokens}, ...], got {list(packed.shape)}."
        )
        index = info["response_index" if offset == 0 else "predictor_index"].to(packed.device)
        if offset == -1:
            need(not bool((index < 0).any()), "every response must follow a prompt, got a row without prompt tokens.")
        return _pick(packed, 0, index)

    @staticmethod
    def responses_in_orig_sample_order(packed: torch.Tensor, info: Mapping[str, Any]) -> torch.Tensor:
        """Response values in packed order `[M, ...]` -> in the caller's row order.

        Reads only `info["prompt_groups"]` and `info["cu_seqlens_response"]`.
        """
        rows = [row for group in info["prompt_groups"] for row in group]
        if rows == sorted(rows):
            return packed
        bounds = torch.as_tensor(info["cu_seqlens_response"], dtype=torch.long, device=packed.device)
        need(
            packed.size(0) == int(bounds[-1]),
            f"packed must have {int(bounds[-1])} values, one a response token, got {packed.size(0)}.",
        )
        place = torch.tensor(rows, device=packed.device).argsort()  # [B] where each row stands in packed order
        lengths = bounds.diff()[place]
        shift = bounds[:-1][place] - (lengths.cumsum(0) - lengths)
        index = shift.repeat_interleave(lengths) + torch.arange(packed.size(0), device=packed.device)
        return _pick(packed, 0, index)

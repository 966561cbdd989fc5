"""Packing by prompts and back: every way round is exact, bit for bit."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from arctic_platform.rl.zorro_train import ReconstructionInfo, ZoRRoTrain
from arctic_platform.rl.zorro_train.tests import create_dummy_batch

R = 5
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def batch_of(seed: int, rows: int, prompts: int, add_padding: bool, permute: bool = True) -> dict[str, Any]:
    torch.manual_seed(seed)
    batch = create_dummy_batch(
        rows,
        prompts,
        prompt_len=7,
        response_len=R,
        vocab_size=6,  # the pad id 0 aside, ids repeat everywhere
        device="cpu",
        add_padding=add_padding,
        min_valid_prompt_len=1,
        min_valid_response_len=0,
    )
    order = torch.randperm(rows) if permute else torch.arange(rows)
    return {name: value[order] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def pack(
    batch: dict[str, Any], use_unpad: bool, width: int = R
) -> tuple[torch.Tensor, torch.Tensor, ReconstructionInfo]:
    mask = batch["attention_mask"] if use_unpad else None
    groups, unique = ZoRRoTrain.find_prompt_groups(batch["input_ids"], width, mask)
    return ZoRRoTrain.create_deduplicated_batch(
        batch["input_ids"], batch["position_ids"], width, groups, unique, batch["attention_mask"], use_unpad
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert a.dtype == b.dtype
    bits = [x.contiguous().view(torch.uint8) for x in (a, b)]
    return a.shape == b.shape and bool((bits[0] == bits[1]).all())


def valid_rows(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.cat([row[keep.bool()] for row, keep in zip(x, mask, strict=True)]).unsqueeze(0)


@pytest.mark.parametrize("use_unpad", [False, True], ids=["padded", "unpadded"])
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 9), more=st.integers(0, 8), add_padding=st.booleans())
@settings(max_examples=60, deadline=None)
def test_reconstruct_gives_the_batch_back(use_unpad: bool, seed: int, rows: int, more: int, add_padding: bool) -> None:
    batch = batch_of(seed, rows, min(rows, more + 1), add_padding)
    table = torch.randn(6, 3)
    ids, positions, info = pack(batch, use_unpad)
    full = ZoRRoTrain.reconstruct_sequences(table[ids], info)
    mask = batch["attention_mask"]
    expected = table[batch["input_ids"]]
    assert same_bits(full, valid_rows(expected, mask) if use_unpad else expected)
    assert same_bits(positions, valid_rows(batch["position_ids"], mask) if use_unpad else batch["position_ids"])
    # The left inverse, on values that nothing else has.
    hidden = torch.randn(1, ids.size(1), 2, 3)
    again = ZoRRoTrain.deduplicate_sequences(ZoRRoTrain.reconstruct_sequences(hidden, info), info)
    assert same_bits(again, hidden)


@pytest.mark.parametrize("use_unpad", [False, True], ids=["padded", "unpadded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("shape", [(), (4,), (2, 3)], ids=["2-D", "3-D", "4-D"])
def test_every_dtype_and_rank(use_unpad: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    batch = batch_of(1, 6, 2, add_padding=True)
    ids, _, info = pack(batch, use_unpad)
    bits = torch.randint(0, 2 if dtype == torch.bool else 128, (1, ids.size(1), *shape))
    hidden = bits.to(torch.float32).to(dtype) if dtype.is_floating_point else bits.to(dtype)
    full = ZoRRoTrain.reconstruct_sequences(hidden, info)
    assert full.dim() == 2 + len(shape)
    assert same_bits(ZoRRoTrain.deduplicate_sequences(full, info), hidden)


def test_groups_come_in_first_seen_order() -> None:
    ids = torch.tensor([[1, 2, 9, 9], [3, 4, 9, 9], [1, 2, 8, 8], [3, 4, 9, 9], [5, 6, 7, 7]])
    groups, unique = ZoRRoTrain.find_prompt_groups(ids, 2)
    assert groups == [[0, 2], [1, 3], [4]]
    assert unique.tolist() == [[1, 2], [3, 4], [5, 6]]


def test_the_mask_decides_what_is_equal() -> None:
    # Row 1: equal ids, another mask. Row 2: other pads, equal tokens.
    ids = torch.tensor([[0, 5, 6, 1], [0, 5, 6, 1], [9, 5, 6, 1]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    assert ZoRRoTrain.find_prompt_groups(ids, 1)[0] == [[0, 1], [2]]
    assert ZoRRoTrain.find_prompt_groups(ids, 1, mask)[0] == [[0, 2], [1]]
    assert ZoRRoTrain.find_prompt_groups(ids, 1, mask.bool())[0] == [[0, 2], [1]]


@pytest.mark.parametrize("use_unpad", [False, True], ids=["padded", "unpadded"])
def test_packed_tokens_are_the_distinct_ones(use_unpad: bool) -> None:
    batch = batch_of(2, 6, 2, add_padding=True, permute=False)
    ids, _, info = pack(batch, use_unpad)
    mask = batch["attention_mask"]
    if use_unpad:
        prompts = int(mask[0, :-R].sum() + mask[3, :-R].sum())
        assert ids.shape == (1, prompts + int(mask[:, -R:].sum()))
        assert info["cu_seqlens_prompt"][-1] == prompts
    else:
        assert ids.shape == (1, 2 * 7 + 6 * R)
    # [prompt of group 0][its responses][prompt of group 1]...
    first = batch["input_ids"][0] if not use_unpad else batch["input_ids"][0][mask[0].bool()]
    assert ids[0, : len(first)].tolist() == first.tolist()


@pytest.mark.parametrize("use_unpad", [False, True], ids=["padded", "unpadded"])
def test_gradients_of_copies_are_summed(use_unpad: bool) -> None:
    batch = batch_of(3, 7, 3, add_padding=True)
    ids, _, info = pack(batch, use_unpad)
    hidden = torch.randn(1, ids.size(1), 2, dtype=torch.float64, requires_grad=True)
    full = ZoRRoTrain.reconstruct_sequences(hidden, info)
    weight = torch.randn_like(full)
    (full * weight).sum().backward()
    expected = torch.zeros_like(hidden[0]).index_add(
        0, info["replicated_to_packed"], weight.flatten(0, 1) if not use_unpad else weight[0]
    )
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad[0], expected.detach(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("offset", [0, -1])
def test_responses_and_their_predictors(offset: int) -> None:
    batch = batch_of(4, 6, 2, add_padding=True)
    ids, _, info = pack(batch, use_unpad=True)
    found = ZoRRoTrain.extract_unpadded_responses_from_deduped_packed_ids(ids[0], info, offset)
    expected = []
    for row in (row for group in info["prompt_groups"] for row in group):
        tokens = batch["input_ids"][row][batch["attention_mask"][row].bool()]
        prompt = int(batch["attention_mask"][row, :-R].sum())
        expected += tokens[prompt + offset : len(tokens) + offset].tolist()
    assert found.tolist() == expected
    bounds = info["cu_seqlens_response"]
    assert bounds.dtype == torch.int32
    assert bounds.diff().sum() == len(expected)


def test_responses_come_back_in_the_callers_order() -> None:
    batch = batch_of(5, 7, 3, add_padding=True)
    ids, _, info = pack(batch, use_unpad=True)
    packed = ZoRRoTrain.extract_unpadded_responses_from_deduped_packed_ids(ids[0], info)
    mask = batch["attention_mask"][:, -R:].bool()
    restored = ZoRRoTrain.responses_in_orig_sample_order(packed, info)
    assert restored.tolist() == batch["input_ids"][:, -R:][mask].tolist()


def test_order_needs_only_a_plain_dict() -> None:
    info = {"prompt_groups": [[3, 1], [0], [2]], "cu_seqlens_response": torch.tensor([0, 2, 2, 5, 6])}
    packed = torch.tensor([30, 31, 0, 1, 2, 20])  # rows 3, 1 (empty), 0, 2
    assert ZoRRoTrain.responses_in_orig_sample_order(packed, info).tolist() == [0, 1, 2, 20, 30, 31]
    ordered = {"prompt_groups": [[0, 1]], "cu_seqlens_response": torch.tensor([0, 1, 2])}
    assert ZoRRoTrain.responses_in_orig_sample_order(packed, ordered) is packed


def test_a_mutation_of_the_map_is_seen() -> None:
    batch = batch_of(6, 6, 2, add_padding=False)
    ids, _, info = pack(batch, use_unpad=False)
    info["replicated_to_packed"][0] += 1
    assert not torch.equal(ZoRRoTrain.reconstruct_sequences(ids, info), batch["input_ids"])


def test_three_position_axes_are_kept() -> None:
    batch = batch_of(7, 4, 2, add_padding=True)
    batch["position_ids"] = torch.stack([batch["position_ids"] + axis for axis in range(3)])
    mask = batch["attention_mask"]
    groups, unique = ZoRRoTrain.find_prompt_groups(batch["input_ids"], R, mask)
    _, positions, _ = ZoRRoTrain.create_deduplicated_batch(
        batch["input_ids"], batch["position_ids"], R, groups, unique, mask, use_unpad=True
    )
    assert positions.shape == (3, 1, int(mask.sum()))
    assert torch.equal(positions[2], valid_rows(batch["position_ids"][2], mask))


IDS = torch.tensor([[1, 2, 3, 4], [1, 5, 3, 4]])
BAD = [
    (lambda: ZoRRoTrain.find_prompt_groups(IDS, 5), r"response_length must lie in \[0, 4\].*got 5"),
    (lambda: ZoRRoTrain.find_prompt_groups(IDS, -1), r"response_length must lie in"),
    (lambda: ZoRRoTrain.find_prompt_groups(IDS[0], 1), r"input_ids must be \[batch, sequence\], got shape \[4\]"),
    (lambda: ZoRRoTrain.find_prompt_groups(IDS.float(), 1), r"input_ids must be integers, got Float"),
    (lambda: ZoRRoTrain.find_prompt_groups(IDS[:0], 1), r"input_ids must have at least one row"),
    (lambda: ZoRRoTrain.find_prompt_groups(IDS, 1, IDS), r"attention_mask must hold 0 and 1, got 2 in row 0, column 1"),
    (lambda: ZoRRoTrain.find_prompt_groups(IDS, 1, IDS * 0.25), r"attention_mask must hold 0 and 1, got a fraction"),
    (lambda: ZoRRoTrain.find_prompt_groups(IDS, 1, torch.ones(2, 3)), r"attention_mask must be \[2, 4\]"),
    (lambda: create([[0, 1]]), r"must join rows of equal prompt tokens, got rows 0 and 1"),
    (lambda: create([[0]]), r"must hold every row of the 2 exactly once"),
    (lambda: create([[0], [0]]), r"must hold every row of the 2 exactly once"),
    (lambda: create([[0], [7]]), r"must hold every row of the 2 exactly once"),
    (lambda: create([[0], [1]], unique=IDS[:1, :2]), r"unique_prompts must have one row a group, 2, got 1"),
    (lambda: create([[0], [1]], positions=IDS[:, :3]), r"position_ids must be \[2, 4\].*got \[2, 3\]"),
    (lambda: ZoRRoTrain.reconstruct_sequences(torch.zeros(1, 3), INFO), r"x must be \[1, 8, ...\], got \[1, 3\]"),
    (lambda: ZoRRoTrain.deduplicate_sequences(torch.zeros(2, 3), INFO), r"full must be \[2, 4, ...\], got \[2, 3\]"),
    (lambda: extract(torch.zeros(8), 1), r"offset must be 0 or -1, got 1"),
    (lambda: extract(torch.zeros(7), 0), r"packed must be \[8, ...\], got \[7\]"),
    (
        lambda: ZoRRoTrain.responses_in_orig_sample_order(
            torch.zeros(3), {"prompt_groups": [[1], [0]], "cu_seqlens_response": torch.tensor([0, 1, 2])}
        ),
        r"packed must have 2 values.*got 3",
    ),
]


def create(groups: list[list[int]], unique: torch.Tensor | None = None, positions: torch.Tensor = IDS) -> Any:
    unique = torch.zeros(len(groups), 2) if unique is None else unique
    return ZoRRoTrain.create_deduplicated_batch(IDS, positions, 2, groups, unique)


def extract(packed: torch.Tensor, offset: int) -> torch.Tensor:
    return ZoRRoTrain.extract_unpadded_responses_from_deduped_packed_ids(packed, INFO, offset)


INFO: ReconstructionInfo = create([[0], [1]])[2]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_is_one_sentence(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert str(error.value).startswith("[zorro] ")
    assert "\n" not in str(error.value)


def test_a_response_without_prompt_has_no_predictor() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    groups, unique = ZoRRoTrain.find_prompt_groups(IDS, 2, mask)
    ids, _, info = ZoRRoTrain.create_deduplicated_batch(IDS, IDS, 2, groups, unique, mask, use_unpad=True)
    assert ids.tolist() == [[3, 4, 1, 5, 3, 4]]
    with pytest.raises(ValueError, match="every response must follow a prompt"):
        ZoRRoTrain.extract_unpadded_responses_from_deduped_packed_ids(ids[0], info, -1)

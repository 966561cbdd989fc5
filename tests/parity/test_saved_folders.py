"""Folders that the command writes are what transformers wrote, and load there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def train(zorro: Callable[..., str], folder: Path, rollouts: Path, out: Path, *flags: object) -> None:
    arguments = ["--model", folder, "--rollouts", rollouts, "--out", out, "--quiet", "--threads", 1]
    zorro("train", *arguments, *flags)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b))


def test_a_step_of_length_zero_saves_the_same_model(
    zorro: Callable[..., str], tiny: Any, rollouts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "trained"
    train(zorro, tiny.folder, rollouts, out, "--lr", 0)
    before, after = load_file(tiny.folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert [name for name in before if not same_bits(before[name], after[name])] == []
    assert json.loads((out / "config.json").read_text()) == json.loads((tiny.folder / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    for name, weight in tiny.model.named_parameters():
        assert same_bits(loaded.get_parameter(name).data, weight.data), name


@pytest.mark.parametrize("sharded", [False, True])
def test_a_bfloat16_checkpoint_keeps_dtype_and_shards(
    zorro: Callable[..., str], tiny: Any, rollouts: Path, sharded: bool, tmp_path: Path
) -> None:
    folder, out = tmp_path / "bfloat16", tmp_path / "trained"
    settings = {"max_shard_size": "100KB"} if sharded else {}
    model = AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.bfloat16)
    model.save_pretrained(folder, **settings)
    train(zorro, folder, rollouts, out, "--lr", 0)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert (len(files) > 1) == sharded
    assert sorted(path.name for path in out.glob("*.safetensors")) == files
    for file in files:
        before, after = load_file(folder / file), load_file(out / file)
        assert before.keys() == after.keys()
        assert all(same_bits(before[name], after[name]) for name in before)


def test_a_real_step_moves_every_weight_as_adamw_does(
    zorro: Callable[..., str], tiny: Any, rollouts: Path, tmp_path: Path
) -> None:
    """One step of torch.optim.AdamW on the gradients that the command saved."""
    out, gradients = tmp_path / "trained", tmp_path / "gradients.safetensors"
    flags = ("--lr", 0.01, "--weight-decay", 0.1, "--max-grad-norm", 0, "--dtype", "float64")
    train(zorro, tiny.folder, rollouts, out, "--save-gradients", gradients, *flags)
    before, after = load_file(tiny.folder / "model.safetensors"), load_file(out / "model.safetensors")
    weights = {name: torch.nn.Parameter(value.double()) for name, value in before.items()}
    for name, gradient in load_file(gradients).items():
        weights[name].grad = gradient
    torch.optim.AdamW(weights.values(), lr=0.01, weight_decay=0.1).step()
    for name, weight in weights.items():
        assert not torch.equal(after[name], before[name]), name
        assert torch.allclose(after[name].double(), weight.data, rtol=1e-6, atol=1e-7), name


def test_metrics_have_one_line_an_update(zorro: Callable[..., str], tiny: Any, rollouts: Path, tmp_path: Path) -> None:
    out = tmp_path / "trained"
    train(zorro, tiny.folder, rollouts, out, "--updates", 3, "--lr", 1e-5)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [1, 2, 3]
    assert rows[2]["loss"] < rows[0]["loss"]
    assert all(row["grad_norm"] > 0 and row["packed_tokens"] < row["replicated_tokens"] for row in rows)

"""Every subcommand on good input: help, JSON, files, exit codes."""

from __future__ import annotations

import gzip
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

COMMANDS = ("demo", "check", "logprobs", "train", "plan", "bench", "inspect")
QUIET = ("--quiet", "--threads", 1)


def test_version_and_help(zorro: Callable[..., Any]) -> None:
    version = zorro("--version")
    assert (version.code, version.err) == (0, "")
    assert version.out.startswith("zorro ")
    result = zorro("--help")
    assert result.code == 0
    assert all(command in result.out for command in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_has_an_example(zorro: Callable[..., Any], name: str) -> None:
    result = zorro(name, "--help")
    assert (result.code, result.err) == (0, "")
    assert f"  zorro {name}" in result.out


def test_check_passes_and_prints_a_table(zorro: Callable[..., Any], model: Path, rollouts: Path) -> None:
    result = zorro("check", "--model", model, "--rollouts", rollouts, *QUIET)
    assert (result.code, result.err) == (0, "")
    for word in ("logprob", "entropy", "gradient", "worst parameter", "tolerance", "verdict", "rho"):
        assert word in result.out
    assert "all within tolerance" in result.out


@pytest.mark.parametrize(
    "flags",
    [
        ("--dtype", "float64"),
        ("--dtype", "bfloat16"),
        ("--head", "none", "--layout", "left"),
        ("--head", "compute", "--layout", "right", "--attention", "composed"),
        ("--checkpointing", "--layout", "both", "--permute", 4),
        ("--sharing", "prefixes", "--min-shared-tokens", 1, "--micro-batches", 4),
        ("--loss", "grpo", "--seed", 9),
    ],
)
def test_check_passes_with(zorro: Callable[..., Any], model: Path, rollouts: Path, flags: tuple[object, ...]) -> None:
    result = zorro("check", "--model", model, "--rollouts", rollouts, "--json", *QUIET, *flags)
    assert result.code == 0, result
    (row,) = result.json["settings"]
    assert result.json["passed"]
    assert row["worst_parameter"].endswith("weight")
    assert row["smallest_gradient_norm"] > 0
    assert row["rho"] > 1


@pytest.mark.parametrize("fault", ["label", "mask", "position"])
@pytest.mark.parametrize("attention", ["composed", "levels"])
def test_every_fault_is_found(
    zorro: Callable[..., Any], model: Path, rollouts: Path, fault: str, attention: str
) -> None:
    arguments = ("--model", model, "--rollouts", rollouts, "--attention", attention, "--json", *QUIET)
    result = zorro("check", *arguments, "--fault", fault)
    assert result.code == 1
    (row,) = result.json["settings"]
    assert row["logprob_error"] > 100 * row["logprob_tolerance"]
    assert row["gradient_error"] > 100 * row["gradient_tolerance"]
    assert zorro("check", *arguments, "--fault", fault, "--tolerance-scale", 1e9).code == 0


def test_a_fault_needs_a_shared_prompt(zorro: Callable[..., Any], model: Path, rollouts: Path) -> None:
    flags = ("--model", model, "--rollouts", rollouts, "--fault", "mask", "--sharing", "none")
    zorro("check", *flags, *QUIET).refused("--fault")


def test_a_tolerance_that_nothing_meets_fails(zorro: Callable[..., Any], model: Path, rollouts: Path) -> None:
    flags = ("--model", model, "--rollouts", rollouts, "--tolerance-scale", 1e-12)
    assert zorro("check", *flags, *QUIET).code == 1


@pytest.mark.slow
def test_sweep_covers_every_factor(zorro: Callable[..., Any], model: Path, rollouts: Path) -> None:
    result = zorro("check", "--model", model, "--rollouts", rollouts, "--sweep", "--json", *QUIET)
    assert result.code == 0, result
    settings = [row["setting"] for row in result.json["settings"]]
    words = ["float64", "bfloat16", "prefixes", "checkpointing", "head=none", "head=compute"]
    words += ["layout=left", "layout=right", "layout=both", "permute", "micro-batches=8", "composed"]
    for word in words:
        assert any(word in setting for setting in settings), word


def test_logprobs_keep_order_and_unknown_keys(
    zorro: Callable[..., Any], model: Path, make: Any, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    marked = [{**row, "note": {"deep": [1, index]}} for index, row in enumerate(rows)]
    out = tmp_path / "out.jsonl"
    flags = ("--model", model, "--rollouts", make.rollouts(marked), "--out", out, "--key", "old_logprobs")
    assert zorro("logprobs", *flags, "--window", 4, *QUIET).code == 0
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(written) == len(marked)
    for before, after in zip(marked, written, strict=True):
        for key in ("prompt_ids", "response_ids", "note", "advantage"):
            assert after[key] == before[key]
        assert "logprobs" not in after
        assert len(after["old_logprobs"]) == len(after["entropy"]) == len(before["response_ids"])
        assert all(value < 0 for value in after["old_logprobs"])


def test_logprobs_read_and_write_gzip(zorro: Callable[..., Any], model: Path, rollouts: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl.gz"
    source.write_bytes(gzip.compress(rollouts.read_bytes()))
    assert zorro("logprobs", "--model", model, "--rollouts", source, "--out", out, *QUIET).code == 0
    assert len(gzip.decompress(out.read_bytes()).splitlines()) == len(rollouts.read_text().splitlines())


def scored(zorro: Callable[..., Any], model: Path, source: Path, out: Path, *flags: object) -> list[Any]:
    result = zorro("logprobs", "--model", model, "--rollouts", source, "--out", out, *QUIET, *flags)
    assert result.code == 0, result
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_b03_every_row_is_scored_to_its_last_token_whatever_its_company(
    zorro: Callable[..., Any], model: Path, make: Any, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    """A row alone and in the file, and its old_logprobs on unchanged weights: ratio 1."""
    together = scored(zorro, model, make.rollouts(rows), tmp_path / "all.jsonl")
    for index in (0, 4, 8):
        source = make.rollouts([rows[index]], f"one{index}.jsonl")
        (alone,) = scored(zorro, model, source, tmp_path / f"alone{index}.jsonl")
        assert len(alone["logprobs"]) == len(rows[index]["response_ids"])
        assert alone["logprobs"] == pytest.approx(together[index]["logprobs"], abs=1e-5)
        assert alone["entropy"] == pytest.approx(together[index]["entropy"], abs=1e-5)


def test_old_logprobs_of_the_same_weights_give_ratio_one(
    zorro: Callable[..., Any], model: Path, rollouts: Path, tmp_path: Path
) -> None:
    """B24 too: at any temperature, policy, old and reference on equal weights agree."""
    for temperature in (2, 1, 0.6, 0.5, 1e-3):
        current = rollouts
        for key in ("old_logprobs", "ref_logprobs"):
            out = tmp_path / f"{key}-{temperature}.jsonl"
            scored(zorro, model, current, out, "--key", key, "--temperature", temperature)
            current = out
        flags = ("--out", tmp_path / f"trained-{temperature}", "--temperature", temperature, "--json")
        result = zorro("train", "--model", model, "--rollouts", current, *flags, *QUIET)
        assert result.code == 0, result
        (update,) = result.json["updates"]
        assert update["mean_ratio"] == pytest.approx(1, abs=1e-5)
        assert update["kl"] == pytest.approx(0, abs=1e-6)
        assert update["clip_fraction"] == 0


def test_b24_a_line_s_own_temperature_wins(
    zorro: Callable[..., Any], model: Path, make: Any, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    own = [{**row, "temperature": 0.5} if index == 1 else row for index, row in enumerate(rows)]
    mixed = scored(zorro, model, make.rollouts(own, "own.jsonl"), tmp_path / "mixed.jsonl", "--temperature", 2)
    source = make.rollouts(rows)
    cold = scored(zorro, model, source, tmp_path / "cold.jsonl", "--temperature", 0.5)
    hot = scored(zorro, model, source, tmp_path / "hot.jsonl", "--temperature", 2)
    assert mixed[1]["logprobs"] == pytest.approx(cold[1]["logprobs"], abs=1e-5)
    assert mixed[0]["logprobs"] == pytest.approx(hot[0]["logprobs"], abs=1e-5)
    assert mixed[1]["logprobs"] != pytest.approx(hot[1]["logprobs"], abs=1e-2)


def test_save_logits_has_one_tensor_an_id(
    zorro: Callable[..., Any], model: Path, rollouts: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    logits = tmp_path / "logits.safetensors"
    written = scored(zorro, model, rollouts, tmp_path / "out.jsonl", "--save-logits", logits)
    found = load_file(logits)
    assert found.keys() == {str(index + 1) for index in range(len(rows))}
    for index, (row, line) in enumerate(zip(rows, written, strict=True)):
        logp = found[str(index + 1)].log_softmax(-1)
        assert logp.shape == (len(row["response_ids"]), 97)
        chosen = logp.gather(-1, torch.tensor(row["response_ids"])[:, None])[:, 0]
        assert line["logprobs"] == pytest.approx(chosen.tolist(), abs=1e-5)


def test_train_writes_a_folder_with_metrics(
    zorro: Callable[..., Any], model: Path, rollouts: Path, tmp_path: Path
) -> None:
    out, gradients = tmp_path / "trained", tmp_path / "gradients.safetensors"
    flags = ("--out", out, "--save-gradients", gradients, "--updates", 2, "--json")
    result = zorro("train", "--model", model, "--rollouts", rollouts, *flags, *QUIET)
    assert result.code == 0, result
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "metrics.jsonl"} <= names
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert metrics == result.json["updates"]
    assert load_file(gradients).keys() == load_file(model / "model.safetensors").keys()
    with safe_open(gradients, "pt") as file:
        assert float(file.metadata()["loss"]) == metrics[-1]["loss"]
    assert sorted(tmp_path.iterdir()) == [gradients, out]


def test_check_saves_the_dedup_arm_s_gradients(
    zorro: Callable[..., Any], model: Path, rollouts: Path, tmp_path: Path
) -> None:
    found = []
    for name, flags in (("a", ()), ("b", ("--sharing", "none", "--permute", 2))):
        path = tmp_path / f"{name}.safetensors"
        arguments = ("--save-gradients", path, "--dtype", "float64", *flags, *QUIET)
        assert zorro("check", "--model", model, "--rollouts", rollouts, *arguments).code == 0
        found.append(load_file(path))
    assert found[0].keys() == load_file(model / "model.safetensors").keys()
    for name, gradient in found[0].items():
        assert gradient.dtype == torch.float64
        assert torch.allclose(gradient, found[1][name], rtol=1e-9, atol=1e-9), name


def test_b06_plan_reports_what_sharing_saves(
    zorro: Callable[..., Any], make: Any, make_rows: Callable[..., list[dict[str, Any]]]
) -> None:
    source = make.rollouts(make_rows(prompt_lengths=(512,), samples=16, response=64))
    plan = zorro("plan", "--rollouts", source, "--json").json
    assert (plan["unique_prompts"], plan["samples"]) == (1, 16)
    assert (plan["replicated_tokens"], plan["packed_tokens"]) == (9216, 1536)
    assert plan["rho"] == 6
    assert 1 < plan["predicted_speedup"] < 6
    unshared = zorro("plan", "--rollouts", source, "--json", "--sharing", "none").json
    assert unshared["packed_tokens"] == 9216
    assert unshared["predicted_speedup"] == pytest.approx(1)


def test_b06_the_counters_are_those_of_the_work_done(
    zorro: Callable[..., Any], model: Path, make: Any, tmp_path: Path,
    make_rows: Callable[..., list[dict[str, Any]]],
) -> None:  # fmt: skip
    source = make.rollouts(make_rows(prompt_lengths=(512,), samples=16, response=64))
    for sharing, expected in (("prompts", 1536), ("none", 9216)):
        flags = ("--out", tmp_path / sharing, "--sharing", sharing, "--max-tokens", 10000, "--json", *QUIET)
        result = zorro("logprobs", "--model", model, "--rollouts", source, *flags)
        assert result.json["packed_tokens"] == expected
        assert (result.json["replicated_tokens"], result.json["unique_prompts"]) == (9216, 1)


def test_plan_spreads_groups_over_ranks(
    zorro: Callable[..., Any], make: Any, make_rows: Callable[..., list[dict[str, Any]]]
) -> None:
    source = make.rollouts(make_rows(prompt_lengths=(20, 30, 40, 50), samples=4, response=5))
    plan = zorro("plan", "--rollouts", source, "--ranks", 2, "--max-tokens", 75, "--json").json
    assert sum(rank["samples"] for rank in plan["ranks"]) == 16
    assert sorted(rank["packed_tokens"] for rank in plan["ranks"]) == [110, 110]
    assert plan["rank_imbalance"] == 1
    assert all(part["packed_tokens"] <= 75 for part in plan["micro_batches"])
    assert sum(part["samples"] for part in plan["micro_batches"]) == 16
    assert "rank" in zorro("plan", "--rollouts", source, "--ranks", 2).out


def test_bench_prints_both_arms(zorro: Callable[..., Any], model: Path) -> None:
    shape = ("--prompt", 48, "--response", 8, "--rollouts-per-prompt", 4, "--pairs", 1)
    bench = zorro("bench", "--model", model, *shape, "--json", *QUIET).json
    assert bench["rho"] == pytest.approx(4 * 56 / (48 + 32))
    assert 1 < bench["bound"] < bench["rho"]
    assert bench["speedup"] > 0
    assert bench["achieved_over_bound"] == pytest.approx(bench["speedup"] / bench["bound"])
    assert bench["naive"]["tokens"] == 224
    assert bench["dedup"]["tokens"] == 80
    assert bench["dedup"]["head_rows"] == 1 + 4 * 7
    assert bench["layer_bytes_times_rho_over_naive"] == pytest.approx(1, abs=0.1)
    assert bench["attention"]["ratio"] > 0
    assert "speed-up" in zorro("bench", "--model", model, *shape, *QUIET).out


@pytest.mark.parametrize("flags", [("--rollouts-per-prompt", 1), ("--sharing", "none")])
def test_bench_does_the_same_work_when_nothing_is_shared(
    zorro: Callable[..., Any], model: Path, flags: tuple[object, ...]
) -> None:
    shape = ("--prompt", 16, "--response", 8, "--prompts", 2)
    bench = zorro("bench", "--model", model, *shape, "--json", *QUIET, *flags).json
    assert bench["operators"]["identical"]
    assert bench["operators"]["calls"] > 100
    assert bench["pairs"] >= 9
    assert bench["bound"] == 1


def test_inspect_names_every_tensor(zorro: Callable[..., Any], model: Path) -> None:
    found = zorro("inspect", "--model", model, "--json").json
    assert (found["family"], found["layers"], found["head_dim"]) == ("qwen3", 2, 16)
    weights = load_file(model / "model.safetensors")
    assert {row["name"]: row["shape"] for row in found["tensors"]} == {
        name: list(weight.shape) for name, weight in weights.items()
    }
    assert found["stored_parameters"] == sum(weight.numel() for weight in weights.values())
    assert "model.layers.1.mlp.down_proj.weight" in zorro("inspect", "--model", model).out


@pytest.mark.slow
def test_demo_on_the_shipped_examples(zorro: Callable[..., Any]) -> None:
    root = Path(__file__).resolve().parents[2]
    demo = zorro("demo", "--examples", root / "examples", "--json", "--quiet").json
    assert demo["passed"]
    for race in demo["updates"].values():
        assert race["rho"] > 1.5
        assert math.isfinite(race["speedup"])


def test_progress_is_plain_lines_on_stderr(
    zorro: Callable[..., Any], model: Path, rollouts: Path, tmp_path: Path
) -> None:
    flags = ("--model", model, "--rollouts", rollouts, "--out", tmp_path / "out.jsonl", "--threads", 1)
    result = zorro("logprobs", *flags)
    assert result.code == 0
    assert "\r" not in result.err
    assert "\033" not in result.err


def test_ctrl_c_leaves_nothing_behind(
    command: Path, model: Path, make: Any, make_rows: Callable[..., list[dict[str, Any]]]
) -> None:
    """A long run is stopped once it has begun to write its temporary file."""
    source = make.rollouts(make_rows(prompt_lengths=(400,) * 10, samples=40, response=20))
    folder = make.folder / "out"
    folder.mkdir()
    arguments = ["--model", model, "--rollouts", source, "--out", folder / "out.jsonl", "--sharing", "none"]
    arguments += ["--threads", 1, "--max-tokens", 500, "--window", 1]
    process = subprocess.Popen([str(command), "logprobs", *map(str, arguments)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not os.listdir(folder) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert os.listdir(folder) == []

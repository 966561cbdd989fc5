"""Bad usage and bad input: exit 2, one line on stderr that says what and where, nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

QUIET = ("--quiet", "--threads", 1)


def broken_copy(model: Path, folder: Path, change: Callable[[Path], object]) -> Path:
    """A copy of a good model folder, then changed."""
    copy = folder / "broken"
    shutil.copytree(model, copy)
    change(copy)
    return copy


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites a safetensors header; the bytes of the tensors stay."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def drop_tensor(folder: Path, name: str) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights[name]
    save_file(weights, path, {"format": "pt"})


def reshape_tensor(folder: Path, name: str, *shape: int) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights[name] = torch.zeros(*shape)
    save_file(weights, path, {"format": "pt"})


NORM = "model.norm.weight"
BAD_MODELS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no safetensors": (lambda folder: (folder / "model.safetensors").unlink(), ("broken",)),
    "no config": (lambda folder: (folder / "config.json").unlink(), ("config.json",)),
    "config is not JSON": (lambda folder: (folder / "config.json").write_text("{"), ("config.json",)),
    "b43 last byte cut": (lambda folder: cut(folder / "model.safetensors", 1), ("model.safetensors",)),
    "b43 much cut": (lambda folder: cut(folder / "model.safetensors", 10000), ("model.safetensors",)),
    "b43 four bytes": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\1\2\3\4"),
        ("model.safetensors",),
    ),
    "b43 empty file": (
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        ("model.safetensors",),
    ),
    "b43 pointer text": (
        lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs\noid sha256:0\n"),
        ("model.safetensors",),
    ),
    "lying offsets": (
        lambda folder: edit_header(
            folder / "model.safetensors", lambda header: header[NORM].update(data_offsets=[0, 1 << 40])
        ),
        (NORM,),
    ),
    "lying shape": (
        lambda folder: edit_header(folder / "model.safetensors", lambda header: header[NORM].update(shape=[31])),
        (NORM,),
    ),
    "unknown dtype": (
        lambda folder: edit_header(folder / "model.safetensors", lambda header: header[NORM].update(dtype="F31")),
        ("F31",),
    ),
    "missing tensor": (lambda folder: drop_tensor(folder, NORM), (NORM,)),
    "b42 untied without a head": (lambda folder: drop_tensor(folder, "lm_head.weight"), ("lm_head.weight",)),
    "wrong shape": (lambda folder: reshape_tensor(folder, NORM, 33), (NORM, "33", "32")),
    "unexpected tensor": (
        lambda folder: reshape_tensor(folder, "model.extra.weight", 3),
        ("model.extra.weight",),
    ),
    "unknown family": (lambda folder: edit_config(folder, model_type="gpt9"), ("gpt9",)),
    "rope scaling": (
        lambda folder: edit_config(folder, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "factor": 4}),
        ("longrope",),
    ),
    "b27 vocabulary of the config differs": (
        lambda folder: edit_config(folder, vocab_size=104),
        ("embed_tokens", "104", "97"),
    ),
    "b43 index names a missing shard": (
        lambda folder: (
            (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors"),
            (folder / "model.safetensors.index.json").write_text(
                json.dumps({"metadata": {}, "weight_map": {NORM: "model-00002-of-00002.safetensors"}})
            ),
        ),
        ("model-00002-of-00002.safetensors",),
    ),
    "b43 two shards without an index": (
        lambda folder: (
            shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors"),
            (folder / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors"),
        ),
        ("index",),
    ),
}


@pytest.mark.parametrize("name", list(BAD_MODELS))
@pytest.mark.parametrize("subcommand", [pytest.param("logprobs", marks=pytest.mark.slow), "train"])
def test_a_bad_model_is_refused(
    zorro: Callable[..., Any], model: Path, rollouts: Path, subcommand: str, name: str, tmp_path: Path
) -> None:
    change, parts = BAD_MODELS[name]
    broken = broken_copy(model, tmp_path, change)
    out = tmp_path / "out"
    flags = ("--rollouts", rollouts, "--out", out, *QUIET)
    zorro(subcommand, "--model", broken, *flags).refused(*parts)
    assert list(tmp_path.iterdir()) == [broken]


GOOD = {"prompt_ids": [1, 2, 3], "response_ids": [4, 5], "advantage": 1.0}
BAD_LINES: dict[str, tuple[str, tuple[str, ...]]] = {
    "not JSON": ('{"prompt_ids": [1', ()),
    "empty prompt": (json.dumps({**GOOD, "prompt_ids": []}), ("prompt_ids",)),
    "no prompt": (json.dumps({"response_ids": [4]}), ("prompt_ids",)),
    "NaN advantage": (json.dumps({**GOOD, "advantage": float("nan")}), ()),
    "infinite advantage": (json.dumps({**GOOD, "advantage": float("inf")}), ()),
    "advantage too large": ('{"prompt_ids":[1],"response_ids":[2],"advantage":1e999}', ()),
    "old log-probs of another length": (json.dumps({**GOOD, "old_logprobs": [-1.0]}), ("old_logprobs",)),
    "negative id": (json.dumps({**GOOD, "response_ids": [4, -100]}), ("response_ids",)),
    "text for an id": (json.dumps({**GOOD, "response_ids": ["4"]}), ("response_ids",)),
    "temperature zero": (json.dumps({**GOOD, "temperature": 0}), ("temperature",)),
    "temperature below zero": (json.dumps({**GOOD, "temperature": -1}), ("temperature",)),
}


@pytest.mark.parametrize("name", list(BAD_LINES))
@pytest.mark.parametrize(
    "subcommand",
    ["plan", "train", *(pytest.param(name, marks=pytest.mark.slow) for name in ("check", "logprobs"))],
)
def test_a_bad_line_is_named(
    zorro: Callable[..., Any], model: Path, subcommand: str, name: str, tmp_path: Path
) -> None:
    line, parts = BAD_LINES[name]
    source, work = tmp_path / "bad.jsonl", tmp_path / "work"
    source.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    work.mkdir()
    flags: tuple[object, ...] = () if subcommand == "plan" else ("--model", model, *QUIET)
    if subcommand in ("logprobs", "train"):
        flags += ("--out", work / "out")
    zorro(subcommand, "--rollouts", source, *flags).refused("bad.jsonl", "2", *parts)
    assert list(work.iterdir()) == []


def test_bad_lines_can_be_skipped(zorro: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "bad.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([json.dumps(GOOD), "{", json.dumps(GOOD)]) + "\n")
    flags = ("--model", model, "--rollouts", source, "--out", out, "--skip-bad", "--json", *QUIET)
    result = zorro("logprobs", *flags)
    assert result.json["skipped"] == 1
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize("subcommand", ["logprobs", "train", "check"])
def test_b27_an_id_beyond_the_vocabulary_is_named(
    zorro: Callable[..., Any], model: Path, make: Any, subcommand: str, tmp_path: Path
) -> None:
    source = make.rollouts([GOOD, {**GOOD, "response_ids": [4, 97]}])
    flags: tuple[object, ...] = () if subcommand == "check" else ("--out", tmp_path / "out")
    zorro(subcommand, "--model", model, "--rollouts", source, *flags, *QUIET).refused("97", "2")
    assert list(tmp_path.iterdir()) == [source]


def test_b27_rows_beyond_the_tokenizer_are_part_of_the_softmax(
    zorro: Callable[..., Any], make: Any, rollouts: Path, tmp_path: Path,
    make_tensors: Callable[..., dict[str, torch.Tensor]],
) -> None:  # fmt: skip
    """The normaliser covers all vocab_size rows, padded ones too, as transformers does."""
    padded = make_tensors()
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        padded[name] = torch.cat([padded[name], torch.zeros(7, padded[name].shape[1])])
    folder, logits = make.model(padded, vocab_size=104), tmp_path / "logits.safetensors"
    out = tmp_path / "out.jsonl"
    flags = ("--model", folder, "--rollouts", rollouts, "--out", out, "--save-logits", logits, *QUIET)
    assert zorro("logprobs", *flags).code == 0
    first = load_file(logits)["1"]
    row = json.loads(out.read_text().splitlines()[0])
    assert first.shape[1] == 104
    assert torch.all(first[:, 97:] == 0)
    expected = first.log_softmax(-1)[torch.arange(len(first)), torch.tensor(row["response_ids"])]
    assert row["logprobs"] == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("file", ["", "\n\n"])
@pytest.mark.parametrize("subcommand", ["logprobs", "train", "plan", "check"])
def test_a_file_without_lines_is_refused(
    zorro: Callable[..., Any], model: Path, subcommand: str, file: str, tmp_path: Path
) -> None:
    source = tmp_path / "empty.jsonl"
    source.write_text(file)
    flags: tuple[object, ...] = () if subcommand == "plan" else ("--model", model, *QUIET)
    if subcommand in ("logprobs", "train"):
        flags += ("--out", tmp_path / "out")
    zorro(subcommand, "--rollouts", source, *flags).refused("empty.jsonl")
    assert list(tmp_path.iterdir()) == [source]


def test_an_empty_response_disturbs_no_other_row(
    zorro: Callable[..., Any], model: Path, make: Any, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    with_empty = [dict(row) for row in rows]
    with_empty.insert(2, {**rows[1], "response_ids": [], "old_logprobs": []})
    written = []
    for name, lines in (("with", with_empty), ("without", rows)):
        source, out = make.rollouts(lines, f"{name}.jsonl"), tmp_path / f"{name}.out.jsonl"
        assert zorro("logprobs", "--model", model, "--rollouts", source, "--out", out, *QUIET).code == 0
        written.append([json.loads(line) for line in out.read_text().splitlines()])
        assert zorro("check", "--model", model, "--rollouts", source, *QUIET).code == 0
        assert zorro("train", "--model", model, "--rollouts", source, "--out", tmp_path / name, *QUIET).code == 0
    empty = written[0].pop(2)
    assert empty["logprobs"] == empty["entropy"] == []
    for row, expected in zip(written[0], written[1], strict=True):
        assert row["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-6)
    metrics = [json.loads((tmp_path / name / "metrics.jsonl").read_text()) for name in ("with", "without")]
    assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"], abs=1e-6)
    assert metrics[0]["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=1e-5)


def test_only_empty_responses_are_legal(zorro: Callable[..., Any], model: Path, make: Any, tmp_path: Path) -> None:
    source = make.rollouts([{**GOOD, "response_ids": []}] * 2)
    out = tmp_path / "out.jsonl"
    assert zorro("logprobs", "--model", model, "--rollouts", source, "--out", out, *QUIET).code == 0
    flags = ("--out", tmp_path / "trained", "--json")
    update = zorro("train", "--model", model, "--rollouts", source, *flags, *QUIET).json["updates"][0]
    assert (update["loss"], update["grad_norm"], update["loss_tokens"]) == (0, 0, 0)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "warm"])
@pytest.mark.parametrize("subcommand", ["logprobs", "train", "check"])
def test_b24_a_temperature_must_be_above_zero(
    zorro: Callable[..., Any], model: Path, rollouts: Path, subcommand: str, value: str, tmp_path: Path
) -> None:
    flags: tuple[object, ...] = () if subcommand == "check" else ("--out", tmp_path / "out")
    result = zorro(subcommand, "--model", model, "--rollouts", rollouts, *flags, f"--temperature={value}", *QUIET)
    result.refused("--temperature", value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("subcommand", ["logprobs", "train"])
def test_output_that_exists_is_refused_and_kept(
    zorro: Callable[..., Any], model: Path, rollouts: Path, subcommand: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    flags = ("--model", model, "--rollouts", rollouts, "--out", out, *QUIET)
    zorro(subcommand, *flags).refused(str(out), "--force")
    assert out.read_text() == "mine"
    assert zorro(subcommand, *flags, "--force").code == 0
    assert out.is_dir() if subcommand == "train" else out.read_text().startswith("{")
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("flag", ["--save-gradients", "--save-logits"])
def test_other_output_that_exists_is_refused(
    zorro: Callable[..., Any], model: Path, rollouts: Path, flag: str, tmp_path: Path
) -> None:
    kept = tmp_path / "kept.safetensors"
    kept.write_text("mine")
    subcommand = "train" if flag == "--save-gradients" else "logprobs"
    flags = ("--model", model, "--rollouts", rollouts, "--out", tmp_path / "out", flag, kept, *QUIET)
    zorro(subcommand, *flags).refused(str(kept))
    assert (list(tmp_path.iterdir()), kept.read_text()) == ([kept], "mine")


def test_output_into_a_missing_folder_is_refused(
    zorro: Callable[..., Any], model: Path, rollouts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "nowhere" / "out"
    zorro("train", "--model", model, "--rollouts", rollouts, "--out", out, *QUIET).refused("nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_row_over_the_cap_is_named(zorro: Callable[..., Any], model: Path, make: Any, tmp_path: Path) -> None:
    source = make.rollouts([GOOD, {**GOOD, "prompt_ids": [1] * 50, "id": "long one"}])
    flags = ("--model", model, "--rollouts", source, "--out", tmp_path / "out", "--max-tokens", 20, *QUIET)
    for subcommand in ("logprobs", "train"):
        zorro(subcommand, *flags).refused("52", "20")
    assert list(tmp_path.iterdir()) == [source]


def test_train_needs_advantages(zorro: Callable[..., Any], model: Path, make: Any, tmp_path: Path) -> None:
    source = make.rollouts([{"prompt_ids": [1], "response_ids": [2]}])
    flags = ("--model", model, "--rollouts", source)
    zorro("train", *flags, "--out", tmp_path / "out", *QUIET).refused("advantage")
    zorro("check", *flags, "--loss", "grpo", *QUIET).refused("advantage")
    assert list(tmp_path.iterdir()) == [source]


def test_duplicate_ids_cannot_name_logits(zorro: Callable[..., Any], model: Path, make: Any, tmp_path: Path) -> None:
    source = make.rollouts([{**GOOD, "id": "same"}, {**GOOD, "id": "same"}])
    flags = ("--out", tmp_path / "out.jsonl", "--save-logits", tmp_path / "logits.safetensors", *QUIET)
    zorro("logprobs", "--model", model, "--rollouts", source, *flags).refused("same", "2")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "subcommand"),
        (("frobnicate",), "frobnicate"),
        (("check",), "--model"),
        (("inspect", "--model", "x", "--colour"), "--colour"),
        (("plan", "--rollouts", "x", "--max-tokens", "0"), "--max-tokens"),
        (("bench", "--dtype", "float16"), "--dtype"),
        (("bench", "--sharing", "some"), "--sharing"),
        (("bench", "--attention", "fast"), "--attention"),
        (("bench", "--prompt", "-3"), "--prompt"),
        (("demo", "--examples", "/nonexistent"), "--examples"),
        (("inspect", "--model", "/nonexistent"), "/nonexistent"),
        (("plan", "--rollouts", "/nonexistent.jsonl"), "/nonexistent.jsonl"),
        (("check", "--model", "x", "--rollouts", "y", "--sweep", "--fault", "mask"), "--sweep"),
        (("train", "--model", "x", "--rollouts", "y", "--out", "z", "--lr", "nan"), "--lr"),
        (("train", "--model", "x", "--rollouts", "y", "--out", "z", "--betas", "0.9,1.5"), "--betas"),
    ],
)
def test_bad_usage_is_refused(zorro: Callable[..., Any], arguments: tuple[str, ...], part: str, tmp_path: Path) -> None:
    zorro(*arguments, cwd=tmp_path).refused(part)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_b42_tied_flag_and_files(
    zorro: Callable[..., Any], make: Any, rollouts: Path, flag: bool, head: str, tmp_path: Path,
    make_tensors: Callable[..., dict[str, torch.Tensor]],
) -> None:  # fmt: skip
    weights = make_tensors()
    if head == "equal":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    if head == "absent":
        del weights["lm_head.weight"]
    folder, out = make.model(weights, tie_word_embeddings=flag), tmp_path / "out"
    result = zorro("train", "--model", folder, "--rollouts", rollouts, "--out", out, "--lr", 0, "--threads", 1)
    if head == "absent" and not flag:
        result.refused("lm_head.weight")
        return
    assert result.code == 0, result
    warns = flag and head == "different"
    assert ("warning" in result.err) == warns
    saved = load_file(out / "model.safetensors")
    saved_tied = json.loads((out / "config.json").read_text())["tie_word_embeddings"]
    if not saved_tied:
        assert torch.equal(saved["lm_head.weight"], weights["lm_head.weight"])
    if warns:
        assert not saved_tied, "a head of its own survives a save only untied"

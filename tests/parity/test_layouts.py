"""Checkpoints of the families as others lay them out: wrapped, stacked or one by one, with parts that we do not run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import FAMILIES, VOCABULARY, build_model

Tensors = dict[str, torch.Tensor]


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def one_by_one(tensors: Tensors) -> Tensors:
    """Stacks of experts taken apart."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        layer, _, stack = name.rpartition("experts.")
        for expert, matrix in enumerate(tensor if stack in ("gate_up_proj", "down_proj") else []):
            prefix = f"{layer}experts.{expert}."
            if stack == "down_proj":
                result[prefix + "down_proj.weight"] = matrix
            else:
                result[prefix + "gate_proj.weight"], result[prefix + "up_proj.weight"] = matrix.chunk(2)
        if stack not in ("gate_up_proj", "down_proj"):
            result[name] = tensor
    return result


def joined(tensors: Tensors) -> Tensors:
    """Experts one by one, gate and up in one matrix, as some exporters write."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        layer, _, stack = name.rpartition("experts.")
        if stack in ("gate_up_proj", "down_proj"):
            result |= {f"{layer}experts.{expert}.{stack}.weight": matrix for expert, matrix in enumerate(tensor)}
        else:
            result[name] = tensor
    return result


EXTRA = {
    "model.visual.patch_embed.proj.weight": torch.arange(6.0).bfloat16().view(2, 3),
    "mtp.fc.weight": torch.randn(4, 2),
    "mtp.layers.0.mlp.experts.0.down_proj.weight": torch.randn(2, 2),
}


def wrapped(tensors: Tensors, prefix: str = "model.language_model.") -> Tensors:
    named = {name.replace("model.", prefix, 1) if name.startswith("model.") else name: x for name, x in tensors.items()}
    return {**named, **EXTRA}


def wrapped_config(model: Any) -> dict[str, Any]:
    text = model.config.to_dict()
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": text["model_type"].removesuffix("_text"),
        "tie_word_embeddings": False,
        "vision_config": {"depth": 1},
        "text_config": text,
    }


@pytest.fixture
def rollouts_file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    prompt = torch.randint(VOCABULARY, (9,)).tolist()
    lines = [
        {"prompt_ids": prompt, "response_ids": torch.randint(VOCABULARY, (n,)).tolist(), "advantage": 1.0}
        for n in (3, 5, 2)
    ]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def scores(zorro: Callable[..., str], folder: Path, rollouts: Path, out: Path) -> str:
    zorro("logprobs", "--model", folder, "--rollouts", rollouts, "--out", out, "--quiet", "--threads", 1, "--force")
    return out.read_text()


def save(zorro: Callable[..., str], folder: Path, rollouts: Path, out: Path) -> None:
    zorro("train", "--model", folder, "--rollouts", rollouts, "--out", out, "--quiet", "--lr", 0, "--threads", 1)


@pytest.mark.parametrize("family", ["qwen3.6", "qwen3.6-moe"])
def test_b44_prefixes_and_extra_parts(
    zorro: Callable[..., str], rollouts_file: Path, tmp_path: Path, family: str
) -> None:
    model = build_model(3, **FAMILIES[family])
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    flat = write(tmp_path / "flat", model.config.to_dict(), tensors)
    expected = scores(zorro, flat, rollouts_file, tmp_path / "out.jsonl")
    for number, prefix in enumerate(("model.language_model.", "language_model.model.")):
        folder = write(tmp_path / f"wrapped{number}", wrapped_config(model), wrapped(tensors, prefix))
        assert scores(zorro, folder, rollouts_file, tmp_path / "out.jsonl") == expected
        saved = tmp_path / f"saved{number}"
        save(zorro, folder, rollouts_file, saved)
        before, after = load_file(folder / "model.safetensors"), load_file(saved / "model.safetensors")
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert tensor.dtype == after[name].dtype, name
            assert torch.equal(tensor, after[name]), name
        assert (folder / "config.json").read_text() == (saved / "config.json").read_text()


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-next-moe", "qwen3.6-moe"])
def test_b44_experts_stacked_or_one_by_one(
    zorro: Callable[..., str], rollouts_file: Path, tmp_path: Path, family: str
) -> None:
    model = build_model(3, **FAMILIES[family])
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    texts = []
    for number, layout in enumerate((lambda x: x, one_by_one, joined)):
        folder = write(tmp_path / f"m{number}", model.config.to_dict(), layout(tensors))
        texts.append(scores(zorro, folder, rollouts_file, tmp_path / "out.jsonl"))
        save(zorro, folder, rollouts_file, tmp_path / f"s{number}")
        assert load_file(tmp_path / f"s{number}" / "model.safetensors").keys() == layout(tensors).keys()
    assert texts[0] == texts[1] == texts[2]


def to_next_layout(tensors: Tensors, key_heads: int, dk: int, dv: int, repeats: int) -> Tensors:
    """Separate projections of Qwen3.5 into the two grouped ones of Qwen3-Next."""
    result = dict(tensors)
    keys, values = key_heads * dk, key_heads * repeats * dv
    for name in [name for name in tensors if name.endswith("in_proj_qkv.weight")]:
        layer = name.removesuffix("in_proj_qkv.weight")
        q, k, v = result.pop(name).split([keys, keys, values])
        z, b, a = (result.pop(f"{layer}in_proj_{part}.weight") for part in "zba")
        groups = [x.view(key_heads, -1, x.size(1)) for x in (q, k, v, z)]
        result[f"{layer}in_proj_qkvz.weight"] = torch.cat(groups, 1).flatten(0, 1)
        result[f"{layer}in_proj_ba.weight"] = torch.cat([x.view(key_heads, -1, x.size(1)) for x in (b, a)], 1).flatten(
            0, 1
        )
    return result


def test_b20_both_layouts_of_the_linear_layers(zorro: Callable[..., str], rollouts_file: Path, tmp_path: Path) -> None:
    """The same mathematics as Qwen3.5-MoE and as Qwen3-Next."""
    model = build_model(3, **FAMILIES["qwen3.6-moe"])
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    newer = write(tmp_path / "3_5", model.config.to_dict(), tensors)
    config = {**model.config.to_dict(), "model_type": "qwen3_next", "norm_topk_prob": True, "mlp_only_layers": []}
    older = write(tmp_path / "next", config, to_next_layout(tensors, 2, 16, 8, 2))
    out = tmp_path / "out.jsonl"
    first, second = scores(zorro, newer, rollouts_file, out), scores(zorro, older, rollouts_file, out)
    for a, b in zip(first.splitlines(), second.splitlines(), strict=True):
        found, expected = (torch.tensor(json.loads(line)["logprobs"]) for line in (a, b))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_b20_a_misspelt_tensor_is_named(zorro: Callable[..., str], rollouts_file: Path, tmp_path: Path) -> None:
    model = build_model(3, **FAMILIES["qwen3.6"])
    tensors = dict(model.state_dict())
    tensors["model.layers.0.linear_attn.in_proj_y.weight"] = tensors[
        "model.layers.0.linear_attn.in_proj_z.weight"
    ].clone()
    folder = write(tmp_path / "m", model.config.to_dict(), tensors)
    with pytest.raises(AssertionError, match=r"in_proj_y.weight.*got a name that it does not have"):
        scores(zorro, folder, rollouts_file, tmp_path / "out.jsonl")
    del tensors["model.layers.0.linear_attn.in_proj_y.weight"], tensors["model.layers.1.linear_attn.A_log"]
    folder = write(tmp_path / "n", model.config.to_dict(), tensors)
    with pytest.raises(AssertionError, match=r"layers.1.linear_attn.A_log.*must be there"):
        scores(zorro, folder, rollouts_file, tmp_path / "out.jsonl")


def test_b19_float32_tensors_stay_float32(zorro: Callable[..., str], rollouts_file: Path, tmp_path: Path) -> None:
    model = build_model(3, **FAMILIES["qwen3.6"])
    kept = ("A_log", "linear_attn.norm.weight")
    tensors = {name: x if name.endswith(kept) else x.bfloat16() for name, x in model.state_dict().items()}
    tensors["model.layers.0.linear_attn.A_log"] = torch.full((6,), 1.2345678)
    folder = write(tmp_path / "m", model.config.to_dict(), tensors)
    out = tmp_path / "saved"
    zorro(
        "train", "--model", folder, "--rollouts", rollouts_file, "--out", out, "--quiet", "--lr", 0,
        "--threads", 1, "--dtype", "bfloat16",
    )  # fmt: skip
    after = load_file(out / "model.safetensors")
    for name, tensor in tensors.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name

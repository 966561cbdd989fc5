"""The command against a live transformers model, row by row: logits, logprobs, entropy, gradients.

The command sees what a user has: the folder that transformers saved and a rollout file.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

CLIP, KL_COEF, ENTROPY_COEF = 0.2, 0.1, 0.05
# Against transformers in the same dtype: values, gradients. Its own float32 casts cost a float64 model 1e-6.
TOLERANCES = {"float32": (1e-5, 1e-4), "true_float64": (1e-10, 1e-9), "plain_float64": (5e-6, 1e-4)}


class Reference:
    """transformers in one of the modes of TOLERANCES; the context must be entered to compute."""

    def __init__(self, mode: str, tiny: Any, module: Any, true_float64: Any) -> None:
        self.dtype = "float32" if mode == "float32" else "float64"
        self.model = copy.deepcopy(tiny.model).to(getattr(torch, self.dtype))
        self.values, self.gradients = TOLERANCES[mode]
        self.context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if mode == "true_float64":
            self.context = lambda: true_float64(module, self.model)

    def score(self, lines: list[Any], score_row: Callable[..., Any], temperature: float = 1.0) -> list[Any]:
        with self.context(), torch.no_grad():
            return [score_row(self.model, line, temperature) for line in lines]


@pytest.fixture(params=["float32", "true_float64", pytest.param("plain_float64", marks=pytest.mark.slow)])
def reference(request: pytest.FixtureRequest, tiny: Any, modeling_module: Any, true_float64: Any) -> Reference:
    """One for each tolerance."""
    return Reference(request.param, tiny, modeling_module, true_float64)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """max |x - y| / max(|y|, 1)."""
    assert found.shape == expected.shape
    if expected.numel() == 0:
        return 0.0
    expected = expected.double()
    return float(((found.double() - expected).abs() / expected.abs().clamp(min=1)).max())


def by_file_name(tensors: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Stacks of experts taken apart where the file has them one by one."""
    result = {}
    for name, tensor in tensors.items():
        layer, _, stack = name.rpartition("experts.")
        if name in names or stack not in ("gate_up_proj", "down_proj"):
            result[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = {"down_proj": matrix}
            if stack == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            result |= {f"{layer}experts.{expert}.{part}.weight": value for part, value in parts.items()}
    return result


def layer_of(name: str) -> str:
    """The group that a gradient is measured in: its layer, else itself."""
    return ".".join(name.split(".")[:3]) if ".layers." in name else name


def gradient_errors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """||x - y|| / max(||y||, 1e-3 ||layer||) of every parameter."""
    assert found.keys() == expected.keys()
    squares: dict[str, float] = {}
    for name, gradient in expected.items():
        squares[layer_of(name)] = squares.get(layer_of(name), 0.0) + float(gradient.double().norm()) ** 2
    errors = {}
    for name, gradient in expected.items():
        floor = 1e-3 * squares[layer_of(name)] ** 0.5
        length = max(float(gradient.double().norm()), floor)
        errors[name] = float((found[name].double() - gradient.double()).norm()) / length
    return errors


def score_file(zorro: Callable[..., str], tiny: Any, rollouts: Path, folder: Path, *flags: object) -> tuple[Any, Any]:
    """Runs `zorro logprobs`; the lines and the logits that it wrote."""
    out, logits = folder / "scored.jsonl", folder / "logits.safetensors"
    arguments = ["--model", tiny.folder, "--rollouts", rollouts, "--out", out, "--save-logits", logits]
    zorro("logprobs", *arguments, "--quiet", "--threads", 1, *flags)
    return [json.loads(text) for text in out.read_text().splitlines()], load_file(logits)


def test_logits_match_row_by_row(
    zorro: Callable[..., str], tiny: Any, lines: list[Any], rollouts: Path, reference: Reference,
    score_row: Callable[..., Any], tmp_path: Path,
) -> None:  # fmt: skip
    _, logits = score_file(zorro, tiny, rollouts, tmp_path, "--dtype", reference.dtype)
    assert logits.keys() == {line.id for line in lines}
    for line, expected in zip(lines, reference.score(lines, score_row), strict=True):
        found = logits[line.id]
        assert found.dtype == getattr(torch, reference.dtype)
        assert found.shape == expected.logits.shape
        scale = max(1.0, float(expected.logits.abs().max())) if line.response else 1.0
        assert relative_error(found / scale, expected.logits / scale) < reference.values, line.id


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_match_row_by_row(
    zorro: Callable[..., str], tiny: Any, lines: list[Any], rollouts: Path, reference: Reference,
    score_row: Callable[..., Any], temperature: float, tmp_path: Path,
) -> None:  # fmt: skip
    flags = ("--dtype", reference.dtype, "--temperature", temperature)
    scored, _ = score_file(zorro, tiny, rollouts, tmp_path, *flags)
    tolerance = max(reference.values, 1e-6)  # the file holds float32
    for line, row, expected in zip(lines, scored, reference.score(lines, score_row, temperature), strict=True):
        assert row["id"] == line.id
        assert relative_error(torch.tensor(row["logprobs"]), expected.logprob) < tolerance, line.id
        assert relative_error(torch.tensor(row["entropy"]), expected.entropy) < tolerance, line.id


def grpo_loss(reference: Reference, lines: list[Any], score_row: Callable[..., Any]) -> torch.Tensor:
    """The training loss by its plain formula, on transformers' own log-probs."""
    total = torch.zeros((), dtype=getattr(torch, reference.dtype))
    num_tokens = sum(sum(line.extra["loss_mask"]) for line in lines)
    for line in lines:
        scores = score_row(reference.model, line)
        old, ref, mask = (
            torch.tensor(line.extra[key], dtype=total.dtype) for key in ("old_logprobs", "ref_logprobs", "loss_mask")
        )
        ratio = (scores.logprob - old).exp()
        advantage = line.extra["advantage"]
        policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        difference = ref - scores.logprob
        kl = difference.exp() - 1 - difference
        total = total + (mask * (policy + KL_COEF * kl - ENTROPY_COEF * scores.entropy)).sum()
    return total / num_tokens


@pytest.mark.parametrize(
    "flags",
    [
        (),
        pytest.param(("--attention", "composed", "--head", "none", "--max-tokens", 100), id="composed"),
        pytest.param(
            ("--sharing", "prefixes", "--min-shared-tokens", 1, "--checkpointing", "--head", "compute"),
            id="prefixes",
        ),
    ],
)
def test_training_gradients_match(
    zorro: Callable[..., str], tiny: Any, lines: list[Any], rollouts: Path, reference: Reference,
    score_row: Callable[..., Any], flags: tuple[object, ...], tmp_path: Path,
) -> None:  # fmt: skip
    gradients = tmp_path / "gradients.safetensors"
    zorro(
        "train", "--model", tiny.folder, "--rollouts", rollouts, "--out", tmp_path / "trained",
        "--save-gradients", gradients, "--dtype", reference.dtype, "--max-grad-norm", 0,
        "--clip", CLIP, "--kl-coef", KL_COEF, "--entropy-coef", ENTROPY_COEF, "--quiet",
        "--threads", 1, *flags,
    )  # fmt: skip
    found = load_file(gradients)
    with reference.context():
        loss = grpo_loss(reference, lines, score_row)
        loss.backward()
    expected = by_file_name({name: weight.grad for name, weight in reference.model.named_parameters()}, set(found))
    errors = gradient_errors(found, expected)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < reference.gradients, (worst, errors[worst])
    assert all(gradient.dtype == getattr(torch, reference.dtype) for gradient in found.values())
    with safe_open(gradients, "pt") as file:
        written = float(file.metadata()["loss"])
    assert abs(written - loss.item()) < 10 * reference.values * max(1.0, abs(loss.item()))


def test_the_gradient_measure_sees_a_wrong_gradient(tiny: Any) -> None:
    gradients = {name: torch.randn_like(weight) for name, weight in tiny.model.named_parameters()}
    wrong = {name: gradient.clone() for name, gradient in gradients.items()}
    name = "model.layers.2.post_attention_layernorm.weight"
    wrong[name][3] += 0.01 * gradients[name].norm()
    errors = gradient_errors(wrong, gradients)
    assert max(errors, key=errors.__getitem__) == name
    assert errors[name] > 5e-3


def test_true_float64_lifts_every_float32_cast(
    tiny: Any, lines: list[Any], score_row: Callable[..., Any], true_float64: Any, modeling_module: Any
) -> None:
    """With the casts lifted, eager and sdpa attention agree to float64; without, they do not."""
    model = copy.deepcopy(tiny.model).double()
    inverse = model.model.rotary_emb.inv_freq

    def difference() -> float:
        values = []
        for attention in ("eager", "sdpa"):
            model.set_attn_implementation(attention)
            with torch.no_grad():
                values.append(score_row(model, lines[-1]).logits)
        return relative_error(values[0], values[1])

    before = difference()
    with true_float64(modeling_module, model):
        assert difference() < 1e-12
    assert before > 1e-9
    assert torch.Tensor.float is not torch.Tensor.double
    assert modeling_module.torch is torch
    assert torch.equal(model.model.rotary_emb.inv_freq, inverse)

"""Tiny Qwen3 models built by transformers, rollout files, and the built command."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import FAMILIES, VOCABULARY, build_model

ROOT = Path(__file__).resolve().parents[2]


def command_path() -> Path:
    """ZORRO_COMMAND, else the release build, else the installed command."""
    chosen = os.environ.get("ZORRO_COMMAND")
    places = [Path(chosen)] if chosen else []
    places += [ROOT / "build/release/apps/zorro/zorro", ROOT / ".venv/bin/zorro"]
    for place in places:
        if place.exists():
            return place
    raise FileNotFoundError(f'no zorro command in {places}. Run "make build".')


@pytest.fixture(scope="session")
def zorro() -> Callable[..., str]:
    """Run the command; its stdout. A failure shows what it said."""
    path = command_path()

    def run(*arguments: object) -> str:
        texts = [str(path), *(str(argument) for argument in arguments)]
        done = subprocess.run(texts, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{' '.join(texts)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


def use_old_rope_layout(folder: Path) -> None:
    """Rewrite config.json as older transformers wrote it: rope_theta at the top level."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config.pop("layer_types", None)
    config["torch_dtype"] = config.pop("dtype", "float32")
    config.update(rope_theta=rope["rope_theta"], rope_scaling=None, use_sliding_window=False)
    path.write_text(json.dumps(config))


@dataclass
class TinyModel:
    """A live transformers model and the folder that it was saved to."""

    name: str
    model: Any
    folder: Path


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True},
    "old_rope": {},
    "moe": FAMILIES["qwen3-moe"],
    "next": FAMILIES["qwen3-next-moe"],
    "3_5": FAMILIES["qwen3.6"],
    "3_5_moe": FAMILIES["qwen3.6-moe"],
    "llama": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {
        "model_type": "qwen2",
        "head_dim": 12,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
}
SLOW_VARIANTS = {"bias", "old_rope", "mistral", "linear_rope", "3_5_moe"}  # quick ones cover what they add


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW_VARIANTS else []) for name in VARIANTS],
)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Each variant once a session."""
    name = request.param
    model = build_model(7, **VARIANTS[name])
    folder = tmp_path_factory.mktemp("models") / name
    model.save_pretrained(folder)
    if name == "old_rope":
        use_old_rope_layout(folder)
    return TinyModel(name, model, folder)


@dataclass
class Line:
    """One sample as the test knows it."""

    prompt: list[int]
    response: list[int]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The name of its tensor in --save-logits."""
        return str(self.extra["id"])


def make_lines(seed: int, prompt_lengths: tuple[int, ...], samples: int) -> list[Line]:
    """Groups whose rows are not neighbours; one response is empty, some tokens are masked."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in prompt_lengths]
    lines = []
    for sample in range(samples):
        for group, prompt in enumerate(prompts):
            length = 0 if (sample, group) == (2, 0) else rng.randrange(1, 13)
            response = [rng.randrange(VOCABULARY) for _ in range(length)]
            extra = {
                "id": f"{group}-{sample}",
                "advantage": rng.gauss(0, 1),
                "loss_mask": [int(rng.random() < 0.8) for _ in response],
            }
            lines.append(Line(prompt, response, extra))
    return lines


def add_old_logprobs(lines: list[Line], logprobs: list[torch.Tensor], seed: int) -> None:
    """Old and reference log-probs near the policy's but away from it: ratio, clip and KL matter."""
    rng = random.Random(seed)
    for line, values in zip(lines, logprobs, strict=True):
        for key in ("old_logprobs", "ref_logprobs"):
            line.extra[key] = [value + rng.gauss(0, 0.2) for value in values.tolist()]


def write_lines(path: Path, lines: list[Line]) -> Path:
    """JSON lines as a user writes them."""
    with path.open("w") as file:
        for line in lines:
            row = {"prompt_ids": line.prompt, "response_ids": line.response, **line.extra}
            file.write(json.dumps(row) + "\n")
    return path


@dataclass
class Scores:
    """What transformers says about one row, with gradient."""

    logits: torch.Tensor  # [response tokens, vocabulary]
    logprob: torch.Tensor  # [response tokens]
    entropy: torch.Tensor


def score_row(model: Any, line: Line, temperature: float = 1.0) -> Scores:
    """One row alone: no padding, no neighbours, no cache."""
    ids = torch.tensor([line.prompt + line.response])
    logits = model(input_ids=ids, use_cache=False).logits[0]
    logits = logits[len(line.prompt) - 1 : -1] if line.response else logits[:0]
    logp = (logits / temperature).log_softmax(-1)
    chosen = torch.tensor(line.response, dtype=torch.long)
    return Scores(logits, logp.gather(-1, chosen[:, None])[:, 0], -(logp.exp() * logp).sum(-1))


@pytest.fixture(scope="session")
def lines(tiny: TinyModel) -> list[Line]:
    """The rollouts of the parity tests, scored by the model at hand."""
    lines = make_lines(3, (9, 1, 66), 4)
    with torch.no_grad():
        add_old_logprobs(lines, [score_row(tiny.model, line).logprob for line in lines], seed=5)
    return lines


@pytest.fixture(scope="session")
def rollouts(lines: list[Line], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a file."""
    return write_lines(tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl", lines)


@pytest.fixture(scope="session")
def modeling_module(tiny: TinyModel) -> Any:
    """The module that the fixture true_float64 changes."""
    return sys.modules[type(tiny.model).__module__]


@pytest.fixture(scope="session", name="score_row")
def score_row_fixture() -> Callable[..., Scores]:
    """The function of that name, for test modules."""
    return score_row

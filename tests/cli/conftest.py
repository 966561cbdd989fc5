"""The built command, a tiny model written by hand, and rollout files."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 97, 32, 2, 4, 2, 16, 48


def command_path() -> Path:
    """ZORRO_COMMAND, else the release build, else the installed command."""
    chosen = os.environ.get("ZORRO_COMMAND")
    places = [Path(chosen)] if chosen else []
    places += [ROOT / "build/release/apps/zorro/zorro", ROOT / ".venv/bin/zorro"]
    for place in places:
        if place.exists():
            return place
    raise FileNotFoundError(f'no zorro command in {places}. Run "make build".')


@dataclass
class Result:
    """What a run left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def refused(self, *parts: str) -> None:
        """Exit 2 with one line on stderr that names these things, and nothing on stdout."""
        assert (self.code, self.out) == (2, ""), self
        assert self.err.count("\n") == 1, self.err
        assert self.err.endswith("\n")
        for part in parts:
            assert part in self.err, (part, self.err)


@pytest.fixture(scope="session")
def command() -> Path:
    """The file that is run."""
    return command_path()


@pytest.fixture(scope="session")
def zorro(command: Path) -> Callable[..., Result]:
    """Run the command in a folder of its own choice."""

    def run(*arguments: object, cwd: Path | None = None) -> Result:
        texts = [str(command), *(str(argument) for argument in arguments)]
        done = subprocess.run(texts, capture_output=True, text=True, timeout=300, check=False, cwd=cwd)
        return Result(done.returncode, done.stdout, done.stderr)

    return run


def tensors(vocabulary: int = VOCABULARY, tied: bool = False) -> dict[str, torch.Tensor]:
    """Wide random weights: flat logits hide faults."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int, scale: float = 0.25) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=generator)

    weights = {"model.embed_tokens.weight": draw(vocabulary, HIDDEN, scale=1.0)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = 1 + draw(HIDDEN)
        for name in ("q_norm", "k_norm"):
            weights[f"{prefix}self_attn.{name}.weight"] = 1 + draw(HEAD_DIM)
        for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            weights[f"{prefix}self_attn.{name}.weight"] = draw(heads * HEAD_DIM, HIDDEN)
        weights[f"{prefix}self_attn.o_proj.weight"] = draw(HIDDEN, HEADS * HEAD_DIM)
        for name in ("gate_proj", "up_proj"):
            weights[f"{prefix}mlp.{name}.weight"] = draw(INTERMEDIATE, HIDDEN)
        weights[f"{prefix}mlp.down_proj.weight"] = draw(HIDDEN, INTERMEDIATE)
    weights["model.norm.weight"] = 1 + draw(HIDDEN)
    if not tied:
        weights["lm_head.weight"] = draw(vocabulary, HIDDEN)
    return weights


def config(**changes: Any) -> dict[str, Any]:
    """A config.json of these sizes."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "dtype": "float32",
        **changes,
    }


class Maker:
    """Writes model folders and rollout files below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def model(self, weights: dict[str, torch.Tensor] | None = None, name: str = "model", **changes: Any) -> Path:
        path = self.folder / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config(**changes)))
        save_file(tensors() if weights is None else weights, path / "model.safetensors", {"format": "pt"})
        return path

    def rollouts(self, rows: list[dict[str, Any]] | None = None, name: str = "rollouts.jsonl") -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in (make_rows() if rows is None else rows)))
        return path


def make_rows(
    prompt_lengths: tuple[int, ...] = (9, 3, 12), samples: int = 3, response: int = 5, seed: int = 1
) -> list[dict[str, Any]]:
    """Rows of one prompt are not neighbours; advantages and old log-probs on every line."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in prompt_lengths]
    rows = []
    for _ in range(samples):
        for prompt in prompts:
            tokens = [rng.randrange(VOCABULARY) for _ in range(response)]
            old = [rng.uniform(-6, -3) for _ in tokens]
            rows.append(
                {
                    "prompt_ids": prompt,
                    "response_ids": tokens,
                    "advantage": rng.gauss(0, 1),
                    "old_logprobs": old,
                }
            )
    return rows


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    """Files below the test's own folder."""
    return Maker(tmp_path)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good model folder; not to be changed."""
    return Maker(tmp_path_factory.mktemp("model")).model()


@pytest.fixture(scope="session")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good rollout file; not to be changed."""
    return Maker(tmp_path_factory.mktemp("rollouts")).rollouts()


@pytest.fixture(scope="session")
def rows() -> list[dict[str, Any]]:
    """The lines of `rollouts`."""
    return make_rows()


@pytest.fixture(scope="session", name="make_rows")
def make_rows_fixture() -> Callable[..., list[dict[str, Any]]]:
    """The function of that name, for test modules."""
    return make_rows


@pytest.fixture(scope="session", name="make_tensors")
def make_tensors_fixture() -> Callable[..., dict[str, torch.Tensor]]:
    """The function `tensors`, for test modules."""
    return tensors

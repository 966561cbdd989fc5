"""Tiny random models under the names that tests use, and what several test files share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from arctic_platform.rl.zorro_train import Qwen3ModelOncePatcher
from arctic_platform.rl.zorro_train.tests import create_dummy_batch

VOCABULARY = 131
MODELS: dict[str, dict[str, Any]] = {
    "tiny-random-Qwen3": {},
    "tiny-random-Qwen3-tied": {"tie_word_embeddings": True},
}


def tiny_qwen3(**settings: Any) -> Qwen3ForCausalLM:
    """Weights wide enough that logits are not flat: bugs hide in flat ones."""
    torch.manual_seed(11)
    config = Qwen3Config(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            **settings,
        }
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            wide = torch.randn_like(weight)
            width = 0.5 if "embed" in name else 0.2
            weight.copy_(1 + 0.2 * wide if "norm" in name else width * wide)
    return model.eval()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face folder that a "tiny-random-..." name stands for, made when first asked for."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        path = root / name
        if not path.exists():
            tiny_qwen3(**MODELS[name]).save_pretrained(path)
        return path

    return folder


@pytest.fixture(scope="session")
def load(model_folder: Callable[[str], Path]) -> Callable[..., Qwen3ForCausalLM]:
    """A fresh model of a name: `load("tiny-random-Qwen3", attn_implementation="sdpa", dtype=torch.float64)`."""

    def fresh(name: str = "tiny-random-Qwen3", **settings: Any) -> Qwen3ForCausalLM:
        settings = {"dtype": torch.float32, "attn_implementation": "eager", **settings}
        return AutoModelForCausalLM.from_pretrained(model_folder(name), **settings).eval()

    return fresh


@pytest.fixture
def model(load: Callable[..., Qwen3ForCausalLM]) -> Qwen3ForCausalLM:
    """A fresh tiny Qwen3, float32, eager."""
    return load()


def patcher(model: Any, response_len: int, **settings: Any) -> Qwen3ModelOncePatcher:
    """A patcher with the arguments that most tests do not care about filled in."""
    return Qwen3ModelOncePatcher(
        model,
        **{
            "response_len": response_len,
            "max_token_len": 4096,
            "rollout_n": 1,
            "temperature": 1.0,
            "logits_optimization": "memory",
            "world_size": 1,
            **settings,
        },
    )


@pytest.fixture
def patch() -> Callable[..., Qwen3ModelOncePatcher]:
    """Patches: `patch(model, response_len, temperature=0.7)`; returns the patcher."""

    def apply(model: Any, response_len: int, **settings: Any) -> Qwen3ModelOncePatcher:
        made = patcher(model, response_len, **settings)
        made.patch_forward()
        return made

    return apply


@pytest.fixture
def score() -> Callable[..., Any]:
    """A ZoRRo call of a batch: `score(model, batch)` -> TokenScores with entropies."""

    def call(model: Any, batch: dict[str, Any], **more: Any) -> Any:
        names = ("input_ids", "attention_mask", "position_ids")
        inputs = {name: batch[name] for name in names if name in batch}
        return model(**inputs, use_cache=False, calculate_entropy=True, **more)

    return call


def interleave(batch: dict[str, Any]) -> dict[str, Any]:
    """The rows in an order in which no prompt stands together: A B A B."""
    rows = batch["input_ids"].size(0)
    order = torch.tensor([*range(0, rows, 2), *range(1, rows, 2)])
    order = order.view(2, -1).t().flatten() if rows % 2 == 0 else order
    return {
        name: value[order] if isinstance(value, torch.Tensor) else value for name, value in copy.copy(batch).items()
    }


@pytest.fixture
def make_batch() -> Callable[..., dict[str, Any]]:
    """A padded batch with interleaved prompts, one empty response and two equal rows; `seed` varies it."""

    def make(seed: int = 0, rows: int = 6, prompts: int = 2, add_padding: bool = True, **more: Any) -> dict[str, Any]:
        torch.manual_seed(seed)
        settings = {"prompt_len": 9, "response_len": 7, "min_valid_response_len": 1, **more}
        batch = create_dummy_batch(
            rows, prompts, vocab_size=VOCABULARY, device="cpu", add_padding=add_padding, **settings
        )
        width = batch["response_length"]
        if add_padding and rows > 3:
            batch["attention_mask"][1, -width:] = 0  # an empty response
            for name in ("input_ids", "attention_mask", "position_ids"):
                batch[name][-1] = batch[name][-2]  # a row twice
        return interleave(batch)

    return make

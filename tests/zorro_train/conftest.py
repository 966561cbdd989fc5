"""Tiny random models under the names that tests use, and what several test files share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from arctic_platform.rl.zorro_train import Qwen3ModelOncePatcher
from arctic_platform.rl.zorro_train.tests import create_dummy_batch
from tests.tiny_models import FAMILIES, build_model

VOCABULARY = 131
LLF = ["linear_attention", "linear_attention", "full_attention"]
SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 3, "max_position_embeddings": 4096}
MODELS: dict[str, dict[str, Any]] = {
    "tiny-random-Qwen3": SIZES,
    "tiny-random-Qwen3-tied": {**SIZES, "tie_word_embeddings": True},
    **{
        f"tiny-random-{name}": {**family, **SIZES, **layers}
        for name, family, layers in (
            ("Qwen3-MoE", FAMILIES["qwen3-moe"], {}),
            ("Qwen3-Next-MoE", FAMILIES["qwen3-next-moe"], {"layer_types": LLF}),
            ("Qwen3.6", FAMILIES["qwen3.6"], {"layer_types": LLF}),
            ("Qwen3.6-MoE", FAMILIES["qwen3.6-moe"], {"layer_types": LLF}),
        )
    },
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face folder that a "tiny-random-..." name stands for, made when first asked for."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        path = root / name
        if not path.exists():
            build_model(11, **MODELS[name]).save_pretrained(path)
        return path

    return folder


@pytest.fixture(scope="session")
def load(model_folder: Callable[[str], Path]) -> Callable[..., Any]:
    """A fresh model of a name: `load("tiny-random-Qwen3", attn_implementation="sdpa", dtype=torch.float64)`."""

    def fresh(name: str = "tiny-random-Qwen3", **settings: Any) -> Any:
        settings = {"dtype": torch.float32, "attn_implementation": "eager", **settings}
        if "MoE" in name:
            settings["experts_implementation"] = "eager"  # the default kernel refuses float64
        return AutoModelForCausalLM.from_pretrained(model_folder(name), **settings).eval()

    return fresh


@pytest.fixture
def model(load: Callable[..., Any]) -> Any:
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

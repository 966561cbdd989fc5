"""What tests of several folders need."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import modeling_rope_utils


class _DoubleTorch:
    """The torch that a modeling module sees: its float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


class TrueFloat64:
    """Lifts the float32 casts inside a transformers modeling module while active.

    Norms, softmax and RoPE of transformers compute in float32 even in a float64 model. Only the
    module given is changed, and `Tensor.float` for as long as the block lasts.
    """

    @contextlib.contextmanager
    def __call__(self, module: Any, model: Any) -> Iterator[None]:
        rotary = model.model.rotary_emb
        inverse = rotary.inv_freq
        rope = getattr(model.config, "rope_parameters", None)  # transformers 5
        theta = rope["rope_theta"] if rope else model.config.rope_theta
        size = 2 * len(inverse)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "torch", _DoubleTorch())
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
            rotary.inv_freq = theta**-exponents
            if rope and rope["rope_type"] != "default":
                patch.setattr(modeling_rope_utils, "torch", _DoubleTorch())
                rotary.inv_freq = modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]](model.config, "cpu")[0]
            try:
                yield
            finally:
                rotary.inv_freq = inverse


@pytest.fixture
def run_pytest() -> Callable[..., str]:
    """Runs pytest on some files in a process with more environment; its output. Everything must pass."""

    def run(environment: dict[str, str], *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            env={**os.environ, **environment},
            cwd=Path(__file__).resolve().parents[1],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    return run


@pytest.fixture
def true_float64() -> TrueFloat64:
    """A context manager: `with true_float64(modeling_module, model): ...`."""
    return TrueFloat64()

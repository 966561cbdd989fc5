"""The patcher on the oldest transformers that is supported, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("test_once_patcher.py", "test_patched_model.py", "test_cases.py")


@pytest.mark.slow
def test_the_patcher_tests_pass_on_transformers_4(run_pytest: Callable[..., str]) -> None:
    overlay = subprocess.run(
        [ROOT / "scripts" / "overlay.sh"], capture_output=True, text=True, check=True
    ).stdout.strip()
    environment = {"PYTHONPATH": overlay}
    version = subprocess.run(
        [sys.executable, "-c", "import transformers; print(transformers.__version__)"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert version.stdout.startswith("4.57.")
    files = [str(ROOT / "tests" / "zorro_train" / name) for name in FILES]
    # Dense models: of the other families 4.57 lacks some and lays out others differently.
    output = run_pytest(environment, "-m", "not gpu", "-k", "not MoE and not Qwen3.6", *files)
    assert "skipped" not in output.splitlines()[-1]

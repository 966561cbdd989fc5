"""A wheel, installed where nothing of the source tree is: it imports, scores, and has the command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "arctic_platform/rl/zorro_train"
SCORE = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in type(finder).__name__]  # .venv may have one
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
import arctic_platform.rl.zorro_train as zorro
assert zorro.__path__[0].startswith(FOLDER), zorro.__path__
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=2, num_key_value_heads=1, head_dim=8))
zorro.Qwen3ModelOncePatcher(model, 2, 100, 2, 1.0, "memory", 1).patch_forward()
print(model(input_ids=torch.ones(3, 5, dtype=torch.long), use_cache=False).logprobs.shape[0])
"""


@pytest.mark.slow
def test_a_wheel_works_without_the_source_tree(tmp_path: Path) -> None:
    # The compiler's name and warnings as errors as in the presets, so that ccache knows the objects.
    environment = {**os.environ, "CXX": "/usr/bin/c++", "CMAKE_CXX_COMPILER_LAUNCHER": "ccache"}
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-build-isolation", "--no-deps", "-Ccmake.define.CMAKE_COMPILE_WARNING_AS_ERROR=ON"]
    build = ROOT / "build" / "py3-none-linux_x86_64"
    subprocess.run([*pip, "wheel", *options, "-w", str(tmp_path), f"{ROOT}"], env=environment, check=True)
    shutil.rmtree(build, ignore_errors=True)
    (wheel,) = tmp_path.glob("zorro_train-*-py3-none-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for file in ("libzorro.so", "zorro", "py.typed", "qwen_model_patcher.py", "demo.py"):
        assert f"{PACKAGE}/{file}" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if "dist-info" not in top} == {"arctic_platform"}

    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    code = f"FOLDER = {str(site)!r}\n{SCORE}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "6"
    # The console script becomes the binary beside the library. Its torch is a sibling of the package's root: here
    # that is .venv's, given by a link.
    import torch

    (site / "torch").symlink_to(Path(torch.__file__).parent)
    done = subprocess.run(
        [sys.executable, str(site / "bin" / "zorro"), "--version"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "0." in done.stdout

"""A program outside the tree must find the installed library with find_package and run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "release"


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torch_folder() -> Path:
    return Path(sys.prefix) / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "torch"


@pytest.mark.slow
def test_an_installed_library_builds_and_runs_a_consumer(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    run("cmake", "--install", BUILD, "--prefix", prefix)
    exported = "".join(path.read_text() for path in (prefix / "lib" / "cmake" / "zorro").glob("*.cmake"))
    assert str(ROOT) not in exported

    build = tmp_path / "build"
    source = ROOT / "tests" / "install" / "consumer"
    run("cmake", "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix};{torch_folder()}")
    run("cmake", "--build", build)
    model, rollouts = ROOT / "examples" / "qwen3-small", ROOT / "examples" / "rollouts.jsonl.gz"
    text = run(build / "consumer", model, rollouts)
    assert re.fullmatch(r"\d+ of \d+ tokens, mean logprob -\d+\.\d+\n", text), text

    environment = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    done = subprocess.run(
        [prefix / "bin" / "zorro", "plan", "--rollouts", rollouts, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    counted = json.loads(done.stdout)
    assert text.startswith(f"{counted['packed_tokens']} of {counted['replicated_tokens']} tokens")

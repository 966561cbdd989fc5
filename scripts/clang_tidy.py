"""Runs clang-tidy over sources that changed since they last passed.

A file is skipped when nothing that decides its findings has changed: the file, the project's headers that it includes
directly or not, the lists of checks, the versions of clang-tidy and torch. Needs build/release/compile_commands.json.

Usage: python scripts/clang_tidy.py [--jobs N] FILE...
"""

import argparse
import hashlib
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "release"
PASSED = ROOT / "build" / "tidy"
TOOL = "clang-tidy-19"
# clang has no omp.h without a package of its own; what is checked does not depend on it. libstdc++ 12's own
# std::stable_sort uses what it deprecates; clang tells, g++ does not.
EXTRA = ["--extra-arg=-fno-openmp", "--extra-arg=-Wno-deprecated-declarations"]
COMMAND = [TOOL, "-p", str(BUILD), "--quiet", "--warnings-as-errors=*", *EXTRA]
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def included(file: Path, root: Path = ROOT) -> set[Path]:
    """`file` and the project's headers that it includes, directly or not."""
    found: set[Path] = set()
    pending = [file.resolve()]
    while pending:
        current = pending.pop()
        if current in found:
            continue
        found.add(current)
        for name in INCLUDE.findall(current.read_text(encoding="utf-8")):
            folders = (current.parent, root / "include", root / "src")
            pending += [path.resolve() for folder in folders if (path := folder / name).is_file()]
    return found


def key(file: Path, common: bytes, root: Path = ROOT) -> str:
    """A hash of everything that decides what clang-tidy finds in `file`."""
    digest = hashlib.sha256(common)
    for path in sorted(included(file, root)):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def common_bytes() -> bytes:
    """What all files depend on."""
    version = subprocess.run([TOOL, "--version"], capture_output=True, check=True).stdout
    files = (
        ".clang-tidy",
        "apps/.clang-tidy",
        "CMakeLists.txt",
        "cmake/Layers.cmake",
        "scripts/setup.sh",
        "scripts/clang_tidy.py",
    )
    return b"\0".join([version, *((ROOT / name).read_bytes() for name in files)])


def main() -> int:
    """Prints the findings; 1 if there are any."""
    parser = argparse.ArgumentParser(description="clang-tidy over the sources that changed since they last passed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("files", nargs="*", type=Path)
    arguments = parser.parse_args()
    common = common_bytes()
    keys = {file: key(file, common) for file in arguments.files}
    changed = [file for file in arguments.files if not (PASSED / keys[file]).exists()]
    PASSED.mkdir(parents=True, exist_ok=True)
    print(f"clang-tidy: {len(arguments.files)} files, {len(changed)} to check", flush=True)

    def check(file: Path) -> bool:
        start = time.monotonic()
        done = subprocess.run([*COMMAND, str(file)], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            (PASSED / keys[file]).touch()
        # Findings stand on stdout; stderr counts the warnings of system headers.
        what = "" if done.returncode == 0 else "\n" + (done.stdout.strip() or done.stderr.strip())
        print(f"clang-tidy: {file}, {time.monotonic() - start:.0f} s{what}", flush=True)
        return done.returncode == 0

    with ThreadPoolExecutor(arguments.jobs) as pool:
        return 0 if all(list(pool.map(check, changed))) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Runs a command that prints one JSON object and keeps it with machine, versions, commit and command.

Usage: python scripts/record.py OUT.json COMMAND...
"""

import json
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path


def processor() -> str:
    """The CPU's name and the vector extensions that decide which kernels run."""
    text = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    found = {key.strip(): value.strip() for key, value in fields.items()}
    flags = found.get("flags", "").split()
    kept = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{found.get('model name', platform.machine())} ({' '.join(kept)})"


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    command = sys.argv[2:]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], stdout=subprocess.PIPE, text=True, check=True)
    record = {
        "command": shlex.join(command),
        "commit": commit.stdout.strip(),
        "machine": processor(),
        "system": platform.platform(),
        "torch": version("torch"),
        **json.loads(done.stdout),
    }
    Path(sys.argv[1]).write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

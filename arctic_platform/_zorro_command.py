"""The console script `zorro` of a wheel: runs the binary that lies beside the library."""

import importlib.util
import os
import sys
from pathlib import Path


def main() -> None:
    """Becomes the command. Does not import the package: that would cost seconds."""
    spec = importlib.util.find_spec("arctic_platform.rl.zorro_train")
    folders = (spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        command = Path(folder) / "zorro"
        if command.is_file():
            os.execv(command, [str(command), *sys.argv[1:]])
    sys.exit(f'[zorro] the command must lie in {", ".join(folders)}, got none. Run "make setup".')

"""Loads libzorro.so, which registers the operators `torch.ops.zorro`."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

LIBRARY = "libzorro.so"


def find(folders: Iterable[str]) -> Path:
    """The library in the first of `folders` that holds it; ImportError if none does."""
    searched = [Path(folder) for folder in folders]
    for folder in searched:
        if (folder / LIBRARY).is_file():
            return folder / LIBRARY
    names = ", ".join(str(folder) for folder in searched)
    raise ImportError(f'[zorro] {LIBRARY} must lie in {names}, got none. Run "make setup".')


def load() -> Any:
    """The namespace of the operators. An editable install and a wheel keep the library in different folders."""
    package = sys.modules[__name__.rpartition(".")[0]]
    torch.ops.load_library(str(find(package.__path__)))
    return torch.ops.zorro


ops: Any = load()

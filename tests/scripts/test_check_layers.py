"""The layer script must see what it is there to see."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def check_layers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_layers", ROOT / "scripts" / "check_layers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tree_keeps_its_layers(check_layers: ModuleType) -> None:
    assert check_layers.offences(ROOT) == []


@pytest.mark.parametrize(
    "line",
    ['#include "zorro/ops/forest_tensors.h"', '#include "models/decoder.h"', 'std::cout << "x";', 'getenv("HOME");'],
)
def test_an_offence_is_named(check_layers: ModuleType, tmp_path: Path, line: str) -> None:
    folder = tmp_path / "src" / "forest"
    folder.mkdir(parents=True)
    (folder / "bad.cpp").write_text(f'#include "zorro/core/error.h"\n{line}\n')
    found = check_layers.offences(tmp_path)
    assert len(found) == 1
    assert found[0].startswith("src/forest/bad.cpp:2:")

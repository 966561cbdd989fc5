"""The layer script must see what it is there to see, and nothing else."""

from pathlib import Path

import pytest

from scripts import check_layers

ROOT = Path(__file__).resolve().parents[2]


def write(root: Path, file: str, line: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#include "zorro/core/error.h"\n{line}\n')


def test_the_tree_keeps_its_layers() -> None:
    assert check_layers.offences(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("src/forest/bad.cpp", '#include "zorro/ops/forest_tensors.h"'),
        ("src/forest/bad.cpp", "#include <zorro/ops/forest_tensors.h>"),
        ("include/zorro/plan/bad.h", '#include "zorro/io/rollouts.h"'),
        ("src/train/bad.cpp", '#include "models/decoder.h"'),
        ("include/zorro/ops/bad.h", '#include "ops/checks.h"'),
        ("src/nn/bad.cpp", '#include "zorro/zorro.h"'),
        ("src/plan/bad.h", "#include <ATen/core/Tensor.h>"),
        ("apps/zorro/bad.cpp", '#include "forest/trie.h"'),
        ("src/forest/bad.cpp", 'std::cout << "x";'),
        ("src/ops/bad.cpp", 'std::fprintf(stderr, "x");'),
        ("src/ops/bad.cpp", 'const char* home = std::getenv("HOME");'),
        ("include/zorro/core/bad.h", "inline void stop() { std::exit(1); }"),
    ],
)
def test_an_offence_is_named(tmp_path: Path, file: str, line: str) -> None:
    write(tmp_path, file, line)
    found = check_layers.offences(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(f"{file}:2:")


def test_a_folder_outside_the_table_is_named(tmp_path: Path) -> None:
    write(tmp_path, "src/helpers/bad.cpp", "")
    assert check_layers.offences(tmp_path) == ["src/helpers/bad.cpp:1: the table of layers must list helpers"]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("src/ops/good.cpp", "#include <ATen/core/Tensor.h>"),
        ("src/ops/good.cpp", '#include "ops/checks.h"'),
        ("src/train/good.cpp", '#include "zorro/models/causal_lm.h"'),
        ("src/ops/good.cpp", 'std::snprintf(text, sizeof text, "x");  // not printf(): it prints nothing'),
        ("apps/zorro/good.cpp", 'std::cout << "x";'),
        ("apps/zorro/good.cpp", '#include "report.h"'),
    ],
)
def test_what_is_allowed_is_not_named(tmp_path: Path, file: str, line: str) -> None:
    write(tmp_path, file, line)
    assert check_layers.offences(tmp_path) == []

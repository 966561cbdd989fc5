"""A file must be checked again when it, or a header that it includes at any remove, has changed, and only then."""

from pathlib import Path

import pytest

from scripts import clang_tidy


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "src/ops/a.cpp": '#include "zorro/ops/a.h"\n#include <vector>\n',
        "include/zorro/ops/a.h": '#include "zorro/core/b.h"\n',
        "include/zorro/core/b.h": "#pragma once\n",
        "include/zorro/core/c.h": "#pragma once\n",
        "src/ops/checks.h": "#pragma once\n",
        "src/ops/d.cpp": '#include "ops/checks.h"\n',
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ("src/ops/a.cpp", {"a"}),
        ("include/zorro/ops/a.h", {"a"}),
        ("include/zorro/core/b.h", {"a"}),
        ("src/ops/checks.h", {"d"}),
        ("include/zorro/core/c.h", set()),
    ],
)
def test_what_is_checked_again(tree: Path, changed: str, again: set[str]) -> None:
    def keys() -> dict[str, str]:
        return {name: clang_tidy.key(tree / "src" / "ops" / f"{name}.cpp", b"", tree) for name in ("a", "d")}

    before = keys()
    (tree / changed).write_text((tree / changed).read_text() + "// edited\n")
    after = keys()
    assert {name for name in before if before[name] != after[name]} == again
    assert clang_tidy.key(tree / "src" / "ops" / "a.cpp", b"other", tree) != after["a"]


def test_a_circle_of_headers_ends(tree: Path) -> None:
    (tree / "include/zorro/core/b.h").write_text('#include "zorro/ops/a.h"\n')
    assert len(clang_tidy.included(tree / "src" / "ops" / "a.cpp", tree)) == 3

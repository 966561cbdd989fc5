"""Holds the includes of every layer against the table of layers, and the library against its own rules.

A layer may include only itself and the layers listed for it, of another layer only the public headers, and torch only
where the table says so. The library never prints, exits or reads the environment: only `apps/` does. One line an
offence; the exit status is 1 if there is one.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

LAYERS: dict[str, set[str]] = {
    "core": set(),
    "forest": {"core"},
    "plan": {"core", "forest"},
    "ops": {"core", "forest"},
    "io": {"core", "forest"},
    "nn": {"core", "forest", "ops"},
    "models": {"core", "forest", "ops", "nn", "io"},
    "train": {"core", "forest", "plan", "ops", "nn", "io", "models"},
    "bindings": {"core", "forest", "plan", "ops", "nn", "io", "models", "train"},
}
WITHOUT_TORCH = {"core", "forest", "plan"}

INCLUDE = re.compile(r'\s*#\s*include\s*[<"]([^>"]+)[>"]')
TORCH = re.compile(r"(ATen|c10|torch|caffe2)/")
FORBIDDEN = re.compile(
    r"\bstd::(cout|cerr|clog)\b|\b(f|v|vf)?printf\s*\(|\bf?puts\s*\(|\b(secure_)?getenv\s*\(|\b(_|quick_)?exit\s*\(|"
    r"\b(abort|terminate)\s*\("
)


def sources(folder: Path) -> Iterator[Path]:
    """The C++ files below `folder`, in a fixed order."""
    return iter(sorted(path for path in folder.rglob("*") if path.suffix in {".h", ".cpp"}))


def include_offence(layer: str, public: bool, header: str) -> str | None:
    """What is wrong with including `header` in `layer` (in a public header of it), if anything."""
    if TORCH.match(header):
        return f"{layer} must not know torch, got {header}" if layer in WITHOUT_TORCH else None
    parts = header.split("/")
    if parts[0] == "zorro":
        if len(parts) == 2:
            return f"the library must include the headers it needs, got {header}"
        if parts[1] != layer and parts[1] not in LAYERS.get(layer, set()):
            return f"{layer} must not include {parts[1]}"
        return None
    if parts[0] not in LAYERS or len(parts) == 1:
        return None
    if public:
        return f"a public header must not include a private one, got {header}"
    if parts[0] != layer:
        return f"{layer} must not include private headers of {parts[0]}"
    return None


def library_offences(root: Path) -> Iterator[str]:
    """Broken rules of `include/zorro/LAYER` and `src/LAYER`."""
    for parent in (root / "include" / "zorro", root / "src"):
        public = parent.name == "zorro"
        for path in sources(parent):
            place = path.relative_to(parent).parts
            if public and len(place) == 1:
                continue  # the header that includes all others
            if place[0] not in LAYERS:
                yield f"{path.relative_to(root)}:1: the table of layers must list {place[0]}"
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                where = f"{path.relative_to(root)}:{number}"
                include = INCLUDE.match(line)
                what = include_offence(place[0], public, include[1]) if include else None
                if what:
                    yield f"{where}: {what}"
                if FORBIDDEN.search(line.split("//")[0]):
                    yield f"{where}: the library must not print, exit or read the environment"


def app_offences(root: Path) -> Iterator[str]:
    """Private headers of the library that `apps/` includes."""
    for path in sources(root / "apps"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            include = INCLUDE.match(line)
            if include and include[1].split("/")[0] in LAYERS and "/" in include[1]:
                yield f"{path.relative_to(root)}:{number}: apps must not include private headers, got {include[1]}"


def offences(root: Path) -> list[str]:
    """Every broken rule below `root`, as `file:line: what`."""
    return [*library_offences(root), *app_offences(root)]


def main() -> int:
    """Prints the offences of the tree given, or of the one that the script lies in."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    found = offences(root)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

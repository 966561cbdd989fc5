"""Holds the includes of every layer against the table of layers, and the library against its own rules.

A folder may include only itself and the layers listed for it. The library never prints, exits or reads the
environment: only `apps/` does.
"""

import re
import sys
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
}

INCLUDE = re.compile(r'#include\s+"(?:zorro/)?(\w+)/')
FORBIDDEN = re.compile(r"std::cout|std::cerr|\bprintf\s*\(|\bgetenv\s*\(|\babort\s*\(|\bexit\s*\(")


def offences(root: Path) -> list[str]:
    """Every broken rule below `root`, as `file:line: what`."""
    found = []
    for layer, allowed in LAYERS.items():
        for folder in (root / "include" / "zorro" / layer, root / "src" / layer):
            for path in sorted(folder.rglob("*.h")) + sorted(folder.rglob("*.cpp")):
                for number, line in enumerate(path.read_text().splitlines(), start=1):
                    place = f"{path.relative_to(root)}:{number}"
                    include = INCLUDE.match(line)
                    if include and include[1] in LAYERS and include[1] not in allowed | {layer}:
                        found.append(f"{place}: {layer} must not include {include[1]}")
                    if FORBIDDEN.search(line):
                        found.append(f"{place}: the library must not print, exit or read the environment")
    return found


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    found = offences(root)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""Plots `zorro bench --json` results: achieved speed-up against the bound S.

Usage: python scripts/plot.py OUT.png RESULT.json...
"""

import json
import sys
from pathlib import Path
from typing import Any


def label(result: dict[str, Any]) -> str:
    """The shape of a run in one line."""
    settings = result["settings"]
    return f"P={settings['prompt']} R={settings['response']}\nn={settings['rollouts_per_prompt']}"


def plot(out: Path, files: list[Path]) -> None:
    """One pair of bars a file: the bound and what was achieved. Raises KeyError for other JSON."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = [json.loads(path.read_text()) for path in files]
    figure, axes = pyplot.subplots(figsize=(1.6 * len(results) + 2, 4))
    for index, result in enumerate(results):
        low, high = result["speedup_range"]
        achieved = result["speedup"]
        axes.bar(index - 0.2, result["bound"], 0.4, color="#c8c8c8", label="bound S" if index == 0 else None)
        axes.bar(index + 0.2, achieved, 0.4, color="#2a6f97", label="achieved" if index == 0 else None)
        axes.errorbar(index + 0.2, achieved, yerr=[[achieved - low], [high - achieved]], color="black", capsize=3)
    axes.set_xticks(range(len(results)), [label(result) for result in results])
    axes.set_ylabel("naive time over dedup time, forward + backward")
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    plot(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
    return 0


if __name__ == "__main__":
    sys.exit(main())

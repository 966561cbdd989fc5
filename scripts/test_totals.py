"""Adds up JUnit files of ctest and pytest and prints one line: `N passed, N failed, N skipped`.

Usage: python scripts/test_totals.py FILE.xml...
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path


def totals(files: Iterable[Path]) -> tuple[int, int, int]:
    """Passed, failed and skipped test cases; a case with an error has failed."""
    passed = failed = skipped = 0
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failed += 1
            elif case.find("skipped") is not None:
                skipped += 1
            else:
                passed += 1
    return passed, failed, skipped


def main() -> int:
    """Prints the line; the exit status says nothing about the tests."""
    passed, failed, skipped = totals(Path(name) for name in sys.argv[1:])
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The totals must count what ctest and pytest write, failures first."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CTEST = """<?xml version="1.0"?>
<testsuite name="Linux" tests="4" failures="1" disabled="0" skipped="1">
  <testcase name="A.a" status="run"><system-out>fine</system-out></testcase>
  <testcase name="A.b" status="run"/>
  <testcase name="A.c" status="fail"><failure message=""/></testcase>
  <testcase name="A.d" status="notrun"><skipped message="no device"/></testcase>
</testsuite>
"""
PYTEST = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest" errors="1" failures="0" skipped="0" tests="2">
  <testcase classname="t" name="a"/><testcase classname="t" name="b"><error message="x"/></testcase>
</testsuite></testsuites>
"""


def totals(*files: Path) -> str:
    script = ROOT / "scripts" / "test_totals.py"
    return subprocess.run([sys.executable, script, *files], capture_output=True, text=True, check=True).stdout


def test_cases_of_both_runners_add_up(tmp_path: Path) -> None:
    cpp, python = tmp_path / "cpp.xml", tmp_path / "python.xml"
    cpp.write_text(CTEST)
    python.write_text(PYTEST)
    assert totals(cpp, python) == "3 passed, 2 failed, 1 skipped\n"


def test_no_file_is_no_test() -> None:
    assert totals() == "0 passed, 0 failed, 0 skipped\n"

#!/usr/bin/env bash
# Runs the tests of one kind, C++ then Python, and prints their totals. Usage: scripts/run_tests.sh quick|slow
set -uo pipefail
shopt -s nullglob
cd "$(dirname "$0")/.."
kind=$1
status=0
results=$PWD/build/test-results
mkdir -p "$results"
rm -f "$results/$kind"-*.xml
ctest --test-dir build/release -L "^$kind\$" --output-on-failure --parallel 2 --progress \
  --output-junit "$results/$kind-cpp.xml" || status=1
mark="not slow"
[[ $kind == slow ]] && mark="slow"
.venv/bin/python -m pytest -q -m "$mark" --junit-xml="$results/$kind-python.xml"
python_status=$?
[[ $python_status -eq 0 || $python_status -eq 5 ]] || status=1  # 5: no test of this kind
.venv/bin/python scripts/test_totals.py "$results/$kind"-*.xml
exit $status

#!/usr/bin/env bash
# Runs the tests of one kind, C++ then Python. Usage: scripts/run_tests.sh quick|slow
set -uo pipefail
cd "$(dirname "$0")/.."
kind=$1
status=0
ctest --test-dir build/release -L "^$kind\$" --output-on-failure --parallel 2 --progress || status=1
mark="not slow"
[[ $kind == slow ]] && mark="slow"
.venv/bin/python -m pytest -q -m "$mark"
python_status=$?
[[ $python_status -eq 0 || $python_status -eq 5 ]] || status=1  # 5: no test of this kind
exit $status

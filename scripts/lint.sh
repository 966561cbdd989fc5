#!/usr/bin/env bash
# Every check of the house style; all run, the exit status tells whether one complained.
set -uo pipefail
cd "$(dirname "$0")/.."
status=0
step() {
  echo "lint: $1"
  shift
  "$@" || status=1
}

clang_format() { scripts/sources.sh '*.h' '*.cpp' | xargs clang-format-19 --dry-run -Werror; }
clang_tidy() {
  scripts/sources.sh 'src/*.cpp' 'apps/*.cpp' | xargs .venv/bin/python scripts/clang_tidy.py --jobs "$(scripts/jobs.sh)"
}

step "clang-format" clang_format
step "clang-tidy" clang_tidy
step "ruff" .venv/bin/ruff check --quiet .
step "ruff format" .venv/bin/ruff format --check --quiet .
step "mypy" .venv/bin/mypy
step "layers" .venv/bin/python scripts/check_layers.py
exit $status

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

clang_format() { git ls-files '*.h' '*.cpp' | xargs clang-format-19 --dry-run -Werror; }

# clang-tidy takes some 20 s a file: files that have not changed since they passed, headers included, are skipped.
clang_tidy() {
  local passed=build/tidy headers
  mkdir -p "$passed"
  headers=$(cat .clang-tidy $(git ls-files '*.h') | sha256sum)
  git ls-files 'src/*.cpp' 'apps/*.cpp' | while read -r file; do
    key=$({ echo "$headers"; cat "$file"; } | sha256sum | cut -d' ' -f1)
    [[ -e $passed/$key ]] || echo "$file $passed/$key"
  done | xargs --no-run-if-empty -P "$(nproc)" -L 1 bash -c \
    'clang-tidy-19 -p build/release --quiet --warnings-as-errors="*" --extra-arg=-fno-openmp "$0" 2>/dev/null && touch "$1"'
}

step "clang-format" clang_format
step "clang-tidy" clang_tidy
step "ruff" .venv/bin/ruff check --quiet .
step "ruff format" .venv/bin/ruff format --check --quiet .
step "mypy" .venv/bin/mypy
step "layers" .venv/bin/python scripts/check_layers.py
exit $status

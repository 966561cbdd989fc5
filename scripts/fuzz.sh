#!/usr/bin/env bash
# Runs fuzz targets for some seconds each, from their seeds. Usage: scripts/fuzz.sh SECONDS TARGET...
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=$1
shift
for target in "$@"; do
  corpus=build/fuzz/corpus/$target
  mkdir -p "$corpus"
  echo "fuzz: $target for $seconds s"
  if ! "build/fuzz/tests/fuzz/$target" -max_total_time="$seconds" -rss_limit_mb=4096 -verbosity=0 \
      -artifact_prefix="build/fuzz/$target-" "$corpus" "tests/fuzz/corpus/$target" > "build/fuzz/$target.log" 2>&1; then
    tail -40 "build/fuzz/$target.log"
    echo "fuzz: $target failed" >&2
    exit 1
  fi
done

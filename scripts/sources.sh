#!/usr/bin/env bash
# Prints the files of the working tree that match and that git tracks or would. Usage: scripts/sources.sh PATTERN...
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files --cached --others --exclude-standard --deduplicate "$@" | while read -r file; do
  if [[ -e $file ]]; then echo "$file"; fi
done

#!/usr/bin/env bash
# Installs requirements-transformers-4.txt into build/transformers-4 unless it is there; prints the folder.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/build/transformers-4
wanted=$(sha256sum requirements-transformers-4.txt | cut -d' ' -f1)
if [[ ! -f $folder/zorro-stamp || $(cat "$folder/zorro-stamp") != "$wanted" ]]; then
  rm -rf "$folder"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" \
    --requirement requirements-transformers-4.txt >&2
  echo "$wanted" > "$folder/zorro-stamp"
fi
echo "$folder"

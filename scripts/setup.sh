#!/usr/bin/env bash
# Makes everything the build needs: Debian packages, .venv with the pinned torch and tools. Does nothing the second time.
#
# PYTHON         interpreter of .venv (python3)
# ZORRO_TORCH    torch requirement to install instead of the choice below, as torch==2.13.0 or a wheel's path
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
torch_version=2.13.0

scripts/install-packages.sh scripts/debian-packages.txt

# The stamp holds a hash of everything that decides what lies in .venv.
wanted=$(cat requirements.txt scripts/setup.sh <(echo "${ZORRO_TORCH:-}") | sha256sum | cut -d' ' -f1)
stamp=.venv/zorro-stamp
if [[ -f $stamp && $(cat "$stamp") == "$wanted" ]] && .venv/bin/python -c '' 2>/dev/null; then exit 0; fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "setup: PYTHON must be 3.11 or later, got $("$python" --version 2>&1). Set PYTHON=/path/to/python3.11." >&2
  exit 1
}
# A .venv that was left half-made has no working pip: begin again.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  rm -rf .venv
  "$python" -m venv .venv
fi
rm -f "$stamp"
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)

if [[ -n ${ZORRO_TORCH:-} ]]; then
  echo "setup: installing $ZORRO_TORCH"
  "${pip[@]}" "$ZORRO_TORCH"
elif ! .venv/bin/python -c "import torch; assert torch.__version__.split('+')[0] == '$torch_version'" 2>/dev/null; then
  if "${pip[@]}" --dry-run --no-deps "torch==$torch_version+cpu" >/dev/null 2>&1; then
    echo "setup: installing torch $torch_version+cpu (about 0.2 GB)"
    "${pip[@]}" "torch==$torch_version+cpu"
  else
    echo "setup: pip finds no CPU build torch $torch_version+cpu; installing the plain $torch_version, which on"
    echo "setup: x86-64 brings several GB of CUDA libraries. To choose: give pip an index or a folder with the CPU"
    echo "setup: wheel (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS), or set ZORRO_TORCH to a requirement or a wheel's path."
    "${pip[@]}" "torch==$torch_version"
  fi
fi
echo "setup: installing the Python tools"
"${pip[@]}" --requirement requirements.txt
echo "$wanted" > "$stamp"

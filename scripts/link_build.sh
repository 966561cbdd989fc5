#!/usr/bin/env bash
# Makes a build tree the one that .venv uses: the command .venv/bin/zorro, `import arctic_platform` from anywhere, and the
# library beside the package. Usage: scripts/link_build.sh BUILD
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
# A script, not a link: pip would write its own `zorro` through a link into the build tree.
printf '#!/bin/sh\nexec "%s" "$@"\n' "$PWD/$build/apps/zorro/zorro" > .venv/bin/zorro.new
chmod +x .venv/bin/zorro.new
mv -f .venv/bin/zorro.new .venv/bin/zorro
for site in .venv/lib/python3*/site-packages; do echo "$PWD" > "$site/zorro-source.pth"; done
# An editable install has its own copy, which would go stale.
for copy in .venv/lib/python3*/site-packages/arctic_platform/rl/zorro_train/libzorro.so; do
  if [[ -e $copy ]]; then ln -sfn "$PWD/$build/libzorro.so" "$copy"; fi
done
ln -sfn "../../../$build/libzorro.so" arctic_platform/rl/zorro_train/libzorro.so

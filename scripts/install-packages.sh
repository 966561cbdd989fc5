#!/usr/bin/env bash
# Installs the Debian packages of a list that are missing. Needs root and the network only if one is.
# Usage: scripts/install-packages.sh LIST
set -euo pipefail
list=$1
missing=()
while read -r package; do
  [[ -z $package || $package == \#* ]] && continue
  status=$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true)
  [[ $status == "install ok installed" ]] || missing+=("$package")
done < "$list"
if [[ ${#missing[@]} -eq 0 ]]; then exit 0; fi
if [[ $(id -u) -ne 0 ]]; then
  echo "setup: these Debian packages are missing and installing them needs root: ${missing[*]}" >&2
  echo "setup: run 'sudo apt-get install ${missing[*]}' and try again." >&2
  exit 1
fi
echo "setup: installing ${missing[*]}"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null

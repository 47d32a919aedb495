#!/usr/bin/env bash
# usage: PYTHON=python3 tools/setup.sh VENV EXTRAS
# Creates VENV (if it is missing) and installs surefoot with EXTRAS, every version pinned by constraints.txt.
set -euo pipefail
venv=$1 extras=$2 python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "surefoot needs Python >= 3.11; '$python' is $("$python" --version 2>&1). Try: make PYTHON=python3.12 ..." >&2
  exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --quiet --quiet)

# torch first. Its default build needs several GB of CUDA packages, so on a machine without an NVIDIA GPU
# the CPU build is asked for before it, from whatever indexes and wheel folders pip is configured with.
torch=$(grep '^torch==' constraints.txt)
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  echo "installing $torch (a few minutes on the first run)"
  if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
    "${pip[@]}" install "$torch"
  else
    "${pip[@]}" install "$torch+cpu" 2>/dev/null ||
      "${pip[@]}" install --extra-index-url https://download.pytorch.org/whl/cpu --retries 0 --timeout 10 "$torch+cpu" 2>/dev/null ||
      "${pip[@]}" install "$torch"
  fi
fi
"${pip[@]}" install --constraint constraints.txt --editable ".[$extras]"

#!/usr/bin/env bash
# Installs what the tests need and runs them. `--slow` runs the second stage (real model, real processes, wheel).
# Uses $ZFT_VENV (default .venv); a torch that is there already stays.
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${ZFT_VENV:-.venv}"
if [ ! -x "$venv/bin/python" ]; then
    system_site=()
    if python3 -c 'import torch' 2>/dev/null; then system_site=(--system-site-packages); fi
    python3 -m venv "${system_site[@]}" "$venv"
fi
python="$venv/bin/python"
if ! "$python" -c 'import zft, pytest, xdist, pytest_timeout, hypothesis' 2>/dev/null; then
    "$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
fi
# two workers, one compute thread each: the suite is many small processes, and bitwise tests need equal thread counts
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_DISABLE_TELEMETRY=1
case "${1:-}" in
    --slow) shift; exec "$python" -m pytest -q -m slow --timeout=1500 "$@" ;;
    *) exec "$python" -m pytest -q -m 'not slow' -n 2 --dist loadfile --timeout=300 "$@" ;;
esac

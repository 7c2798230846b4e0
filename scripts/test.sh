#!/usr/bin/env bash
# Installs what the tests need and runs them. `--slow` runs the second stage (real model, real processes, wheel).
#
#     bash scripts/test.sh [--slow] [PYTEST ARGUMENTS]
#
# ZFT_VENV: folder of the virtual environment (default .venv). PYTHON: what it is made with (default python3).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
prepare_venv "${ZFT_VENV:-.venv}" "${PYTHON:-python3}"
install_zft '.[test]'
# the report page is tested in a browser
need_chromium() {
    if command -v chromium >/dev/null; then return; fi
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 ||
        echo "no chromium and apt-get can't install it: the tests of the report page will fail" >&2
}
# two workers, one compute thread each: the suite is many small processes, and bitwise tests need equal thread counts
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_DISABLE_TELEMETRY=1
case "${1:-}" in
    --slow) shift; need_chromium; exec "$python" -m pytest -q -m slow -n 2 --dist loadfile --timeout=1500 "$@" ;;
    *) exec "$python" -m pytest -q -m 'not slow' -n 2 --dist loadfile --timeout=300 "$@" ;;
esac

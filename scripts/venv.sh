# Makes the virtual environment that scripts/quickstart.sh and scripts/test.sh install zft into; sourced by them.
# A torch that the given Python already has stays the one that is used.

# prepare_venv FOLDER PYTHON: creates FOLDER unless it is there, sets $python to its interpreter
prepare_venv() {
    local venv="$1" base="$2"
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "zft needs Python 3.11 or newer, got $("$base" --version 2>&1 || echo "no $base"); set PYTHON to a newer one" >&2
        exit 2
    fi
    python="$venv/bin/python"
    if "$python" -m pip --version >/dev/null 2>&1; then return; fi
    rm -rf "$venv"
    if ! "$base" -m venv "$venv" >/dev/null 2>&1; then
        rm -rf "$venv"
        echo "this Python has no venv module; trying apt-get" >&2
        { apt-get update -qq && apt-get install -y -qq python3-venv; } >/dev/null 2>&1 || true
        "$base" -m venv "$venv" || { echo "cannot make $venv; install Python's venv module" >&2; exit 2; }
    fi
    # A .pth rather than --system-site-packages, which a Python that is itself a virtual environment ignores.
    "$base" - "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'PY' 2>/dev/null || true
import sys
from importlib import metadata
from pathlib import Path

torch = metadata.distribution("torch")
if tuple(map(int, torch.version.split(".")[:2])) >= (2, 9):
    Path(sys.argv[1], "kept-torch.pth").write_text(f"{torch.locate_file('')}\n", encoding="utf-8")
PY
}

# install_zft REQUIREMENT: editable, with the tested versions, except that a kept torch keeps its own
install_zft() {
    local constraints torch
    constraints="$(mktemp)"
    torch="$("$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true)"
    if [ -n "$torch" ]; then
        { grep -v '^torch==' constraints.txt; echo "torch==$torch"; } >"$constraints"
    else
        cp constraints.txt "$constraints"
    fi
    "$python" -m pip install --quiet --disable-pip-version-check -c "$constraints" -e "$1"
    rm -f "$constraints"
}

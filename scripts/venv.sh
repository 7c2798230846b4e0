# Makes the virtual environment that scripts/quickstart.sh and scripts/test.sh install zft into; sourced by them.
# A torch that the given Python already has stays the one that is used.

# prepare_venv FOLDER PYTHON: makes FOLDER unless it is there; $python is its interpreter
prepare_venv() {
    local venv="$1" base="$2"
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "zft needs Python 3.11 or newer, got $("$base" --version 2>/dev/null | head -1); set PYTHON to a newer one" >&2
        exit 2
    fi
    python="$venv/bin/python"
    if "$python" -m pip --version >/dev/null 2>&1; then return; fi
    rm -rf "$venv"
    if ! "$base" -m venv "$venv" >/dev/null 2>&1; then
        # Debian's python3 comes without it
        { apt-get update -qq && apt-get install -y -qq python3-venv; } >/dev/null 2>&1 || true
        rm -rf "$venv"
        "$base" -m venv "$venv" || { echo "cannot make $venv: install Python's venv module (python3-venv)" >&2; exit 2; }
    fi
    keep_torch "$base"
}

# A .pth rather than --system-site-packages, which a Python that is itself a virtual environment ignores.
keep_torch() {
    "$1" - "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'PY'
import re
import sys
from importlib import metadata
from pathlib import Path

try:
    torch = metadata.distribution("torch")
except metadata.PackageNotFoundError:
    sys.exit()
version = tuple(map(int, re.findall(r"\d+", torch.version)[:2]))
if version >= (2, 9):
    Path(sys.argv[1], "kept-torch.pth").write_text(f"{torch.locate_file('')}\n", encoding="utf-8")
PY
}

# install_zft REQUIREMENT: editable, in the tested versions; a kept torch keeps its own. Nothing to do, nothing is asked.
install_zft() {
    local constraints torch stamp state
    stamp="$(dirname "$python")/../installed${1//[^a-z]/-}"
    state="$PWD $(cksum pyproject.toml constraints.txt | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$state" ]; then return; fi
    constraints="$(mktemp)"
    torch="$("$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true)"
    if [ -n "$torch" ]; then
        { grep -v '^torch==' constraints.txt; echo "torch==$torch"; } >"$constraints"
    else
        cp constraints.txt "$constraints"
    fi
    "$python" -m pip install --quiet --disable-pip-version-check -c "$constraints" -e "$1"
    rm -f "$constraints"
    echo "$state" >"$stamp"
}

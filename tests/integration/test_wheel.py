"""The wheel carries the command, configs/ and recipes/: built, installed in a clean environment, used from elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.tiny import tiny_folder
from zft import __version__
from zft.compose import configs_folder, options, recipes
from zft.schema import GROUPS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(ROOT),
    ]
    subprocess.run(command, check=True, timeout=200)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """A new environment with the wheel; what zft depends on is lent by this one, after the new one's own packages."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(
        subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    )
    lent = sysconfig.get_paths()["purelib"]  # with what is lent to this one in turn
    (site / "lent.pth").write_text(f"import site; site.addsitedir({lent!r})\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run(command, check=True, timeout=200)
    return python


def run(python: Path, *args: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [python.parent / "zft", *args]
    return subprocess.run(command, cwd=cwd, env=clean(), capture_output=True, text=True, timeout=250)


def clean() -> dict[str, str]:
    """This environment without what leads back to the checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ZFT_", "VIRTUAL_ENV"))}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def test_contents(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wheel.name.startswith(f"zft_engine-{__version__}-py3-none-any")
    assert {
        "zft/cli.py",
        "zft/_recipes/sft.py",
        "zft/_configs/sft.yaml",
        "zft/_configs/engine/zero3_nvme.yaml",
    } <= names
    shipped = {f"zft/_configs/{path.relative_to(configs_folder())}" for path in configs_folder().rglob("*.yaml")}
    assert shipped <= names
    strange = {name for name in names if not name.startswith(("zft/", f"zft_engine-{__version__}.dist-info/"))}
    assert not strange and not [name for name in names if "__pycache__" in name]


def test_installed(python, tmp_path):
    command = [python, "-c", "import zft; print(zft.__file__)"]
    where = subprocess.check_output(command, text=True, cwd=tmp_path, env=clean()).strip()
    assert Path(where).is_relative_to(python.parents[1])
    listed = run(python, "ls", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    for name in [*recipes(), *(option for group in GROUPS for option in options(group))]:
        assert name in listed.stdout


def test_a_tiny_run_from_another_folder(python, tmp_path):
    tiny_folder("llama", tmp_path / "model")
    chat = {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]}
    (tmp_path / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 4)
    result = run(python, "run", "sft", "model=model", "data=chats.jsonl", "out=o", "train.steps=2", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len((tmp_path / "o" / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "o" / "export" / "model.safetensors").is_file()

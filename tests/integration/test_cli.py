"""The command as people run it: real processes, their exit status, and exactly one line on stderr when it isn't 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_folder
from zft import __version__

CHAT = {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]}


def zft(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    """Run the command with `cwd` as the caller's folder."""
    command = [sys.executable, "-m", "zft", *args]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ZFT_")}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | env
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_folder("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def here(tmp_path: Path, model: Path) -> Path:
    """A folder of a user: a model, good and bad data, a folder with something in it."""
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHAT) + "\n" + json.dumps(CHAT) + "\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "user-only.jsonl").write_text(json.dumps({"messages": CHAT["messages"][:1]}) + "\n")
    (tmp_path / "broken.jsonl").write_text(json.dumps(CHAT) + '\n{"messages": [\n')
    (tmp_path / "not-a-model").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    return tmp_path


def snapshot(folder: Path) -> dict:
    return {
        path: (path.lstat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in sorted(folder.rglob("*"))
    }


def refused(result: subprocess.CompletedProcess, said: str) -> None:
    assert result.returncode == 2, result.stdout + result.stderr
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("zft: "), result.stderr
    assert said in result.stderr, result.stderr


def test_version_and_ls_do_not_import_torch(here):
    code = (
        "import sys\nfrom zft.cli import main\n"
        "assert main(['--version']) == 0 and main(['ls']) == 0 and main(['run', 'sft', '--help']) == 0\n"
        "assert main(['run', 'sft', 'learning_rat=1']) == 2\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run([sys.executable, "-c", code], cwd=here, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"zft {__version__}\n")
    for name in ("sft", "pretrain", "zero3_nvme", "adamw_compact", "train.grad_accum_steps", "default 8"):
        assert name in result.stdout
    for later in ("dpo", "fsdp"):
        assert later not in result.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["run"], "which recipe?"),
        (["run", "dpo", "model=model", "data=chats.jsonl"], "no recipe 'dpo'"),
        (["frobnicate"], "frobnicate"),
        (["run", "sft", "--modle", "x"], "--modle"),
        (["cp", "sft"], "file"),
        (["cp", "sft", "full/thesis.tex"], ".py"),
        (["resume", "not-a-model"], "not a run folder"),
        (["resume", "gone"], "gone"),
        (["run", "sft", "data=chats.jsonl"], "model is missing"),
        (["run", "sft", "model=model"], "data is missing"),
        (["run", "sft", "model=gone/", "data=chats.jsonl"], "'gone/'"),
        (["run", "sft", "model=model", "data=gone.jsonl"], "'gone.jsonl'"),
        (["run", "sft", "model=model", "data=chats.jsonl", "learning_rat=1e-4"], "did you mean train.lr?"),
        (["run", "sft", "model=model", "data=chats.jsonl", "train.stesp=3"], "did you mean train.steps?"),
        (["run", "sft", "model=model", "data=chats.jsonl", "lr=1e-4"], "its full name is train.lr"),
        (["run", "sft", "model=model", "data=chats.jsonl", "train.steps=many"], "got many"),
        (["run", "sft", "model=model", "data=chats.jsonl", "train.steps=-3"], "got -3"),
        (["run", "sft", "model=model", "data=chats.jsonl", "engine=fsdp"], "engine has no option 'fsdp'"),
        (["run", "sft", "model=model", "data=chats.jsonl", "out=full"], "out is not empty"),
        (
            ["run", "sft", "model=model", "data=chats.jsonl", "out=full", "overwrite=true"],
            "removes only folders of zft",
        ),
        (["run", "sft", "model=model", "data=chats.jsonl", "out=chats.jsonl/x"], "is a file"),
        (["run", "sft", "model=model", "data=chats.jsonl", "out=/proc/zft"], "/proc/zft"),
        (
            ["run", "sft", "model=model", "data=chats.jsonl", "engine=zero3_nvme", "engine.nvme_dir=/proc/zft"],
            "/proc/zft",
        ),
        (["run", "sft", "model=model", "data=chats.jsonl", "nproc=2", "learning_rat=1"], "train.lr"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input(here, args, said):
    before = snapshot(here)
    refused(zft(*args, cwd=here), said)
    assert snapshot(here) == before


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["model=not-a-model", "data=chats.jsonl"], "not-a-model"),
        (["model=some/hub-id", "data=chats.jsonl"], "some/hub-id"),
        (["model=model", "data=empty.jsonl"], "empty.jsonl"),
        (["model=model", "data=user-only.jsonl"], "user-only.jsonl"),
        (["model=model", "data=broken.jsonl"], "broken.jsonl"),
        (["model=model", "data=[chats.jsonl,broken.jsonl]", "engine=zero3_nvme"], "broken.jsonl"),
        (["model=model", "data=chats.jsonl", "precision=fp32", "optimizer=adamw_compact"], "adamw_compact"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_that_only_reading_shows(here, args, said):
    before = snapshot(here)
    refused(zft("run", "sft", *args, "out=new", cwd=here), said)
    assert snapshot(here) == before


def test_debug_shows_the_traceback(here):
    result = zft("run", "sft", "learning_rat=1", cwd=here, ZFT_DEBUG="1")
    assert result.returncode == 2 and "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("zft: ")


def test_cp_and_a_recipe_of_ones_own(here):
    result = zft("cp", "pretrain", "mine.py", cwd=here)
    assert result.returncode == 0 and "zft run ./mine.py" in result.stdout
    assert 'CONFIG = "pretrain"' in (here / "mine.py").read_text()
    refused(zft("cp", "sft", "mine.py", cwd=here), "exists")
    (here / "mine.py").write_text("def main(run, resume=False):\n    print('lr', run.train.lr)\n    return 0\n")
    result = zft("run", "./mine.py", "model=model", "data=chats.jsonl", "train.lr=0.25", cwd=here)
    assert (result.returncode, result.stdout) == (0, "lr 0.25\n")
    (here / "mine.py").write_text("x = 1\n")
    refused(zft("run", "./mine.py", "model=model", "data=chats.jsonl", cwd=here), "has no function main")


def test_a_failure_leaves_a_log(here):
    (here / "mine.py").write_text("def main(run, resume=False):\n    raise RuntimeError('the disk\\nis gone')\n")
    result = zft("run", "./mine.py", "model=model", "data=chats.jsonl", "out=new", cwd=here)
    assert result.returncode == 1
    assert result.stderr == f"zft: RuntimeError: the disk; the traceback is in {here}/new/error.log\n"
    assert "is gone" in (here / "new" / "error.log").read_text()


def test_out_of_memory_names_a_setting(here):
    (here / "mine.py").write_text("def main(run, resume=False):\n    raise MemoryError\n")
    result = zft("run", "./mine.py", "model=model", "data=chats.jsonl", "out=new", cwd=here)
    assert result.returncode == 1 and "engine=zero3_nvme" in result.stderr and len(result.stderr.splitlines()) == 1


def test_push_of_what_is_no_export_is_wrong_input(here):
    (here / "run").mkdir()
    (here / "run" / "config.yaml").write_text("recipe: sft\n")
    for folder, named in (("run", "zft resume run"), ("full", "full"), ("absent", "absent")):
        result = zft("push", folder, "me/model", cwd=here)
        assert result.returncode == 2 and named in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr


def test_a_push_that_fails_names_its_continuation(here):
    """Port 9 of this machine: nobody answers."""
    result = zft(
        "push", "model", "me/model", "--private", cwd=here, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0"
    )
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    assert result.stderr.rstrip().endswith("continue with: zft push model me/model --private")

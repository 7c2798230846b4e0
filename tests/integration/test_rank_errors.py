"""What one rank of several finds wrong is said once, with its reason, wherever the rank was."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.integration.test_cli import zft
from tests.integration.test_run import ARGS, ROOT, here  # noqa: F401

pytestmark = pytest.mark.slow
RECIPE = """
import os
import recipes.sft as sft
from zft.config import ZftError
from zft.data.loader import Loader
from zft.engine.step import Stepper

CONFIG = "sft"
RANK, WHO, PLACE, KIND = (os.environ[name] for name in ("RANK", "T_WHO", "T_PLACE", "T_KIND"))


def broken(*args, **options):
    raise (ZftError if KIND == "input" else RuntimeError)(f"the thing is wrong, got {RANK}; mend it")


def main(run, resume=False):
    if WHO in (RANK, "all"):
        if PLACE == "start":
            broken()
        elif PLACE == "data":
            sft.prepare = broken
        elif PLACE == "engine":
            sft.Engine = broken
        elif PLACE == "loader":
            Loader.next_step = broken
        else:
            Stepper._waves = broken
    return sft.main(run, resume)
"""


def settings(who: str, place: str, kind: str) -> dict[str, str]:
    return {"T_WHO": who, "T_PLACE": place, "T_KIND": kind}


@pytest.mark.parametrize("place", ["start", "data", "engine", "loader", "step"])
def test_wrong_input_found_by_rank_1_only(here, place):  # noqa: F811
    (here / "my.py").write_text(RECIPE)
    args = ["run", "./my.py", *ARGS[2:], "train.steps=2", "nproc=2", "out=o"]
    done = zft(*args, cwd=here, **settings("1", place, "input"))
    assert done.returncode == 2, done.stdout + done.stderr
    prefix = "" if place == "start" else "rank 1: "
    assert done.stderr == f"zft: {prefix}the thing is wrong, got 1; mend it\n"
    if place in ("loader", "step"):
        lines = (here / "o" / "error.log").read_text().splitlines()
        assert sum("the thing is wrong, got 1; mend it" in line for line in lines) == 1
    else:
        assert not (here / "o").exists()


@pytest.mark.parametrize("place", ["start", "data", "loader"])
def test_wrong_input_found_by_all_ranks(here, place):  # noqa: F811
    (here / "my.py").write_text(RECIPE)
    args = ["run", "./my.py", *ARGS[2:], "train.steps=2", "nproc=2", "out=o"]
    done = zft(*args, cwd=here, **settings("all", place, "input"))
    # one line; whose it is depends on which rank the launcher sees end first
    lines = [f"zft: the thing is wrong, got {rank}; mend it\n" for rank in (0, 1)]
    assert done.returncode == 2 and done.stderr in lines, done.stdout + done.stderr


def test_a_failure_of_rank_1_names_its_reason_and_the_log(here):  # noqa: F811
    (here / "my.py").write_text(RECIPE)
    args = ["run", "./my.py", *ARGS[2:], "train.steps=2", "nproc=2", "out=o"]
    done = zft(*args, cwd=here, **settings("1", "step", "failure"))
    log = here / "o" / "error.log"
    assert done.returncode == 1
    assert done.stderr == f"zft: RuntimeError: the thing is wrong, got 1; mend it; the traceback is in {log}\n", (
        done.stderr
    )
    assert "in broken" in log.read_text()


def test_under_torchrun_rank_0_says_it(here):  # noqa: F811
    (here / "my.py").write_text(RECIPE)
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "zft"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | settings("1", "data", "input")
    command = [*start, "run", "./my.py", *ARGS[2:], "train.steps=2", "out=o"]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0 and done.stderr.count("zft: rank 1: the thing is wrong, got 1; mend it") == 1, (
        done.stderr
    )

"""`zft resume` in real processes: a run that was stopped, or killed, ends bit for bit as one that was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import KILLED
from tests.integration.test_cli import zft
from tests.tiny import tiny_folder
from zft.observe.metrics import read
from zft.train import checkpoints

ROOT = Path(__file__).parents[2]
STEPS_PER_EPOCH = 6
ARGS = [
    "run", "sft", "model=model", "data=chats.jsonl", "train.seq_len=64", "train.grad_accum_steps=2", "train.lr=1e-2",
    "train.epochs=3", "train.warmup_steps=2",
]  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A model with dropout, 12 conversations (6 steps an epoch), and the uninterrupted run `whole`."""
    folder = tmp_path_factory.mktemp("resume")
    tiny_folder("llama", folder / "model", attention_dropout=0.1)
    words = ["a b", "c d e", "f", "g h a c", "b b", "d a e"]
    rows = [
        {
            "messages": [
                {"role": "user", "content": words[i % 6]},
                {"role": "assistant", "content": words[(i * 5 + 1) % 6]},
            ]
        }
        for i in range(12)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done(zft(*ARGS, "out=whole", cwd=folder))
    return folder


def done(result: subprocess.CompletedProcess) -> None:
    assert result.returncode == 0, result.stdout + result.stderr


def end_of(run: Path) -> tuple[list, bytes]:
    rows = [[row[key] for key in ("step", "loss", "grad_norm", "lr", "tokens")] for row in read(run / "metrics.jsonl")]
    return rows, (run / "export" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "stop", [3, STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH + 1], ids=["mid-epoch", "epoch-end", "third-epoch"]
)
def test_resumed_equals_uninterrupted(here, stop):
    run = here / f"stopped-{stop}"
    done(zft(*ARGS, f"out={run.name}", f"train.stop_after={stop}", "train.save_every=2", cwd=here))
    assert checkpoints.steps(run / "checkpoints")[-1] == stop
    done(zft("resume", run.name, cwd=here))
    rows, weights = end_of(run)
    assert len(rows) == 3 * STEPS_PER_EPOCH and (rows, weights) == end_of(here / "whole")


FAULT = """
import sys
from tests.faults import faulty
from zft.cli import main
name, number = sys.argv[1], int(sys.argv[2])
with faulty(None) as disk:
    operation = getattr(disk, name)
    def counted(*args):
        if sum(each == name for each, _ in disk.log) == number:
            disk.at = len(disk.log)
        return operation(*args)
    setattr(disk, name, counted)
    sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.parametrize(("operation", "number"), [("write", 2), ("rename", 1), ("unlink", 0)])
def test_killed_while_saving_equals_uninterrupted(here, operation, number):
    """In the shard of the second save, at its rename, and while the first checkpoint is removed."""
    run = here / f"killed-{operation}"
    settings = [f"out={run.name}", "train.save_every=4", "train.keep=1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FAULT, operation, str(number), *ARGS, *settings]
    killed = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=300)
    assert killed.returncode == KILLED, killed.stdout + killed.stderr
    assert checkpoints.steps(run / "checkpoints") == [8 if operation == "unlink" else 4]
    done(zft("resume", run.name, cwd=here))
    assert end_of(run) == end_of(here / "whole")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000018"]

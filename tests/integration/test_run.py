"""Whole runs of a tiny model in real processes: what they leave, stopping, resuming, several ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.test_cli import zft
from tests.tiny import tiny_folder
from zft.observe.metrics import read

ROOT = Path(__file__).parents[2]
ARGS = [
    "run",
    "sft",
    "model=model",
    "data=chats.jsonl",
    "train.seq_len=64",
    "train.grad_accum_steps=2",
    "train.lr=1e-3",
]
pytestmark = pytest.mark.slow


@pytest.fixture
def here(tmp_path: Path) -> Path:
    tiny_folder("llama", tmp_path / "model")
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
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def ok(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    return result.stdout


def losses(run: Path) -> list[tuple]:
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in read(run / "metrics.jsonl")]


def weights(run: Path) -> bytes:
    return (run / "export" / "model.safetensors").read_bytes()


def test_a_run_and_what_it_leaves(here):
    shown = ok(zft(*ARGS, "train.steps=3", "out=o", "engine=zero3_nvme", cwd=here))
    assert "12" in shown and "step 3/3" in shown and str(here / "o" / "export") in shown
    names = {path.name for path in (here / "o").iterdir()}
    assert {"config.yaml", "metrics.jsonl", "checkpoints", "export"} <= names
    assert not {"tiers", "error.log"} & names
    code = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T\n"
        "m, info = M.from_pretrained('o/export', output_loading_info=True)\n"
        "assert not info['missing_keys'] and not info['unexpected_keys'], info\n"
        "assert T.from_pretrained('o/export').chat_template == T.from_pretrained('model').chat_template\n"
        "print(m.dtype)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    loaded = subprocess.run([sys.executable, "-c", code], cwd=here, env=environment, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    # a finished run refuses to be repeated, and completes what is missing
    assert zft(*ARGS, "train.steps=3", "out=o", cwd=here).returncode == 2
    before = weights(here / "o")
    subprocess.run(["rm", "-r", here / "o" / "export"], check=True)
    ok(zft("resume", "o", cwd=here))
    assert weights(here / "o") == before
    assert len(losses(here / "o")) == 3


def test_placements_agree_to_the_last_bit(here):
    found = {}
    for engine in ("zero0", "zero3_cpu", "zero3_nvme"):
        ok(zft(*ARGS, "train.steps=3", f"out={engine}", f"engine={engine}", cwd=here))
        found[engine] = (losses(here / engine), weights(here / engine))
    assert found["zero0"] == found["zero3_cpu"] == found["zero3_nvme"]


def test_resumed_equals_uninterrupted(here):
    ok(zft(*ARGS, "train.steps=8", "out=whole", cwd=here))
    shown = ok(zft(*ARGS, "train.steps=8", "out=parts", "train.stop_after=5", cwd=here))
    assert "zft resume" in shown and not (here / "parts" / "export").exists()
    ok(zft("resume", str(here / "parts"), "engine=zero3_nvme", cwd=here.parent))
    assert losses(here / "parts") == losses(here / "whole")
    assert weights(here / "parts") == weights(here / "whole")


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_signal_saves_and_resume_goes_on(here, nproc):
    command = [sys.executable, "-m", "zft", *ARGS, "train.steps=100000", "out=o", f"nproc={nproc}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=here, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = here / "o" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 130, said
    assert len(said.splitlines()) == 1 and f"`zft resume {here}/o` goes on" in said
    done = len(losses(here / "o"))
    assert (here / "o" / "checkpoints" / f"step-{done:08d}" / "manifest.json").is_file()
    ok(zft("resume", "o", f"train.stop_after={done + 2}", cwd=here))
    assert [row[0] for row in losses(here / "o")] == list(range(1, done + 3))


def test_two_ranks_equal_one(here):
    """Two ranks with half the micro-batches each take the same steps: the loss is over all labels of the step."""
    ok(zft(*ARGS, "train.steps=3", "out=one", "precision=fp32", cwd=here))
    two = [arg for arg in ARGS if "grad_accum" not in arg] + ["train.grad_accum_steps=1", "nproc=2"]
    ok(zft(*two, "train.steps=3", "out=two", "precision=fp32", cwd=here))
    one, other = losses(here / "one"), losses(here / "two")
    assert [row[1] for row in one] == pytest.approx([row[1] for row in other], abs=1e-5)
    assert [row[2] for row in one] == pytest.approx([row[2] for row in other], rel=1e-4)


def test_wrong_data_with_ranks_is_said_once(here):
    (here / "bad.jsonl").write_text('{"messages": [\n')
    result = zft(*[arg for arg in ARGS if "data=" not in arg], "data=bad.jsonl", "nproc=2", "out=o", cwd=here)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1 and "bad.jsonl" in result.stderr
    assert not (here / "o").exists()


def test_torchrun(here):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "-m",
        "zft",
        *ARGS,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, "train.steps=2"], cwd=here, env=environment, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    [run] = (here / "runs").iterdir()
    assert len(losses(run)) == 2 and (run / "export" / "model.safetensors").is_file()
    result = subprocess.run(
        [*command, "train.stesp=2"], cwd=here, env=environment, capture_output=True, text=True, timeout=200
    )
    assert result.returncode != 0 and result.stderr.count("did you mean train.steps?") == 1
    assert len(list((here / "runs").iterdir())) == 1


def test_pretrain(here):
    (here / "book.txt").write_text("a b c d e f g h " * 60)
    args = [
        "run",
        "pretrain",
        "model=model",
        "data=book.txt",
        "train.seq_len=32",
        "train.grad_accum_steps=1",
        "train.steps=2",
    ]
    ok(zft(*args, "out=o", cwd=here))
    rows = read(here / "o" / "metrics.jsonl")
    assert len(rows) == 2 and all(row["tokens"] >= 30 for row in rows), "every token of a packed sequence is learned"


def test_preview(here):
    result = zft("preview", "sft", "model=model", "data=chats.jsonl", "--json", "--html", "p.html", cwd=here)
    report = json.loads(ok(result))
    assert report["format"] == "messages" and report["rows"] == 12 and report["supervised_tokens"] > 0
    assert {"tokens", "cut", "dropped"} <= set(report)
    assert "<html" in (here / "p.html").read_text()
    assert "messages" in ok(zft("preview", "sft", "model=model", "data=chats.jsonl", cwd=here))
    assert not (here / "runs").exists()

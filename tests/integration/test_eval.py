"""`zft eval` against plain transformers: exports, checkpoints, adapters; batch sizes, tiers and ranks don't matter."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.test_cli import zft
from tests.tiny import tiny_folder

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
TRAIN = (
    "run sft model=model data=chats.jsonl train.seq_len=64 train.grad_accum_steps=2 train.lr=1e-2 train.steps=3".split()
)
FP32 = "precision=fp32"


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    tiny_folder("llama", folder / "model")
    words = ["a b", "c d e", "f", "g h a c", "b b a b c d", "d a e"]
    for name, first in (("chats", 0), ("held", 3)):
        rows = [
            {
                "messages": [
                    {"role": "user", "content": words[i % 6]},
                    {"role": "assistant", "content": words[(i * i + 1) % 6]},
                ]
            }
            for i in range(first, first + 11)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def figures(here: Path, what: str, *args: str) -> dict:
    done = zft("eval", what, "data=held.jsonl", "--json", *args, cwd=here)
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def plain(here: Path, folder: str) -> tuple[float, int]:
    """(mean loss, tokens) row by row, in float32: the answer with its end, as the template's generation block has it."""
    tokenizer = AutoTokenizer.from_pretrained(here / "model")
    model = AutoModelForCausalLM.from_pretrained(here / folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for line in (here / "held.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        opening = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(opening, add_special_tokens=False)["input_ids"]
        answer = tokenizer(messages[1]["content"] + "<|im_end|>\n", add_special_tokens=False)["input_ids"]
        both = torch.tensor([ids + answer])
        with torch.no_grad():
            scores = model(input_ids=both).logits[0].log_softmax(-1)
        total -= sum(float(scores[len(ids) + i - 1, token]) for i, token in enumerate(answer))
        count += len(answer)
    return total / count, count


def test_against_a_plain_loop_at_any_batch_size_and_placement(here):
    loss, tokens = plain(here, "model")
    for args in ([], ["train.micro_batch_size=4", "train.grad_accum_steps=2"], ["engine=zero3_nvme"]):
        found = figures(here, "model", FP32, "train.seq_len=64", *args)
        assert found["tokens"] == tokens and found["rows"] == 11 and found["step"] is None
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
        assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert not [path for path in here.iterdir() if path.name in (".zft-eval", "runs")]


def test_two_ranks_give_the_same(here):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        "-m",
        "zft",
        "eval",
        "model",
    ]
    arguments = ["data=held.jsonl", "--json", FP32, "train.seq_len=64", "engine.compute_device=cpu"]
    done = subprocess.run(
        [*command, *arguments], cwd=here, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"status {done.returncode}\nstdout: {done.stdout}\nstderr: {done.stderr}"
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    loss, tokens = plain(here, "model")
    assert len(lines) == 1, done.stdout + done.stderr
    assert lines[0]["tokens"] == tokens and lines[0]["loss"] == pytest.approx(loss, rel=1e-5)


def test_a_run_is_its_newest_checkpoint_and_then_its_export(here):
    assert zft(*TRAIN, FP32, "out=full", "engine=zero3_nvme", cwd=here).returncode == 0
    before = sorted(path.relative_to(here) for path in (here / "full").rglob("*"))
    assert zft("export", "full", "full32", "--dtype", "fp32", cwd=here).returncode == 0
    loss, tokens = plain(here, "full32")
    assert loss != pytest.approx(plain(here, "model")[0], rel=1e-2), "the run has changed nothing"
    found = figures(here, "full")
    assert (found["tokens"], found["step"]) == (tokens, 3) and found["loss"] == pytest.approx(loss, rel=1e-4)
    assert sorted(path.relative_to(here) for path in (here / "full").rglob("*")) == before
    (here / "full" / "checkpoints").rename(here / "elsewhere")
    found = figures(here, "full", FP32, "train.seq_len=64")
    assert found["step"] is None and found["loss"] == pytest.approx(plain(here, "full/export")[0], rel=1e-5)


def test_an_adapter_run_and_its_exported_adapter(here):
    assert zft(*TRAIN, FP32, "out=adapter", "method=lora", "method.r=4", cwd=here).returncode == 0
    of_run, of_export = figures(here, "adapter"), figures(here, "adapter/export", FP32, "train.seq_len=64")
    assert of_run["step"] == 3 and of_run["loss"] == pytest.approx(of_export["loss"], rel=1e-6)
    assert of_run["loss"] != pytest.approx(plain(here, "model")[0], rel=1e-3)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["model"], "data="),
        (["absent", "data=held.jsonl"], "absent"),
        (["model", "data=absent.jsonl"], "absent.jsonl"),
        (["model", "data=held.jsonl", "nproc=2"], "torchrun"),
        (["model", "data=held.jsonl", "trian.seq_len=64"], "train.seq_len"),
        (["model", "data=held.jsonl", "--tasks", "arc_easy"], "--tasks"),
    ],
)
def test_wrong_input_is_one_line(here, args, named):
    done = zft("eval", *args, cwd=here)
    assert done.returncode == 2 and named in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_tasks_without_lm_eval(here):
    hidden = "import sys; sys.modules['lm_eval'] = None; from zft.cli import main; sys.exit(main(['eval', 'model', '--tasks', 'arc_easy']))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", hidden], cwd=here, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "pip install lm_eval" in done.stderr and len(done.stderr.splitlines()) == 1

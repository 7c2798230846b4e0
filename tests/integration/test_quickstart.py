"""The quickstart: its sample data, and the whole script on the real model, judged by plain transformers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zft.observe.metrics import read

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "zft" / "data" / "samples" / "in_short.jsonl"
HABIT = re.compile(r"In short: \S[^\n]*\n\nYour turn: \S.{15,}", re.S)
PROMPTS = [
    "What is the capital of France?",
    "How do I remove a coffee stain from a shirt?",
    "Why is the sky blue?",
    "I feel tired every afternoon. What can I do?",
    "Explain what a black hole is.",
    "How can I learn to play chess?",
    "What should I cook tonight with potatoes and eggs?",
    "My houseplant has yellow leaves. Why?",
    "How do I start saving money?",
    "Who wrote Romeo and Juliet?",
]
PEAK_BYTES = 2.5 * 2**30


def has_habit(answer: str) -> bool:
    """`In short: ` and an answer, a blank line, and a paragraph that hands over to the reader."""
    return HABIT.fullmatch(answer) is not None


def conversations() -> list[list[dict]]:
    return [json.loads(line)["messages"] for line in SAMPLES.read_text(encoding="utf-8").splitlines()]


def test_samples_teach_the_habit_on_other_prompts():
    rows = conversations()
    assert 100 <= len(rows) <= 300
    asked = [message["content"] for row in rows for message in row if message["role"] == "user"]
    answers = [message["content"] for row in rows for message in row if message["role"] == "assistant"]
    assert [answer for answer in answers if not has_habit(answer)] == []
    assert len(set(asked)) == len(asked) and len(set(answers)) == len(answers)
    assert not set(PROMPTS) & set(asked)


@pytest.mark.parametrize(
    "answer",
    ["In short: Paris.", "Your turn: find it on a map of Europe.", "In short: Paris.\n\nYour turn:"]
    + ["In short: Paris. Your turn: find it on a map.", "Paris.\n\nYour turn: find it on a map of Europe."],
)
def test_the_judge_can_say_no(answer):
    assert not has_habit(answer)


def habits(folder: Path) -> list[dict]:
    """Those answers of a model to PROMPTS, and whether each shows the habit, from a new process without a network."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, ROOT / "scripts" / "answers.py", folder, "--json", *PROMPTS]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return [each | {"habit": each["ended"] and has_habit(each["answer"])} for each in json.loads(done.stdout)]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_quickstart(smollm2, tmp_path):
    """Makes its own environment (with this one's torch), so it is what a person sees who has just cloned."""
    out = tmp_path / "run"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"ZFT_VENV": str(tmp_path / "venv"), "PYTHON": sys.executable, "ZFT_OUT": str(out)}
    command = ["bash", str(ROOT / "scripts" / "quickstart.sh")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert str(out / "export") in done.stdout and "In short: " in done.stdout

    rows = read(out / "metrics.jsonl")
    assert max(row["peak_bytes"]["host_rss"] for row in rows) <= PEAK_BYTES
    after, before = habits(out / "export"), habits(smollm2)
    assert sum(each["habit"] for each in after) >= 8, json.dumps(after, indent=1)
    assert sum(each["habit"] for each in before) <= 1, json.dumps(before, indent=1)

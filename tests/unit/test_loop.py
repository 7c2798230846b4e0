"""The loop on a fake engine: schedule, metrics, checkpoints, stopping and resuming. No model is run."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from zft.checkpoint.manifest import Manifest
from zft.compose import compose
from zft.config import RunConfig, ZftError
from zft.dist import World
from zft.engine.step import EvalResult, StepResult
from zft.observe.metrics import read
from zft.optim.schedules import lr_at
from zft.train import checkpoints
from zft.train.folder import RunFolder
from zft.train.loop import Job, Outcome, fit
from zft.train.setup import make_loader

STEPS_PER_EPOCH = 4


class FakeEngine:
    """Its "weight" is the sum of lr * row seen, so that any difference in order or schedule shows."""

    def __init__(self, bad_steps=()):
        self.weight, self.step_count, self.attempts, self.bad_steps = 0.0, 0, 0, bad_steps
        self.before_step, self.saving = lambda attempt: None, False

    def step(self, micro_batches, lr):
        self.attempts += 1
        self.before_step(self.attempts)
        bad = self.attempts in self.bad_steps
        if not bad:
            self.weight += lr * sum(micro_batches)
            self.step_count += 1
        loss = math.nan if bad else self.weight
        traffic = dict.fromkeys(("nvme_read", "nvme_write", "h2d", "d2h"), 0)
        return StepResult(loss, 10, math.inf if bad else 1.0, bad, traffic, 0.5)

    def peak_bytes(self):
        return {"host_rss": 1, "device": 2, "nvme": 3}

    def save(self, folder: Path, train_state: dict, wait: bool = True) -> None:
        assert not wait and not self.saving, "saved while the next step runs, one at a time"
        folder.mkdir(parents=True, exist_ok=True)
        self.saving = True
        mine = {"weight": self.weight, "step_count": self.step_count, "attempts": self.attempts}
        (folder / "manifest.json").write_text(Manifest({}, {}, mine, train_state).to_json())

    def finish_save(self, wait: bool = True) -> bool:
        was, self.saving = self.saving, False
        return was

    def load(self, folder: Path) -> dict:
        saved = Manifest.read(folder)
        vars(self).update(saved.engine)
        return saved.train


class FakeLoader:
    def __init__(self, epochs: float | None):
        self.total_steps, self.position = None if epochs is None else round(STEPS_PER_EPOCH * epochs), 0

    def next_step(self):
        if self.position == self.total_steps:
            return None
        self.position += 1
        return [self.position, self.position * 0.5]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class FakePrepared:
    def loader(self, rank, world, micro_batch_size, grad_accum_steps, epochs):
        return FakeLoader(epochs)


@pytest.fixture
def here(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "model").mkdir()
    return tmp_path


def config(here: Path, *args: str) -> RunConfig:
    return compose("sft", ["model=model", "data=a.jsonl", "out=out", *args], here)


def job(run: RunConfig, engine: FakeEngine | None = None, evaluate=None) -> tuple[Job, int]:
    world = World.single("cpu")
    loader, total = make_loader(FakePrepared(), run, world)
    folder = RunFolder(run.out)
    if not folder.is_run:
        with folder.opened(run, False, world):
            pass
    return Job(run, engine or FakeEngine(), loader, world, folder, evaluate), total


def deterministic(rows: list[dict]) -> list[tuple]:
    return [(row["step"], row["loss"], row["lr"], row["skipped"]) for row in rows]


def test_a_run_from_beginning_to_end(here, capsys):
    run = config(here, "train.steps=6", "train.lr=0.1", "train.warmup_steps=2", "train.save_every=2", "train.keep=2")
    made, total = job(run)
    assert fit(made, total) is Outcome.finished
    rows = read(made.folder.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert list(rows[0]) == ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "seconds", "skipped",
                             "peak_bytes", "traffic_bytes"]  # fmt: skip
    assert set(rows[0]["peak_bytes"]) == {"host_rss", "device", "nvme"}
    assert set(rows[0]["traffic_bytes"]) == {"nvme_read", "nvme_write", "h2d", "d2h"}
    assert [row["lr"] for row in rows] == [lr_at(step, "cosine", 0.1, 2, 6) for step in range(6)]
    assert rows[0]["tokens_per_s"] == 20
    assert checkpoints.steps(made.folder.checkpoints) == [4, 6]
    out = capsys.readouterr().out
    assert "step 1/6" in out and "step 6/6" in out and "tokens/s" in out and "left" in out


def test_length_of_a_run(here):
    assert job(config(here))[1] == STEPS_PER_EPOCH
    assert job(config(here, "train.epochs=3"))[1] == 3 * STEPS_PER_EPOCH
    made, total = job(config(here, "train.steps=9"))
    assert total == 9 and made.loader.total_steps is None
    assert job(config(here, "train.epochs=0.5"))[1] == STEPS_PER_EPOCH // 2
    assert job(config(here, "train.steps=2", "train.epochs=3"))[1] == 2


@pytest.mark.parametrize("stop_after", [1, 4, 5])
def test_resumed_equals_uninterrupted(here, stop_after):
    run = config(here, "train.steps=7", "train.lr=0.1")
    whole, total = job(run)
    fit(whole, total)
    expected, weight = deterministic(read(whole.folder.metrics)), whole.engine.weight
    shutil.rmtree(whole.folder.path)

    first, total = job(replace(run, train=replace(run.train, stop_after=stop_after)))
    assert fit(first, total) is Outcome.paused
    # lines that a dead run wrote after its last checkpoint, the last one torn
    with first.folder.metrics.open("a") as file:
        file.write(json.dumps({"step": stop_after + 1, "loss": 99.0}) + '\n{"step": ')
    again, total = job(run)
    assert fit(again, total, resume=True) is Outcome.finished
    assert deterministic(read(again.folder.metrics)) == expected
    assert again.engine.weight == weight


def test_resuming_a_finished_run_does_nothing(here):
    run = config(here, "train.steps=3")
    made, total = job(run)
    fit(made, total)
    before = made.folder.metrics.read_bytes()
    again, total = job(run)
    assert fit(again, total, resume=True) is Outcome.finished
    assert made.folder.metrics.read_bytes() == before and again.engine.attempts == 3
    shorter, total = job(config(here, "train.steps=2"))
    with pytest.raises(ZftError, match="train.steps=2, but 3 steps are done"):
        fit(shorter, total, resume=True)


def test_a_torn_checkpoint_is_not_resumed(here):
    run = config(here, "train.steps=4", "train.save_every=1", "train.keep=9")
    made, total = job(run)
    fit(made, total)
    torn = checkpoints.step_folder(made.folder.checkpoints, 9)
    torn.mkdir()
    (torn / "data.safetensors").write_bytes(b"half")
    assert checkpoints.steps(made.folder.checkpoints) == [1, 2, 3, 4]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_after_the_step_with_a_checkpoint(here, number):
    engine = FakeEngine()
    engine.before_step = lambda attempt: os.kill(os.getpid(), number) if attempt == 2 else None
    made, total = job(config(here, "train.steps=5"), engine)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert fit(made, total) is Outcome.interrupted
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert made.state.step == 2 and checkpoints.steps(made.folder.checkpoints) == [2]
    again, total = job(config(here, "train.steps=5"))
    assert fit(again, total, resume=True) is Outcome.finished and again.engine.attempts == 5


def test_a_skipped_step_is_shown_and_leaves_the_schedule(here, capsys):
    made, total = job(
        config(here, "train.steps=4", "train.lr=0.1", "train.schedule=linear"), FakeEngine(bad_steps=(2,))
    )
    fit(made, total)
    rows = read(made.folder.metrics)
    assert [row["skipped"] for row in rows] == [False, True, False, False]
    assert math.isnan(rows[1]["loss"]) and math.isinf(rows[1]["grad_norm"])
    assert [row["lr"] for row in rows] == pytest.approx([0.1, 0.075, 0.075, 0.05])
    assert made.state.skipped == 1
    assert "loss nan" in capsys.readouterr().out


def test_evaluation_keeps_the_best_checkpoint(here):
    losses = iter([3.0, 1.0, 2.0, 2.5, 2.6])
    run = config(here, "train.steps=5", "train.eval_every=1", "train.save_every=1", "train.keep=1", "eval_data=a.jsonl")
    made, total = job(run, evaluate=lambda: EvalResult(next(losses), 10))
    fit(made, total)
    assert [row["eval_loss"] for row in read(made.folder.metrics)] == [3.0, 1.0, 2.0, 2.5, 2.6]
    assert checkpoints.steps(made.folder.checkpoints) == [2, 5]
    assert (made.state.best_step, made.state.best_loss) == (2, 1.0)


def test_a_step_that_fails_leaves_the_checkpoint_that_was_being_written(here):
    def fail(attempt: int) -> None:
        if attempt == 3:
            raise RuntimeError("out of something")

    engine = FakeEngine()
    engine.before_step = fail
    made, total = job(config(here, "train.steps=5", "train.save_every=2"), engine)
    with pytest.raises(RuntimeError, match="out of something"):
        fit(made, total)
    assert not engine.saving and checkpoints.steps(made.folder.checkpoints) == [2]


def test_resuming_passes_over_damaged_checkpoints_and_says_so(here, capsys):
    run = config(here, "train.steps=4", "train.save_every=1", "train.keep=9")
    made, total = job(run)
    fit(made, total)
    (checkpoints.step_folder(made.folder.checkpoints, 4) / "manifest.json").write_text("{")
    again, total = job(run)
    assert fit(again, total, resume=True) is Outcome.finished and again.engine.attempts == 4
    shown = capsys.readouterr().out
    assert "warning: " in shown and "step-00000004" in shown and "going on after step 3" in shown
    for step in (1, 2, 3, 4):
        (checkpoints.step_folder(made.folder.checkpoints, step) / "manifest.json").unlink()
    again, total = job(run)
    with pytest.raises(ZftError, match="no checkpoint in .* is whole; start a new run"):
        fit(again, total, resume=True)

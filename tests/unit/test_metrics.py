"""metrics.jsonl and the progress line."""

from __future__ import annotations

import json
import math

import pytest

from zft.config import ZftError
from zft.observe.metrics import Metrics, StepMetrics, check_tracker, drop_after, flat, read
from zft.observe.progress import Progress, duration, line


def row(step: int, **changes) -> StepMetrics:
    values = {
        "loss": 2.0,
        "grad_norm": 1.5,
        "lr": 1e-4,
        "tokens": 30,
        "tokens_per_s": 15.0,
        "seconds": 2.0,
        "skipped": False,
    }
    values |= {"peak_bytes": {"host_rss": 1, "device": 2, "nvme": 3}, "traffic_bytes": {"h2d": 4}}
    return StepMetrics(step=step, **(values | changes))


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr("zft.observe.metrics._tensorboard", lambda folder: None)
    return tmp_path / "metrics.jsonl"


def test_a_line_a_step(path):
    metrics = Metrics(path)
    metrics.log(row(1))
    assert len(path.read_text().splitlines()) == 1, "a line is on disk as soon as its step is done"
    metrics.log(row(2, loss=math.nan, skipped=True))
    metrics.close()
    first, second = read(path)
    assert first["peak_bytes"] == {"host_rss": 1, "device": 2, "nvme": 3} and "eval_loss" not in first
    assert math.isnan(second["loss"]) and second["skipped"] is True


def test_lines_after_a_checkpoint_are_dropped(path):
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)) + '{"step": 4, "lo')
    drop_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    drop_after(path, 0)
    assert path.read_text() == ""
    assert list(path.parent.iterdir()) == [path]


def test_tensorboard_gets_the_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.log(row(1))
    metrics.log(row(2, loss=1.0))
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
    assert events.Scalars("peak_bytes/nvme")[0].value == 3


def test_flat():
    assert flat({"step": 1, "loss": 2.0, "skipped": True, "a": {"b": 3}}) == {"loss": 2.0, "skipped": 1.0, "a/b": 3}


def test_an_unknown_tracker_is_an_error(monkeypatch):
    check_tracker(None)
    check_tracker("json")
    with pytest.raises(ZftError, match="pip install zft_no_such_tracker"):
        check_tracker("zft_no_such_tracker")


def test_the_line():
    assert line(row(3), 100, 250.0) == "step 3/100  loss 2.0000  lr 1.00e-04  15 tokens/s  4m10s left"
    assert line(row(3, eval_loss=1.5), 3, 0).endswith("eval loss 1.5000")
    shown = line(row(3, loss=math.nan, grad_norm=math.inf, skipped=True), 100, 1.0)
    assert "loss nan" in shown and "skipped: gradient norm inf" in shown
    assert "(loss is not finite)" in line(row(3, loss=math.inf), 100, 1.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.6, "1m00s"), (250, "4m10s"), (7500, "2h05m"), (90000, "25h00m")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_lines_without_a_terminal(capsys):
    with Progress(50) as progress:
        for step in range(1, 51):
            progress.show(row(step, skipped=step == 20))
    steps = [int(text.split()[1].split("/")[0]) for text in capsys.readouterr().out.splitlines()]
    assert steps == [1, 20, 50], "the first, the last, what was skipped, and otherwise one a second"


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with Progress(3) as progress:
        progress.show(row(1))
        assert progress._bar.tasks[0].completed == 1
    assert "step 1/3" in capsys.readouterr().out

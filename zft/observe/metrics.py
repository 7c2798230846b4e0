"""metrics.jsonl, a line for each step, and the same numbers for TensorBoard, trackio or W&B."""

from __future__ import annotations

import importlib
import importlib.util
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from zft.config import ZftError


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl. Loss and norm of a step that went wrong are NaN or Infinity, as Python's json writes."""

    step: int
    loss: float
    """Mean over the step's supervised tokens, on all ranks."""
    grad_norm: float
    """Global L2 norm before clipping."""
    lr: float
    tokens: int
    """Supervised tokens of the step, on all ranks."""
    tokens_per_s: float
    seconds: float
    skipped: bool
    """The norm was not finite: weights, moments and schedule are untouched."""
    peak_bytes: dict[str, int]
    """Rank 0: host_rss, device, nvme."""
    traffic_bytes: dict[str, int]
    """Rank 0: nvme_read, nvme_write, h2d, d2h."""
    eval_loss: float | None = None
    """Only on steps that evaluate."""


class Metrics:
    """Appends to `path` and passes each line on to the trackers."""

    def __init__(self, path: Path, track: str | None = None, config: dict | None = None):
        self.path = path
        self._file = path.open("a", encoding="utf-8")
        self._sinks = [sink for sink in (_tensorboard(path.parent), _tracker(track, path.parent, config or {})) if sink]

    def log(self, metrics: StepMetrics) -> None:
        row = {key: value for key, value in asdict(metrics).items() if key != "eval_loss" or value is not None}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for sink in self._sinks:
            sink.log(metrics.step, flat(row))

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()


def flat(row: dict) -> dict[str, float]:
    """The numbers of a line by name, `peak_bytes/device` for nested ones."""
    numbers: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            numbers |= {f"{key}/{name}": inner for name, inner in value.items()}
        elif key != "step":
            numbers[key] = float(value)
    return numbers


def read(path: Path) -> list[dict]:
    """The whole lines of a metrics.jsonl; a torn last line, left by a process that died, is not one."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def drop_after(path: Path, step: int) -> None:
    """Keep the lines up to `step`, in one atomic change: a resumed run writes the rest again."""
    kept = [row for row in read(path) if row["step"] <= step]
    partial = path.with_name(f".{path.name}")
    partial.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    partial.replace(path)


def check_tracker(track: str | None) -> None:
    """Raises ZftError if the package behind `track=` is not installed."""
    if track and importlib.util.find_spec(track) is None:
        raise ZftError(f"track={track} needs the package {track}: `pip install {track}`, or leave track out")


class _TensorBoard:
    def __init__(self, folder: Path):
        self.folder, self._writer = folder, None

    def log(self, step: int, numbers: dict[str, float]) -> None:
        if self._writer is None:  # imported after the first step: it takes a second
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder / "tensorboard"))
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _tensorboard(folder: Path) -> _TensorBoard | None:
    return _TensorBoard(folder) if importlib.util.find_spec("tensorboard") else None


class _Tracker:
    """trackio and wandb share init, log and finish."""

    def __init__(self, package: str, folder: Path, config: dict):
        self._package = importlib.import_module(package)
        self._package.init(project="zft", name=folder.name, config=config)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self._package.log(numbers, step=step)

    def close(self) -> None:
        self._package.finish()


def _tracker(track: str | None, folder: Path, config: dict) -> _Tracker | None:
    return _Tracker(track, folder, config) if track else None

"""The live line of a run: step, loss, learning rate, tokens/s, time left."""

from __future__ import annotations

import math
import sys
import time

from zft.observe.metrics import StepMetrics

_LINE_EVERY_S = 1.0
"""Without a terminal: at most one line in this time, and always the first, the last and a skipped step."""


def line(metrics: StepMetrics, total_steps: int, left_s: float) -> str:
    """`step 3/100  loss 2.1234  lr 1.00e-05  812 tokens/s  4m10s left`; what is not finite is shown as such."""
    text = f"step {metrics.step}/{total_steps}  loss {metrics.loss:.4f}  lr {metrics.lr:.2e}"
    text += f"  {metrics.tokens_per_s:.0f} tokens/s  {duration(left_s)} left"
    if metrics.eval_loss is not None:
        text += f"  eval loss {metrics.eval_loss:.4f}"
    if metrics.skipped:
        text += f"  (skipped: gradient norm {metrics.grad_norm})"
    elif not math.isfinite(metrics.loss):
        text += "  (loss is not finite)"
    return text


def duration(seconds: float) -> str:
    """4s, 4m10s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


class Progress:
    """A rich bar on a terminal, plain lines elsewhere. As a context."""

    def __init__(self, total_steps: int, done_steps: int = 0):
        self.total_steps, self._last_line = total_steps, -math.inf
        self._started, self._first = time.perf_counter(), done_steps
        self._bar = _bar(total_steps, done_steps) if sys.stdout.isatty() else None

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, metrics: StepMetrics) -> None:
        now = time.perf_counter()
        step_s = (now - self._started) / max(1, metrics.step - self._first)
        text = line(metrics, self.total_steps, step_s * (self.total_steps - metrics.step))
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=metrics.step, description=text)
            return
        is_edge = metrics.step in (self._first + 1, self.total_steps) or metrics.skipped
        if is_edge or now - self._last_line >= _LINE_EVERY_S:
            print(text, flush=True)
            self._last_line = now


def _bar(total_steps: int, done_steps: int):
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    bar = Bar(TextColumn("{task.description}"), BarColumn(), refresh_per_second=4)
    bar.add_task("first step …", total=total_steps, completed=done_steps)
    return bar

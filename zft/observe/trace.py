"""trace.json: what each lane did in two steps, for https://ui.perfetto.dev and for the report.

Trace Event Format (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), times in microseconds:
a complete event (`ph: X`) for each span, on process 0, one thread per lane; the steps are a lane of their own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LANES = ("compute", "update", "collective", "h2d", "d2h", "nvme read", "nvme write")
FILE = "trace.json"
STEPS = 2
WARM_UP_STEPS = 1
"""The first step learns the order of the units and has no update to make."""


@dataclass(frozen=True)
class Span:
    """Something that a lane did; seconds on one clock."""

    lane: str
    name: str
    start_s: float
    end_s: float


class Trace:
    """Collects the spans of the first steps; `add` may be called from any thread."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._steps: list[Span] = []
        self.is_complete = False

    def add(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        """The engine's `record=`. After the last traced step nothing is kept."""
        if not self.is_complete:
            self._spans.append(Span(lane, name, start_s, end_s))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step of the run."""
        started = time.perf_counter()
        yield
        if not self.is_complete:
            self._steps.append(Span("step", f"step {number}", started, time.perf_counter()))
            self.is_complete = len(self._steps) == WARM_UP_STEPS + STEPS

    def steps(self) -> list[Span]:
        """The traced steps: two after the warm-up, or the last ones that there were."""
        return self._steps[-STEPS:]

    def spans(self) -> list[Span]:
        """What the lanes did in those steps, by time."""
        steps = self.steps()
        first, last = (steps[0].start_s, steps[-1].end_s) if steps else (0.0, 0.0)
        inside = [span for span in list(self._spans) if span.end_s > first and span.start_s < last]
        return sorted(joined(inside), key=lambda span: (span.start_s, -span.end_s))

    def write(self, folder: Path) -> None:
        """Write trace.json, unless no step was traced."""
        steps = self.steps()
        if not steps:
            return
        content = {"traceEvents": list(events(steps, self.spans())), "displayTimeUnit": "ms"}
        partial = folder / f".{FILE}"
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(folder / FILE)


def events(steps: list[Span], spans: list[Span]) -> Iterator[dict]:
    """Trace events; zero is where the first step starts. Spans of a lane that cross each other get a row each."""
    zero = steps[0].start_s
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "zft rank 0"}}
    thread = 0
    for lane in ("step", *LANES):
        for place, row in enumerate(rows([span for span in [*steps, *spans] if span.lane == lane])):
            name = lane if place == 0 else f"{lane} {place + 1}"
            yield {"ph": "M", "pid": 0, "tid": thread, "name": "thread_name", "args": {"name": name}}
            yield {"ph": "M", "pid": 0, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
            for span in row:
                start_us, length_us = (span.start_s - zero) * 1e6, (span.end_s - span.start_s) * 1e6
                yield {
                    "ph": "X",
                    "pid": 0,
                    "tid": thread,
                    "cat": lane,
                    "name": span.name,
                    "ts": start_us,
                    "dur": length_us,
                }
            thread += 1


def joined(spans: Iterable[Span]) -> list[Span]:
    """Spans of one lane and name that overlap as one: pieces of a transfer or an update, moved by several threads."""
    found: dict[tuple[str, str], list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        mine = found.setdefault((span.lane, span.name), [])
        if mine and span.start_s <= mine[-1].end_s:
            mine[-1] = Span(span.lane, span.name, mine[-1].start_s, max(mine[-1].end_s, span.end_s))
        else:
            mine.append(span)
    return [span for mine in found.values() for span in mine]


def rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans spread over rows in which any two are apart or one holds the other, as viewers need it."""
    found: list[tuple[list[Span], list[Span]]] = []  # (row, the spans of it that are open)
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        for row, open_spans in found:
            while open_spans and open_spans[-1].end_s <= span.start_s:
                open_spans.pop()
            if not open_spans or span.end_s <= open_spans[-1].end_s:
                row.append(span)
                open_spans.append(span)
                break
        else:
            found.append(([span], [span]))
    return [row for row, _ in found]


def read(folder: Path) -> tuple[list[Span], list[Span]]:
    """(steps, spans) of a trace.json, seconds from the start of the first step; empty without a file."""
    path = folder / FILE
    if not path.is_file():
        return [], []
    found = [event for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"] if event["ph"] == "X"]
    spans = [Span(e["cat"], e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in found]
    return [span for span in spans if span.lane == "step"], [span for span in spans if span.lane != "step"]


def union(spans: Iterable[Span], start_s: float, end_s: float) -> list[tuple[float, float]]:
    """The times in [start, end] in which any of the spans was busy, as intervals apart from each other."""
    out: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        low, high = max(span.start_s, start_s), min(span.end_s, end_s)
        if high <= low:
            continue
        if out and low <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return out


def busy(spans: list[Span], start_s: float, end_s: float) -> dict[str, float]:
    """Seconds that each lane was busy in [start, end]; lanes that did nothing are left out."""
    sums = {lane: sum(b - a for a, b in union([s for s in spans if s.lane == lane], start_s, end_s)) for lane in LANES}
    return {lane: seconds for lane, seconds in sums.items() if seconds}


def critical(spans: list[Span], start_s: float, end_s: float) -> list[Span]:
    """What the step waited for at each moment: compute where it runs, else the first of LANES that does; or `idle`."""
    order = {lane: union([s for s in spans if s.lane == lane], start_s, end_s) for lane in LANES}
    borders = sorted({start_s, end_s, *(edge for parts in order.values() for pair in parts for edge in pair)})
    out: list[Span] = []
    places = dict.fromkeys(LANES, 0)
    for low, high in zip(borders, borders[1:], strict=False):
        who = "idle"
        for lane in LANES:
            parts = order[lane]
            while places[lane] < len(parts) and parts[places[lane]][1] <= low:
                places[lane] += 1
            if who == "idle" and places[lane] < len(parts) and parts[places[lane]][0] <= low:
                who = lane
        if out and out[-1].lane == who:
            out[-1] = Span(who, who, out[-1].start_s, high)
        else:
            out.append(Span(who, who, low, high))
    return out

"""Spans of a run's first steps: which are kept, how they are written, and what they add up to."""

from __future__ import annotations

import json
import random
import threading

import pytest

from zft.observe import trace
from zft.observe.trace import Span, Trace, busy, critical, events, joined, read, rows


def traced(steps: int) -> Trace:
    made = Trace()
    for number in range(1, steps + 1):
        with made.step(number):
            now = trace.time.perf_counter()
            made.add("compute", f"forward {number}", now, trace.time.perf_counter())
    return made


@pytest.mark.parametrize(("steps", "kept"), [(0, []), (1, [1]), (2, [1, 2]), (3, [2, 3]), (9, [2, 3])])
def test_two_steps_after_the_first_or_what_there_is(steps, kept):
    made = traced(steps)
    assert [span.name for span in made.steps()] == [f"step {number}" for number in kept]
    assert [span.name for span in made.spans()] == [f"forward {number}" for number in kept]


def test_spans_of_other_threads_and_across_the_border_are_kept():
    made = Trace()
    started = trace.time.perf_counter()
    with made.step(1):
        when = (started - 1, started + 60)
        threads = [threading.Thread(target=made.add, args=("nvme read", str(i), *when)) for i in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        made.add("nvme read", "long before", started - 2, started - 1)
    assert sorted(span.name for span in made.spans()) == [str(i) for i in range(8)]


def test_the_file_is_a_trace_that_perfetto_reads_and_comes_back(tmp_path):
    made = traced(3)
    made.write(tmp_path)
    content = json.loads((tmp_path / "trace.json").read_text())
    found = content["traceEvents"]
    assert {event["ph"] for event in found} == {"X", "M"} and {event["pid"] for event in found} == {0}
    names = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    assert names == {0: "step", 1: "compute"}
    steps, spans = read(tmp_path)
    assert steps[0].start_s == 0 and [span.name for span in spans] == ["forward 2", "forward 3"]
    for old, new in zip(made.spans(), spans, strict=True):
        assert new.end_s - new.start_s == pytest.approx(old.end_s - old.start_s, abs=1e-9)


def test_no_step_no_file(tmp_path):
    Trace().write(tmp_path)
    assert not list(tmp_path.iterdir()) and read(tmp_path) == ([], [])


def random_spans(seed: int) -> list[Span]:
    draw = random.Random(seed)
    starts = [(draw.choice(trace.LANES), draw.randrange(100), draw.randrange(1, 20)) for _ in range(60)]
    return [Span(lane, str(i), float(start), float(start + length)) for i, (lane, start, length) in enumerate(starts)]


@pytest.mark.parametrize("seed", range(5))
def test_rows_hold_every_span_once_and_none_crosses_another(seed):
    spans = random_spans(seed)
    spread = rows(spans)
    assert sorted(span.name for row in spread for span in row) == sorted(span.name for span in spans)
    for row in spread:
        for a in row:
            for b in row:
                crossing = a.start_s < b.start_s < a.end_s < b.end_s
                assert not crossing, (a, b)
    assert len(list(events([Span("step", "step 1", 0, 120)], spans))) > len(spans)


@pytest.mark.parametrize("seed", range(5))
def test_busy_and_critical_path_against_counting_seconds(seed):
    """Every edge is a whole second, so each second belongs to one state: the plainest reference."""
    spans, start, end = random_spans(seed), 10, 90
    active = [{span.lane for span in spans if span.start_s <= second < span.end_s} for second in range(start, end)]
    expected = {lane: sum(lane in lanes for lanes in active) for lane in trace.LANES}
    assert busy(spans, start, end) == {lane: seconds for lane, seconds in expected.items() if seconds}
    path = critical(spans, start, end)
    assert path[0].start_s == start and path[-1].end_s == end
    assert all(a.end_s == b.start_s and a.lane != b.lane for a, b in zip(path, path[1:], strict=False))
    told = [span.lane for span in path for _ in range(int(span.end_s - span.start_s))]
    assert told == [next((lane for lane in trace.LANES if lane in lanes), "idle") for lanes in active]


@pytest.mark.parametrize("seed", range(5))
def test_pieces_that_overlap_become_one_and_cover_the_same_time(seed):
    draw = random.Random(seed)
    kinds = [(draw.choice(("nvme read", "update")), draw.choice("ab")) for _ in range(40)]
    pieces = [(*kind, draw.randrange(60), draw.randrange(1, 6)) for kind in kinds]
    spans = [Span(lane, name, float(start), float(start + length)) for lane, name, start, length in pieces]
    whole = joined(spans)
    assert len(whole) < len(spans)
    for lane, name in {(span.lane, span.name) for span in spans}:
        before, after = ([s for s in some if (s.lane, s.name) == (lane, name)] for some in (spans, whole))
        assert [(s.start_s, s.end_s) for s in after] == trace.union(before, 0, 100)

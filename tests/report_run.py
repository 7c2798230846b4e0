"""A run folder with made-up metrics, trace, plan and facts, for the report's tests."""

from __future__ import annotations

import json
import math
from pathlib import Path

from zft.observe.report import write_facts
from zft.observe.trace import Span, events

GIB = 2**30
PLAN = {
    "peak_host_bytes": 2 * GIB, "peak_device_bytes": 0, "nvme_bytes": 3 * GIB, "step_s": 2.0,
    "traffic_bytes": {"nvme_read": 700, "nvme_write": 600, "h2d": 400, "d2h": 200},
}  # fmt: skip
FACTS = {
    "title": "sft of a model",
    "total_steps": 50,
    "facts": [["model", "someone/a-model"], ["parameters", "1,234 trained"]],
    "data": {
        "format": "messages", "rows": 12, "sequences": 12, "tokens": 480, "supervised_tokens": 210,
        "supervised_share": 0.4375, "cut": 1, "dropped": {"no answer": 2}, "dropped_rows": 2, "seq_len": 64, "packs": 8,
        "eval_rows": 3, "lengths": {"min": 2, "median": 30, "mean": 31.0, "p95": 60, "max": 64}, "notes": ["a note"],
        "histogram": [{"from": 1, "to": 32, "sequences": 9}, {"from": 33, "to": 64, "sequences": 3}],
        "sample": [{"text": "ask <b>", "supervised": False}, {"text": "answer", "supervised": True}],
    },
}  # fmt: skip


def metric(step: int) -> dict:
    """A line of metrics.jsonl; step 20 was skipped."""
    bad = step == 20
    return {
        "step": step, "loss": 2 * math.exp(-step / 30) + 1, "grad_norm": math.inf if bad else 1 + 1 / step, "lr": 1e-5,
        "tokens": 100, "tokens_per_s": 50.0 + step % 3, "seconds": 2.0, "skipped": bad,
        "peak_bytes": {"host_rss": 2 * GIB, "device": 0, "nvme": 3 * GIB}, "traffic_bytes": dict(PLAN["traffic_bytes"]),
    }  # fmt: skip


def make_run(folder: Path, steps: int = 40, **facts) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("recipe: sft\n")
    lines = [metric(step) | ({"eval_loss": 1.5} if step % 10 == 0 else {}) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    spans, now = [], 0.0
    for name in [f"layer {i}" for i in range(12)] * 2:
        spans += [Span("update", name, now, now + 0.05), Span("nvme read", name, now, now + 0.06)]
        spans += [Span("compute", f"forward {name}", now + 0.06, now + 0.16)]
        now += 0.16
    steps = [Span("step", "step 2", 0.0, now / 2), Span("step", "step 3", now / 2, now)]
    (folder / "trace.json").write_text(json.dumps({"traceEvents": list(events(steps, spans))}))
    (folder / "plan.json").write_text(json.dumps(PLAN))
    write_facts(folder, FACTS | facts)
    return folder

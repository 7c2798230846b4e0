"""report.html: what a run did, in one page, made of metrics.jsonl, trace.json, plan.json and report.json."""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from statistics import median

from zft.config import ZftError
from zft.observe import trace
from zft.observe.chart import Line, line_chart, smoothed, timeline
from zft.observe.memory import Row, bytes_text, memory_rows, traffic_rows
from zft.observe.metrics import read
from zft.observe.progress import duration
from zft.observe.style import STYLE

FACTS = "report.json"
"""What a run knows of itself: title, facts [[label, value]], total_steps, data; later samples. Any may be missing."""
PLAN = "plan.json"
"""The object of `zft plan --json`; may be missing."""
PAGE = "report.html"
_LANES = {
    "compute": "computing",
    "update": "updating weights",
    "collective": "gathering weights from other ranks",
    "nvme read": "reading NVMe",
    "nvme write": "writing NVMe",
    "h2d": "copying to the device",
    "d2h": "copying from the device",
    "idle": "between them",
}


def write_facts(folder: Path, facts: dict) -> None:
    """Keep what the page needs beside metrics and trace."""
    partial = folder / f".{FACTS}"
    partial.write_text(json.dumps(facts, ensure_ascii=False), encoding="utf-8")
    partial.replace(folder / FACTS)


def add_facts(folder: Path, **facts: object) -> None:
    """Keep more, what is known only later."""
    path = folder / FACTS
    write_facts(folder, (json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}) | facts)


def read_facts(folder: Path) -> dict:
    """FACTS, with PLAN as `planned`."""
    facts, plan = (
        json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for path in (folder / FACTS, folder / PLAN)
    )
    return {"planned": plan} | facts


def write_report(folder: Path) -> Path:
    """Write the page of a run into its folder; returns its path. Raises ZftError where no step is logged."""
    metrics = read(folder / "metrics.jsonl")
    if not metrics:
        raise ZftError(f"{folder} has no finished step to report; `zft resume {folder}` goes on")
    partial = folder / f".{PAGE}"
    html = page(folder.name, metrics, read_facts(folder), trace.read(folder))
    partial.write_text(html, encoding="utf-8")
    partial.replace(folder / PAGE)
    return folder / PAGE


def page(name: str, metrics: list[dict], facts: dict, traced: tuple[list[trace.Span], list[trace.Span]]) -> str:
    """HTML text; everything that comes from outside is escaped. metrics: lines of metrics.jsonl, at least one."""
    title = facts.get("title", name)
    body = [
        f"<h1>{escape(title)}</h1><p class=sub>{escape(name)}</p><p class=lead>{escape(lead(metrics, facts))}</p>",
        _warnings(metrics),
        _tiles(metrics, facts),
        _section("Training", f"<div class=charts>{_curves(metrics)}</div>"),
        _section("Memory", _memory(metrics, facts)),
        _section("Traffic of a step", _traffic(metrics, facts)),
        _section("Where the time goes", _time(*traced)),
        _section("Data", _data(facts.get("data"))),
        _section("Before and after", _samples(facts.get("samples"))),
        _section("Settings", _table(facts.get("facts"))),
    ]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style>{''.join(body)}</html>"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def lead(metrics: list[dict], facts: dict) -> str:
    """The run in two sentences."""
    last, total = metrics[-1], facts.get("total_steps")
    tokens, seconds = sum(row["tokens"] for row in metrics), sum(row["seconds"] for row in metrics)
    done = f"{last['step']} of {total} steps" if total and total != last["step"] else f"{last['step']} steps"
    text = f"{done} on {tokens:,} trained tokens in {duration(seconds) if seconds >= 10 else f'{seconds:.2g}s'}."
    losses = [row["loss"] for row in metrics if math.isfinite(row["loss"])]
    if len(losses) < 2:
        return text
    few = max(1, len(losses) // 10)
    before, after = sum(losses[:few]) / few, sum(losses[-few:]) / few
    change = "fell" if after < before * 0.995 else "rose" if after > before * 1.005 else "stayed"
    how = f"at {after:.3f}" if change == "stayed" else f"from {before:.3f} to {after:.3f}"
    return f"{text} The loss {change} {how}" + (f" (first and last {few} steps)." if few > 1 else ".")


def _warnings(metrics: list[dict]) -> str:
    skipped = [row["step"] for row in metrics if row["skipped"]]
    if not skipped:
        return ""
    steps = ", ".join(map(str, skipped[:8])) + (" …" if len(skipped) > 8 else "")
    why = f"their gradient was not finite (step {steps})"
    return f"<p class=warn>{len(skipped)} of {len(metrics)} steps were skipped: {why}.</p>"


def _tiles(metrics: list[dict], facts: dict) -> str:
    steady, planned = metrics[1:] or metrics, facts.get("planned", {})
    step_s = median(row["seconds"] for row in steady)
    tiles = [
        (f"{metrics[-1]['loss']:.3f}", "loss of the last step"),
        (f"{median(row['tokens_per_s'] for row in steady):,.0f}", "trained tokens per second"),
        (f"{step_s:.3g} s", "a step takes" + (f", planned {planned['step_s']:.3g} s" if "step_s" in planned else "")),
        *((bytes_text(row.measured_bytes), f"{row.name}, at most") for row in memory_rows(metrics, planned)),
    ]
    evaluated = [row["eval_loss"] for row in metrics if "eval_loss" in row]
    if evaluated:
        tiles.insert(1, (f"{evaluated[-1]:.3f}", "loss on held-out data"))
    cells = "".join(f"<div class=tile><b>{value}</b><span>{escape(text)}</span></div>" for value, text in tiles)
    return f"<div class=tiles>{cells}</div>"


def _curves(metrics: list[dict]) -> str:
    def points(key: str) -> list[tuple[float, float]]:
        return [(row["step"], row[key]) for row in metrics if key in row]

    loss = [Line("loss", "s-blue", points("loss"))]
    if len(metrics) > 30:
        loss = [
            Line("each step", "s-faint", points("loss")),
            Line("mean of the last 5 %", "s-blue", smoothed(points("loss"))),
        ]
    if points("eval_loss"):
        loss.append(Line("held-out data", "s-orange", points("eval_loss")))
    charts = [
        line_chart("Loss", loss, "lower is better"),
        line_chart("Learning rate", [Line("lr", "s-green", points("lr"))]),
        line_chart("Gradient norm", [Line("norm", "s-orange", points("grad_norm"))], "before clipping"),
        line_chart("Speed", [Line("speed", "s-blue", points("tokens_per_s"))], "trained tokens per second"),
    ]
    return "".join(charts)


def _memory(metrics: list[dict], facts: dict) -> str:
    planned = facts.get("planned", {})
    return _compared(memory_rows(metrics, planned), "highest use", "planned", tolerance=0.1)


def _traffic(metrics: list[dict], facts: dict) -> str:
    rows = traffic_rows(metrics, facts.get("planned", {}))
    if not rows:
        return "<p class=none>Weights and state stay where they are computed: nothing moves.</p>"
    return _compared(rows, "a usual step", "by formula", tolerance=0.001)


def _compared(rows: list[Row], measured: str, planned: str, tolerance: float) -> str:
    most = max(max(row.measured_bytes, row.planned_bytes or 0) for row in rows) or 1
    lines = []
    for row in rows:
        bar = f"<span class=meter style='width:{100 * row.measured_bytes / most:.2f}%'></span>"
        told, ratio = "–", ""
        if row.planned_bytes is not None:
            told = bytes_text(row.planned_bytes)
            bar = f"<span class='meter planned' style='width:{100 * row.planned_bytes / most:.2f}%'></span>{bar}"
        if row.ratio is not None:
            style = "ok" if abs(row.ratio - 1) <= tolerance else "off"
            ratio = f"<span class={style}>{100 * row.ratio:.4g} %</span>"
        lines.append(
            f"<tr><td>{row.name}<td class=n>{bytes_text(row.measured_bytes)}<td class=n>{told}<td class=n>{ratio}"
            f"<td style='width:40%'>{bar}"
        )
    has_plan = any(row.planned_bytes is not None for row in rows)
    note = "" if has_plan else "<p class=sub>This run has no plan to compare with.</p>"
    head = f"<tr><th><th class=n>{measured}<th class=n>{planned}<th class=n>ratio<th>"
    return f"<div class='card scroll'><table>{head}{''.join(lines)}</table></div>{note}"


def _time(steps: list[trace.Span], spans: list[trace.Span]) -> str:
    if not steps or not spans:
        return ""
    start, end = steps[0].start_s, steps[-1].end_s
    busy = trace.busy(spans, start, end)
    longest = max(busy, key=busy.__getitem__)
    path: dict[str, float] = {}
    for span in trace.critical(spans, start, end):
        path[span.lane] = path.get(span.lane, 0.0) + span.end_s - span.start_s
    whole = end - start
    waits = ", ".join(
        f"{100 * seconds / whole:.0f} % {_LANES[lane]}"
        for lane, seconds in sorted(path.items(), key=lambda row: -row[1])
        if seconds >= 0.005 * whole
    )
    shares = ", ".join(f"{lane} {100 * seconds / whole:.0f} %" for lane, seconds in busy.items())
    return (
        f"<p>The longest lane is <b>{longest}</b>, busy {100 * busy[longest] / whole:.0f} % of the time. "
        f"The critical path: {waits}.</p>"
        f"<div class='card scroll'>{timeline(steps, spans, longest)}</div>"
        f"<p class=sub>Busy: {shares}. Lanes run at the same time; the critical path shows what the step waited for: "
        f"another lane counts only while nothing is computed. {trace.FILE} opens in ui.perfetto.dev.</p>"
    )


def _data(data: dict | None) -> str:
    if not data:
        return ""
    lengths = data["lengths"]
    facts = [
        ["format", data["format"]],
        ["rows", f"{data['rows']:,}" + (f", and {data['eval_rows']:,} held out" if data["eval_rows"] else "")],
        ["tokens", f"{data['tokens']:,}"],
        ["trained on", f"{data['supervised_tokens']:,} tokens ({data['supervised_share']:.1%})"],
        ["cut", f"{data['cut']:,} sequences longer than {data['seq_len']:,} tokens"],
        ["dropped", ", ".join(f"{count:,} {why}" for why, count in data["dropped"].items()) or "0"],
        ["length", f"{lengths['min']:,} to {lengths['max']:,} tokens, median {lengths['median']:,}"],
    ]
    if data["packs"] is not None:
        facts.append(["packed", f"into {data['packs']:,} rows of {data['seq_len']:,} tokens"])
    facts += [["note", note] for note in data["notes"]]
    most = max((row["sequences"] for row in data["histogram"]), default=0) or 1
    bars = "".join(
        f"<tr><td class=n>{row['from']}–{row['to']}<td style='width:80%'>"
        f"<span class=meter style='width:{100 * row['sequences'] / most:.1f}%'></span><td class=n>{row['sequences']:,}"
        for row in data["histogram"]
    )
    sample = "".join(
        f"<mark>{escape(piece['text'])}</mark>" if piece["supervised"] else escape(piece["text"])
        for piece in data["sample"]
    )
    legend = "<p class=sub><mark>Marked</mark> text is trained on.</p>"
    shown = f"<details open><summary>A sequence</summary>{legend}<pre>{sample}</pre></details>"
    histogram = f"<details><summary>Tokens per sequence</summary><table>{bars}</table></details>"
    return f"<div class=card>{_table(facts)}{shown if sample else ''}{histogram if bars else ''}</div>"


def _samples(samples: list[dict] | None) -> str:
    """samples: {prompt, before, after}, texts."""
    if not samples:
        return ""
    rows = "".join(
        "<tr>" + "".join(f"<td><pre>{escape(sample[part])}</pre>" for part in ("prompt", "before", "after"))
        for sample in samples
    )
    return f"<div class='card scroll'><table><tr><th>prompt<th>before<th>after{rows}</table></div>"


def _table(facts: list | None) -> str:
    rows = "".join(f"<tr><td>{escape(str(label))}<td>{escape(str(value))}" for label, value in facts or ())
    return f"<table class=facts>{rows}</table>" if rows else ""

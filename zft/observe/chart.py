"""Charts as inline SVG: lines over steps and spans over time. Colours are classes of zft.observe.style."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from zft.observe.trace import LANES, Span, critical

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 460, 190, 70, 24, 10
_POINTS = 400
"""Points that a line shows; of more, each group's smallest and largest."""


@dataclass(frozen=True)
class Line:
    """One curve. Values that are not finite leave a gap, with a mark at the bottom."""

    name: str
    style: str
    points: list[tuple[float, float]]


def line_chart(title: str, lines: list[Line], unit: str = "") -> str:
    """A figure over steps; the value of every point shows where the pointer rests."""
    finite = [point for line in lines for point in line.points if math.isfinite(point[1])]
    if not finite:
        return f"<figure><figcaption>{escape(title)}</figcaption><p class=none>no finite value</p></figure>"
    xs = [x for line in lines for x, _ in line.points]
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
    marks = ticks(min(y for _, y in finite), max(y for _, y in finite))
    y_low, y_high = marks[0], marks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - 12)
        return across, TOP + (1 - (y - y_low) / (y_high - y_low)) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for mark in marks:
        _, y = place(x_low, mark)
        parts.append(f"<line class=grid x1={LEFT} x2={WIDTH - 12} y1={y:.1f} y2={y:.1f} />")
        parts.append(f"<text class=tick x={LEFT - 6} y={y + 4:.1f} text-anchor=end>{short(mark)}</text>")
    for x, anchor in ((x_low, "start"), (x_high, "end")):
        across = place(x, y_low)[0]
        parts.append(f"<text class=tick x={across:.1f} y={HEIGHT - 6} text-anchor={anchor}>step {x:.0f}</text>")
    for line in lines:
        parts += _curve(line, place)
    keys = "".join(f"<span class='key {line.style}'>{escape(line.name)}</span>" for line in lines)
    keys = keys if len(lines) > 1 else ""
    head = f"<figcaption>{escape(title)}{f' <small>{escape(unit)}</small>' if unit else ''}{keys}</figcaption>"
    frame = f"viewBox='0 0 {WIDTH} {HEIGHT}' role=img aria-label='{escape(title)}'"
    return f"<figure>{head}<svg {frame}>{''.join(parts)}</svg></figure>"


def _curve(line: Line, place) -> list[str]:
    """Paths between gaps, a dot for each of few points, and a mark for each value that is not finite."""
    parts, path = [], []
    few = len(line.points) <= 40
    for x, y in thinned(line.points):
        if not math.isfinite(y):
            across = place(x, 0)[0]
            mark = f"M{across - 4:.1f} {HEIGHT - BOTTOM}l4 -7l4 7z"
            parts.append(f"<path class=bad d='{mark}'><title>step {x:.0f}: {y}</title></path>")
            path.append(None)
            continue
        across, up = place(x, y)
        path.append(f"{across:.1f} {up:.1f}")
        if few:
            told = f"<title>step {x:.0f}: {y:.6g}</title>"
            parts.append(f"<circle class='{line.style}' cx={across:.1f} cy={up:.1f} r=2.5>{told}</circle>")
    pieces, piece = [], []
    for each in [*path, None]:
        if each is None and piece:
            pieces.append("M" + "L".join(piece))
            piece = []
        elif each is not None:
            piece.append(each)
    return [f"<path class='curve {line.style}' d='{''.join(pieces)}' />", *parts]


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most about _POINTS of them, with every extreme and everything that is not finite."""
    size = -(-2 * len(points) // _POINTS)
    if size <= 2:
        return points
    out = []
    for begin in range(0, len(points), size):
        group = points[begin : begin + size]
        finite = [point for point in group if math.isfinite(point[1])]
        kept = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])} if finite else set()
        out += [point for point in group if point in kept or not math.isfinite(point[1])]
    return out


def smoothed(points: list[tuple[float, float]], share: float = 0.05) -> list[tuple[float, float]]:
    """Mean of the last `share` of the steps, at each step; what is not finite is left out."""
    window = max(2, round(len(points) * share))
    finite = [point for point in points if math.isfinite(point[1])]
    out, total = [], 0.0
    for place, (x, y) in enumerate(finite):
        total += y - (finite[place - window][1] if place >= window else 0.0)
        out.append((x, total / min(place + 1, window)))
    return out


def ticks(low: float, high: float) -> list[float]:
    """3 to 6 round values that enclose [low, high]."""
    if high - low < 1e-9 * max(abs(high), 1e-30):
        reach = abs(high) * 0.1 or 1.0
        low, high = low - reach, high + reach
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [place * step for place in range(first, last + 1)]


def short(value: float) -> str:
    """1.5k, 0.25, 1e-05."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.6g}"
    for power, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= power:
            return f"{value / power:.6g}{letter}"
    return f"{value:.3g}"


def timeline(steps: list[Span], spans: list[Span], longest: str) -> str:
    """The lanes of the steps, one row each, above them the steps, below what the steps waited for."""
    start, end = steps[0].start_s, steps[-1].end_s
    width, left, row = 960, 84, 26
    scale = (width - left) / (end - start)
    lanes = [lane for lane in LANES if any(span.lane == lane for span in spans)]
    parts, y = [], 20
    for step in steps:
        x = left + (step.start_s - start) * scale
        parts.append(
            f"<text class=tick x={x + 4:.1f} y=13>{escape(step.name)}, {step.end_s - step.start_s:.3g} s</text>"
        )
        parts.append(f"<line class=edge x1={x:.1f} x2={x:.1f} y1=2 y2={y + row * (len(lanes) + 1) + 8} />")
    for lane in [*lanes, "critical path"]:
        is_path = lane == "critical path"
        y += 8 if is_path else 0
        shown = critical(spans, start, end) if is_path else [span for span in spans if span.lane == lane]
        mark = " class=longest" if lane == longest else ""
        parts.append(f"<text{mark} x=0 y={y + 16}>{lane}</text>")
        parts.append(f"<rect class=track x={left} y={y} width={width - left} height={row - 4} />")
        for span in merged(shown, 0.3 / scale):
            parts.append(_block(span, left + (max(span.start_s, start) - start) * scale, y, scale, end))
        y += row
    frame = f"viewBox='0 0 {width} {y + 4}' role=img aria-label='timeline of {len(steps)} steps'"
    return f"<svg class=wide {frame}>{''.join(parts)}</svg>"


def _block(span: Span, x: float, y: float, scale: float, end: float) -> str:
    length = max((min(span.end_s, end) - max(span.start_s, 0.0)) * scale, 0.6)
    title = f"{escape(span.name)}: {(span.end_s - span.start_s) * 1e3:.3g} ms"
    style = f"lane-{span.lane.replace(' ', '-')}"
    return f"<rect class='{style}' x={x:.2f} y={y} width={length:.2f} height=22><title>{title}</title></rect>"


def merged(spans: list[Span], gap_s: float) -> list[Span]:
    """Spans that a reader could not tell apart as one, so that a page of a large model stays small."""
    out: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        last = out[-1] if out else None
        is_tiny = span.end_s - span.start_s < 3 * gap_s
        is_near = last and last.lane == span.lane and span.start_s - last.end_s < gap_s
        if is_tiny and is_near and last.end_s - last.start_s < 20 * gap_s:
            name = last.name if last.name.endswith("…") else f"{last.name} …"
            out[-1] = Span(last.lane, name, last.start_s, max(last.end_s, span.end_s))
        else:
            out.append(span)
    return out

"""The data report as one HTML page without scripts or outside files."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zft.data.report import DataReport

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1b1b1f;background:#fff}
table{border-collapse:collapse}td{padding:.15rem .9rem .15rem 0;vertical-align:top}td:first-child{color:#555}
.bar{background:#4b7bec;height:.8rem;min-width:1px;display:inline-block}
pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid #ccc;border-radius:6px;padding:.8rem}
mark{background:#c9f2d0;color:inherit}pre{color:#666}pre mark{color:#0b3d17}
@media(prefers-color-scheme:dark){body{background:#16181c;color:#e6e6e6}td:first-child,pre{color:#aaa}
mark{background:#174a25}pre mark{color:#d9ffe2}pre{border-color:#444}}
"""


def page(report: DataReport) -> str:
    """HTML text. All text of the data set is escaped."""
    facts = "".join(f"<tr><td>{escape(label)}<td>{escape(value)}" for label, value in report.facts())
    most = max((count for _, _, count in report.histogram), default=1) or 1
    bars = "".join(
        f'<tr><td>{low}–{high}<td><span class=bar style="width:{24 * count / most:.2f}rem"></span> {count:,}'
        for low, high, count in report.histogram
    )
    rows = "".join(
        f"<h3>Sequence {number}</h3><pre>"
        + "".join(f"<mark>{escape(text)}</mark>" if target else escape(text) for text, target in segments)
        + "</pre>"
        for number, segments in enumerate(report.samples, 1)
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>zft data preview</title><style>{_STYLE}</style><h1>Data preview</h1><table>{facts}</table>"
        f"<h2>Tokens per sequence</h2><table>{bars}</table>"
        f"<h2>Decoded sequences</h2><p><mark>Marked</mark> text is trained on.</p>{rows}</html>"
    )

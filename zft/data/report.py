"""What a data set is, before the first step: counts, lengths, what was left out and why, rows with their targets."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Segments = list[tuple[str, bool]]
"""A decoded sequence: consecutive pieces of text and whether they are targets."""

_SHOWN = 4000  # characters of a sequence in the terminal


@dataclass
class DataReport:
    """The numbers of one prepared data set. `rows` counts rows kept, `sequences` what they became."""

    format: str
    rows: int
    sequences: int
    tokens: int
    supervised_tokens: int
    cut: int
    dropped: dict[str, int]
    seq_len: int
    lengths: dict[str, float]
    histogram: list[tuple[int, int, int]]
    """(from, up to and including, sequences) by tokens."""
    packs: int | None = None
    """Rows of seq_len tokens after packing; null without."""
    eval_rows: int = 0
    notes: list[str] = field(default_factory=list)
    samples: list[Segments] = field(default_factory=list)

    @property
    def supervised_share(self) -> float:
        return self.supervised_tokens / self.tokens if self.tokens else 0.0

    @property
    def dropped_rows(self) -> int:
        return sum(self.dropped.values())

    @property
    def sample(self) -> Segments:
        """The first sequence."""
        return self.samples[0] if self.samples else []

    def to_dict(self) -> dict:
        """For --json."""
        return {
            "format": self.format, "rows": self.rows, "sequences": self.sequences, "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens, "supervised_share": round(self.supervised_share, 6),
            "cut": self.cut, "dropped": self.dropped, "dropped_rows": self.dropped_rows, "seq_len": self.seq_len,
            "packs": self.packs, "eval_rows": self.eval_rows, "lengths": self.lengths,
            "histogram": [{"from": a, "to": b, "sequences": n} for a, b, n in self.histogram], "notes": self.notes,
            "sample": [{"text": text, "supervised": target} for text, target in self.sample],
        }  # fmt: skip

    def facts(self) -> list[tuple[str, str]]:
        """(label, value) lines that the terminal and the page both show."""
        rows = f"{self.rows:,}" + (f" in {self.sequences:,} sequences" if self.sequences != self.rows else "")
        out = [
            ("format", self.format),
            ("rows", rows + (f", and {self.eval_rows:,} held out for evaluation" if self.eval_rows else "")),
            ("tokens", f"{self.tokens:,}"),
            ("supervised", f"{self.supervised_tokens:,} ({self.supervised_share:.1%})"),
            ("cut", f"{self.cut:,} longer than seq_len {self.seq_len:,}"),
            ("dropped", ", ".join(f"{n:,} {why}" for why, n in self.dropped.items()) or "0"),
            ("length", "{min:,} to {max:,} tokens, median {median:,}, mean {mean:,}".format(**self.lengths)),
        ]
        if self.packs is not None:
            fill = self.tokens / (self.packs * self.seq_len) if self.packs else 0
            out.append(("packed", f"into {self.packs:,} rows of {self.seq_len:,} tokens, {fill:.1%} full"))
        return out + [("note", note) for note in self.notes]

    def render(self, samples: int = 1):
        """A rich renderable: the facts, the histogram, decoded sequences with the targets in green."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for label, value in self.facts():
            table.add_row(Text(label, style="bold"), Text(value))
        bars = Table.grid(padding=(0, 1))
        most = max((count for _, _, count in self.histogram), default=1) or 1
        for low, high, count in self.histogram:
            bar = Text("█" * max(round(32 * count / most), 1 if count else 0), style="cyan")
            bars.add_row(Text(f"{low}–{high}", justify="right"), bar, Text(f"{count:,}"))
        parts: list = [table, bars]
        for number, segments in enumerate(self.samples[:samples], 1):
            text = Text()
            for piece, target in segments:
                text.append(piece, style="green" if target else "dim")
            if len(text) > _SHOWN:
                text = text[:_SHOWN] + Text(f" … {len(text) - _SHOWN:,} more characters", style="italic")
            parts.append(Panel(text, title=f"sequence {number}; green is trained on", title_align="left"))
        return Group(*parts)

    def html(self) -> str:
        """A self-contained page."""
        from zft.data.report_html import page

        return page(self)


def length_facts(lengths: np.ndarray) -> dict[str, float]:
    """min, median, mean, p95, max of sequence lengths in tokens."""
    if not len(lengths):
        return {"min": 0, "median": 0, "mean": 0, "p95": 0, "max": 0}
    return {
        "min": int(lengths.min()), "median": int(np.median(lengths)), "mean": round(float(lengths.mean()), 1),
        "p95": int(np.percentile(lengths, 95)), "max": int(lengths.max()),
    }  # fmt: skip


def histogram(lengths: np.ndarray, bins: int = 12) -> list[tuple[int, int, int]]:
    """(from, up to, count) in bins of equal, round width that cover all lengths."""
    if not len(lengths):
        return []
    top = int(lengths.max())
    width = max(1, -(-top // bins))
    unit = 10 ** max(0, len(str(width)) - 2)
    width = -(-width // unit) * unit
    counts = np.bincount((lengths - 1).clip(0) // width, minlength=1)
    first = int(np.flatnonzero(counts)[0])
    return [(i * width + 1, (i + 1) * width, int(count)) for i, count in enumerate(counts)][first:]


def decode_segments(tokenizer, ids: np.ndarray, mask: np.ndarray) -> Segments:
    """The sequence as text, cut where targets begin and end."""
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    return [
        (tokenizer.decode(ids[a:b].tolist(), skip_special_tokens=False), bool(mask[a]))
        for a, b in zip(borders, borders[1:], strict=False)
        if b > a
    ]

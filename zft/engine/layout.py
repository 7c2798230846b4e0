"""Flat layout: where each parameter of a group lies in one flat buffer, and which slice of it a rank owns.

Pure arithmetic. Parameters start at multiples of ALIGN elements and shards have a multiple of SHARD_ALIGN elements, so that a
block of an 8-bit optimizer never crosses a parameter or a shard, whatever the world size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 256
"""Elements; the block of the 8-bit optimizer."""
SHARD_ALIGN = 2048
"""Elements; a shard of 2-byte weights then starts on a 4096-byte page of its file."""


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Span:
    """One parameter in the flat buffer, in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    decay: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """Spans of one group and its division over `ranks`."""

    spans: tuple[Span, ...]
    ranks: int

    @staticmethod
    def of(parameters: Sequence[tuple[str, tuple[int, ...], bool]], ranks: int) -> FlatLayout:
        """From (name, shape, decay) in model order."""
        spans, offset = [], 0
        for name, shape, decay in parameters:
            spans.append(Span(name, tuple(shape), offset, decay))
            offset = round_up(spans[-1].end, ALIGN)
        return FlatLayout(tuple(spans), ranks)

    @property
    def padded_numel(self) -> int:
        last = self.spans[-1].end if self.spans else 0
        return round_up(last, SHARD_ALIGN * self.ranks)

    @property
    def shard_numel(self) -> int:
        return self.padded_numel // self.ranks

    def shard_start(self, rank: int) -> int:
        return rank * self.shard_numel

    def pieces(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """(span index, first, last) of every span's part inside [start, end), in flat elements; empty parts left out."""
        found = []
        for index, span in enumerate(self.spans):
            first, last = max(span.offset, start), min(span.end, end)
            if first < last:
                found.append((index, first, last))
        return found

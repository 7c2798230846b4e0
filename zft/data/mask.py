"""Character ranges → token masks, and the policy for long rows. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zft.data.options import Truncate


def token_mask(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, int]:
    """(mask uint8 [T], number of tokens that lie across the start of a span).

    A token is a target when all its characters lie in one span. One that begins before the span holds text of the
    prompt, so at inference it is not generated as such: it is no target.
    """
    if not len(offsets):
        return np.zeros(0, np.uint8), 0
    table = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    starts, ends = table[:, 0].copy(), table[:, 1]
    # byte-level tokenizers may trim the leading space off an offset; the token owns it all the same
    starts[1:] = np.minimum(starts[1:], np.maximum(ends[:-1], 0))
    starts[0] = min(starts[0], 0)
    mask = np.zeros(len(table), np.uint8)
    across = 0
    for start, end in spans:
        mask |= (starts >= start) & (ends <= end) & (ends > start)
        across += int(((starts < start) & (ends > start)).sum())
    return mask, across


def fit(ids: np.ndarray, mask: np.ndarray, seq_len: int, how: Truncate) -> list[tuple[np.ndarray, np.ndarray]]:
    """The sequences that a row becomes: itself, its head, its consecutive pieces, or none (dropped).

    A sequence's first token is never a target (nothing predicts it). Pieces overlap by one token, so that splitting
    loses no target.
    """
    if len(ids) <= seq_len:
        pieces = [(ids, mask)]
    elif how is Truncate.drop:
        return []
    elif how is Truncate.split:
        stride = max(1, seq_len - 1)
        starts = range(0, len(ids) - 1, stride)
        pieces = [(ids[s : s + seq_len], mask[s : s + seq_len]) for s in starts]
    else:
        pieces = [(ids[:seq_len], mask[:seq_len])]
    out = []
    for piece_ids, piece_mask in pieces:
        piece_mask = piece_mask.copy()
        piece_mask[:1] = 0
        out.append((piece_ids, piece_mask))
    return out

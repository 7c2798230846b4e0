"""In which order an epoch visits the items: a pure function of (seed, epoch), the same for any number of ranks."""

from __future__ import annotations

import numpy as np

_BLOCK = 1024  # items that are sorted by length together
_RUN = 64  # neighbours in length that stay together


def shuffled(count: int, seed: int, *stream: int) -> np.ndarray:
    """A permutation of range(count), int64 [count]."""
    return np.random.Generator(np.random.PCG64([seed, *stream])).permutation(count)


def quotas(counts: list[int], weights: list[float]) -> list[int]:
    """How many items of an epoch each source supplies: shares of sum(counts) by weight, by largest remainder."""
    total, scale = sum(counts), sum(weights)
    exact = [total * weight / scale for weight in weights]
    out = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (out[i] - exact[i], i))
    for index in by_remainder[: total - sum(out)]:
        out[index] += 1
    return out


def _draws(count: int, quota: int, seed: int, epoch: int, source: int) -> np.ndarray:
    """Items of one source in one epoch: the epoch's stretch of an endless row of permutations.

    So every item is drawn equally often, up to one, over any number of epochs.
    """
    start, out = epoch * quota, []
    while sum(map(len, out)) < quota:
        pas, offset = divmod(start, count)
        take = shuffled(count, seed, 1, source, pas)[offset : offset + quota - sum(map(len, out))]
        out.append(take)
        start += len(take)
    return np.concatenate(out) if out else np.zeros(0, np.int64)


def epoch_order(counts: list[int], weights: list[float] | None, seed: int, epoch: int) -> np.ndarray:
    """Item numbers of an epoch, int64. Items of source i follow those of source i - 1. Without weights: each once."""
    total = sum(counts)
    if weights is None:
        return shuffled(total, seed, 0, epoch)
    first = np.cumsum([0, *counts[:-1]])
    shares = quotas(counts, weights)
    parts = [_draws(n, q, seed, epoch, i) + first[i] for i, (n, q) in enumerate(zip(counts, shares, strict=True))]
    return np.concatenate(parts)[shuffled(total, seed, 2, epoch)]


def group_by_length(order: np.ndarray, lengths: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """The same items with neighbours of similar length: blocks sorted by length, cut into runs, the runs shuffled."""
    runs = []
    for start in range(0, len(order), _BLOCK):
        block = order[start : start + _BLOCK]
        block = block[np.argsort(lengths[block], kind="stable")]
        runs += [block[i : i + _RUN] for i in range(0, len(block), _RUN)]
    full = [run for run in runs if len(run) == _RUN]
    # short runs go last, so that the others stay aligned to micro-batches
    rest = [run for run in runs if len(run) < _RUN]
    mixed = [full[i] for i in shuffled(len(full), seed, 3, epoch)]
    return np.concatenate([*mixed, *rest]) if len(order) else order

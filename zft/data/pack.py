"""Best-fit packing: which sequences share a row of seq_len tokens. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Items:
    """What a loader draws: item i holds the sequences `members[ends[i-1]:ends[i]]`."""

    members: np.ndarray  # int64, sequence numbers in a store
    ends: np.ndarray  # int64 [items]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.members[self.ends[index - 1] if index else 0 : self.ends[index]]

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Per item the sum of a per-sequence array, int64 [items]."""
        totals = np.concatenate([[0], np.cumsum(values[self.members], dtype=np.int64)])
        return np.diff(totals[self.ends], prepend=0) if len(self) else np.zeros(0, np.int64)


def one_each(sequences: np.ndarray) -> Items:
    """Every sequence is an item of its own."""
    return Items(np.asarray(sequences, np.int64), np.arange(1, len(sequences) + 1, dtype=np.int64))


def join(parts: list[Items]) -> Items:
    """The items of several lists, one after the other."""
    shifts = np.cumsum([0] + [len(part.members) for part in parts[:-1]])
    return Items(
        np.concatenate([part.members for part in parts]),
        np.concatenate([part.ends + shift for part, shift in zip(parts, shifts, strict=True)]),
    )


def best_fit(sequences: np.ndarray, lengths: np.ndarray, capacity: int) -> Items:
    """Best-fit decreasing bin packing (Johnson 1973): longest first, each into the fullest bin that has room.

    `sequences` int64 [n]; `lengths` int64 [n], each between 0 and `capacity`. O(n log n); ties go by position, so the
    result depends on the arguments only.
    """
    bins: list[list[int]] = []
    free: dict[int, list[int]] = {}  # room left → bins with it
    rooms: list[int] = []  # the keys of `free`, sorted
    order = np.argsort(-lengths, kind="stable")
    for position in order.tolist():
        length = int(lengths[position])
        assert length <= capacity, f"sequence of {length} tokens does not fit into {capacity}"
        slot = bisect_left(rooms, length)
        if slot == len(rooms):
            bins.append([position])
            number, room = len(bins) - 1, capacity - length
        else:
            room = rooms[slot]
            number = free[room].pop()
            if not free[room]:
                del free[room], rooms[slot]
            bins[number].append(position)
            room -= length
        if room:
            if room not in free:
                insort(rooms, room)
            free.setdefault(room, []).append(number)
    sizes = np.asarray([len(members) for members in bins], np.int64)
    flat = np.fromiter((p for members in bins for p in members), np.int64, count=int(sizes.sum()))
    return Items(np.asarray(sequences, np.int64)[flat], np.cumsum(sizes))

"""Reusable buffers, so that a step allocates nothing: unsharded units, staged weights, gradients of the unit at hand."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable

import torch

from zft.engine.layout import round_up
from zft.tiers.cpu import Arena, aligned_empty
from zft.tiers.device import Event


def maker(device: torch.device) -> Callable[[int], torch.Tensor]:
    """Allocates uint8 buffers on a device, or page-aligned ones in host memory."""
    if device.type == "cuda":
        return lambda count_bytes: torch.empty(count_bytes, dtype=torch.uint8, device=device)
    return aligned_empty


class PinnedMemory:
    """Host buffers that cross PCIe: each pinned at its exact size where there is a GPU and pinning is wanted."""

    def __init__(self, device: torch.device, pin: bool):
        self.pin = pin and device.type == "cuda"
        self.arenas: list[Arena] = []

    def __call__(self, count_bytes: int) -> torch.Tensor:
        """uint8 [count_bytes], page-aligned; pinned until `close`."""
        if not self.pin:
            return aligned_empty(count_bytes)
        self.arenas.append(Arena(count_bytes))
        return self.arenas[-1].take(count_bytes)

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()


SHRINK = 8
"""Buffers come in the pool's capacity, an eighth of it, an eighth of that, ..."""


class BufferPool:
    """Buffers of few sizes. `acquire` hands out a free one, makes another, or waits where `limit` are out already.

    A unit has large and small groups (a frozen layer and its adapter): a small one must not hold a buffer for a large one.
    """

    def __init__(
        self, capacity_bytes: int, make: Callable[[int], torch.Tensor] = aligned_empty, limit: int | None = None
    ):
        self.capacity_bytes = max(capacity_bytes, 4096)
        self.make, self.limit = make, limit
        self.free: dict[int, list[tuple[torch.Tensor, Event]]] = defaultdict(list)
        self.taken: dict[int, torch.Tensor] = {}
        self.changed = threading.Condition()

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor [numel] at the start of a 4096-byte aligned buffer."""
        return self.acquire_after(numel, dtype)[0]

    def acquire_after(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, Event]:
        """As `acquire`, with the point at which the buffer's last user is through with it."""
        needed = numel * dtype.itemsize
        assert needed <= self.capacity_bytes, f"{needed} bytes asked of a pool of {self.capacity_bytes}-byte buffers"
        size = self._size(needed)
        with self.changed:
            free = self.free[size]
            self.changed.wait_for(lambda: free or self.limit is None or len(self.taken) < self.limit)
            raw, event = free.pop() if free else (self.make(size), Event())
            tensor = raw[:needed].view(dtype)
            self.taken[tensor.data_ptr()] = raw
        return tensor, event

    def release(self, tensor: torch.Tensor, event: Event | None = None) -> None:
        """Take a buffer back; it may be written again once `event` is reached."""
        with self.changed:
            raw = self.taken.pop(tensor.data_ptr(), None)
            assert raw is not None, "a buffer was released twice or never came from this pool"
            self.free[raw.numel()].append((raw, event or Event()))
            self.changed.notify()

    def forget(self) -> None:
        """Let go of the buffers that nobody holds; `acquire` makes others."""
        with self.changed:
            self.free.clear()

    def _size(self, needed: int) -> int:
        """The smallest of the pool's sizes that holds `needed` bytes."""
        size = self.capacity_bytes
        while (smaller := round_up(size // SHRINK, 4096)) >= needed and smaller < size:
            size = smaller
        return size

    def owns(self, tensor: torch.Tensor) -> bool:
        with self.changed:
            return tensor.data_ptr() in self.taken

"""Reusable buffers, so that a step allocates nothing: unsharded units, staged weights, gradients of the unit at hand."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from zft.tiers.cpu import aligned_empty


def maker(device: torch.device) -> Callable[[int], torch.Tensor]:
    """Allocates uint8 buffers on a device, or page-aligned ones in host memory."""
    if device.type == "cuda":
        return lambda count_bytes: torch.empty(count_bytes, dtype=torch.uint8, device=device)
    return aligned_empty


class BufferPool:
    """Buffers of one size class. `acquire` hands out a free one or makes another; `release` takes it back."""

    def __init__(self, capacity_bytes: int, make: Callable[[int], torch.Tensor] = aligned_empty):
        self.capacity_bytes = max(capacity_bytes, 4096)
        self.make = make
        self.free: list[torch.Tensor] = []
        self.taken: dict[int, torch.Tensor] = {}
        self.lock = threading.Lock()

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor [numel] at the start of a 4096-byte aligned buffer."""
        needed = numel * dtype.itemsize
        assert needed <= self.capacity_bytes, f"{needed} bytes asked of a pool of {self.capacity_bytes}-byte buffers"
        with self.lock:
            raw = self.free.pop() if self.free else self.make(self.capacity_bytes)
            tensor = raw[:needed].view(dtype)
            self.taken[tensor.data_ptr()] = raw
        return tensor

    def release(self, tensor: torch.Tensor) -> None:
        with self.lock:
            raw = self.taken.pop(tensor.data_ptr(), None)
            assert raw is not None, "a buffer was released twice or never came from this pool"
            self.free.append(raw)

    def owns(self, tensor: torch.Tensor) -> bool:
        with self.lock:
            return tensor.data_ptr() in self.taken

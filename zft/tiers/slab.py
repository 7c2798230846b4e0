"""A slab: one field of one record on one tier, read and written in byte ranges. Every move is counted as traffic."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from zft.config import Tier

ROUTES = ("nvme_read", "nvme_write", "h2d", "d2h")


@dataclass
class Traffic:
    """Payload bytes moved between tiers, per direction."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ROUTES, 0))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, route: str, count_bytes: int) -> None:
        with self.lock:
            self.counts[route] += count_bytes

    def take(self) -> dict[str, int]:
        """The counts since the last call."""
        with self.lock:
            counts, self.counts = self.counts, dict.fromkeys(ROUTES, 0)
        return counts

    def snapshot(self) -> dict[str, int]:
        with self.lock:
            return dict(self.counts)


def done(value=None) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


class MemorySlab:
    """A tensor in host or device memory."""

    def __init__(self, tensor: torch.Tensor, tier: Tier):
        self.tensor, self.tier, self.dtype = tensor, tier, tensor.dtype

    @property
    def resident(self) -> bool:
        return True

    def view(self, start: int, end: int) -> torch.Tensor:
        return self.tensor[start:end]


class FileSlab:
    """Bytes in one range of a record's file. Offsets and lengths are in elements; payload is what is counted."""

    tier = Tier.nvme

    def __init__(self, file, base_bytes: int, dtype: torch.dtype, traffic: Traffic):
        self.file, self.base_bytes, self.dtype, self.traffic = file, base_bytes, dtype, traffic

    @property
    def resident(self) -> bool:
        return False

    def read(self, start: int, buffer: torch.Tensor) -> Future:
        """Fill buffer [n] (dtype of the slab, 4096-byte aligned) from element `start` (a multiple of 4096 bytes)."""
        raw = buffer.view(torch.uint8)
        self.traffic.add("nvme_read", raw.numel())
        return self.file.read(self.base_bytes + start * self.dtype.itemsize, raw)

    def write(self, start: int, buffer: torch.Tensor) -> Future:
        """Store buffer [n] at element `start`."""
        raw = buffer.view(torch.uint8)
        self.traffic.add("nvme_write", raw.numel())
        return self.file.write(self.base_bytes + start * self.dtype.itemsize, raw)


Slab = MemorySlab | FileSlab

"""Host memory: page-aligned buffers and the pinned arena."""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref

import psutil
import torch

from zft.config import ZftError
from zft.tiers.page import PAGE, round_up

_MMAP_FROM = 1 << 20


def aligned_empty(nbytes: int) -> torch.Tensor:
    """uint8 tensor [nbytes] whose first byte is page-aligned; its storage reaches to the end of the last page.

    From 1 MiB on it has its own mapping, so that dropping the last reference returns the memory to the system.
    """
    capacity = max(round_up(nbytes), PAGE)
    if capacity >= _MMAP_FROM:
        return torch.frombuffer(mmap.mmap(-1, capacity), dtype=torch.uint8, count=nbytes)
    raw = torch.empty(capacity + PAGE, dtype=torch.uint8)
    start = -raw.data_ptr() % PAGE
    return raw[start : start + nbytes]


HEAP_SLACK_BYTES = 64 << 20
"""How far resident memory may grow before freed pages are asked back: asking often costs page faults."""
HEAP_SLACK_SHARE = 16
"""Or this part of what is resident, where that is more: beside much memory a little slack is cheaper than faults."""


class Heap:
    """The C library's heap. Small allocations that stay (a tape's entries) split the large blocks that a layer has freed, the
    next layer's blocks no longer fit, and resident memory grows with the number of layers though nothing is kept."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # glibc's
        self._process = psutil.Process()
        self._low_bytes = 0

    def tidy(self) -> None:
        """Give free pages back to the system, if resident memory has grown by more than the slack since it was lowest."""
        if self._trim is None:
            return
        now = self._process.memory_info().rss
        if now > self._low_bytes + max(HEAP_SLACK_BYTES, self._low_bytes // HEAP_SLACK_SHARE):
            self.trim()
        self._low_bytes = min(self._low_bytes, now)

    def trim(self) -> None:
        """Give free pages back to the system."""
        if self._trim is not None:
            self._trim(0)
            self._low_bytes = self._process.memory_info().rss


class Arena:
    """One host buffer of an exact size, pinned for CUDA, from which page-aligned pieces are taken.

    PyTorch's own pinned allocator rounds to powers of two; this one costs what it says. Without CUDA, or with
    pin=False, it is plain memory. Pieces stay readable after close(), but are no longer pinned.
    """

    def __init__(self, nbytes: int, pin: bool = True):
        self.nbytes = round_up(nbytes)
        self.used_bytes = 0
        self._buffer = aligned_empty(self.nbytes)
        self.pinned = pin and self.nbytes > 0 and torch.cuda.is_available()
        self._unpin = lambda: None
        if self.pinned:
            address = self._buffer.data_ptr()
            status = int(torch.cuda.cudart().cudaHostRegister(address, self.nbytes, 0))
            if status != 0:
                raise ZftError(
                    f"could not pin {self.nbytes} bytes of host memory (cudaHostRegister: {status}); "
                    "set engine.pin_memory=false"
                )
            # the closure keeps the mapping alive until it is unregistered
            self._unpin = weakref.finalize(self, _unregister, self._buffer)

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 view [nbytes] of the next free, page-aligned piece."""
        start = self.used_bytes
        end = start + round_up(nbytes)
        assert end <= self.nbytes, f"arena of {self.nbytes} bytes is full: {start} used, {nbytes} asked"
        self.used_bytes = end
        return self._buffer[start : start + nbytes]

    def close(self) -> None:
        self._unpin()
        self.pinned = False

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _unregister(buffer: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())

"""Pages: the unit in which direct I/O and page-aligned buffers count. Nothing here imports torch, so that a command starts fast."""

from __future__ import annotations

import mmap

PAGE = 4096
"""Alignment of buffers and of NVMe offsets (bytes)."""


def round_up(nbytes: int, multiple: int = PAGE) -> int:
    return -(-nbytes // multiple) * multiple


def page_buffer(nbytes: int) -> memoryview:
    """Zeroed bytes of their own mapping; the first is page-aligned. Dropping them returns the memory to the system."""
    return memoryview(mmap.mmap(-1, max(round_up(nbytes), PAGE)))[:nbytes]

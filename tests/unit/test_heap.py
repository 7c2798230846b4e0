"""Pages that the C library keeps when small allocations split its free blocks go back to the system."""

import subprocess
import sys

import pytest

GROWING = """
import ctypes, psutil, sys, torch
from zft.tiers import cpu
heap, kept, most = cpu.Heap(), [], 0
for option, value in ((-3, 32 << 20), (-1, 1 << 30)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD: as they become in a run
    ctypes.CDLL(None).mallopt(option, value)
for turn in range(60):
    big = [torch.ones((4 << 20) + turn * 4096, dtype=torch.uint8) for _ in range(4)]
    kept += [torch.ones(10_000) for _ in range(4)]  # small ones that stay, behind each layer's large ones
    big.clear()
    kept += [torch.ones(10_000) for _ in range(4)]
    if sys.argv[1] == "tidy":
        heap.tidy()
    most = max(most, psutil.Process().memory_info().rss)
    start = most if turn == 0 else start
print(most - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_resident_memory_does_not_grow_with_the_number_of_layers():
    def growth(how: str) -> int:
        return int(
            subprocess.run([sys.executable, "-c", GROWING, how], capture_output=True, check=True, timeout=100).stdout
        )

    wild, tidy = growth("leave"), growth("tidy")
    assert tidy < 128 << 20 < 2 * (128 << 20) < wild, f"grew by {tidy >> 20} MiB, without it by {wild >> 20} MiB"

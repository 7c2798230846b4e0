"""Pages that the C library keeps when small allocations split its free blocks go back to the system."""

import json
import subprocess
import sys

import pytest

FREED_MIB = 256
SPLIT_AND_FREED = f"""
import ctypes, json, psutil, torch
from zft.tiers import cpu

def resident_mib():
    return psutil.Process().memory_info().rss / (1 << 20)

for option, value in ((-3, 32 << 20), (-1, 1 << 30)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD: as they become in a run
    assert ctypes.CDLL(None).mallopt(option, value) == 1
heap, layers, kept = cpu.Heap(), [], []
heap.trim()
start = resident_mib()
for layer in range({FREED_MIB} // 4):
    layers.append(torch.ones(4 << 20, dtype=torch.uint8))
    kept.append(torch.ones(10_000))  # a small one that stays, behind each layer's large one
full = resident_mib()
layers.clear()
freed = resident_mib()
heap.tidy()
print(json.dumps({{"full": full - start, "freed": freed - start, "tidy": resident_mib() - start}}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_freed_layers_go_back_to_the_system_between_small_blocks_that_stay():
    answer = subprocess.run([sys.executable, "-c", SPLIT_AND_FREED], capture_output=True, check=True, timeout=100).stdout
    grown_mib = json.loads(answer)
    assert grown_mib["full"] > FREED_MIB * 0.9, grown_mib
    assert grown_mib["freed"] > FREED_MIB * 0.9, f"nothing is kept here, so there is nothing to give back: {grown_mib}"
    assert grown_mib["tidy"] < FREED_MIB / 8, grown_mib

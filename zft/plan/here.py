"""The machine at hand as Rates: what `zft doctor` measured, or a short measurement now, and the room there is."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import psutil
import torch

from zft.config import ZftError
from zft.plan import probe
from zft.plan.rates import GIB, Rates

UNMEASURED_NVME = 1.0e9
"""Bytes/s assumed for a folder that can't be written to now."""


def rates_here(nvme_dir: str | None, compute_dtype: torch.dtype) -> Rates:
    """Rates of this machine for one rank that has it to itself (`Rates.shared` divides it)."""
    found = measured(nvme_dir)
    is_gpu = torch.cuda.is_available()
    rooms = free_rooms(nvme_dir)
    disk = found.get("nvme", {}).get(probe.filesystem(Path(nvme_dir)) if nvme_dir else "", {})
    matmul = found[f"matmul_{'float32' if compute_dtype == torch.float32 else 'bfloat16'}"]
    return Rates(
        name="this machine", is_gpu=is_gpu, device_room=rooms["device"], host_room=rooms["cpu"], nvme_room=rooms["nvme"],
        h2d=found.get("h2d", 25e9), d2h=found.get("d2h", 25e9), dram=found["dram"],
        nvme_read=disk.get("read", UNMEASURED_NVME), nvme_write=disk.get("write", UNMEASURED_NVME),
        update=found["update"], matmul=tuple((int(width), float(rate)) for width, rate in matmul),
    )  # fmt: skip


def measured(nvme_dir: str | None) -> dict:
    """The doctor's cache, completed by a short measurement of what it lacks; kept."""
    found = probe.cached()
    folder = nearest(nvme_dir) if nvme_dir else None
    if found is None:
        found = probe.measure(folder)
        if os.getloadavg()[0] <= len(os.sched_getaffinity(0)):  # what a busy machine shows is no lasting truth
            probe.keep(found)
    elif folder is not None and probe.filesystem(folder) not in found.get("nvme", {}):
        with contextlib.suppress(ZftError, OSError):  # no usable folder: the run itself says so
            found.setdefault("nvme", {})[probe.filesystem(folder)] = probe.nvme_rates(folder, 64 * probe.MIB)
            probe.keep(found)
    return found


def nearest(path: str) -> Path:
    """`path`, or the nearest folder above it that exists."""
    there = Path(path).absolute()
    return next(parent for parent in (there, *there.parents) if parent.is_dir())


def free_rooms(nvme_dir: str | None) -> dict[str, int]:
    """Free bytes of each tier, with what this process holds already. Without a GPU device and cpu are the same RAM."""
    host = min(psutil.virtual_memory().available, _cgroup_room()) + psutil.Process().memory_info().rss
    device = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else host
    disk = shutil.disk_usage(nearest(nvme_dir or os.getcwd())).free
    return {"device": device, "cpu": host, "nvme": disk}


def _cgroup_room() -> int:
    """What a container's own limit (cgroup v2) leaves; a very large number without one."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit != "max":
            return int(limit) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        pass
    return 2**62


__all__ = ["GIB", "free_rooms", "measured", "nearest", "rates_here"]

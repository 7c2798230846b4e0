"""Measures this machine: copies, products, the update, the disk. A fraction of a second each; `zft doctor` takes longer."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import torch

from zft.config import AdamW, EngineConfig, ZftError
from zft.optim.rules import Hyper, Segments, make_rule
from zft.precision import resolve_precision
from zft.tiers.cpu import aligned_empty
from zft.tiers.nvme import NvmeFolder, wait_all

WIDTHS = (256, 576, 1024, 2048)
"""Widths of the matrix products that are timed."""
ROWS = 512
"""Tokens in them."""
MIB = 1 << 20


def best_s(work: Callable[[], object], seconds: float) -> float:
    """The shortest time of one call, of as many as fit into `seconds` (at least two, the first as warm-up)."""
    work()
    shortest, until = float("inf"), time.perf_counter() + seconds
    while True:
        started = time.perf_counter()
        work()
        now = time.perf_counter()
        shortest = min(shortest, now - started)
        if now >= until:
            return shortest


def typical_s(work: Callable[[], object], seconds: float) -> float:
    """The median time of one call."""
    work()
    times, until = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < until:
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def copy_rate(seconds: float = 0.3, size: int = 256 * MIB) -> float:
    """Bytes/s read and written together by a copy in host memory."""
    source, target = torch.ones(size // 4), torch.empty(size // 4)
    return 2 * size / typical_s(lambda: target.copy_(source), seconds)


def matmul_rates(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> list[tuple[int, float]]:
    """(width, operations/s) of a layer's kind of product: [ROWS, n] with [n, 4 n]."""
    rows = []
    widths = WIDTHS if device.type == "cpu" else (1024, 4096, 8192)
    tokens = ROWS if device.type == "cpu" else 4096
    for width in widths:
        a = torch.randn(tokens, width, device=device).to(dtype)
        b = torch.randn(4 * width, width, device=device).to(dtype)

        def work(a=a, b=b) -> None:
            torch.nn.functional.linear(a, b)
            if device.type == "cuda":
                torch.cuda.synchronize()

        rows.append((width, 2.0 * tokens * width * 4 * width / typical_s(work, seconds)))
    return rows


def update_rate(seconds: float = 0.3, numel: int = 8 << 20) -> float:
    """Bytes/s of records read and written by the update on all cores, in the engine's chunks."""
    plan = resolve_precision(EngineConfig(), "cpu")
    rule, cores = make_rule(AdamW(), plan), len(os.sched_getaffinity(0))
    views = {f.name: torch.zeros(numel, dtype=f.dtype) for f in plan.fields}
    grad, chunk = torch.zeros(numel, dtype=plan.grad_dtype), 1 << 20
    moved = 2 * sum(f.bytes(numel) for f in plan.fields) + 2 * numel

    def part(start: int) -> None:
        end = min(start + chunk, numel)
        rule.update(
            {k: v[start:end] for k, v in views.items()}, grad[start:end], Segments.whole(end - start), Hyper(1, 1e-5)
        )

    with ThreadPoolExecutor(cores) as pool:
        return moved / typical_s(lambda: list(pool.map(part, range(0, numel, chunk))), seconds)


def bus_rates(device: torch.device, seconds: float = 0.2, size: int = 256 * MIB) -> tuple[float, float]:
    """(host to device, device to host) bytes/s with pinned memory."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)

    def timed(target: torch.Tensor, source: torch.Tensor) -> float:
        def work() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        return size / typical_s(work, seconds)

    return timed(there, host), timed(host, there)


def nvme_rates(folder: Path, size: int = 256 * MIB, threads: int = 4, rounds: int = 3) -> dict[str, float]:
    """Bytes/s of the engine's own reads and writes in `folder` (median of `rounds`), and whether they bypass the cache.

    Raises ZftError where the folder can't be used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".zft-probe-") as inside,
        NvmeFolder(inside, threads=threads) as nvme,
    ):
        nvme.require_free(2 * size)
        file = nvme.create("probe", size)
        buffer = aligned_empty(size)
        buffer.random_(0, 256)
        parts = [(at, buffer[at : at + 8 * MIB]) for at in range(0, size, 8 * MIB)]
        write = [_timed(lambda: wait_all([file.write(at, part) for at, part in parts])) for _ in range(rounds)]
        read = [_timed(lambda: wait_all([file.read(at, part) for at, part in parts])) for _ in range(rounds)]
        return {
            "write": size / sorted(write)[rounds // 2],
            "read": size / sorted(read)[rounds // 2],
            "direct": nvme.direct,
        }


def buffered_rates(folder: Path, size: int = 256 * MIB) -> dict[str, float]:
    """Bytes/s through the page cache: written and synced to the disk, read back after the cache has dropped it."""
    data = os.urandom(MIB) * (size // MIB)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        started = time.perf_counter()
        file.write(data)
        os.fsync(file.fileno())
        write_s = time.perf_counter() - started
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        started = time.perf_counter()
        while file.read(8 * MIB):
            pass
        return {"write": size / write_s, "read": size / (time.perf_counter() - started)}


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# what was measured is kept


def cache_file() -> Path:
    """$XDG_CACHE_HOME/zft/doctor.json, else ~/.cache/zft/doctor.json."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zft" / "doctor.json"


def machine() -> str:
    """What a measurement holds for: host, processor, cores, memory, GPU, torch."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    memory_gib = psutil.virtual_memory().total / 2**30
    return f"{platform.node()}, {processor()}, {len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB, {gpu}, torch {torch.__version__}"


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cached() -> dict | None:
    """What was measured on this machine; None if nothing, or not readable."""
    try:
        return json.loads(cache_file().read_text(encoding="utf-8")).get(machine())
    except (OSError, ValueError, AttributeError):
        return None


def keep(found: dict) -> Path | None:
    """Remember `found` for this machine beside those of others; None where the cache can't be written."""
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        everything = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError):
        everything = {}
    everything = everything if isinstance(everything, dict) else {}
    everything[machine()] = found
    try:
        partial = path.with_name(f".{path.name}-{os.getpid()}")
        partial.write_text(json.dumps(everything, indent=1), encoding="utf-8")
        partial.replace(path)
    except OSError:
        return None
    return path


def measure(folder: Path | None, seconds: float = 0.15, size: int = 64 * MIB) -> dict:
    """Everything that the planner asks for. folder: where the nvme tier would be; None leaves the disk out."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict = {"dram": copy_rate(seconds, max(size, 128 * MIB)), "update": update_rate(seconds)}
    for dtype in ("float32", "bfloat16"):
        found[f"matmul_{dtype}"] = matmul_rates(device, getattr(torch, dtype), seconds / 2)
    if device.type == "cuda":
        found["h2d"], found["d2h"] = bus_rates(device, seconds)
    found["nvme"] = {}
    if folder is not None:
        with contextlib.suppress(ZftError, OSError):  # no usable folder: the run itself says so
            found["nvme"] = {filesystem(folder): nvme_rates(folder, size)}
    return found


def filesystem(folder: Path) -> str:
    """Device number of the filesystem that holds `folder`."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return f"{os.major(there.stat().st_dev)}:{os.minor(there.stat().st_dev)}"

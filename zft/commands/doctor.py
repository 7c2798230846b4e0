"""`zft doctor`: versions, devices and measured bandwidths, kept for the planner; what to fix and how."""

from __future__ import annotations

import json
import os
from pathlib import Path

import typer

from zft.config import EngineConfig, ZftError


def add(app: typer.Typer) -> None:
    app.command("doctor", help="Measure this machine for the planner, and say what to fix.")(doctor)


def doctor(
    nvme_dir: Path = typer.Option(None, "--nvme-dir", help="Folder of the nvme tier; the current one unless given."),
    as_json: bool = typer.Option(False, "--json", help="Print what was found as one JSON object."),
    quick: bool = typer.Option(False, "--quick", help="Measure for a second instead of ten."),
) -> None:
    from zft.plan.health import advice

    found = examine(nvme_dir or Path.cwd(), quick)
    rows = advice(found)
    if as_json:
        print(json.dumps({**found, "advice": [vars(row) for row in rows]}))
        return

    from rich.console import Console

    console = Console()
    console.print(render(found))
    for row in rows:
        console.print(
            f"[bold red]fix[/] {row.text}" if row.is_problem else f"[dim]note[/] {row.text}",
            soft_wrap=True,
            highlight=False,
        )
    if not any(row.is_problem for row in rows):
        console.print("[bold green]nothing to fix[/]")


def examine(folder: Path, quick: bool = False) -> dict:
    """Everything the doctor knows. Measures, and keeps the rates for the planner."""
    import psutil
    import torch

    from zft.plan import here, probe
    from zft.precision import resolve_precision

    size, seconds = (64 << 20, 0.1) if quick else (512 << 20, 1.0)
    rates = probe.measure(None, seconds, size)
    disk, there = _disk(folder, size), here.nearest(str(folder))
    rates["nvme"] = {probe.filesystem(there): disk["direct"]} if "direct" in disk else {}
    earlier = (probe.cached() or {}).get("nvme", {})
    rates["nvme"] = {**earlier, **rates["nvme"]}
    versions, wanted, satisfied = _packages()
    memory = psutil.virtual_memory()
    compute = resolve_precision(EngineConfig(), "cuda" if torch.cuda.is_available() else "cpu").compute_dtype
    return {
        "compute_dtype": str(compute).removeprefix("torch."),
        "versions": versions, "wanted": wanted, "satisfied": satisfied, "processor": probe.processor(),
        "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0], "torch_cuda": torch.version.cuda,
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
        "memory": {"total_bytes": memory.total, "available_bytes": memory.available, "lockable_bytes": _lockable()},
        "nvme_dir": str(folder), "disk": disk, "rates": rates, "kept": (path := probe.keep(rates)) and str(path),
    }  # fmt: skip


def _disk(folder: Path, size: int) -> dict:
    import shutil

    from zft.plan import here, probe

    first = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not first.is_dir():
        return {"error": f"{first} is a file; name a folder"}
    there = here.nearest(str(folder))
    try:
        found = {"direct": probe.nvme_rates(there, size), "buffered": probe.buffered_rates(there, size)}
    except (ZftError, OSError) as error:
        return {"error": str(error)}
    return {**found, "free_bytes": shutil.disk_usage(there).free}


def _gpu(index: int) -> dict:
    import torch

    found = torch.cuda.get_device_properties(index)
    return {"name": found.name, "total_bytes": found.total_memory, "free_bytes": torch.cuda.mem_get_info(index)[0]}


def _lockable() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _packages() -> tuple[dict[str, str], dict[str, str], dict[str, bool]]:
    """(versions that are there, what zft's own metadata asks for, whether it is met)."""
    import platform
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement

    from zft import __version__

    versions, wanted, satisfied = {"python": platform.python_version(), "zft": __version__}, {}, {}
    try:
        rows = [Requirement(line) for line in requires("zft-engine") or ()]
    except PackageNotFoundError:  # run from a folder without being installed
        rows = [Requirement(name) for name in ("torch", "transformers", "safetensors", "numba", "datasets", "peft")]
    for row in rows:
        if row.marker is not None and not row.marker.evaluate({"extra": ""}):
            continue
        wanted[row.name] = str(row.specifier)
        try:
            versions[row.name] = version(row.name)
            satisfied[row.name] = row.specifier.contains(versions[row.name], prereleases=True)
        except PackageNotFoundError:
            satisfied[row.name] = False
    return versions, wanted, satisfied


def render(found: dict):
    """The tables that a terminal shows."""
    from rich.console import Group
    from rich.table import Table

    memory, rates, disk = found["memory"], found["rates"], found["disk"]
    machine = Table(box=None, show_header=False, pad_edge=False)
    shown = ("python", "zft", "torch", "transformers", "peft", "datasets", "numba")
    machine.add_row(
        "versions", ", ".join(f"{name} {found['versions'][name]}" for name in shown if name in found["versions"])
    )
    machine.add_row("processor", f"{found['processor']}, {found['cores']} cores, load {found['load']:.1f}")
    machine.add_row(
        "memory", f"{memory['available_bytes'] / 2**30:.1f} GiB free of {memory['total_bytes'] / 2**30:.1f}"
    )
    for gpu in found["gpus"] or [None]:
        machine.add_row(
            "gpu",
            f"{gpu['name']}, {gpu['free_bytes'] / 2**30:.1f} GiB free of {gpu['total_bytes'] / 2**30:.1f}"
            if gpu
            else "none",
        )
    table = Table(box=None, pad_edge=False)
    table.add_column("measured")
    table.add_column("", justify="right")
    rows = [("host memory, read and written by a copy", rates["dram"]), ("update, read and written", rates["update"])]
    rows += [(name, rates[key]) for key, name in (("h2d", "host to device"), ("d2h", "device to host")) if key in rates]
    if "direct" in disk:
        kind = "direct" if disk["direct"]["direct"] else "buffered"
        for name, row in (
            (f"disk, as the nvme tier uses it ({kind})", disk["direct"]),
            ("disk, through the page cache", disk["buffered"]),
        ):
            rows += [(f"{name}: read", row["read"]), (f"{name}: write", row["write"])]
    for name, rate in rows:
        table.add_row(name, f"{rate / 1e9:.2f} GB/s")
    for dtype in ("float32", "bfloat16"):
        width, flops = rates[f"matmul_{dtype}"][-1]
        table.add_row(f"matrix products in {dtype}, {width} wide", f"{flops / 1e9:,.0f} GFLOP/s")
    parts = [machine, "", table]
    return Group(*parts, "", f"kept in {found['kept']}" if found["kept"] else "not kept")

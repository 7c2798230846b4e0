"""What is wrong with this machine for training, and how to mend it: pure rules over what the doctor found."""

from __future__ import annotations

from dataclasses import dataclass

GOOD_DISK = 1.0e9
"""Bytes/s from which on a disk hides behind a small model's compute."""


@dataclass(frozen=True)
class Advice:
    """One line: what was found, and what to do."""

    is_problem: bool
    text: str


def advice(found: dict) -> list[Advice]:
    """Problems first. `found` is what `zft doctor --json` prints."""
    rows = [*_packages(found), *_devices(found), *_disk(found), *_memory(found)]
    return sorted(rows, key=lambda row: not row.is_problem)


def _packages(found: dict) -> list[Advice]:
    rows = []
    for name, wanted in found["wanted"].items():
        have = found["versions"].get(name)
        if have is None:
            rows.append(Advice(True, f"{name} is missing; pip install '{name}{wanted}'"))
        elif not found["satisfied"].get(name, True):
            rows.append(Advice(True, f"{name} {have} is not {wanted}; pip install -U '{name}{wanted}'"))
    return rows


def _devices(found: dict) -> list[Advice]:
    rows = []
    if not found["gpus"]:
        rows.append(Advice(False, f"no GPU: everything computes on the processor, in {found['compute_dtype']} from the same records"))
        if found["torch_cuda"]:
            rows.append(
                Advice(
                    True,
                    f"torch is built for CUDA {found['torch_cuda']} but sees no GPU; check nvidia-smi and the driver",
                )
            )
    h2d = found["rates"].get("h2d")
    if h2d is not None and h2d < 10e9:
        rows.append(
            Advice(
                True,
                f"host to device runs at {h2d / 1e9:.1f} GB/s; the card may sit in a slot with few lanes (nvidia-smi topo -m)",
            )
        )
    return rows


def _disk(found: dict) -> list[Advice]:
    disk, folder = found["disk"], found["nvme_dir"]
    if "error" in disk:
        return [Advice(True, f"the nvme tier can't use {folder}: {disk['error']}")]
    rows = []
    if not disk["direct"]["direct"]:
        rows.append(
            Advice(
                True,
                f"{folder} has no direct I/O (tmpfs or a network disk): it fills host memory; set engine.nvme_dir to a local disk",
            )
        )
    slow = min(disk["direct"]["read"], disk["direct"]["write"])
    if slow < GOOD_DISK:
        rows.append(
            Advice(
                True,
                f"the disk of {folder} moves {slow / 1e9:.2f} GB/s; updates on NVMe will wait for it: use an NVMe drive, or engine=zero3_cpu",
            )
        )
    buffered = min(disk["buffered"]["read"], disk["buffered"]["write"])
    if disk["direct"]["direct"] and buffered > 1.5 * slow:
        rows.append(
            Advice(
                False,
                f"through the page cache the disk moves {buffered / 1e9:.2f} GB/s; more requests may help: engine.nvme_threads=8",
            )
        )
    if disk["free_bytes"] < 20 * 2**30:
        rows.append(
            Advice(
                True,
                f"{folder} has {disk['free_bytes'] / 2**30:.1f} GiB free; a model takes 14 bytes a parameter there",
            )
        )
    return rows


def _memory(found: dict) -> list[Advice]:
    rows, memory = [], found["memory"]
    if memory["available_bytes"] < 0.5 * memory["total_bytes"]:
        share = 1 - memory["available_bytes"] / memory["total_bytes"]
        rows.append(
            Advice(
                True,
                f"{share:.0%} of the memory is taken by other programs; end them, or the planner will use the disk",
            )
        )
    if found["load"] > found["cores"]:
        rows.append(
            Advice(
                True,
                f"the load is {found['load']:.1f} on {found['cores']} cores: the rates are too low; run zft doctor again when it is quiet",
            )
        )
    if found["gpus"] and memory["lockable_bytes"] is not None and memory["lockable_bytes"] < 2**30:
        rows.append(
            Advice(False, "ulimit -l is low; pinning goes through CUDA, which isn't bound by it, so this is fine")
        )
    if not found["kept"]:
        rows.append(
            Advice(True, "the cache folder can't be written, so the planner measures each time; set XDG_CACHE_HOME")
        )
    return rows

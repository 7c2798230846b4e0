"""How fast and how large a rank's machine is: what `hardware=` names, and for the rest what was measured here."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from zft.config import Hardware

GIB = 2**30
GPU_EFFICIENCY = 0.5
"""Share of the data sheet's dense rate that a decoder layer's forward and backward reach."""
UPDATE_SHARE = 0.8
"""Share of the memory bandwidth that the streamed update reaches, where it was not measured."""


@dataclass(frozen=True)
class Rates:
    """One rank's share of a machine. Bytes, bytes/s, operations/s."""

    name: str
    is_gpu: bool
    device_room: int
    host_room: int
    nvme_room: int
    h2d: float
    d2h: float
    dram: float
    """Host memory, reads and writes together; on a machine without a GPU the activations go through it, too."""
    nvme_read: float
    nvme_write: float
    update: float
    """Bytes of records that the update on the CPU reads and writes a second."""
    matmul: tuple[tuple[int, float], ...]
    """(width of the matrices, operations/s) in rising order, in the dtype that computes."""

    def flops(self, width: int) -> float:
        """Rate of matrix products of a hidden size, interpolated on a logarithmic scale."""
        rows = self.matmul
        if width <= rows[0][0]:
            return rows[0][1]
        for (low, slow), (high, fast) in zip(rows, rows[1:], strict=False):
            if width <= high:
                share = math.log(width / low) / math.log(high / low)
                return slow + share * (fast - slow)
        return rows[-1][1]

    def shared(self, ranks: int) -> Rates:
        """The share of one of `ranks` that divide this machine among themselves."""
        if ranks == 1:
            return self
        parts = {name: getattr(self, name) / ranks for name in ("dram", "nvme_read", "nvme_write", "update")}
        rooms = {"host_room": self.host_room // ranks, "nvme_room": self.nvme_room // ranks}
        if not self.is_gpu:
            parts |= {"matmul": tuple((width, rate / ranks) for width, rate in self.matmul)}
            rooms |= {"device_room": self.device_room // ranks}
        return replace(self, **parts, **rooms)


def named(hardware: Hardware, here: Rates) -> Rates:
    """`here` with what `hardware` says in its place. A name other than `this` is a machine with one GPU."""
    is_gpu = here.is_gpu or hardware.name != "this"
    values: dict = {"name": hardware.name, "is_gpu": is_gpu}
    for field, unit in (("device", GIB), ("host", GIB), ("nvme", GIB)):
        given = getattr(hardware, f"{field}_gib")
        if given is not None:
            values[f"{field}_room"] = int(given * unit)
    for field in ("h2d", "d2h", "dram", "nvme_read", "nvme_write"):
        given = getattr(hardware, f"{field}_gbps")
        if given is not None:
            values[field] = given * 1e9
    if hardware.dram_gbps is not None:
        values["update"] = hardware.dram_gbps * 1e9 * UPDATE_SHARE
    if hardware.tflops is not None:
        values["matmul"] = ((1, hardware.tflops * 1e12 * (GPU_EFFICIENCY if is_gpu else 1.0)),)
    return replace(here, **values)

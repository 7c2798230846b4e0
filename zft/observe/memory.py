"""Measured peaks and traffic beside what the planner's formulas say."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

GIB = 2**30
TIERS = (
    ("host memory", "host_rss", "peak_host_bytes"), ("device memory", "device", "peak_device_bytes"),
    ("NVMe", "nvme", "nvme_bytes"),
)  # fmt: skip
ROUTES = (
    ("nvme_read", "read from NVMe"), ("nvme_write", "written to NVMe"), ("h2d", "into the device"),
    ("d2h", "out of the device"),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One figure: bytes measured and planned (None: nobody planned it)."""

    name: str
    measured_bytes: int
    planned_bytes: int | None

    @property
    def ratio(self) -> float | None:
        """measured / planned."""
        return self.measured_bytes / self.planned_bytes if self.planned_bytes else None


def memory_rows(metrics: list[dict], planned: dict) -> list[Row]:
    """Highest use of each tier that is used, on rank 0. planned: the object of `zft plan --json`, or part of it."""
    rows = [
        Row(name, max(row["peak_bytes"][key] for row in metrics), planned.get(planned_key))
        for name, key, planned_key in TIERS
    ]  # fmt: skip
    return [row for row in rows if row.measured_bytes or row.planned_bytes]


def traffic_rows(metrics: list[dict], planned: dict) -> list[Row]:
    """Bytes of a usual step: the median of those not skipped, without the first (it has no update to make)."""
    steady = [row for row in metrics if not row["skipped"]][1:] or metrics
    formula = planned.get("traffic_bytes", {})
    usual = {key: round(median(row["traffic_bytes"][key] for row in steady)) for key, _ in ROUTES}
    rows = [Row(text, usual[key], formula.get(key)) for key, text in ROUTES]
    return [row for row in rows if row.measured_bytes or row.planned_bytes]


def bytes_text(count: float) -> str:
    """`1.50 GiB`, `12.0 MiB`, `3 B`."""
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}" if count < 1000 * unit else f"{count / unit:,.0f} {name}"
    return f"{count:.0f} B"

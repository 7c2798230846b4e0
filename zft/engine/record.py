"""The record of a group: what this rank keeps for it on the tiers (hi, lo, m, v, gradient), field by field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zft.config import EngineConfig, Tier
from zft.dist import World
from zft.engine.layout import round_up
from zft.engine.unit import ParamGroup
from zft.optim.rules import Rule
from zft.tiers.device import Event
from zft.tiers.nvme import NvmeFolder
from zft.tiers.slab import FileSlab, MemorySlab, Slab, Traffic

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Ranges:
    """Which part of a group's flat buffer this rank stores and updates, in elements: [start, start + numel)."""

    hi_start: int
    hi_numel: int
    state_start: int
    state_numel: int
    grad_start: int
    grad_numel: int

    @staticmethod
    def of(group: ParamGroup, stage: int, world: World) -> Ranges:
        layout, padded = group.layout, group.layout.padded_numel
        mine = (layout.shard_start(world.mesh.shard_rank), layout.shard_numel)
        whole = (0, padded)
        if group.replicated:
            return Ranges(*whole, *whole, *whole)
        hi = mine if stage >= 3 else whole
        state = mine if stage >= 1 else whole
        grad = mine if stage >= 2 else whole
        return Ranges(*hi, *state, *grad)


@dataclass(frozen=True)
class Memory:
    """Where resident slabs are made: on the device, or on the host, pinned if they cross PCIe."""

    device: torch.device
    pinned: Callable[[int], torch.Tensor]

    def zeros(self, numel: int, dtype: torch.dtype, tier: Tier, crosses: bool = False) -> torch.Tensor:
        if tier is Tier.device:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        if not crosses:
            return torch.zeros(numel, dtype=dtype)
        return self.pinned(numel * dtype.itemsize)[: numel * dtype.itemsize].view(dtype).zero_()


class Record:
    """Slabs of one group. Offsets given to `slab` are relative to the field's own range."""

    def __init__(self, group: ParamGroup, rule: Rule | None, grad_dtype: torch.dtype, ranges: Ranges):
        self.group, self.rule, self.ranges, self.grad_dtype = group, rule, ranges, grad_dtype
        self.slabs: dict[str, Slab] = {}
        self.updated = Event()
        """The point at which its last update is through, on the stream that it ran on."""

    @property
    def hi_entries(self) -> int:
        """Entries of `hi` that this rank keeps."""
        return self.group.entries(self.ranges.hi_numel)

    def fields(self) -> list[tuple[str, torch.dtype, int]]:
        """(name, dtype, elements) of everything this rank keeps, in record order."""
        rows = [("hi", self.group.hi_dtype, self.hi_entries)]
        if self.rule is not None:
            state = self.ranges.state_numel
            rows += [(f.name, f.dtype, state // f.block) for f in self.rule.fields if f.name != "hi"]
            rows.append(("grad", self.grad_dtype, self.ranges.grad_numel))
        return rows

    def tier_of(self, field: str, config: EngineConfig) -> Tier:
        return {"hi": config.param_tier, "grad": config.grad_tier, "partial": config.grad_tier}.get(
            field, config.state_tier
        )

    def nvme_bytes(self, config: EngineConfig) -> int:
        """Bytes of this record's file; 0 when nothing of it is on NVMe."""
        rows = [row for row in self.fields() if self.tier_of(row[0], config) is Tier.nvme]
        return sum(round_up(numel * dtype.itemsize, PAGE_BYTES) for _, dtype, numel in rows)

    def allocate(self, config: EngineConfig, folder: NvmeFolder | None, memory: Memory, traffic: Traffic) -> None:
        """Make every slab; one file for those on NVMe."""
        file, base = None, 0
        total = self.nvme_bytes(config)
        if total:
            file = folder.create(self.group.name, total)
        for name, dtype, numel in self.fields():
            tier = self.tier_of(name, config)
            if tier is Tier.nvme:
                self.slabs[name] = FileSlab(file, base, dtype, traffic)
                base += round_up(numel * dtype.itemsize, PAGE_BYTES)
            else:
                crosses = name in ("hi", "grad")
                self.slabs[name] = MemorySlab(memory.zeros(numel, dtype, tier, crosses), tier)

    def allocate_partial(
        self, config: EngineConfig, folder: NvmeFolder | None, memory: Memory, traffic: Traffic
    ) -> Slab:
        """The float32 partial gradient of several waves or visits, made when first needed."""
        if "partial" not in self.slabs:
            numel = self.ranges.grad_numel
            if config.grad_tier is Tier.nvme:
                file = folder.create(f"{self.group.name}.partial", round_up(numel * 4, PAGE_BYTES))
                self.slabs["partial"] = FileSlab(file, 0, torch.float32, traffic)
            else:
                self.slabs["partial"] = MemorySlab(
                    memory.zeros(numel, torch.float32, config.grad_tier), config.grad_tier
                )
        return self.slabs["partial"]

"""Unsharding: from this rank's weights to usable parameters, and back."""

from __future__ import annotations

import time

import torch

from zft.dist import World
from zft.engine.pool import BufferPool, maker
from zft.engine.record import Record
from zft.engine.schedule import Fetcher, Staged
from zft.engine.unit import ParamGroup, Unit, UnitState
from zft.tiers.device import Recorder


class Sharder:
    """Gathers, widens and attaches the weights of units."""

    def __init__(self, records: dict[ParamGroup, Record], fetcher: Fetcher, world: World, record: Recorder):
        self.records, self.fetcher, self.world, self.record = records, fetcher, world, record
        groups = list(records)
        make = maker(world.device)
        self.slots = BufferPool(
            max((g.layout.padded_numel * g.compute_dtype.itemsize for g in groups), default=0), make
        )
        self.gathered = BufferPool(
            max((g.entries(g.layout.padded_numel) * g.hi_dtype.itemsize for g in groups), default=0), make
        )
        self.held: dict[ParamGroup, Staged] = {}

    def unshard(self, unit: Unit) -> None:
        """Make the unit's parameters usable. Collective over ranks."""
        staged = self.fetcher.take(unit)
        if self.world.mesh.shard > 1 and any(self._needs_gather(group) for group in unit.needed):
            self.world.agree()  # a rank whose read failed says so here, not in the gather
        started = time.perf_counter()
        for group in unit.needed:
            group.attach(self._flat(group, staged[group]))
        unit.move(UnitState.UNSHARDED)
        self.record("compute", f"unshard {unit.name}", started, time.perf_counter())

    def reshard(self, unit: Unit) -> None:
        for group in unit.needed:
            self._give_back(group)
        unit.move(UnitState.RESHARDED)

    def _give_back(self, group: ParamGroup) -> None:
        flat = group.detach()
        held = self.held.pop(group, None)
        if held is not None:
            held.release(self.fetcher.streams.record())
        for pool in (self.slots, self.gathered):
            if pool.owns(flat):
                pool.release(flat)

    def _flat(self, group: ParamGroup, staged: Staged) -> torch.Tensor:
        """[padded_numel] in the compute dtype."""
        staged.event.wait_on_compute()
        full = self._gather(group, staged)
        if group.compute_dtype == group.hi_dtype:
            if full is staged.hi:
                self.held[group] = staged
            else:
                staged.release(self.fetcher.streams.record())
            return full
        flat = self.slots.acquire(group.layout.padded_numel, group.compute_dtype)
        if group.codec is None:
            flat.copy_(full)
        else:
            self._decode(group, full, flat)
        staged.release(self.fetcher.streams.record())
        if full is not staged.hi:
            self.gathered.release(full)
        return flat

    def _decode(self, group: ParamGroup, full: torch.Tensor, flat: torch.Tensor) -> None:
        """flat [padded_numel] <- the blobs of all shards, one behind the other."""
        shard = self.records[group].ranges.hi_numel
        blobs = full.split(group.entries(shard))
        for blob, part in zip(blobs, flat.split(shard), strict=True):
            group.codec.decode(blob, part)

    def force_reshard(self, unit: Unit) -> None:
        """After an error, whatever state the unit was left in."""
        for group in unit.needed:
            if group.flat is not None:
                self._give_back(group)
        unit.state = UnitState.RESHARDED

    def _needs_gather(self, group: ParamGroup) -> bool:
        return group.stale or self.records[group].ranges.hi_numel != group.layout.padded_numel

    def _gather(self, group: ParamGroup, staged: Staged) -> torch.Tensor:
        """hi of all shards, [padded_numel] or as many blobs as shards."""
        if not self._needs_gather(group):
            return staged.hi
        ranges = self.records[group].ranges
        full = self.gathered.acquire(group.entries(group.layout.padded_numel), group.hi_dtype)
        if not group.stale or ranges.hi_numel != group.layout.padded_numel:
            self.world.gather_shards(full, staged.hi)
            return full
        own = slice(ranges.state_start, ranges.state_start + ranges.state_numel)
        self.world.gather_shards(full, staged.hi[own].clone())
        self._refresh(group, staged, full)
        self.gathered.release(full)
        return staged.hi

    def _refresh(self, group: ParamGroup, staged: Staged, full: torch.Tensor) -> None:
        """Stages 1 and 2: the other ranks' updated slices go into this rank's replica, wherever it lives."""
        staged.hi.copy_(full)
        slab = self.records[group].slabs["hi"]
        if not slab.resident:
            slab.write(0, staged.hi).result()
        elif slab.tensor.data_ptr() != staged.hi.data_ptr():
            slab.tensor.copy_(full)
        group.stale = False

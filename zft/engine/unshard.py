"""Unsharding: from this rank's weights to usable parameters, and back."""

from __future__ import annotations

import time

import torch

from zft.dist import World
from zft.engine.pool import BufferPool, maker
from zft.engine.record import Record
from zft.engine.schedule import Fetcher, Staged
from zft.engine.unit import ParamGroup, Unit, UnitState
from zft.tiers.cpu import Heap
from zft.tiers.device import Recorder


class Sharder:
    """Gathers, widens and attaches the weights of units."""

    def __init__(self, records: dict[ParamGroup, Record], fetcher: Fetcher, world: World, record: Recorder):
        self.records, self.fetcher, self.world, self.record = records, fetcher, world, record
        self.slots = BufferPool(
            max((g.layout.padded_numel * g.compute_dtype.itemsize for g in records), default=0), maker(world.device)
        )
        self.held: dict[ParamGroup, Staged] = {}
        self.heap = Heap()

    def unshard(self, unit: Unit) -> None:
        """Make the unit's parameters usable. Collective over ranks."""
        staged = self.fetcher.take(unit)
        if any(group.stale for group in unit.needed):
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
        self.heap.tidy()

    def _give_back(self, group: ParamGroup) -> None:
        flat = group.detach()
        held = self.held.pop(group, None)
        if held is not None:
            held.release(self.fetcher.streams.record())
        if self.slots.owns(flat):
            self.slots.release(flat)

    def _flat(self, group: ParamGroup, staged: Staged) -> torch.Tensor:
        """[padded_numel] in the compute dtype."""
        staged.event.wait_on_compute()
        if group.stale:
            self._refresh(group, staged)
        if group.compute_dtype == group.hi_dtype:
            self.held[group] = staged
            return staged.hi
        flat = self.slots.acquire(group.layout.padded_numel, group.compute_dtype)
        if group.codec is None:
            flat.copy_(staged.hi)
        else:
            self._decode(group, staged.hi, flat)
        staged.release(self.fetcher.streams.record())
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

    def _refresh(self, group: ParamGroup, staged: Staged) -> None:
        """Stages 1 and 2: the other ranks' updated slices go into this rank's replica, wherever it lives."""
        ranges, pool = self.records[group].ranges, self.fetcher.gathered
        full = pool.acquire(group.layout.padded_numel, group.hi_dtype)
        own = slice(ranges.state_start, ranges.state_start + ranges.state_numel)
        self.world.gather_shards(full, staged.hi[own].clone())
        staged.hi.copy_(full)
        slab = self.records[group].slabs["hi"]
        if not slab.resident:
            slab.write(0, staged.hi).result()
        elif slab.tensor.data_ptr() != staged.hi.data_ptr():
            slab.tensor.copy_(full)
        pool.release(full, self.fetcher.streams.record())
        group.stale = False

"""The schedule: which unit comes next, and its weights on their way before they are needed.

One background thread fetches units in order. Fetching a unit whose update is pending runs that update, which leaves the new
weights in the staging buffer: they are not read a second time. Where the weights are sharded over ranks, the thread also
gathers them, on groups of its own: every rank asks for the same units in the same order.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch

from zft.config import Tier
from zft.dist import RankError, World
from zft.engine.guard import CopyGuard
from zft.engine.pool import BufferPool, PinnedMemory, maker
from zft.engine.record import Record
from zft.engine.unit import ParamGroup, Pending, Unit
from zft.engine.update import Updater
from zft.tiers.device import Event, Streams
from zft.tiers.slab import Traffic


@dataclass
class Staged:
    """Weights of a group on the compute device, once `event` is reached: all of them, or at stages 1 and 2 a replica of which
    other ranks' slices may be stale."""

    hi: torch.Tensor
    event: Event
    pool: BufferPool | None
    """The pool `hi` goes back to; None: it is the slab itself."""

    def release(self, last_use: Event | None = None) -> None:
        """Give the buffer back; it may be written again once `last_use` is reached."""
        if self.pool is not None:
            self.pool.release(self.hi, last_use)


class Fetcher:
    """Brings units' weights to the device, ahead of time where the order of units is known."""

    def __init__(
        self, records: dict[ParamGroup, Record], updater: Updater, streams: Streams, pinned: PinnedMemory, world: World
    ):
        self.records, self.updater, self.streams, self.world = records, updater, streams, world
        self.record = streams.recorder
        self.traffic: Traffic = updater.traffic
        sizes = [r.hi_entries * r.group.hi_dtype.itemsize for r in records.values()]
        self.host = BufferPool(max(sizes, default=0), pinned)
        self.device = BufferPool(max(sizes, default=0), maker(streams.device)) if streams.is_cuda else None
        self.gathered = BufferPool(
            max((g.entries(g.layout.padded_numel) * g.hi_dtype.itemsize for g in records), default=0),
            maker(world.device),
        )
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="zft-fetch")
        self.meetings = 0
        """Fetches at which the ranks meet that this rank has asked for."""
        self.waiting: dict[Unit, Future] = {}
        self.failed: BaseException | None = None
        self.guard = CopyGuard()
        self.locks: dict[ParamGroup, threading.Lock] = defaultdict(threading.Lock)
        """A group's update is run by whoever needs it first: a fetch, or a save in the background."""

    def prefetch(self, unit: Unit | None) -> None:
        """Start fetching a unit, unless it is on its way or needs no fetching. Collective where weights are sharded."""
        if unit is not None and unit not in self.waiting and (self._is_sharded(unit) or not self._at_hand(unit)):
            self.waiting[unit] = self._ask(unit)

    def take(self, unit: Unit) -> dict[ParamGroup, Staged]:
        """The unit's weights; waits for a prefetch, or fetches now."""
        # a unit that was guessed wrongly still holds the buffers; its turn will come or `settle` frees it
        future = self.waiting.pop(unit, None)
        if future is None and not self._is_sharded(unit):
            return self._fetch(unit)
        if future is None:
            for wrong in self.waiting.values():  # where a fetch has failed, the ranks no longer meet in the next
                wrong.result()
            future = self._ask(unit)
        return future.result()

    def catch_up(self, error: BaseException) -> None:
        """After `error` on any rank: answer for this rank the fetches that others have asked for already. Collective."""
        while not self.world.out_of_contact:
            with suppress(RankError):  # one more rank has failed, and says so here
                asked = max(row[0] for row in self.world.gather_ints([self.meetings]))
                for _ in range(asked - self.meetings):
                    self.thread.submit(self.world.ahead.refuse, error).result()
                self.meetings = asked
                return

    def _ask(self, unit: Unit) -> Future:
        self.meetings += self._is_sharded(unit)
        return self.thread.submit(self._fetch, unit)

    def settle(self) -> None:
        """Wait for everything on its way and give the buffers back (before weights are looked at, and after an error)."""
        errors = []
        for future in self.waiting.values():
            if future.exception():
                errors.append(future.exception())
            else:
                for staged in future.result().values():
                    staged.release()
        self.waiting.clear()
        if errors:
            raise errors[0]

    def apply(self, group: ParamGroup, hi_out: torch.Tensor | None = None) -> bool:
        """Run the group's pending update, if any."""
        pending = group.pending
        if pending is None:
            return False
        self.guard.before_update(group, pending.step)
        with self.locks[group]:
            if group.pending is None:
                return False
            self._update(group, group.pending, hi_out)
            return True

    def apply_until(self, group: ParamGroup, step: int) -> None:
        """Run the group's pending update if it is of a step up to `step`; from any thread."""
        with self.locks[group]:
            if group.pending is not None and group.pending.step <= step:
                self._update(group, group.pending, None)

    def _update(self, group: ParamGroup, pending: Pending, hi_out: torch.Tensor | None) -> None:
        record = self.records[group]
        try:
            self.updater.run(record, pending, hi_out=hi_out)
        except BaseException as error:  # part of the record is updated, part is not
            self.failed = error
            raise
        record.updated = self.streams.record()
        group.outdated = group.flat is not None
        group.stale = not group.replicated and record.ranges.hi_numel != record.ranges.state_numel
        group.pending = None  # last: who sees none finds the rest in order

    def close(self) -> None:
        self.thread.shutdown(wait=True)

    def _at_hand(self, unit: Unit) -> bool:
        return all(g.pending is None and self._resident(g) for g in unit.needed)

    def _resident(self, group: ParamGroup) -> bool:
        slab = self.records[group].slabs["hi"]
        return slab.resident and (slab.tier is Tier.device or not self.streams.is_cuda)

    def _is_sharded(self, unit: Unit) -> bool:
        return any(self._is_part(group) for group in unit.needed)

    def _is_part(self, group: ParamGroup) -> bool:
        """Does each rank keep a part of the weights (stage 3)?"""
        return self.records[group].ranges.hi_numel != group.layout.padded_numel

    def _fetch(self, unit: Unit) -> dict[ParamGroup, Staged]:
        if not self._is_sharded(unit):
            return {group: self._fetch_group(group) for group in unit.needed}
        staged, error = {}, None
        try:
            for group in unit.needed:
                staged[group] = self._fetch_group(group)
        except BaseException as raised:  # told to the other ranks, which wait
            error = raised
        try:
            self.world.ahead.agree_on(unit.index, "unshards unit", error)
            for group in filter(self._is_part, unit.needed):
                staged[group] = self._gather(group, staged[group])
        except BaseException:
            for each in staged.values():
                each.release()
            raise
        return staged

    def _gather(self, group: ParamGroup, own: Staged) -> Staged:
        """[padded_numel] of all ranks, or as many blobs as ranks, from what each of them has."""
        started = time.perf_counter()
        with self.streams.beside_compute():
            full, free = self.gathered.acquire_after(group.entries(group.layout.padded_numel), group.hi_dtype)
            free.wait_on_compute()
            own.event.wait_on_compute()
            self.world.ahead.gather_shards(full, own.hi)
            done = self.streams.record()
        own.release(done)
        self.record("collective", f"gather {group.name}", started, time.perf_counter())
        return Staged(full, done, self.gathered)

    def _fetch_group(self, group: ParamGroup) -> Staged:
        record = self.records[group]
        slab = record.slabs["hi"]
        if slab.tier is not Tier.device:
            self.traffic.add("h2d", record.hi_entries * group.hi_dtype.itemsize)
        if slab.resident:
            self.apply(group)
            if not self._resident(group):
                return self._upload(slab.tensor, group)
            return Staged(slab.tensor, record.updated, None)
        buffer = self.host.acquire(record.hi_entries, group.hi_dtype)
        updates_all = group.pending is not None and record.ranges.hi_numel == record.ranges.state_numel
        if not self.apply(group, hi_out=buffer) or not updates_all:
            slab.read(0, buffer).result()
        staged = Staged(buffer, Event(), self.host)
        if not self.streams.is_cuda:
            return staged
        uploaded = self._upload(buffer, group)
        uploaded.event.synchronize()
        staged.release()
        return uploaded

    def _upload(self, host: torch.Tensor, group: ParamGroup) -> Staged:
        hi, free = self.device.acquire_after(host.numel(), host.dtype)
        event = self.streams.copy_h2d(hi, host, after=free, name=f"weights {group.name}")
        return Staged(hi, event, self.device)


class Order:
    """The order of unit visits, learnt from the last step; before that, the order of the modules."""

    def __init__(self, units: list[Unit]):
        self.known = list(units)
        self.seen: list[Unit] = []

    def begin(self) -> None:
        self.seen = []

    def after(self, unit: Unit) -> Unit | None:
        """The unit expected after this visit; notes the visit."""
        self.seen.append(unit)
        place = len(self.seen)
        if place <= len(self.known) and self.known[place - 1] is unit:
            return self.known[place] if place < len(self.known) else None
        later = [i for i, other in enumerate(self.known) if other is unit]
        return self.known[later[-1] + 1] if later and later[-1] + 1 < len(self.known) else None

    def end(self) -> None:
        self.known = list(self.seen)

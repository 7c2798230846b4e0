"""Gradients: they add up in float32 on the device for the unit at hand, are reduced over ranks, and then wait or step."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from zft.config import EngineConfig, Tier
from zft.dist import World
from zft.engine.pool import BufferPool, PinnedMemory, maker
from zft.engine.record import Memory, Record
from zft.engine.schedule import Fetcher
from zft.engine.unit import ParamGroup, Pending
from zft.engine.update import CHUNK_NUMEL
from zft.optim.norm import sumsq_blocks
from zft.tiers.cpu import aligned_empty
from zft.tiers.device import Event, recorded
from zft.tiers.nvme import wait_all
from zft.tiers.slab import Traffic


class Gradients:
    """Collects, reduces, parks and finishes the gradients of one step after another."""

    def __init__(
        self,
        records: dict[ParamGroup, Record],
        world: World,
        config: EngineConfig,
        fetcher: Fetcher,
        pinned: PinnedMemory,
    ):
        self.records, self.world, self.config = records, world, config
        self.updater, self.streams, self.record = fetcher.updater, fetcher.streams, fetcher.streams.recorder
        self.guard = fetcher.guard
        self.traffic: Traffic = self.updater.traffic
        self.folder = None
        trained = [r for g, r in records.items() if g.trainable]
        large = max((g.layout.padded_numel for g in records if g.trainable and not g.replicated), default=0)
        small = max((g.layout.padded_numel for g in records if g.trainable and g.replicated), default=0)
        self.flats = BufferPool(large * 4, maker(world.device))
        self.small_flats = BufferPool(small * 4, maker(world.device))
        staged_bytes = max((r.ranges.grad_numel * r.grad_dtype.itemsize for r in trained), default=0)
        # two: one being stored or stepped while the next unit runs backwards; a third would hide that the disk is behind
        self.staged = BufferPool(staged_bytes, pinned, limit=2)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="zft-gradient")
        self.finished: dict[ParamGroup, Future] = {}
        """Sum of squares of this rank's share, once the gradient is where it waits (or its update has run)."""
        self.immediate: Pending | None = None
        """Set while updates run in the backward pass: step, lr and scale for them."""

    def begin(self, immediate: Pending | None) -> None:
        self.immediate = immediate
        self.finished.clear()
        for group in self.records:
            group.used = [False] * len(group.used)
            group.parked = False

    def open(self, groups: list[ParamGroup]) -> None:
        """Start collecting for groups of a unit that is about to run backwards."""
        for group in groups:
            if group.trainable and group.grad_flat is None:
                pool = self.small_flats if group.replicated else self.flats
                group.open_gradients(pool.acquire(group.layout.padded_numel, torch.float32).zero_())

    def close(self, group: ParamGroup, last: bool) -> None:
        """The visit is over: reduce over ranks and park, or finish when nothing more will come. Collective."""
        started = time.perf_counter()
        flat = group.take_gradients()
        shard = self._reduce(group, flat)
        if group.parked:
            self._add_parked(group, shard)
        if last:
            self._finish(group, shard)
        else:
            self._park(group, shard)
        (self.small_flats if group.replicated else self.flats).release(flat)
        self.record("compute", f"reduce {group.name}", started, time.perf_counter())

    def finish_parked(self) -> None:
        """Finish what was parked and got no last visit (a unit that the last wave skipped)."""
        for group, record in self.records.items():
            if group.parked and group not in self.finished:
                shard = torch.zeros(record.ranges.grad_numel, dtype=torch.float32, device=self.world.device)
                self._add_parked(group, shard)
                self._finish(group, shard)

    def norm_squared(self) -> float:
        """Sum of squares over all parameters and ranks, float64. Waits for all gradients; raises their errors."""
        own = 0.0
        for group, future in self.finished.items():
            total = future.result()
            record = self.records[group]
            repeated = record.ranges.state_numel == group.layout.padded_numel and self.world.mesh.shard > 1
            if not repeated or self.world.mesh.shard_rank == 0:
                own += total
        return self.world.sum_over_shards([own])[0]

    def abandon(self) -> None:
        """After an error: forget what this step collected."""
        for future in self.finished.values():
            future.exception()
        self.finished.clear()
        for group in self.records:
            if group.grad_flat is not None:
                pool = self.small_flats if group.replicated else self.flats
                pool.release(group.take_gradients())
            group.parked = False
            group.awaited = 0

    def close_threads(self) -> None:
        self.thread.shutdown(wait=True)

    def _reduce(self, group: ParamGroup, flat: torch.Tensor) -> torch.Tensor:
        """This rank's range [grad_numel] of the sum over ranks, float32."""
        ranges = self.records[group].ranges
        if self.world.size == 1:
            return flat
        reduced = flat if self.config.reduce_dtype == "float32" else flat.to(getattr(torch, self.config.reduce_dtype))
        if ranges.grad_numel == flat.numel():
            return self.world.all_reduce(reduced).float()
        return self.world.reduce_shards(reduced).float()

    def _finish(self, group: ParamGroup, shard: torch.Tensor) -> None:
        record = self.records[group]
        slab = record.slabs["grad"]
        on_host = self.immediate is not None or slab.tier is not Tier.device
        if on_host:
            self.traffic.add("d2h", shard.numel() * record.grad_dtype.itemsize)
        if self.immediate is None and slab.resident:
            arrived = self._lower(slab.tensor, shard, group) if on_host else _on_device(slab.tensor, shard)
            self.finished[group] = self.thread.submit(self._measure, record, slab.tensor, arrived)
            return
        buffer = self.staged.acquire(shard.numel(), record.grad_dtype)
        arrived = self._lower(buffer, shard, group)
        work = self._step_now if self.immediate is not None else self._store
        self.finished[group] = self.thread.submit(work, group, record, buffer, arrived)

    def _lower(self, target: torch.Tensor, shard: torch.Tensor, group: ParamGroup) -> Event:
        """target (host) <- shard, rounded on the device; from a GPU without waiting."""
        rounded = shard if target.device == shard.device else shard.to(target.dtype)
        return self.streams.copy_d2h(target, rounded, name=f"gradient {group.name}")

    def _measure(self, record: Record, grad: torch.Tensor, arrived: Event) -> float:
        """Sum of squares of the part that this rank updates, float64, over fixed blocks in a fixed order."""
        arrived.synchronize()
        ranges = record.ranges
        first = ranges.state_start - ranges.grad_start
        return math.fsum(sumsq_blocks(grad[first : first + ranges.state_numel]).tolist())

    def _store(self, group: ParamGroup, record: Record, buffer: torch.Tensor, arrived: Event) -> float:
        try:
            arrived.synchronize()
            written = record.slabs["grad"].write(0, buffer)
            total = self._measure(record, buffer, arrived)
            written.result()
            return total
        finally:
            self.staged.release(buffer)

    def _step_now(self, group: ParamGroup, record: Record, buffer: torch.Tensor, arrived: Event) -> float:
        try:
            total = self._measure(record, buffer, arrived)
            if not math.isfinite(total):
                raise FloatingPointError(
                    f"the gradient of {group.name} is not finite at step {self.immediate.step}; "
                    "engine.nonfinite=skip leaves such a step out"
                )
            now = self.immediate
            self.guard.before_update(group, now.step)
            pending = group.pending_update(now.step, now.lr, now.grad_scale)
            first = record.ranges.state_start - record.ranges.grad_start
            self.updater.run(record, pending, grad=buffer[first : first + record.ranges.state_numel])
            record.updated = self.streams.record()
            group.outdated = group.flat is not None
            group.stale = not group.replicated and record.ranges.hi_numel != record.ranges.state_numel
            return total
        finally:
            self.staged.release(buffer)

    def _park(self, group: ParamGroup, shard: torch.Tensor) -> None:
        record = self.records[group]
        slab = record.allocate_partial(self.config, self.folder, Memory(self.world.device, aligned_empty), self.traffic)
        if slab.tier is not Tier.device:
            self.traffic.add("d2h", shard.numel() * 4)
        if slab.tier is Tier.device:
            slab.tensor.copy_(shard)
        elif slab.resident:
            with recorded(self.record, "d2h", f"partial gradient {group.name}"):
                slab.tensor.copy_(shard)
        else:
            # through aligned host memory: a reduced shard may lie anywhere, and on a GPU
            pieces, buffers = _pieces(shard.numel())
            writes = []
            for i, (start, end) in enumerate(pieces):
                if i >= 2:
                    writes[i - 2].result()
                with recorded(self.record, "d2h", f"partial gradient {group.name}"):
                    piece = buffers[i % 2][: end - start].copy_(shard[start:end])
                writes.append(slab.write(start, piece))
            wait_all(writes)
        group.parked = True

    def _add_parked(self, group: ParamGroup, shard: torch.Tensor) -> None:
        """shard [grad_numel] float32 += the partial gradient, in pieces."""
        slab = self.records[group].slabs["partial"]
        group.parked = False
        if slab.tier is not Tier.device:
            self.traffic.add("h2d", shard.numel() * 4)
        if slab.resident:
            shard.add_(slab.tensor.to(shard.device))
            return
        pieces, buffers = _pieces(shard.numel())
        reads = [slab.read(start, buffers[i % 2][: end - start]) for i, (start, end) in enumerate(pieces[:2])]
        for i, (start, end) in enumerate(pieces):
            reads[i].result()
            shard[start:end].add_(buffers[i % 2][: end - start].to(shard.device))
            if i + 2 < len(pieces):
                first, last = pieces[i + 2]
                reads.append(slab.read(first, buffers[i % 2][: last - first]))


def _on_device(target: torch.Tensor, shard: torch.Tensor) -> Event:
    target.copy_(shard)
    return Event()


def _pieces(numel: int) -> tuple[list[tuple[int, int]], list[torch.Tensor]]:
    """([start, end) of each piece, two page-aligned float32 host buffers to take turns)."""
    pieces = [(start, min(start + CHUNK_NUMEL, numel)) for start in range(0, numel, CHUNK_NUMEL)]
    largest = min(CHUNK_NUMEL, numel)
    return pieces, [aligned_empty(largest * 4).view(torch.float32) for _ in pieces[:2]]

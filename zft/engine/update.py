"""The update of a group: one streamed pass over its record in chunks, on worker threads that release the GIL."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from zft.config import EngineConfig, Tier
from zft.engine.layout import round_up
from zft.engine.record import PAGE_BYTES, Record
from zft.engine.unit import Pending
from zft.optim.rules import Hyper, Segments
from zft.tiers.cpu import aligned_empty
from zft.tiers.device import Recorder, recorded, unrecorded
from zft.tiers.nvme import wait_all
from zft.tiers.slab import Traffic

CHUNK_NUMEL = 1 << 20


class Updater:
    """Runs updates; several chunks are in flight, so that reading, arithmetic and writing overlap."""

    def __init__(self, config: EngineConfig, device: torch.device, traffic: Traffic, recorder: Recorder = unrecorded):
        self.config, self.device, self.traffic, self.recorder = config, device, traffic, recorder
        streamed = Tier.nvme in (config.state_tier, config.param_tier, config.grad_tier)
        cores = config.update_threads or len(os.sched_getaffinity(0))
        self.workers = max(cores, 4) if streamed else cores
        self.pool = ThreadPoolExecutor(self.workers, thread_name_prefix="zft-update")
        self.staging = threading.local()

    def run(
        self, record: Record, pending: Pending, grad: torch.Tensor | None = None, hi_out: torch.Tensor | None = None
    ) -> None:
        """Apply `pending` to the record. `grad`: the gradient [state_numel] if it is not in its slab.

        `hi_out` [hi_numel]: also leave the updated weights here (only where the weights' slab is not resident).
        """
        chunks, lock = iter(self._chunks(record)), threading.Lock()
        jobs = [
            self.pool.submit(self._work, chunks, lock, (record, pending, grad, hi_out)) for _ in range(self.workers)
        ]
        errors = [error for job in jobs if (error := job.exception())]
        if errors:
            raise errors[0]

    def forget(self) -> None:
        """Let go of the workers' staging buffers; the next update makes others."""
        self.staging = threading.local()

    def close(self) -> None:
        self.pool.shutdown(wait=True)

    @staticmethod
    def _chunks(record: Record) -> Iterator[tuple[int, int]]:
        """[start, end) in elements of the state's own range."""
        total = record.ranges.state_numel
        return ((start, min(start + CHUNK_NUMEL, total)) for start in range(0, total, CHUNK_NUMEL))

    def _work(self, chunks: Iterator[tuple[int, int]], lock: threading.Lock, task: tuple) -> None:
        while True:
            with lock:
                chunk = next(chunks, None)
            if chunk is None:
                return
            self._chunk(*chunk, *task)

    def _chunk(self, start: int, end: int, record: Record, pending: Pending, grad, hi_out) -> None:
        ranges, rule = record.ranges, record.rule
        parts = segments_of(record, pending, start, end)
        if not parts and hi_out is None:
            return
        views, reads, writes, used_bytes = {}, [], [], 0
        shift = {"hi": ranges.state_start - ranges.hi_start, "grad": ranges.state_start - ranges.grad_start}
        wanted = [(f.name, f.dtype, f.block) for f in rule.fields]
        if grad is None:
            wanted.append(("grad", record.grad_dtype, 1))
        for name, dtype, block in wanted:
            first, count = (start + shift.get(name, 0)) // block, (end - start) // block
            slab = record.slabs[name]
            if slab.resident:
                views[name] = slab.view(first, first + count)
                continue
            if name == "hi" and hi_out is not None:
                views[name] = hi_out[first : first + count]
            else:
                views[name] = self._stage(used_bytes, count, dtype)
                used_bytes += round_up(count * dtype.itemsize, PAGE_BYTES)
            reads.append(slab.read(first, views[name]))
            if name != "grad":
                writes.append((slab, first, views[name]))
        wait_all(reads)
        if not parts:
            return
        gradient = views.pop("grad") if grad is None else grad[start:end]
        with recorded(self.recorder, "update", record.group.name):
            for step, segments in parts.items():
                rule.update(views, gradient, segments, Hyper(step, pending.lr, pending.grad_scale))
        wait_all([slab.write(first, view) for slab, first, view in writes])

    def _stage(self, offset_bytes: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A page-aligned piece of this worker's own staging buffer."""
        staging = self.staging  # `forget` may put another in its place
        if not hasattr(staging, "buffer"):
            staging.buffer = aligned_empty(CHUNK_NUMEL * 24)
        return staging.buffer[offset_bytes : offset_bytes + count * dtype.itemsize].view(dtype)


def segments_of(record: Record, pending: Pending, start: int, end: int) -> dict[int, Segments]:
    """{step count: segments} of the used parameters' parts of a chunk, relative to it."""
    offset = record.ranges.state_start + start
    spans = record.group.layout.spans
    rows: dict[int, list[tuple[int, int, float]]] = {}
    for index, first, last in record.group.layout.pieces(offset, offset + end - start):
        if pending.used[index]:
            row = (first - offset, last - offset, float(spans[index].decay))
            rows.setdefault(pending.step - pending.missed[index], []).append(row)
    return {step: Segments.of(found) for step, found in rows.items()}

"""Weights out of the engine: full parameters of one group at a time, whole on every rank, float32 or as they compute."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zft.dist import World
from zft.engine.fill import get_field
from zft.engine.pool import maker
from zft.engine.record import Record
from zft.engine.update import CHUNK_NUMEL
from zft.tiers.cpu import aligned_empty


def full_group(record: Record, world: World, master: bool) -> torch.Tensor:
    """[padded_numel] on the CPU: float32 masters, or `hi`. Collective; the engine must have drained."""
    own = own_weights(record, master)
    ranges, padded = record.ranges, record.group.layout.padded_numel
    if own.numel() == padded:
        return own
    assert ranges.state_numel * world.mesh.shard == padded or record.rule is None
    world.agree()  # a rank that failed says so here, not in the gather
    make = maker(world.device)
    full = make(padded * own.dtype.itemsize)[: padded * own.dtype.itemsize].view(own.dtype)
    world.gather_shards(full, own.to(world.device))
    return full.cpu()


def own_weights(record: Record, master: bool) -> torch.Tensor:
    """This rank's part on the CPU: of the state's range as float32 masters, or of hi's (state's range where that is known
    to be current). Quantized weights come back in float32."""
    ranges = record.ranges
    if record.group.codec is not None:
        out = aligned_empty(ranges.hi_numel * 4).view(torch.float32)
        record.group.codec.decode(_whole(record, 0, record.hi_entries), out)
        return out
    shift = ranges.state_start - ranges.hi_start
    if record.rule is None:
        return _whole(record, 0, ranges.hi_numel).to(torch.float32 if master else record.group.hi_dtype)
    if not master:
        return _whole(record, shift, shift + ranges.state_numel)
    out = aligned_empty(ranges.state_numel * 4)[: ranges.state_numel * 4].view(torch.float32)
    for start in range(0, ranges.state_numel, CHUNK_NUMEL):
        end = min(start + CHUNK_NUMEL, ranges.state_numel)
        names = [f for f in record.rule.fields if f.name in ("hi", "lo", "master")]
        views = {}
        for f in names:
            first = (start + shift) if f.name == "hi" else start
            views[f.name] = get_field(record, f.name, first, first + end - start)
        out[start:end] = record.rule.master(views)
    return out


def _whole(record: Record, start: int, end: int) -> torch.Tensor:
    """Entries [start, end) of `hi` on the CPU: one request, so that all of the disk's threads read."""
    slab = record.slabs["hi"]
    if slab.resident:
        return slab.view(start, end).to("cpu", copy=True)
    out = aligned_empty((end - start) * slab.dtype.itemsize)[: (end - start) * slab.dtype.itemsize].view(slab.dtype)
    slab.read(start, out).result()
    return out


def group_tensors(record: Record, world: World, master: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, CPU tensor) of a group's parameters; views of one buffer, valid until the next group."""
    full = full_group(record, world, master)
    for span in record.group.layout.spans:
        yield span.name, full[span.offset : span.end].view(span.shape)

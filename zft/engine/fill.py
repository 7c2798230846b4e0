"""Filling records: the first weights into their final place, one group at a time."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch

from zft.engine.record import Record
from zft.engine.unit import ParamGroup
from zft.engine.update import CHUNK_NUMEL
from zft.tiers.cpu import aligned_empty
from zft.tiers.nvme import wait_all


def fill_record(record: Record, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Store (name, CPU tensor) of every parameter of the group; moments start at zero.

    bfloat16 weights become `hi` as they are (lo = 0); wider ones keep their exact float32 value as master.
    """
    group, ranges = record.group, record.ranges
    flat = assemble(group, weights)
    if group.codec is not None:
        put_field(record, "hi", _encoded(record, flat[ranges.hi_start : ranges.hi_start + ranges.hi_numel]))
        return
    if record.rule is None or (flat.dtype == group.hi_dtype and "master" not in record.slabs):
        put_field(record, "hi", flat[ranges.hi_start : ranges.hi_start + ranges.hi_numel].to(group.hi_dtype))
        return  # hi is the exact master: the rest of the record is zeros, as its slabs are from the start
    # hi reaches beyond the state's range at stages 1 and 2, and is rounded there as the owner of that range rounds it
    ends = (
        ranges.hi_start,
        ranges.state_start,
        ranges.state_start + ranges.state_numel,
        ranges.hi_start + ranges.hi_numel,
    )
    for first, last in pairwise(ends):
        for start in range(first, last, CHUNK_NUMEL):
            _init_chunk(record, flat, start, min(start + CHUNK_NUMEL, last))


def _init_chunk(record: Record, flat: torch.Tensor, start: int, end: int) -> None:
    """Elements [start, end) of the group, all within the state's range or all outside of it."""
    ranges = record.ranges
    owned = ranges.state_start <= start < ranges.state_start + ranges.state_numel
    views = {f.name: _scratch(f.dtype, (end - start) // f.block) for f in record.rule.fields}
    record.rule.init(views, flat[start:end])
    for f in record.rule.fields:
        if f.name == "hi":
            put(record.slabs["hi"], start - ranges.hi_start, views["hi"], fresh=True)
        elif owned:
            put(record.slabs[f.name], (start - ranges.state_start) // f.block, views[f.name], fresh=True)


def _encoded(record: Record, own: torch.Tensor) -> torch.Tensor:
    blob = aligned_empty(record.hi_entries)
    record.group.codec.encode(own, blob)
    return blob


def assemble(group: ParamGroup, weights: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """[padded_numel] of all parameters, zeros between them: hi's dtype where nothing is lost by it, else float32."""
    flat, spans = None, {span.name: span for span in group.layout.spans}
    narrow = group.hi_dtype if group.codec is None else torch.bfloat16
    for name, tensor in weights:
        span = spans.pop(name)
        assert tuple(tensor.shape) == span.shape, f"{name} has shape {tuple(tensor.shape)}, its place has {span.shape}"
        if flat is None:
            dtype = narrow if tensor.dtype == narrow else torch.float32
            flat = aligned_empty(group.layout.padded_numel * dtype.itemsize).view(dtype).zero_()
        elif flat.dtype != torch.float32 and tensor.dtype != flat.dtype:
            flat = flat.float()
        flat[span.offset : span.end].copy_(tensor.reshape(-1))
    assert not spans, f"no weights came for {sorted(spans)}"
    return flat


def put_field(record: Record, name: str, values: torch.Tensor) -> None:
    """Store all of a field's range from values of its dtype."""
    slab = record.slabs[name]
    for start in range(0, values.numel(), CHUNK_NUMEL):
        part = values[start : start + CHUNK_NUMEL]
        if not slab.resident:
            part = _scratch(part.dtype, part.numel()).copy_(part)
        put(slab, start, part)


def put(slab, first: int, values: torch.Tensor, fresh: bool = False) -> None:
    """Store values at element `first`. `fresh`: the slab was just made, so that zeros lie there already."""
    if slab.resident:
        slab.view(first, first + values.numel()).copy_(values)
    elif not (fresh and not values.view(torch.uint8).any()):
        wait_all([slab.write(first, values)])


def get_field(record: Record, name: str, start: int, end: int) -> torch.Tensor:
    """A CPU copy of elements [start, end) of a field; start is a multiple of CHUNK_NUMEL or 0."""
    slab = record.slabs[name]
    out = _scratch(slab.dtype, end - start)
    if slab.resident:
        return out.copy_(slab.view(start, end))
    wait_all([slab.read(start, out)])
    return out


def _scratch(dtype: torch.dtype, numel: int) -> torch.Tensor:
    return aligned_empty(numel * dtype.itemsize)[: numel * dtype.itemsize].view(dtype)

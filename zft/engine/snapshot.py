"""A record as it is kept outside the engine: by parameter name and element, without padding, whatever the placement.

Each rank stores its shard of every group (also at the stages where it holds more), so that together the ranks of one copy
store every element once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from zft.engine.fill import put
from zft.engine.record import PAGE_BYTES, Record
from zft.engine.unit import ParamGroup
from zft.engine.update import CHUNK_NUMEL
from zft.precision import Field
from zft.tiers.cpu import aligned_empty
from zft.tiers.slab import Slab, done

Reader = Callable[[str, Field, int, int, torch.Tensor], None]
"""(parameter, field, first, last, out): fill `out` with the entries of elements [first, last)."""


@dataclass(frozen=True)
class Part:
    """Elements [first, last) of a parameter, in row-major order."""

    name: str
    first: int
    last: int


def fields_of(record: Record) -> tuple[Field, ...]:
    """What is stored of a record; `hi` alone for frozen parameters."""
    return record.rule.fields if record.rule is not None else (Field("hi", record.group.hi_dtype),)


def own_range(group: ParamGroup, shard_rank: int) -> tuple[int, int]:
    """[start, end) of the group's flat buffer that a rank stores; replicated leftovers are rank 0's."""
    if group.replicated:
        return (0, group.layout.padded_numel) if shard_rank == 0 else (0, 0)
    start = group.layout.shard_start(shard_rank)
    return start, start + group.layout.shard_numel


def parts_of(group: ParamGroup, shard_rank: int) -> list[Part]:
    """What a rank stores of a group, in order."""
    spans = group.layout.spans
    pieces = group.layout.pieces(*own_range(group, shard_rank))
    return [Part(spans[i].name, first - spans[i].offset, last - spans[i].offset) for i, first, last in pieces]


def stream_field(record: Record, field: Field, shard_rank: int) -> Iterator[torch.Tensor]:
    """The entries of a field of `parts_of`, one after the other, in pieces of at most CHUNK_NUMEL elements.

    CPU tensors, valid until the next. The next chunk is read from the NVMe tier while one is used; it is not traffic.
    """
    start, end = own_range(record.group, shard_rank)
    base = _field_range(record, field)[0]
    slab, block = record.slabs[field.name], field.block
    chunks = [(at, min(at + CHUNK_NUMEL, end)) for at in range(start, end, CHUNK_NUMEL)]
    buffers = [aligned_empty(CHUNK_NUMEL // block * field.dtype.itemsize + 2 * PAGE_BYTES) for _ in chunks[:2]]
    if slab.resident:
        buffers = [None, None]
    coming: list[Future] = []
    for number, (at, stop) in enumerate(chunks):
        for later in range(len(coming), min(number + 2, len(chunks))):
            first, last = chunks[later]
            coming.append(_read(slab, (first - base) // block, -(-(last - base) // block), buffers[later % 2]))
        entries = coming[number].result()
        for _, first, last in record.group.layout.pieces(at, stop):
            yield entries[(first - at) // block : -(-(last - at) // block)]


def restore_record(record: Record, read: Reader) -> None:
    """Fill a record from stored entries; the padding becomes zeros. An update that waits is dropped."""
    group = record.group
    for field in fields_of(record):
        start, numel = _field_range(record, field)
        slab, block = record.slabs[field.name], field.block
        size = min(numel, CHUNK_NUMEL) // block
        buffer = aligned_empty(size * field.dtype.itemsize)[: size * field.dtype.itemsize].view(field.dtype)
        for at in range(start, start + numel, CHUNK_NUMEL):
            stop = min(at + CHUNK_NUMEL, start + numel)
            chunk = buffer[: (stop - at) // block].zero_()
            for index, first, last in group.layout.pieces(at, stop):
                span = group.layout.spans[index]
                out = chunk[(first - at) // block : -(-(last - at) // block)]
                read(span.name, field, first - span.offset, last - span.offset, out)
            put(slab, (at - start) // block, chunk)
    group.pending, group.stale, group.outdated = None, False, group.flat is not None


def _field_range(record: Record, field: Field) -> tuple[int, int]:
    """(start, numel) of the flat elements that this rank holds of a field."""
    ranges = record.ranges
    if field.name == "hi":
        return ranges.hi_start, ranges.hi_numel
    return ranges.state_start, ranges.state_numel


def _read(slab: Slab, first: int, last: int, buffer: torch.Tensor | None) -> Future:
    """A future of entries [first, last) on the CPU: the slab's own memory, or read from its file into `buffer`."""
    if slab.resident:
        return done(slab.view(first, last).cpu())
    itemsize = slab.dtype.itemsize
    lead = first * itemsize % PAGE_BYTES
    nbytes = (last - first) * itemsize
    reading = slab.file.read(slab.base_bytes + first * itemsize - lead, buffer[: lead + nbytes])
    whole: Future = Future()

    def finish(read: Future) -> None:
        error = read.exception()
        if error is not None:
            whole.set_exception(error)
        else:
            whole.set_result(buffer[lead : lead + nbytes].view(slab.dtype))

    reading.add_done_callback(finish)
    return whole

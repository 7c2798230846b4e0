"""Checkpoints to go on from: each rank streams its shard of the state into one file, rank 0 seals them with a manifest.

    save: .tmp-step-… made -> every rank: its file, hashed on the way, fsynced -> manifest, fsynced -> rename -> fsync
    load: manifest, sizes and checksums -> does it fit this engine? -> every rank reads what it needs, at any world size,
          stage and placement

All ranks take part and all raise when one cannot; nothing is loaded from a checkpoint that is damaged or does not fit.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from zft.checkpoint import disk
from zft.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    StoredFile,
    StoredTensor,
    overlaps,
    tensor_key,
)
from zft.checkpoint.shard import ShardWriter
from zft.config import ZftError
from zft.dist import World
from zft.engine.parts import Parts
from zft.engine.record import Record
from zft.engine.snapshot import fields_of, parts_of, restore_record, stream_field
from zft.models.tensorfile import NAMES, TensorFile
from zft.precision import Field

T = TypeVar("T")
_OURS = re.compile(rf"rank-\d+-of-\d+\.safetensors|{re.escape(MANIFEST)}")
"""What a save may replace, whole or not."""
VALUE = "value"
"""The only field of a buffer."""


@dataclass
class Content:
    """What a checkpoint holds beside the records."""

    engine: dict
    """Plain data: the engine's counters."""
    train: dict
    """Plain data of the caller."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Persistent buffers, equal on all ranks."""
    with_frozen: bool = False
    """Also the frozen parameters, which otherwise come from the base model again."""


def save_checkpoint(folder: Path, parts: Parts, content: Content) -> None:
    """Write the engine's state as checkpoint `folder`, replacing a checkpoint of that name. Collective; drain before.

    Raises ZftError where `folder` is something else than a checkpoint, OSError where the disk fails; `folder` is then as
    it was.
    """
    world, work = parts.world, disk.work_folder(folder)
    records = [record for record in parts.records.values() if record.rule is not None or content.with_frozen]
    try:
        _on_main(world, lambda: _prepare(folder, work))
        stored = together(world, lambda: _write_shard(work, records, world, content.buffers))
        files = _gather_files(world, stored)
        manifest = Manifest(files, _layout(records, world, content.buffers), content.engine, content.train)
        _on_main(world, lambda: _seal(folder, work, manifest))
    except BaseException:
        if world.is_main:
            with contextlib.suppress(OSError):  # the error that is raised says more; the next save removes it
                disk.remove_tree(work)
        raise


def load_checkpoint(folder: Path, parts: Parts, buffers: dict[str, torch.Tensor]) -> Manifest:
    """Restore every record and the buffers, in place. Collective; the caller restores what the manifest says.

    Raises DamagedCheckpoint or ZftError (it is of another model, precision or optimizer) before anything is changed.
    """
    world = parts.world
    manifest = together(world, lambda: Manifest.read(folder))
    _verify(folder, manifest, world)
    together(world, lambda: _check_fit(folder, manifest, parts, buffers))
    parts.fetcher.settle()
    together(world, lambda: _restore(folder, manifest, parts, buffers))
    return manifest


def together(world: World, action: Callable[[], T]) -> T:
    """The action's result, once it has worked on all ranks; an error on one is raised on all."""
    error = result = None
    try:
        result = action()
    except Exception as raised:  # the other ranks wait in the agreement
        error = raised
    world.agree(error)
    return result


def file_name(shard_rank: int, shard_ranks: int) -> str:
    return f"rank-{shard_rank:05d}-of-{shard_ranks:05d}.safetensors"


def _on_main(world: World, action: Callable[[], None]) -> None:
    together(world, action if world.is_main else lambda: None)


def _prepare(folder: Path, work: Path) -> None:
    if folder.exists() and not (folder.is_dir() and all(_OURS.fullmatch(path.name) for path in folder.iterdir())):
        raise ZftError(f"{folder} exists and is no checkpoint; choose another folder")
    if not folder.parent.is_dir():
        disk.DISK.make_folder(folder.parent)
    disk.remove_stale(folder.parent)
    if work.exists():
        disk.remove_tree(work)
    disk.DISK.make_folder(work)


def _write_shard(work: Path, records: list[Record], world: World, buffers: dict[str, torch.Tensor]) -> StoredFile | None:
    """This rank's file; None on the ranks that hold a further copy."""
    mesh = world.mesh
    if world.rank >= mesh.shard:
        return None
    own = {name: buffer.detach().cpu().contiguous() for name, buffer in buffers.items()} if world.is_main else {}
    planned = [(tensor_key(name, VALUE, 0), buffer.dtype, buffer.numel()) for name, buffer in own.items()]
    for record in records:
        for each in fields_of(record):
            for part in parts_of(record.group, mesh.shard_rank):
                planned.append((tensor_key(part.name, each.name, part.first), each.dtype, each.entries(part.last - part.first)))
    writer = ShardWriter(work / file_name(mesh.shard_rank, mesh.shard), planned)
    try:
        for buffer in own.values():
            writer.write(buffer.reshape(-1))
        for record in records:
            for each in fields_of(record):
                for entries in stream_field(record, each, mesh.shard_rank):
                    writer.write(entries)
        return writer.finish()
    finally:
        writer.close()


def _gather_files(world: World, stored: StoredFile | None) -> dict[str, StoredFile]:
    """Size and checksum of every rank's file, on all ranks."""
    digest = int(stored.xxh3_128, 16) if stored else 0
    words = [digest >> shift & 0xFFFFFFFF for shift in (96, 64, 32, 0)]
    rows = world.gather_ints([stored.nbytes if stored else 0, *words])
    files = {}
    for rank, (nbytes, *four) in enumerate(rows[: world.mesh.shard]):
        files[file_name(rank, world.mesh.shard)] = StoredFile(nbytes, "".join(f"{word:08x}" for word in four))
    return files


def _layout(records: list[Record], world: World, buffers: dict[str, torch.Tensor]) -> dict[str, StoredTensor]:
    """What is where: pure arithmetic, the same for all ranks' files."""
    ranks = world.mesh.shard
    tensors = {
        name: StoredTensor("buffer", tuple(b.shape), {VALUE: NAMES[b.dtype]}, [(file_name(0, ranks), 0, b.numel())])
        for name, b in buffers.items()
    }
    for record in records:
        pieces: dict[str, list[tuple[str, int, int]]] = {span.name: [] for span in record.group.layout.spans}
        for rank in range(ranks):
            for part in parts_of(record.group, rank):
                pieces[part.name].append((file_name(rank, ranks), part.first, part.last))
        for span in record.group.layout.spans:
            tensors[span.name] = StoredTensor(_kind(record), span.shape, _field_names(record), pieces[span.name])
    return tensors


def _seal(folder: Path, work: Path, manifest: Manifest) -> None:
    """The manifest is the last file; then the folder gets its name."""
    fd = disk.DISK.create(work / MANIFEST)
    try:
        disk.DISK.write(fd, memoryview(manifest.to_json().encode()))
        disk.DISK.sync(fd)
    finally:
        disk.DISK.close(fd)
    disk.DISK.sync_folder(work)
    disk.put_in_place(work, folder)


def _verify(folder: Path, manifest: Manifest, world: World) -> None:
    """Every byte, shared between the ranks. Raises DamagedCheckpoint on all of them."""
    names = sorted(manifest.files)
    error = bad = None
    try:
        bad = manifest.digests_differ(folder, names[world.rank :: world.size])
    except OSError as raised:
        error = DamagedCheckpoint(f"{folder} cannot be read ({raised}); use an earlier checkpoint")
    world.agree(error)
    rows = world.gather_ints([names.index(bad) + 1 if bad else 0])
    found = [names[row[0] - 1] for row in rows if row[0]]
    if found:
        raise DamagedCheckpoint(f"{folder / found[0]} is damaged (checksum); use an earlier checkpoint")


def _check_fit(folder: Path, manifest: Manifest, parts: Parts, buffers: dict[str, torch.Tensor]) -> None:
    """Raises ZftError that names what differs between the checkpoint and this engine."""
    stored, differ = dict(manifest.tensors), []
    for record in parts.records.values():
        for span in record.group.layout.spans:
            found = stored.pop(span.name, None)
            if found is None:
                if record.rule is not None:
                    differ.append(f"{span.name} is not in it")
                continue
            for what, there, here in (
                ("kind", found.kind, _kind(record)),
                ("shape", list(found.shape), list(span.shape)),
                ("record", _shown(found.fields), _shown(_field_names(record))),
            ):
                if there != here:
                    differ.append(f"{span.name} has {what} {there} there and {here} here")
    extra = [name for name, each in stored.items() if each.kind != "buffer"]
    differ += [f"{name} is not in this model" for name in extra]
    differ += [
        f"buffer {name} has shape {list(stored[name].shape)} there and {list(buffer.shape)} here"
        for name, buffer in buffers.items()
        if name in stored and stored[name].shape != tuple(buffer.shape)
    ]
    if differ:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise ZftError(
            f"{folder} does not fit this engine: {'; '.join(differ[:3])}{more}; use the model, precision, optimizer and "
            "method that it was saved with"
        )


def _restore(folder: Path, manifest: Manifest, parts: Parts, buffers: dict[str, torch.Tensor]) -> None:
    files = ShardFiles(folder, manifest)
    try:
        for record in parts.records.values():
            if all(span.name in manifest.tensors for span in record.group.layout.spans):
                restore_record(record, files.read)
        for name, buffer in buffers.items():
            if name in manifest.tensors:
                values = torch.empty(buffer.numel(), dtype=buffer.dtype)
                files.read(name, Field(VALUE, buffer.dtype), 0, buffer.numel(), values)
                buffer.copy_(values.view(buffer.shape))
    finally:
        files.close()


class ShardFiles:
    """The shards of a checkpoint, opened when first needed."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self._open: dict[str, TensorFile] = {}

    def read(self, name: str, field: Field, first: int, last: int, out: torch.Tensor) -> None:
        """Fill `out` with a field's entries of elements [first, last) of a parameter, from however many shards."""
        block, itemsize = field.block, field.dtype.itemsize
        for piece, start, end in overlaps(self.manifest.tensors[name], first, last):
            file = self._file(piece[0])
            entry = file.entries[tensor_key(name, field.name, piece[1])]
            part = out[(start - first) // block : -(-(end - first) // block)]
            file.read_into(entry.start + (start - piece[1]) // block * itemsize, part)

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = TensorFile(self.folder / name)
        return self._open[name]


def _kind(record: Record) -> str:
    return "frozen" if record.rule is None else "trained"


def _field_names(record: Record) -> dict[str, str]:
    return {f.name: NAMES[f.dtype] + (f"/{f.block}" if f.block > 1 else "") for f in fields_of(record)}


def _shown(fields: dict[str, str]) -> str:
    return " ".join(f"{name}:{dtype}" for name, dtype in fields.items())

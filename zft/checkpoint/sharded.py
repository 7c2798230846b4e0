"""Checkpoints to go on from: each rank streams its shard of the state into one file, rank 0 seals them with a manifest.

    .tmp-step-… made -> every rank: its file, hashed on the way, fsynced -> manifest, fsynced -> rename -> fsync

The middle part may run while the next step computes: a thread copies record after record, each after its own update, and
a later update of a record waits until it is copied. All ranks take part and all raise when one cannot.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from zft.checkpoint import disk
from zft.checkpoint.manifest import MANIFEST, Manifest, StoredFile, StoredTensor, tensor_key
from zft.checkpoint.shard import ShardWriter
from zft.config import ZftError
from zft.dist import World
from zft.engine.parts import Parts
from zft.engine.record import Record
from zft.engine.snapshot import fields_of, parts_of, stream_field
from zft.models.tensorfile import NAMES

T = TypeVar("T")
_OURS = re.compile(rf"rank-\d+-of-\d+\.safetensors|{re.escape(MANIFEST)}")
"""What a save may replace, whole or not."""
VALUE = "value"
"""The only field of a buffer."""


@dataclass
class Content:
    """What a checkpoint holds beside the records."""

    engine: dict
    """Plain data: the engine's counters, among them `step_count`."""
    train: dict
    """Plain data of the caller."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Persistent buffers, equal on all ranks."""
    with_frozen: bool = False
    """Also the frozen parameters, which otherwise come from the base model again."""


class Saving:
    """One checkpoint on its way: `copy` here or `start` in a thread, then `finish`; `abandon` leaves it unfinished.

    Collective, but for `copy` and what it does. Raises ZftError where `folder` is something else than a checkpoint, OSError
    where the disk fails; `folder` is then as it was.
    """

    def __init__(self, folder: Path, parts: Parts, content: Content):
        self.folder, self.parts, self.content = folder, parts, content
        self.work, self.world = disk.work_folder(folder), parts.world
        # quantized groups have come from a base model, and come from there again
        with_frozen = [r for r in parts.records.values() if content.with_frozen and r.group.codec is None]
        self.records = [r for r in parts.records.values() if r.rule is not None or r in with_frozen]
        self.buffers = {name: buffer.detach().cpu().clone().contiguous() for name, buffer in content.buffers.items()}
        self.stored: StoredFile | None = None
        self.error: Exception | None = None
        self.abandoned = False
        self.thread: threading.Thread | None = None
        parts.fetcher.settle()
        self._on_main(lambda: _prepare(folder, self.work))

    def copy(self) -> None:
        """Write this rank's file; an error waits in `error` until all ranks meet in `finish`."""
        try:
            self.stored = self._write_shard()
        except Exception as raised:
            self.error = raised
        finally:
            self.parts.fetcher.guard.end()

    def start(self) -> None:
        """Copy in a thread."""
        self.parts.fetcher.guard.begin([record.group for record in self.records], self.content.engine["step_count"])
        self.thread = threading.Thread(target=self.copy, name="zft-save", daemon=True)
        self.thread.start()

    @property
    def is_copied(self) -> bool:
        """On this rank."""
        return self.thread is None or not self.thread.is_alive()

    def finish(self) -> None:
        """Wait for the copy, seal the checkpoint and give it its name."""
        if self.thread is not None:
            self.thread.join()
        try:
            self.world.agree(self.error)
            files = _gather_files(self.world, self.stored)
            layout = _layout(self.records, self.world, self.buffers)
            manifest = Manifest(files, layout, self.content.engine, self.content.train)
            self._on_main(lambda: _seal(self.folder, self.work, manifest))
        except BaseException:
            if self.world.is_main:
                with contextlib.suppress(OSError):  # the error that is raised says more; the next save removes it
                    disk.remove_tree(self.work)
            raise

    def abandon(self) -> None:
        """End the copy soon. What it has written is removed by the next save."""
        self.abandoned = True
        if self.thread is not None:
            self.thread.join()

    def _on_main(self, action: Callable[[], None]) -> None:
        together(self.world, action if self.world.is_main else lambda: None)

    def _write_shard(self) -> StoredFile | None:
        """This rank's file; None on the ranks that hold a further copy."""
        mesh, fetcher = self.world.mesh, self.parts.fetcher
        if self.world.rank >= mesh.shard:
            return None
        buffers = self.buffers if self.world.is_main else {}
        planned = [(tensor_key(name, VALUE, 0), buffer.dtype, buffer.numel()) for name, buffer in buffers.items()]
        for record in self.records:
            planned += _planned(record, mesh.shard_rank)
        writer = ShardWriter(self.work / file_name(mesh.shard_rank, mesh.shard), planned)
        try:
            for buffer in buffers.values():
                writer.write(buffer.reshape(-1))
            for record in self.records:
                fetcher.apply_until(record.group, self.content.engine["step_count"])
                for each in fields_of(record):
                    for entries in stream_field(record, each, mesh.shard_rank):
                        if self.abandoned:
                            raise RuntimeError(f"the save of {self.folder} was given up")
                        writer.write(entries)
                fetcher.guard.copied(record.group)
            return writer.finish()
        finally:
            writer.close()


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


def kind_of(record: Record) -> str:
    return "frozen" if record.rule is None else "trained"


def field_names(record: Record) -> dict[str, str]:
    """{"hi": "BF16", "m_scale": "F32/256", ...} of a record, as the manifest has them."""
    return {f.name: NAMES[f.dtype] + (f"/{f.block}" if f.block > 1 else "") for f in fields_of(record)}


def _prepare(folder: Path, work: Path) -> None:
    if folder.exists() and not (folder.is_dir() and all(_OURS.fullmatch(path.name) for path in folder.iterdir())):
        raise ZftError(f"{folder} exists and is no checkpoint; choose another folder")
    if not folder.parent.is_dir():
        disk.DISK.make_folder(folder.parent)
    disk.remove_stale(folder.parent)
    if work.exists():
        disk.remove_tree(work)
    disk.DISK.make_folder(work)


def _planned(record: Record, shard_rank: int) -> list[tuple[str, torch.dtype, int]]:
    """(key, dtype, entries) of a record's part of a rank's file."""
    parts = parts_of(record.group, shard_rank)
    return [
        (tensor_key(part.name, each.name, part.first), each.dtype, each.entries(part.last - part.first))
        for each in fields_of(record)
        for part in parts
    ]


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
            tensors[span.name] = StoredTensor(kind_of(record), span.shape, field_names(record), pieces[span.name])
    return tensors


def _seal(folder: Path, work: Path, manifest: Manifest) -> None:
    """The manifest is the last file; then the folder gets its name."""
    fd = disk.DISK.create(work / MANIFEST)
    try:
        disk.DISK.write(fd, memoryview(manifest.to_json().encode()), 0)
        disk.DISK.sync(fd)
    finally:
        disk.DISK.close(fd)
    disk.DISK.sync_folder(work)
    disk.put_in_place(work, folder)

"""Going on from a checkpoint: what is in the files goes to where this engine keeps it, whatever its ranks and tiers.

manifest and sizes -> every byte's checksum -> does it fit this engine? -> each rank reads what it holds
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash

from zft.checkpoint.base import base_differs
from zft.checkpoint.manifest import DamagedCheckpoint, Manifest, overlaps, tensor_key
from zft.checkpoint.shard import DIGESTS
from zft.checkpoint.sharded import VALUE, field_names, kind_of, together
from zft.config import ZftError
from zft.dist import World
from zft.engine.parts import Parts
from zft.engine.snapshot import restore_record
from zft.models.tensorfile import TensorFile
from zft.precision import Field
from zft.tiers.direct import Reader


def load_checkpoint(
    folder: Path, parts: Parts, buffers: dict[str, torch.Tensor], base: Callable[[], dict[str, str]] = dict
) -> Manifest:
    """Restore every record and the buffers, in place. Collective; the caller restores what the manifest says.

    base: the fingerprint of the model that frozen weights have come from, asked for where the checkpoint has none of them.
    Raises DamagedCheckpoint or ZftError (it is of another model, precision or optimizer) before anything is changed.
    """
    world = parts.world
    manifest = together(world, lambda: Manifest.read(folder))
    _verify(folder, manifest, world)
    together(world, lambda: _check_fit(folder, manifest, parts, buffers))
    together(world, lambda: _check_base(folder, manifest.engine.get("base"), base))
    parts.fetcher.settle()
    together(world, lambda: _restore(folder, manifest, parts, buffers))
    return manifest


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
                ("kind", found.kind, kind_of(record)),
                ("shape", list(found.shape), list(span.shape)),
                ("record", _shown(found.fields), _shown(field_names(record))),
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


def _check_base(folder: Path, then: dict[str, str] | None, base: Callable[[], dict[str, str]]) -> None:
    if then and (name := base_differs(then, base())):
        raise ZftError(
            f"{folder} was trained on another base model: {name} differs; give the model that it was trained on"
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
        self._reader = Reader()
        self._known: dict[str, dict[str, int]] = {}

    def read(self, name: str, field: Field, first: int, last: int, out: torch.Tensor) -> None:
        """Fill `out` with a field's entries of elements [first, last) of a parameter, from however many shards."""
        block, itemsize = field.block, field.dtype.itemsize
        for piece, start, end in overlaps(self.manifest.tensors[name], first, last):
            file = self._file(piece[0])
            entry = file.entries[tensor_key(name, field.name, piece[1])]
            part = out[(start - first) // block : -(-(end - first) // block)]
            file.read_into(entry.start + (start - piece[1]) // block * itemsize, part)

    def read_checked(self, name: str, field: Field, out: torch.Tensor) -> None:
        """Fill `out` with a field's entries of the whole parameter. Raises DamagedCheckpoint where a checksum differs."""
        stored = self.manifest.tensors[name]
        self.read(name, field, 0, math.prod(stored.shape), out)
        for file, first, last in stored.pieces:
            part = out[first // field.block : -(-last // field.block)].view(torch.uint8)
            found = xxhash.xxh3_64_intdigest(memoryview(part.numpy()))
            if found != self._digests(file)[tensor_key(name, field.name, first)]:
                raise DamagedCheckpoint(f"{self.folder / file} is damaged (checksum); use an earlier checkpoint")

    def _digests(self, name: str) -> dict[str, int]:
        if name not in self._known:
            file = self._file(name)
            keys = [key for key in file.entries if key != DIGESTS]
            values = torch.empty(len(keys), dtype=torch.int64)
            file.read_into(file.entries[DIGESTS].start, values)
            self._known[name] = {key: value % (1 << 64) for key, value in zip(keys, values.tolist(), strict=True)}
        return self._known[name]

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = TensorFile(self.folder / name, self._reader)
        return self._open[name]


def _shown(fields: dict[str, str]) -> str:
    return " ".join(f"{name}:{dtype}" for name, dtype in fields.items())

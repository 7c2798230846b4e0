"""manifest.json: what a checkpoint is made of. It is written last; without a valid one, a folder is no checkpoint.

    {"checksum": ..., "format": 2, "files": {name: {bytes, xxh3_128}},
     "tensors": {fqn: {kind, shape, fields: {field: dtype or dtype/block}, pieces: [[file, first, last], ...]}},
     "engine": {step_count, ...}, "train": {...}}

A piece is a run of elements of one parameter, in row-major order. Its field lies in the safetensors file under
`fqn/field/first`. This module needs no torch: commands look at checkpoints before they import it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import xxhash

from zft.config import ZftError
from zft.tiers.direct import Reader, set_direct

MANIFEST = "manifest.json"
FORMAT = 2


class DamagedCheckpoint(ZftError):
    """A checkpoint is incomplete or its bytes are not those that were written. Raised before anything is loaded."""


@dataclass(frozen=True)
class StoredFile:
    """A file's size and checksum. xxh3_128 finds what disks and copies do to files, an order of magnitude faster than
    they deliver them; it does not prove who wrote them."""

    nbytes: int
    xxh3_128: str


@dataclass(frozen=True)
class StoredTensor:
    """A parameter or buffer: where its elements are."""

    kind: str
    """trained, frozen or buffer."""
    shape: tuple[int, ...]
    fields: dict[str, str]
    """{"hi": "BF16", "m_scale": "F32/256", ...}: safetensors' dtype names, and the block where elements share an entry."""
    pieces: list[tuple[str, int, int]]
    """(file, first, last) in elements, in order."""


@dataclass
class Manifest:
    """All of manifest.json."""

    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    engine: dict = field(default_factory=dict)
    train: dict = field(default_factory=dict)

    def to_json(self) -> str:
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({"checksum": _checksum(content), **content}, ensure_ascii=False)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest of a checkpoint whose files are all there, at their sizes. Raises DamagedCheckpoint."""
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            checksum = content.pop("checksum")
            version = content.pop("format")
            if version != FORMAT:
                raise DamagedCheckpoint(
                    f"{path} has format {version}, and this zft reads {FORMAT}; use the zft that wrote it"
                )
            if checksum != _checksum({"format": version, **content}):
                raise DamagedCheckpoint(f"{path} is damaged (checksum); use an earlier checkpoint")
            manifest = _build(content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{folder} is not a complete checkpoint ({error}); use an earlier one") from error
        for name, stored in manifest.files.items():
            found = folder / name
            size = found.stat().st_size if found.is_file() else None
            if size != stored.nbytes:
                raise DamagedCheckpoint(
                    f"{found} has {size} bytes instead of {stored.nbytes}; use an earlier checkpoint"
                )
        return manifest

    def digests_differ(self, folder: Path, names: list[str]) -> str | None:
        """The first of the files whose bytes are not those that were written."""
        return next((name for name in names if file_digest(folder / name) != self.files[name].xxh3_128), None)


def is_complete(folder: Path) -> bool:
    """Whether `folder` is a checkpoint, by its manifest and its files' sizes; their bytes are checked when loading."""
    try:
        Manifest.read(folder)
    except DamagedCheckpoint:
        return False
    return True


def file_digest(path: Path) -> str:
    """xxh3_128 of what is on the disk."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        set_direct(file.fileno(), True)
        for block in Reader().blocks(file.fileno()):
            digest.update(block)
    return digest.hexdigest()


def tensor_key(name: str, field_name: str, first: int) -> str:
    """The name of a piece's field in its safetensors file."""
    return f"{name}/{field_name}/{first}"


def overlaps(stored: StoredTensor, first: int, last: int) -> Iterator[tuple[tuple[str, int, int], int, int]]:
    """(piece, start, end) of the stored pieces that make up elements [first, last); start and end count from the parameter.

    Raises DamagedCheckpoint where some of it is missing.
    """
    at = first
    for piece in stored.pieces:
        start, end = max(piece[1], first), min(piece[2], last)
        if start < end:
            if start != at:
                break
            yield piece, start, end
            at = end
    if at != last:
        raise DamagedCheckpoint(f"the checkpoint's pieces do not cover elements {at} to {last} of a parameter")


def _build(content: dict) -> Manifest:
    files = {name: StoredFile(**each) for name, each in content["files"].items()}
    tensors = {
        name: StoredTensor(
            each["kind"], tuple(each["shape"]), each["fields"], [tuple(piece) for piece in each["pieces"]]
        )
        for name, each in content["tensors"].items()
    }
    return Manifest(files, tensors, content["engine"], content["train"])


def _checksum(content: dict) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(text.encode())

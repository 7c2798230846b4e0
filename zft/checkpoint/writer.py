"""Writing one safetensors file tensor by tensor, in any order, at offsets planned from shapes alone.

A tensor's bytes go from its own memory to the disk in chunks (converted on the way if need be), and their checksum is
kept so that a reader can prove what it finds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zft.models.tensorfile import NAMES
from zft.tiers.direct import WriteBehind
from zft.tiers.disk import allocate

CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor will be in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")


def checksum(view: memoryview, total: int = 0) -> int:
    """Adds 8-byte words modulo 2^64 (the tail padded with zeros): cheap, order-independent over aligned chunks."""
    data = torch.frombuffer(view, dtype=torch.uint8) if len(view) else torch.empty(0, dtype=torch.uint8)
    whole = len(view) // 8 * 8
    if whole:
        words = data[:whole]
        if words.data_ptr() % 8:
            words = words.clone()
        total += int(words.view(torch.int64).sum())
    return (total + int.from_bytes(view[whole:], "little")) % (1 << 64)


class TensorFileWriter:
    """A safetensors file under construction. `write` each planned tensor once, then `finish`; `abort` only closes.

    behind: carries the bytes to the disk; files may share one.
    """

    def __init__(self, path: Path, specs: dict[str, TensorSpec], behind: WriteBehind):
        self.path, self.specs, self._behind = path, specs, behind
        self.checksums: dict[str, int] = {}
        header, self._offsets, self.nbytes = plan_header(specs)
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            allocate(self._fd, self.nbytes)  # a full disk is found now rather than after an hour
            behind.write(self._fd, memoryview(header), 0)
        except BaseException:
            self.abort()
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        """Stores a CPU tensor of the planned shape; another dtype is converted in chunks (one rounding)."""
        spec = self.specs[name]
        assert tuple(tensor.shape) == spec.shape, f"{name}: {tuple(tensor.shape)} was planned as {spec.shape}"
        assert name not in self.checksums, f"{name} written twice"
        offset, total = self._offsets[name], 0
        for part in _parts(tensor, spec.dtype):
            view = byte_view(part)
            self._behind.write(self._fd, view, offset)
            total = checksum(view, total)
            offset += len(view)
        self.checksums[name] = total

    def finish(self) -> None:
        """Makes the file durable. Raises if a planned tensor was not written."""
        missing = self.specs.keys() - self.checksums.keys()
        assert not missing, f"{self.path.name}: {sorted(missing)[:3]} were never written"
        self._behind.flush()
        os.fsync(self._fd)
        self.abort()

    def abort(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def plan_header(specs: dict[str, TensorSpec]) -> tuple[bytes, dict[str, int], int]:
    """(header bytes, absolute offset of each tensor, bytes of the file); wide dtypes first, so that all align."""
    at, header = 0, {"__metadata__": {"format": "pt"}}
    for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):
        header[name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    offsets = {name: base + header[name]["data_offsets"][0] for name in specs}
    return len(text).to_bytes(8, "little") + text, offsets, base + at


def _parts(tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """The flat tensor in chunks that are contiguous and of `dtype`; a large contiguous tensor is not copied."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    flat = tensor.detach().reshape(-1)
    step = CHUNK_BYTES // max(dtype.itemsize, tensor.dtype.itemsize)
    for part in flat.split(step):
        yield part if part.dtype == dtype else part.to(dtype)

"""One rank's file of a checkpoint: a safetensors file written from front to back and hashed on the way.

The header is planned from shapes alone, so that nothing is kept in memory but one chunk of one field. Behind its tensors
lies a checksum of each (`DIGESTS`), so that who needs a few of them need not read the file.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import xxhash

from zft.checkpoint import disk
from zft.checkpoint.manifest import StoredFile
from zft.models.tensorfile import NAMES
from zft.tiers.direct import WriteBehind

DIGESTS = "digests"
"""int64 [tensors], in file order: xxh3_64 of each tensor's bytes."""


class ShardWriter:
    """Give it the planned tensors' bytes in their order, then `finish`; `close` leaves what is there."""

    def __init__(self, path: Path, planned: list[tuple[str, torch.dtype, int]]):
        """planned: (key, dtype, entries) in file order."""
        header, at = {"__metadata__": {"format": "zft"}}, 0
        self._sizes = [entries * dtype.itemsize for _, dtype, entries in planned]
        self._digests, self._tensor, self._hashed = [], xxhash.xxh3_64(), 0
        for key, dtype, entries in [*planned, (DIGESTS, torch.int64, len(planned))]:
            end = at + entries * dtype.itemsize
            header[key] = {"dtype": NAMES[dtype], "shape": [entries], "data_offsets": [at, end]}
            at = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.path, self.nbytes, self._written = path, 8 + len(text) + at, 0
        self._digest, self._behind = xxhash.xxh3_128(), WriteBehind(disk.DISK.write)
        self._fd = disk.DISK.create(path)
        try:
            disk.DISK.reserve(self._fd, self.nbytes)
            self._append(memoryview(len(text).to_bytes(8, "little") + text))
        except BaseException:
            self.close()
            raise

    def write(self, tensor: torch.Tensor) -> None:
        """The next bytes: a contiguous 1-D CPU tensor. It may change afterwards."""
        if tensor.numel():
            data = memoryview(tensor.view(torch.uint8).numpy())
            self._hash(data)
            self._append(data)

    def finish(self) -> StoredFile:
        """Make the file durable."""
        self._end_tensors()
        assert len(self._digests) == len(self._sizes), f"{self.path}: {len(self._sizes)} tensors were planned"
        signed = [digest - (digest >> 63 << 64) for digest in self._digests]
        if signed:
            self._append(memoryview(torch.tensor(signed, dtype=torch.int64).view(torch.uint8).numpy()))
        self._behind.flush()
        assert self._written == self.nbytes, f"{self.path} has {self._written} bytes, planned were {self.nbytes}"
        disk.DISK.sync(self._fd)
        self.close()
        return StoredFile(self.nbytes, self._digest.hexdigest())

    def close(self) -> None:
        self._behind.close()
        if self._fd >= 0:
            disk.DISK.close(self._fd)
            self._fd = -1

    def _hash(self, data: memoryview) -> None:
        """Into the checksums of the tensors that the bytes belong to."""
        while data:
            self._end_tensors()
            part = data[: self._sizes[len(self._digests)] - self._hashed]
            self._tensor.update(part)
            self._hashed += len(part)
            data = data[len(part) :]

    def _end_tensors(self) -> None:
        """Note the checksum of every tensor that is complete."""
        while len(self._digests) < len(self._sizes) and self._hashed == self._sizes[len(self._digests)]:
            self._digests.append(self._tensor.intdigest())
            self._tensor.reset()
            self._hashed = 0

    def _append(self, data: memoryview) -> None:
        self._digest.update(data)
        self._behind.write(self._fd, data, self._written)
        self._written += len(data)

"""Reading safetensors files by plain `pread`: nothing is mapped, so resident memory is what the caller holds.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the bytes
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zft.config import ZftError
from zft.tiers.direct import Reader, set_direct

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # absolute offset in the file
    nbytes: int


class TensorFile:
    """One open safetensors file. Raises ZftError, naming the file, when it is damaged. Close when done.

    reader: tensors are read past the page cache, by it. Thread-safe without one.
    """

    def __init__(self, path: Path, reader: Reader | None = None):
        self.path = path
        self._fd = os.open(path, os.O_RDONLY)
        try:
            self.entries, self.metadata = self._header()
            self._reader = reader if reader is not None and set_direct(self._fd, True) else None
        except BaseException:
            self.close()
            raise

    def _header(self) -> tuple[dict[str, TensorEntry], dict[str, str]]:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little") if size >= 8 else -1
        if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
            raise ZftError(
                f"{self.path} is not a complete safetensors file ({size} bytes); download or export it again"
            )
        try:
            header: dict[str, Any] = json.loads(os.pread(self._fd, length, 8))
            metadata = header.pop("__metadata__", {})
            entries = {name: self._entry(name, each, 8 + length) for name, each in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ZftError(
                f"{self.path} has a damaged safetensors header ({error}); download or export it again"
            ) from error
        end = max((each.start + each.nbytes for each in entries.values()), default=8 + length)
        if end != size:
            raise ZftError(f"{self.path} has {size} bytes but its header promises {end}; download or export it again")
        return entries, metadata

    def _entry(self, name: str, each: dict[str, Any], base: int) -> TensorEntry:
        if each["dtype"] not in DTYPES:
            raise ZftError(f"{self.path}: tensor {name} has dtype {each['dtype']}, which zft cannot read")
        dtype, shape, (start, end) = DTYPES[each["dtype"]], tuple(each["shape"]), each["data_offsets"]
        nbytes = math.prod(shape) * dtype.itemsize
        if end - start != nbytes or start < 0:
            raise ZftError(
                f"{self.path}: tensor {name} spans {end - start} bytes where its shape {shape} needs {nbytes}"
            )
        return TensorEntry(dtype, shape, base + start, nbytes)

    def read(self, name: str) -> Tensor:
        """The whole tensor, freshly allocated on the CPU."""
        entry = self.entries[name]
        out = torch.empty(entry.shape, dtype=entry.dtype)
        self.read_into(entry.start, out)
        return out

    def read_into(self, offset: int, out: Tensor) -> None:
        """Fills a contiguous CPU tensor from the file's bytes at an absolute offset."""
        view = memoryview(out.reshape(-1).view(torch.uint8).numpy()) if out.numel() else memoryview(b"")
        done = 0
        while done < len(view):
            if self._reader is not None:
                got = self._reader.read(self._fd, offset + done, view[done:])
            else:
                got = os.preadv(self._fd, [view[done : done + (1 << 30)]], offset + done)
            if got <= 0:
                raise ZftError(
                    f"{self.path} ends at byte {offset + done}, in the middle of a tensor; download it again"
                )
            done += got

    def equal(self, name: str, other: TensorFile, other_name: str, chunk_bytes: int = 16 << 20) -> bool:
        """Whether two tensors have the same bytes, compared in chunks."""
        mine, theirs = self.entries[name], other.entries[other_name]
        if mine.nbytes != theirs.nbytes:
            return False
        for at in range(0, mine.nbytes, chunk_bytes):
            size = min(chunk_bytes, mine.nbytes - at)
            if os.pread(self._fd, size, mine.start + at) != os.pread(other._fd, size, theirs.start + at):
                return False
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

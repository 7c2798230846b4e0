"""Tokenized rows on disk: written once, row after row, then read through a memory map.

A folder with `ids.bin` (int32, all tokens in a row), `mask.bin` (uint8, 1 = target), `ends.npy` (int64, where each
sequence ends), `targets.npy` (int32 per sequence), `rows.npy` (int64, which row a sequence comes from), `source.npy`
(int32), `meta.json`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from array import array
from pathlib import Path

import numpy as np

KEPT = 24
"""Stores that a cache folder keeps: those used last."""


class StoreWriter:
    """Appends sequences to a folder next to its final place; `finish` moves it there in one step."""

    def __init__(self, place: Path | None) -> None:
        self.place = place
        parent = place.parent if place else None
        if parent:
            parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=".tmp-zft-data-", dir=parent))
        self._cleanup = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._ids = open(self.folder / "ids.bin", "wb")
        self._mask = open(self.folder / "mask.bin", "wb")
        self.ends, self.targets, self.rows, self.source = array("q"), array("i"), array("q"), array("i")
        self.tokens = 0

    def append(self, ids: np.ndarray, mask: np.ndarray, row: int, source: int) -> None:
        self._ids.write(ids.astype("<i4", copy=False).tobytes())
        self._mask.write(mask.astype(np.uint8, copy=False).tobytes())
        self.tokens += len(ids)
        self.ends.append(self.tokens)
        self.targets.append(int(mask.sum()))
        self.rows.append(row)
        self.source.append(source)

    def finish(self, meta: dict) -> Store:
        self._ids.close()
        self._mask.close()
        for name in ("ends", "targets", "rows", "source"):
            values = getattr(self, name)
            np.save(self.folder / f"{name}.npy", np.frombuffer(values, dtype=values.typecode) if values else
                    np.zeros(0, dtype=values.typecode))  # fmt: skip
        (self.folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        self._cleanup.detach()
        if self.place is None:
            return Store(self.folder, temporary=True)
        try:
            os.rename(self.folder, self.place)
        except OSError:  # another process was faster: the content is the same, by the key
            shutil.rmtree(self.folder, ignore_errors=True)
        store = Store(self.place)
        _evict(self.place.parent)
        return store

    def abandon(self) -> None:
        self._ids.close()
        self._mask.close()
        self._cleanup()


class Store:
    """Tokenized sequences: `len(store)`, `store.ids(i)`, `store.mask(i)`, and per-sequence arrays."""

    def __init__(self, folder: Path, temporary: bool = False) -> None:
        self.folder = folder
        self.ends = np.load(folder / "ends.npy")
        self.targets = np.load(folder / "targets.npy")
        self.rows = np.load(folder / "rows.npy")
        self.source = np.load(folder / "source.npy")
        self.meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.lengths = np.diff(self.ends, prepend=0)
        count = int(self.ends[-1]) if len(self.ends) else 0
        self._ids = _map(folder / "ids.bin", "<i4", count)
        self._mask = _map(folder / "mask.bin", "u1", count)
        if temporary:
            self._cleanup = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def __len__(self) -> int:
        return len(self.ends)

    def ids(self, index: int) -> np.ndarray:
        """Token ids, int32 [T]."""
        return self._ids[self.ends[index] - self.lengths[index] : self.ends[index]]

    def mask(self, index: int) -> np.ndarray:
        """Targets, uint8 [T]."""
        return self._mask[self.ends[index] - self.lengths[index] : self.ends[index]]


def open_store(place: Path) -> Store | None:
    """A finished store, or None when there is none or it is damaged (it is then written anew)."""
    try:
        os.utime(place)
        return Store(place)
    except (OSError, ValueError, KeyError):
        shutil.rmtree(place, ignore_errors=True)
        return None


def _evict(cache: Path) -> None:
    """Remove the stores that were not used for longest. An open one stays readable: its map outlives the name."""
    stores = sorted((p for p in cache.iterdir() if (p / "meta.json").exists() and p.name[0] != "."), key=_used)
    for place in stores[:-KEPT]:
        shutil.rmtree(place, ignore_errors=True)


def _used(place: Path) -> float:
    try:
        return place.stat().st_mtime
    except OSError:  # another process removed it
        return 0.0


def _map(path: Path, dtype: str, count: int) -> np.ndarray:
    if path.stat().st_size != count * np.dtype(dtype).itemsize:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, not {count} × {np.dtype(dtype).itemsize}")
    return np.memmap(path, dtype=dtype, mode="r") if count else np.zeros(0, dtype=dtype)

"""`data=` → sources: files, folders, Hub ids, and lists of these with weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from zft.config import ZftError
from zft.data.errors import shorten
from zft.data.options import DataOptions
from zft.data.read import SUFFIXES, Record, read_file, suffix_of, without_nulls

_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$|^[\w-]+$")
_SPLITS = {"train": "train", "training": "train", "test": "test", "validation": "validation", "valid": "validation",
           "val": "validation", "dev": "validation", "eval": "validation"}  # fmt: skip


@dataclass
class Source:
    """One entry of `data=`: its files, or a Hub id when `files` is empty."""

    path: str
    weight: float | None = None
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def records(self, options: DataOptions) -> Iterator[Record]:
        """Rows in the source's own order."""
        if self.files:
            for file in self.files:
                yield from read_file(file)
        else:
            yield from _read_hub(self.path, options)

    def content_hash(self, options: DataOptions) -> str | None:
        """A hash of the bytes that are read; None when it can't be known without reading (a streamed Hub data set)."""
        if not self.files:
            return None if options.streaming else _load_hub(self.path, options)._fingerprint
        digest = hashlib.blake2b(digest_size=20)
        for file in self.files:
            with open(file, "rb") as stream:
                digest.update(file.name.encode() + hashlib.file_digest(stream, "blake2b").digest())
        return digest.hexdigest()


def find_sources(data: str | list, options: DataOptions) -> list[Source]:
    """The sources of `data=`. Raises ZftError for a missing file, an empty folder, and weights on some entries only."""
    entries = data if isinstance(data, list | tuple) else [data]
    if not entries:
        raise ZftError("data is an empty list; name at least one file, folder or Hub id")
    sources = []
    for entry in entries:
        path, weight = (entry.get("path"), entry.get("weight")) if hasattr(entry, "get") else (entry, None)
        if not path:
            raise ZftError(f"data: an entry has no path, got {entry!r}; write {{path: FILE, weight: 0.5}}")
        if weight is not None and not (isinstance(weight, int | float) and 0 < weight < float("inf")):
            raise ZftError(f"data: weight of {path} has to be a positive number, got {weight!r}")
        sources.append(_find(str(path), weight, options))
    weighted = [source.weight is not None for source in sources]
    if any(weighted) and not all(weighted):
        missing = sources[weighted.index(False)].path
        raise ZftError(f"data: {missing} has no weight but others have; give every entry a weight or none")
    return sources


def _find(path: str, weight: float | None, options: DataOptions) -> Source:
    place = Path(path)
    if place.is_dir():
        files, notes = _files_of(place, options.split)
        return Source(path, weight, files, notes)
    if place.exists():
        if place.stat().st_size == 0:
            raise ZftError(f"data: {path} is empty; it has to hold at least one row")
        if suffix_of(place) not in SUFFIXES:
            raise ZftError(f"data: no reader for {path}; known are {', '.join(SUFFIXES)}")
        return Source(path, weight, [place])
    if place.is_absolute() or suffix_of(place) in SUFFIXES or not _HUB_ID.match(path):
        raise ZftError(f"data: {path} does not exist; name a file, a folder or a Hub id (owner/name)")
    return Source(path, weight)


def _files_of(folder: Path, split: str) -> tuple[list[Path], list[str]]:
    every = sorted(p for p in folder.rglob("*") if p.is_file() and not _hidden(p.relative_to(folder)))
    files = [p for p in every if suffix_of(p) in SUFFIXES and p.stat().st_size]
    files = [p for p in files if p.name not in ("dataset_info.json", "dataset_infos.json", "dataset_dict.json",
                                                "state.json")]  # fmt: skip
    if not files:
        raise ZftError(f"data: folder {folder} has no data file; known are {', '.join(SUFFIXES)}")
    named = {p: _split_of(p.relative_to(folder)) for p in files}
    if not any(named.values()):
        return files, []
    wanted = _SPLITS.get(split, split)
    chosen = [p for p in files if named[p] == wanted]
    if not chosen:
        found = sorted({name for name in named.values() if name})
        raise ZftError(f"data: folder {folder} has no split {split!r}; it has {', '.join(found)} (data_options.split)")
    note = [f"{len(chosen)} of {len(files)} files of {folder.name} belong to split {split}"]
    return chosen, note if len(chosen) < len(files) else []


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _split_of(path: Path) -> str | None:
    for part in reversed(path.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLITS:
                return _SPLITS[word]
    return None


def _load_hub(name: str, options: DataOptions):
    import datasets

    try:
        return datasets.load_dataset(name, options.subset, split=options.split, streaming=options.streaming)
    except Exception as error:  # the libraries below raise a dozen types, from connection errors to ValueError
        text = shorten(error, 160)
        if any(word in text.lower() for word in ("gated", "401", "403")):
            raise ZftError(
                f"data: {name} is gated: accept the licence on its Hub page, then `hf auth login` or set HF_TOKEN"
            ) from error
        raise ZftError(
            f"data: {name} is no local path, and reading it from the Hub failed ({type(error).__name__}: {text}); "
            "check the name, data_options.split and data_options.subset"
        ) from error


def _read_hub(name: str, options: DataOptions) -> Iterator[Record]:
    for number, row in enumerate(_load_hub(name, options), 1):
        yield Record(f"{name}[{options.split}] row {number}", without_nulls(dict(row)))

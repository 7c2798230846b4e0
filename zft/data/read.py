"""Files and Hub data sets → records, one at a time, so that memory does not grow with the file.

Own parsers for the text formats, because an error has to name the file and the line; Arrow's for parquet; `datasets`
for the Hub. A record carries either a row or what is wrong with it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zft.config import ZftError
from zft.data.errors import RowError, shorten
from zft.data.json_stream import iter_json

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".text")
_TXT_PIECE = 1 << 20  # characters of a .txt document that are held in memory at once


@dataclass
class Record:
    """One row as read: `where` is file:line or file row N, `row` its columns (None when `error` is set)."""

    where: str
    row: dict | None = None
    error: RowError | None = None


def suffix_of(path: Path) -> str:
    """The suffix that tells the parser, without .gz."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def read_file(path: Path) -> Iterator[Record]:
    """Records of one file, in its order. Raises ZftError for a suffix without a parser and for unreadable files."""
    readers = {
        ".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".tsv": _read_csv,
        ".parquet": _read_parquet, ".arrow": _read_arrow, ".txt": _read_txt, ".text": _read_txt,
    }  # fmt: skip
    reader = readers.get(suffix_of(path))
    if reader is None:
        raise ZftError(f"data: no reader for {path.name!r} ({path}); known are {', '.join(SUFFIXES)}")
    try:
        yield from reader(path)
    except OSError as error:
        raise ZftError(f"data: {path} can't be read: {error.strerror or error}") from error


def _open(path: Path) -> io.BufferedIOBase:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else open(path, "rb")


def _read_jsonl(path: Path) -> Iterator[Record]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            where = f"{path.name}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield _as_record(where, json.loads(text))
            except UnicodeDecodeError as error:
                yield Record(where, error=RowError("not UTF-8", f"byte {error.start + 1} of the line"))
            except json.JSONDecodeError as error:
                yield Record(where, error=RowError("broken JSON", f"{error.msg} at column {error.colno}"))
            except RecursionError:
                yield Record(where, error=RowError("broken JSON", "nested too deeply"))


def _read_json(path: Path) -> Iterator[Record]:
    with _open(path) as file:
        for number, line, item in iter_json(file):
            where = f"{path.name}:{line} (row {number})"
            yield Record(where, error=item) if isinstance(item, RowError) else _as_record(where, item)


def _as_record(where: str, value: object) -> Record:
    if isinstance(value, dict):
        return Record(where, value)
    return Record(where, error=RowError("not an object", f"a row is a JSON object, got {shorten(repr(value))}"))


def _read_csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if suffix_of(path) == ".tsv" else ","
    with _open(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.DictReader(text, delimiter=delimiter, strict=True)
        line = 1
        while True:
            try:
                row = next(reader, None)
                line = reader.line_num
            except csv.Error as error:
                yield Record(f"{path.name}:{reader.line_num}", error=RowError("broken CSV", str(error)))
                continue
            if row is None:
                return
            yield _csv_record(f"{path.name}:{line}", row)


def _csv_record(where: str, row: dict) -> Record:
    if None in row:
        return Record(where, error=RowError("broken CSV", f"{len(row[None])} more values than the header has columns"))
    if any(value is None for value in row.values()):
        return Record(where, error=RowError("broken CSV", "fewer values than the header has columns"))
    if any("\udc80" <= char <= "\udcff" for value in row.values() for char in value if char > "\ud7ff"):
        return Record(where, error=RowError("not UTF-8"))
    return Record(where, {name: _cell(name, value) for name, value in row.items()})


def _cell(name: str, value: str) -> object:
    # a CSV cell is text; only the columns that hold lists by definition are read as JSON, never ordinary content
    if name in ("messages", "conversations", "history") and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            # its threads decode ahead and keep what they have freed
            yield from _arrow_records(path.name, file.iter_batches(batch_size=256, use_threads=False))
    except pyarrow.ArrowException as error:
        raise ZftError(f"data: {path} is not a readable parquet file: {shorten(error, 120)}") from error


def _read_arrow(path: Path) -> Iterator[Record]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source:
            yield from _arrow_records(path.name, pyarrow.ipc.open_stream(source))
    except pyarrow.ArrowException as error:
        raise ZftError(f"data: {path} is not a readable arrow file: {shorten(error, 120)}") from error


def _arrow_records(name: str, batches) -> Iterator[Record]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield Record(f"{name} row {number}", without_nulls(row))


def without_nulls(value: object) -> object:
    """Arrow fills every key that any row has: a null in a nested record means that the key was not there."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _read_txt(path: Path) -> Iterator[Record]:
    """A .txt file is one document. A long one comes in pieces (`begins`, `ends` tell the first and the last)."""
    with _open(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="strict")
        piece, begins = "", True
        try:
            while block := text.read(_TXT_PIECE):
                piece += block
                border = piece.rfind("\n") + 1 or len(piece)
                if len(piece) > _TXT_PIECE:
                    yield Record(path.name, {"text": piece[:border], "begins": begins, "ends": False})
                    piece, begins = piece[border:], False
        except UnicodeDecodeError as error:
            yield Record(path.name, error=RowError("not UTF-8", f"{error.reason}", fatal=True))
            return
        yield Record(path.name, {"text": piece, "begins": begins, "ends": True})

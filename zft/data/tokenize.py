"""Sources → a store of tokenized sequences: from the cache, or row by row."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zft.config import ZftError
from zft.data.cache import cache_key
from zft.data.chat import Renderer
from zft.data.errors import RowError
from zft.data.formats import Row, detect
from zft.data.options import DataOptions, Format, OnError
from zft.data.rows import Chunk, Done, Limits, chunks, run_chunks
from zft.data.sources import Source, find_sources
from zft.data.store import Store, StoreWriter, open_store


@dataclass
class Job:
    """The arguments of `prepare` that its steps need."""

    tokenizer: object
    options: DataOptions
    limits: Limits
    seed: int
    pack: bool
    cache_dir: Path | None
    progress: Callable[[int], None] | None


def tokenize(data: str | list, job: Job, renderer: Renderer) -> tuple[Store, str, list[Source]]:
    sources = find_sources(data, job.options)
    limits = [job.limits.seq_len, job.limits.split_documents, job.limits.vocab_size]
    key = cache_key(sources, job.options, job.tokenizer, renderer.source, limits)
    place = job.cache_dir / key if job.cache_dir and key else None
    store = open_store(place) if place and place.exists() else None
    if store is None:
        writer = StoreWriter(place)
        try:
            store = writer.finish(_write(writer, sources, job, renderer))
        except BaseException:
            writer.abandon()
            raise
    if not store.targets.any():
        raise ZftError(_nothing_left(data, store.meta, job))
    return store, key or _fingerprint(store), sources


def _nothing_left(data: str | list, meta: dict, job: Job) -> str:
    why = ", ".join(f"{count} {reason}" for reason, count in meta["dropped"].items()) or "no rows"
    hint = "raise train.seq_len or change data_options.truncate" if "seq_len" in why else "check data and data_options"
    hint = f"for one, {meta['example']}" if meta["example"] else hint
    names = ", ".join(s.path for s in find_sources(data, job.options))
    return (
        f"data: {names} has no supervised token: of {meta['read']} rows, {why} (seq_len {job.limits.seq_len}); {hint}"
    )


def _fingerprint(store: Store) -> str:
    return hashlib.blake2b(store.ends.tobytes() + store.targets.tobytes(), digest_size=20).hexdigest()


def _write(writer: StoreWriter, sources: list[Source], job: Job, renderer: Renderer) -> dict:
    """Tokenize all sources into `writer`; returns what the report needs beyond the arrays."""
    forms: dict[int, Format] = {}
    dropped, notes = Counter(), Counter()
    read, cut, example = 0, 0, ""
    stops: Counter = Counter()
    specials = set(job.tokenizer.convert_tokens_to_ids(renderer.specials))

    def work() -> Iterator[Chunk]:
        for number, source in enumerate(sources):
            records = itertools.islice(source.records(job.options), job.options.max_rows)
            form, records = _detect(records, source, job.options)
            forms[number] = form
            yield from chunks(records, number, form)

    for chunk, rows, chunk_notes in run_chunks(work(), job.tokenizer, job.options, job.limits):
        notes.update(chunk_notes)
        for done in rows:
            if done.error is not None:
                _refuse(done, job.options)
                dropped[done.error.kind] += 1
                example = example or f"{done.where}: {done.error}"
            elif done.dropped is not None:
                dropped[done.dropped] += 1
            for ids, mask in done.sequences:
                writer.append(ids, mask, read, chunk.source)
                if not done.cut:
                    stops[_stop_of(ids[mask == 1], specials, job.tokenizer)] += 1
            cut += done.cut
            read += 1
        if job.progress:
            job.progress(read)
    return {
        "read": read,
        "cut": cut,
        "dropped": dict(dropped),
        "example": example,
        "formats": [str(forms[number]) for number in sorted(forms)],
        "notes": [note for source in sources for note in source.notes] + _describe(notes),
        "stops": [token for token, _ in stops.most_common(4) if token is not None],
    }


def _stop_of(targets: np.ndarray, specials: set[int], tokenizer) -> int | None:
    """The special token that a row's targets end with, white space behind it or not."""
    for token in targets[:-4:-1].tolist():
        if token in specials:
            return token
        if tokenizer.decode([token]).strip():
            return None
    return None


def _describe(notes: Counter) -> list[str]:
    return [f"{count} {text}" for text, count in sorted(notes.items()) if count]


def _refuse(done: Done, options: DataOptions) -> None:
    if done.error.fatal or options.on_error is OnError.raise_:
        hint = "" if done.error.fatal else " (data_options.on_error=skip leaves such rows out)"
        raise ZftError(f"data: {done.where}: {done.error}{hint}")


def _detect(records: Iterator, source: Source, options: DataOptions) -> tuple[Format, Iterator]:
    """The format of a source, by its first readable row; and all of its records, that one included."""
    if options.format is not Format.auto:
        return options.format, records
    seen = []
    for record in records:
        seen.append(record)
        if record.error is None:
            try:
                return detect(Row(record.row, options.columns)), itertools.chain(seen, records)
            except RowError as error:
                raise ZftError(f"data: {record.where}: {error}") from error
        if record.error.fatal or options.on_error is OnError.raise_:
            raise ZftError(f"data: {record.where}: {record.error}")
        if len(seen) > 1000:
            break
    if seen:
        raise ZftError(f"data: {source.path}: none of its first {len(seen)} rows can be read; {seen[0].where}: "
                       f"{seen[0].error}")  # fmt: skip
    raise ZftError(f"data: {source.path} holds no rows")

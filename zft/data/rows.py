"""Rows → tokenized sequences: convert, render, tokenize, cut; in this process or in several, with the same result."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np

from zft.data.chat import Renderer
from zft.data.encode import Encoded, Encoder
from zft.data.errors import RowDropped, RowError
from zft.data.formats import Row, convert
from zft.data.mask import fit
from zft.data.options import DataOptions, Format, Truncate
from zft.data.read import Record

CHUNK = 64  # rows that are tokenized together


@dataclass(frozen=True)
class Limits:
    """What rows are cut to, and checked against."""

    seq_len: int
    split_documents: bool  # truncate=auto splits documents (pretraining) or cuts them
    vocab_size: int | None


@dataclass
class Chunk:
    """Consecutive rows of one source."""

    source: int
    form: Format
    records: list[Record]


@dataclass
class Done:
    """What one row became: sequences of (ids, mask), or why none."""

    where: str
    sequences: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    cut: bool = False
    error: RowError | None = None
    dropped: str | None = None


class RowWorker:
    """Turns chunks into tokenized rows. Has no state but its notes, so that any number of them agree."""

    def __init__(self, tokenizer, options: DataOptions, limits: Limits) -> None:
        self.options, self.limits = options, limits
        self.renderer = Renderer(tokenizer, options)
        self.encoder = Encoder(tokenizer)

    def run(self, chunk: Chunk) -> tuple[list[Done], Counter]:
        """(one Done for each record, notes)."""
        self.renderer.notes = Counter()
        out, renderings, owners = [], [], []
        for index, record in enumerate(chunk.records):
            done = Done(record.where, error=record.error)
            out.append(done)
            if record.error:
                continue
            try:
                example = convert(Row(record.row, self.options.columns), chunk.form, record.where)
                for rendering in self.renderer.render(example):
                    renderings.append(rendering)
                    owners.append(index)
            except RowError as error:
                done.error = error
            except RowDropped as reason:
                done.dropped = str(reason)
        encoded: list[list[Encoded]] = [[] for _ in chunk.records]
        ended = [not r.plain and self.renderer.ends_turn(r) for r in renderings]
        for owner, row in zip(owners, self.encoder.encode(renderings, ended) if renderings else [], strict=True):
            encoded[owner].append(row)
        for done, rows in zip(out, encoded, strict=True):
            if done.error is None and done.dropped is None:
                self._finish(done, rows)
        return out, self.renderer.notes

    def _finish(self, done: Done, rows: list[Encoded]) -> None:
        notes, limits = self.renderer.notes, self.limits
        for row in rows:
            how = self.options.truncate
            if how is Truncate.auto:
                how = Truncate.split if row.document and limits.split_documents else Truncate.cut
            long = len(row.ids) > limits.seq_len
            if long and how is Truncate.error:
                done.error = RowError("too long", f"{len(row.ids)} tokens, train.seq_len is {limits.seq_len}")
                return
            if limits.vocab_size is not None and len(row.ids) and row.ids.max() >= limits.vocab_size:
                detail = f"id {row.ids.max()}, the model's embedding has {limits.vocab_size} rows"
                done.error = RowError("token outside the embedding", detail)
                return
            notes["answers that begin inside a token: that token is not trained on"] += row.across
            notes["rows: no end-of-turn token in the template, EOS appended"] += not row.ended
            done.cut |= long and how is Truncate.cut
            done.sequences += [piece for piece in fit(row.ids, row.mask, limits.seq_len, how) if piece[1].any()]
            if not done.sequences:
                done.dropped = ("longer than seq_len" if how is Truncate.drop else "no target within seq_len") if long \
                    else "no target"  # fmt: skip
        if done.sequences:
            done.dropped = None
        done.cut &= bool(done.sequences)


def chunks(records: Iterable[Record], source: int, form: Format) -> Iterator[Chunk]:
    """Cut a source's records into chunks."""
    records = iter(records)
    while batch := list(islice(records, CHUNK)):
        yield Chunk(source, form, batch)


_worker: RowWorker | None = None  # of a worker process


def _start(tokenizer, options: DataOptions, limits: Limits) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker = RowWorker(tokenizer, options, limits)


def _run(chunk: Chunk) -> tuple[list[Done], Counter]:
    assert _worker is not None, "worker process without _start"
    return _worker.run(chunk)


def run_chunks(
    work: Iterable[Chunk], tokenizer, options: DataOptions, limits: Limits
) -> Iterator[tuple[Chunk, list[Done], Counter]]:
    """Results in the order of `work`, with `options.num_workers` processes and a bounded number of chunks in flight."""
    work = iter(work)
    first = list(islice(work, 2))
    work = chain(first, work)
    workers = min(options.num_workers, os.cpu_count() or 1)
    if workers < 1 or len(first) < 2:
        worker = RowWorker(tokenizer, options, limits)
        for chunk in work:
            yield chunk, *worker.run(chunk)
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    waiting: deque = deque()
    with ProcessPoolExecutor(workers, get_context("spawn"), _start, (tokenizer, options, limits)) as pool:
        try:
            for chunk in work:
                waiting.append((chunk, pool.submit(_run, chunk)))
                while len(waiting) > 2 * workers:
                    done, future = waiting.popleft()
                    yield done, *future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, *future.result()
        finally:
            for _, future in waiting:
                future.cancel()

"""`data=` → tokenized, checked and reported data, from which loaders are made. Needs the tokenizer, not the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from zft.config import ZftError
from zft.data.chat import Renderer
from zft.data.formats import check_columns
from zft.data.isolation import packing_problem
from zft.data.loader import Epochs, Loader
from zft.data.options import DataOptions, Format, OnError, TrainOn, Truncate
from zft.data.order import shuffled
from zft.data.pack import Items, best_fit, join, one_each
from zft.data.report import DataReport, decode_segments, histogram, length_facts
from zft.data.rows import Limits
from zft.data.sources import Source
from zft.data.store import Store
from zft.data.tokenize import Job, tokenize

_SAMPLES = 8  # decoded sequences that a report keeps
_RULES = {
    Format.text: "plain text: every token is a target",
    Format.preference: "preference pairs: trained on the prompt with the chosen answer, rejected answers are not used",
    Format.unpaired: "unpaired preferences: trained on the rows labelled good",
    Format.prompt_completion: "prompt and completion that are strings are plain text: no chat template is applied",
}


@dataclass
class Prepared:
    """Tokenized data: its report, and loaders over it. `eval` holds the held-out part, if one was asked for."""

    report: DataReport
    epochs: Epochs
    chat_template: str | dict[str, str] | None
    """The template rendered with, to be saved with the model (null: none was used)."""
    stop_ids: list[int]
    """End-of-turn tokens that answers end with: generation has to stop at them."""
    eval: Prepared | None = None

    def loader(
        self, rank: int = 0, world: int = 1, micro_batch_size: int = 1, grad_accum_steps: int = 1,
        epochs: float | None = 1,
    ) -> Loader:  # fmt: skip
        """Micro-batches of one rank. `epochs=None` never ends."""
        return Loader(self.epochs, rank, world, micro_batch_size, grad_accum_steps, epochs)

    def keep_apart(self, model) -> None:
        """Check that packed documents don't see each other in `model`, and choose the layout its attention needs.

        Applies to loaders made before, too. Raises ZftError where the model can't keep documents apart.
        """
        if not (self.epochs.packed or self.epochs.padding_free):
            return
        if problem := packing_problem(model):
            key = "pack" if self.epochs.packed else "padding_free"
            raise ZftError(
                f"data_options.{key}=true: {type(model).__name__} can't keep rows apart ({problem}); set it to false"
            )
        if str(model.config._attn_implementation).startswith(("flash", "kernels")):
            self.epochs.padding_free = True
        if self.eval:
            self.eval.keep_apart(model)


def prepare(
    data: str | list, tokenizer, options: DataOptions | None = None, *, seq_len: int, seed: int = 0,
    method: str = "sft", eval_data: str | list | None = None, cache_dir: str | Path | None = None,
    vocab_size: int | None = None, progress: Callable[[int], None] | None = None,
) -> Prepared:  # fmt: skip
    """Read, render, tokenize and cut `data`; reuse the result from `cache_dir` when nothing of it has changed.

    `data`: a file, folder or Hub id, or a list of them or of {path, weight}. `method`: sft, or pretrain (every token is
    a target, documents are split and packed). `vocab_size`: rows of the model's embedding, to check token ids against.
    `progress` is called with the number of rows read so far. Raises ZftError for anything wrong with the user's data.
    """
    options = _with_enums(options or DataOptions())
    if seq_len < 2:
        raise ZftError(f"train.seq_len has to be at least 2, got {seq_len}")
    if not 0 <= options.eval_share < 1:
        raise ZftError(f"data_options.eval_share has to be in [0, 1), got {options.eval_share}")
    if eval_data is not None and options.eval_share:
        raise ZftError(f"eval_data and data_options.eval_share={options.eval_share} exclude each other; give one")
    check_columns(options.columns)
    if method == "pretrain":
        options = replace(options, train_on=TrainOn.all)
    pack = method == "pretrain" if options.pack is None else options.pack
    limits = Limits(seq_len, method == "pretrain", vocab_size)
    job = Job(tokenizer, options, limits, seed, pack, Path(cache_dir) if cache_dir else None, progress)
    renderer = Renderer(tokenizer, options)
    if options.chat_template is not None:
        tokenizer.chat_template = renderer.source  # what is trained with is what is exported
    store, key, sources = tokenize(data, job, renderer)
    train, held = _split(store, options.eval_share, seed)
    prepared = _prepared(store, train, key, sources, job, renderer)
    if eval_data is not None:
        store, key, sources = tokenize(eval_data, job, renderer)
        prepared.eval = _prepared(store, np.arange(len(store)), key, sources, job, renderer)
    elif len(held):
        prepared.eval = _prepared(store, held, key, [replace(s, weight=None) for s in sources], job, renderer)
    if prepared.eval:
        prepared.report.eval_rows = prepared.eval.report.rows
    return prepared


def _with_enums(options: DataOptions) -> DataOptions:
    """Options given as plain strings from Python become enum members. Raises ZftError for a value that is none."""
    found = {}
    for name, kind in (("format", Format), ("truncate", Truncate), ("train_on", TrainOn), ("on_error", OnError)):
        value = getattr(options, name)
        try:
            found[name] = kind(value)
        except ValueError as error:
            raise ZftError(f"data_options.{name}={value!r}: it has to be one of {', '.join(kind)}") from error
    return replace(options, **found)


def _split(store: Store, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequence numbers for training and for evaluation; all sequences of a row stay together."""
    every = np.arange(len(store))
    if not share:
        return every, every[:0]
    rows = np.unique(store.rows)
    held = round(share * len(rows))
    if held < 1 or held >= len(rows):
        raise ZftError(
            f"data_options.eval_share={share} of {len(rows)} rows leaves {held} for evaluation and "
            f"{len(rows) - held} for training; give more rows, another share, or eval_data"
        )
    chosen = rows[shuffled(len(rows), seed, 4)[:held]]
    is_held = np.isin(store.rows, chosen)
    return every[~is_held], every[is_held]


def _prepared(
    store: Store, sequences: np.ndarray, key: str, sources: list[Source], job: Job, renderer: Renderer
) -> Prepared:
    options, weights = job.options, [source.weight for source in sources]
    items, counts = _items(store, sequences, len(sources), job)
    if weights[0] is not None and not all(counts):
        raise ZftError(f"data: {sources[counts.index(0)].path} has a weight but no row left to draw")
    report = _report(store, sequences, job, len(items))
    state = [key, len(sequences), job.seed if options.eval_share else 0, options.eval_share, job.pack, weights,
             options.length_grouped, job.limits.seq_len]  # fmt: skip
    pad = job.tokenizer.pad_token_id
    epochs = Epochs(
        store=store, items=items, counts=counts, weights=weights if weights[0] is not None else None,
        lengths=items.sums(store.lengths), targets=items.sums(store.targets), seed=job.seed,
        length_grouped=options.length_grouped and not job.pack, packed=job.pack, padding_free=options.padding_free,
        pad_id=next((i for i in (pad, job.tokenizer.eos_token_id) if i is not None), 0),
        fingerprint=hashlib.blake2b(json.dumps(state).encode(), digest_size=12).hexdigest(),
    )  # fmt: skip
    uses_chat = any(form not in ("text", "prompt_completion") for form in store.meta["formats"])
    return Prepared(
        report, epochs, renderer.source if uses_chat or options.chat_template else None, store.meta["stops"]
    )


def _items(store: Store, sequences: np.ndarray, sources: int, job: Job) -> tuple[Items, list[int]]:
    """Items grouped by source (packs don't mix sources, so that weights hold), and how many each source has."""
    parts = []
    for source in range(sources):
        mine = sequences[store.source[sequences] == source]
        parts.append(best_fit(mine, store.lengths[mine], job.limits.seq_len) if job.pack else one_each(mine))
    return join(parts), [len(part) for part in parts]


def _report(store: Store, sequences: np.ndarray, job: Job, items: int) -> DataReport:
    lengths, meta = store.lengths[sequences], store.meta
    samples = sequences[np.linspace(0, len(sequences) - 1, min(_SAMPLES, len(sequences))).astype(int)]
    notes = [_RULES[Format(form)] for form in dict.fromkeys(meta["formats"]) if Format(form) in _RULES]
    return DataReport(
        format=", ".join(dict.fromkeys(meta["formats"])),
        rows=len(np.unique(store.rows[sequences])),
        sequences=len(sequences),
        tokens=int(lengths.sum()),
        supervised_tokens=int(store.targets[sequences].sum()),
        cut=meta["cut"],
        dropped=meta["dropped"],
        seq_len=job.limits.seq_len,
        lengths=length_facts(lengths),
        histogram=histogram(lengths),
        packs=items if job.pack else None,
        notes=notes + meta["notes"],
        samples=[decode_segments(job.tokenizer, store.ids(i), store.mask(i)) for i in samples],
    )

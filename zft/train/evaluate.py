"""Loss on a data set: of a run's model while it trains, and of a finished model or a checkpoint by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zft.api import Engine
from zft.checkpoint.names import base_model
from zft.checkpoint.source import StoredWeights
from zft.config import RunConfig
from zft.data import prepare
from zft.dist import World
from zft.engine.step import EvalResult
from zft.models.hub import cache_dir, resolve_model
from zft.models.load import embedding_rows, load_config
from zft.train.setup import placed, run_tokenizer, structure, together


def mean_loss(prepared: Any, run: RunConfig, world: World, engine: Engine) -> EvalResult:
    """Mean over every supervised token of the data, a step's micro-batches at a time. Collective."""
    train = run.train
    loader = prepared.loader(world.rank, world.size, train.micro_batch_size, train.grad_accum_steps, 1)
    loss_sum, tokens = 0.0, 0
    while (micro_batches := loader.next_step()) is not None:
        result = engine.evaluate(micro_batches)
        loss_sum, tokens = loss_sum + result.loss * result.tokens, tokens + result.tokens
    return EvalResult(loss_sum / tokens, tokens)


@dataclass(frozen=True)
class Evaluation:
    """Figures of a model on a data set."""

    loss: float
    """Mean negative log-likelihood of a supervised token, in nats."""
    tokens: int
    """Supervised ones."""
    rows: int
    cut: int
    """Rows longer than train.seq_len."""
    dropped_rows: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


class TrainedWeights:
    """A weight source: what a checkpoint has, and the rest from where the run took it."""

    def __init__(self, stored: StoredWeights, base: Any, model: torch.nn.Module):
        self.stored, self.base, self.folder = stored, base, getattr(base, "folder", None)
        self._dtypes = {name: tensor.dtype for name, tensor in [*model.named_parameters(), *model.named_buffers()]}

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, CPU tensor), as it computes."""
        there = self.stored.manifest.tensors
        for name in names:
            if name in there:
                yield name, self.stored.read(name, self._dtypes[name])
        yield from self.base.read([name for name in names if name not in there])


def evaluate_model(run: RunConfig, world: World, method: str, checkpoint: Path | None = None) -> Evaluation:
    """Loss of `run.model`, or of a checkpoint of this run, on `run.data`. Collective.

    Nothing is trained: the engine holds weights only. method: sft or pretrain, what counts as a target. Raises ZftError.
    """
    with together(world):
        base = resolve_model(run.model)
        config = load_config(base, run.trust_remote_code)
        tokenizer = run_tokenizer(run, base)
        prepared = prepare(
            [vars(source) for source in run.data],
            tokenizer,
            replace(run.data_options, eval_share=0.0),
            seq_len=run.train.seq_len,
            seed=run.train.seed,
            method=method,
            cache_dir=cache_dir() / "data",
            vocab_size=embedding_rows(config, tokenizer),
        )
        model, source = structure(run, base, tokenizer, world)
        prepared.keep_apart(base_model(model))
        if checkpoint is not None:
            source = TrainedWeights(StoredWeights(checkpoint), source, model)
        model.requires_grad_(False)
        run, _ = placed(run, model, world, prepared.report)
    with together(world):
        engine = Engine(model, run.engine, source, world)
    with engine:
        result = mean_loss(prepared, run, world, engine)
    report = prepared.report
    return Evaluation(result.loss, result.tokens, report.rows, report.cut, report.dropped_rows)

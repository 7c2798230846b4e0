"""One optimizer step: count, forward and backward wave by wave, norm, decide, hand the update over.

    count labels of all ranks -> per wave: forward (coroutines, tape) -> backward (tape reversed) -> norm -> pending updates
The updates run in the next forward pass, each ahead of its unit; or, without clipping and skipping, in the backward pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from zft.config import EngineConfig, Nonfinite, Precision, ZftError
from zft.dist import RankError
from zft.engine.backward import is_plain_embedding, trained
from zft.engine.gate import Mode, Pass
from zft.engine.parts import Parts
from zft.engine.tape import Tape
from zft.engine.unit import Pending, Unit
from zft.engine.wave import MicroBatch, visits

LossFn = Callable[[torch.nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, float]]


@dataclass
class StepResult:
    """What one step did. `loss` is the mean over all supervised tokens; `grad_norm` is global and before clipping."""

    loss: float
    tokens: int
    grad_norm: float
    skipped: bool
    traffic: dict[str, int]
    """Payload bytes of this rank: nvme_read, nvme_write, h2d, d2h."""
    seconds: float


@dataclass
class EvalResult:
    """Mean loss over all supervised tokens of all ranks."""

    loss: float
    tokens: int


@dataclass
class Totals:
    """What the ranks agreed on before (and, for a custom loss, after) the forward passes of a step."""

    waves: int
    tokens: float
    """Supervised tokens (or weights) of the whole step, over all ranks."""
    loss_sum: float = 0.0
    own_weight: float = 0.0
    extras: list[torch.Tensor] = field(default_factory=list)


class Stepper:
    """Runs steps and evaluations of one engine."""

    def __init__(self, parts: Parts, config: EngineConfig):
        self.parts, self.config = parts, config
        self.step_count = 0
        self.attempt_count = 0
        self.skipped_count = 0
        self.broken: BaseException | None = None

    @property
    def immediate(self) -> bool:
        """Do updates run in the backward pass?"""
        config = self.config
        exact = config.precision is not Precision.fp16
        return config.max_grad_norm is None and config.nonfinite is Nonfinite.raise_ and exact

    def step(
        self, micro_batches: list[dict[str, torch.Tensor]], lr: float | None, loss_fn: LossFn | None
    ) -> StepResult:
        """See Engine.step."""
        parts, started = self.parts, time.perf_counter()
        self.check_usable()
        lr = self.config.optim.lr if lr is None else lr
        parts.updater.traffic.take()
        parts.model.train()
        try:
            totals = self._count(micro_batches, loss_fn)
            parts.gradients.begin(self._now(lr) if self.immediate else None)
            self._waves(micro_batches, totals, loss_fn)
            parts.fetcher.settle()  # weights fetched on a wrong guess must not be taken for those after an update
            result = self._decide(totals, lr)
            parts.streams.report()
        except BaseException as error:
            self._recover(error)
            raise
        finally:
            parts.gates.mode = Mode.IDLE
        self.attempt_count += 1
        loss, grad_norm, skipped = result
        seconds = time.perf_counter() - started
        return StepResult(loss, int(totals.tokens), grad_norm, skipped, parts.updater.traffic.take(), seconds)

    def evaluate(self, micro_batches: list[dict[str, torch.Tensor]]) -> EvalResult:
        """See Engine.evaluate."""
        parts = self.parts
        self.check_usable()
        self.drain()
        was_training = parts.model.training
        parts.model.eval()
        try:
            totals = self._count(micro_batches, None, allow_empty=True)
            size = self.config.wave or max(len(micro_batches), 1)
            for wave in range(totals.waves):
                rows = [self._micro_batch(i, mb, None) for i, mb in enumerate(micro_batches)][
                    wave * size : (wave + 1) * size
                ]
                with torch.no_grad():
                    self._forward(rows, Pass(Tape(), parts.objective, 1.0), Mode.EVALUATE)
                totals.loss_sum += sum(float(mb.loss_sum) for mb in rows)
        except BaseException as error:
            self._recover(error)
            raise
        finally:
            parts.gates.mode = Mode.IDLE
            parts.model.train(was_training)
        loss = sum(row[0] for row in parts.world.gather_floats([totals.loss_sum]))
        return EvalResult(loss / totals.tokens if totals.tokens else math.nan, int(totals.tokens))

    def drain(self) -> None:
        """Run every pending update, so that the weights are those after the last step."""
        self.check_usable()
        try:
            self.parts.fetcher.settle()
            for group in self.parts.records:
                self.parts.fetcher.apply(group)
        except BaseException as error:
            self.broken = error
            raise

    def counters(self) -> dict:
        """All that a resumed engine must know beside its records, as plain data; `restore_counters` takes it back."""
        scaler = self.parts.scaler
        return {
            "step_count": self.step_count,
            "attempt_count": self.attempt_count,
            "skipped_count": self.skipped_count,
            "missed": {
                s.name: n for g in self.parts.records for s, n in zip(g.layout.spans, g.missed, strict=True) if n
            },
            "loss_scale": scaler.state_dict() if scaler is not None else None,
        }

    def restore_counters(self, counters: dict) -> None:
        self.step_count = counters["step_count"]
        self.attempt_count = counters["attempt_count"]
        self.skipped_count = counters["skipped_count"]
        for group in self.parts.records:
            group.missed = [counters["missed"].get(span.name, 0) for span in group.layout.spans]
        if self.parts.scaler is not None and counters["loss_scale"] is not None:
            self.parts.scaler.load_state_dict(counters["loss_scale"])

    def _count(self, micro_batches: list[dict], loss_fn: LossFn | None, allow_empty: bool = False) -> Totals:
        """Meet the other ranks: how many waves, and how many supervised tokens in all."""
        tokens = 0
        if loss_fn is None:
            if self.parts.objective is None:
                raise ZftError("this model has no output head for the default loss; pass loss_fn to step")
            tokens = sum(int((self.parts.objective.targets(mb["labels"]) != -100).sum()) for mb in micro_batches)
        rows = self.parts.world.gather_ints([len(micro_batches), tokens])
        most = max(row[0] for row in rows)
        total = sum(row[1] for row in rows)
        if most == 0:
            raise ZftError("step got no micro-batches on any rank; pass at least one")
        if loss_fn is None and total == 0 and not allow_empty:
            raise ZftError(
                "no token of this step is supervised (every label is -100); check the data's mask and truncation"
            )
        return Totals(math.ceil(most / (self.config.wave or most)), total)

    def _waves(self, micro_batches: list[dict], totals: Totals, loss_fn: LossFn | None) -> None:
        parts = self.parts
        size = self.config.wave or math.ceil(max(len(micro_batches), 1) / totals.waves)
        prepared = [self._micro_batch(i, mb, loss_fn) for i, mb in enumerate(micro_batches)]
        objective = parts.objective if loss_fn is None else None
        scale = parts.loss_scale / (totals.tokens if loss_fn is None else 1.0)
        head = next((u for u in parts.units if objective is not None and u.module is objective.head), None)
        for wave in range(totals.waves):
            rows, last = prepared[wave * size : (wave + 1) * size], wave == totals.waves - 1
            tape = Tape()
            self._ready_leftovers()
            parts.gradients.open(trained(parts.leftovers))
            self._forward(rows, Pass(tape, objective, scale), Mode.TRAIN)
            for visit in tape.visits:
                visit.entries = visit.entries if visit.unit is not head else []
            parts.order.end()
            roots = self._losses(rows, totals, loss_fn, scale)
            if last and loss_fn is not None:
                totals.tokens = sum(row[0] for row in parts.world.gather_floats([totals.own_weight]))
                if not totals.tokens:
                    raise ZftError("loss_fn returned weight 0 for every micro-batch of the step; return (sum, weight)")
                self._rescale_immediate(totals)
            self._close_head(tape, head, last)
            if roots:
                torch.autograd.backward(roots, retain_graph=True)
            parts.backward.walk(tape, last, head)
        parts.backward.close(trained(parts.leftovers), last_wave=True)
        parts.gradients.finish_parked()

    def _forward(self, rows: list[MicroBatch], wave: Pass, mode: Mode) -> None:
        """Take all micro-batches of the wave through the model's forward."""
        parts, gates = self.parts, self.parts.gates
        gates.mode, gates.wave = mode, wave
        self._ready_leftovers()
        parts.order.begin()
        parts.fetcher.prefetch(parts.order.known[0] if parts.order.known else None)
        try:
            for unit, arrivals in visits(rows, parts.units, parts.world):
                gates.visit = wave.tape.visit(unit)
                parts.sharder.unshard(unit)
                parts.fetcher.prefetch(parts.order.after(unit) or self._first_backward(wave, mode))
                if mode is Mode.TRAIN and wave.objective is not None and unit.module is wave.objective.head:
                    parts.gradients.open(trained(unit))
                started = time.perf_counter()
                for micro_batch in arrivals:
                    micro_batch.resume(parts.world.device)
                parts.record("compute", f"forward {unit.name}", started, time.perf_counter())
                parts.sharder.reshard(unit)
        except BaseException:
            for micro_batch in rows:
                micro_batch.abandon()
            raise

    def _first_backward(self, wave: Pass, mode: Mode) -> Unit | None:
        """At the last visit of a forward pass: the unit whose weights the backward pass needs first."""
        if mode is not Mode.TRAIN:
            return None
        head = wave.objective.head if wave.objective is not None else None
        later = (visit.unit for visit in reversed(wave.tape.visits) if visit.unit.module is not head)
        return next((unit for unit in later if not is_plain_embedding(unit)), None)

    def _losses(
        self, rows: list[MicroBatch], totals: Totals, loss_fn: LossFn | None, scale: float
    ) -> list[torch.Tensor]:
        """Add this wave's losses to the totals; the scalars whose graphs have to be walked backwards."""
        roots = []
        for mb in rows:
            if loss_fn is not None:
                loss, weight = mb.result
                totals.loss_sum += float(loss.detach())
                totals.own_weight += float(weight)
                roots.append(loss * scale)
                continue
            totals.loss_sum += float(mb.loss_sum)
            extra = self.parts.objective.extra(mb.result)
            if extra is not None:
                own = int((self.parts.objective.targets(mb.labels) != -100).sum())
                totals.loss_sum += float(extra.detach()) * own
                roots.append(extra * (own * scale))
        return [root for root in roots if root.requires_grad]

    def _close_head(self, tape: Tape, head: Unit | None, last: bool) -> None:
        """Reduce what the head's visit collected; it is finished unless it is tied to a unit still to come."""
        if head is None or not any(visit.unit is head for visit in tape.visits):
            return
        units = [visit.unit for visit in tape.visits if visit.unit is not head]
        groups = trained(head)
        for group in groups:
            group.awaited += sum(group in unit.needed for unit in units)
        self.parts.backward.close(groups, last)
        for group in groups:
            group.awaited = 0

    def _decide(self, totals: Totals, lr: float) -> tuple[float, float, bool]:
        """Norm, skip or go on, pending updates. Returns (loss, grad_norm, skipped)."""
        parts, config = self.parts, self.config
        custom_scale = 1.0 if parts.gates.wave.objective is not None else totals.tokens
        unscale = 1.0 / (parts.loss_scale * custom_scale)
        norm = math.sqrt(parts.gradients.norm_squared()) * unscale
        loss = sum(row[0] for row in parts.world.gather_floats([totals.loss_sum])) / totals.tokens
        finite = math.isfinite(norm)
        if not finite and config.nonfinite is Nonfinite.raise_ and config.precision is not Precision.fp16:
            raise FloatingPointError(f"gradient norm is {norm} (loss {loss}); weights are untouched")
        if parts.scaler is not None:
            parts.scaler.update(overflow=not finite)
        if not finite:
            self.skipped_count += 1
            return loss, norm, True
        self.step_count += 1
        if not self.immediate:
            clip = 1.0 if config.max_grad_norm is None else min(1.0, config.max_grad_norm / (norm + 1e-6))
            for group in parts.gradients.finished:
                group.pending = group.pending_update(self.step_count, lr, clip * unscale)
        for group in parts.records:
            group.count_missed()
        return loss, norm, False

    def _now(self, lr: float) -> Pending:
        return Pending(self.step_count + 1, lr, 1.0, (), ())

    def _rescale_immediate(self, totals: Totals) -> None:
        if self.parts.gradients.immediate is not None:
            self.parts.gradients.immediate.grad_scale = 1.0 / totals.tokens

    def _micro_batch(self, index: int, batch: dict[str, torch.Tensor], loss_fn: LossFn | None) -> MicroBatch:
        parts = self.parts
        number = index * parts.world.size + parts.world.rank
        device = parts.world.device
        inputs = {k: v.to(device, non_blocking=True) for k, v in batch.items() if k != "labels"}
        labels = batch.get("labels")

        def run(mb: MicroBatch) -> Any:
            if loss_fn is not None:
                with_labels = mb.inputs if labels is None else {**mb.inputs, "labels": labels.to(device)}
                return loss_fn(parts.model, with_labels)
            return parts.model(**mb.inputs, use_cache=False) if parts.takes_use_cache else parts.model(**mb.inputs)

        mb = MicroBatch(number, inputs, labels, run)
        mb.context = parts.outside_context().seeded(self.config.seed, self.attempt_count, number, device)
        return mb

    def _ready_leftovers(self) -> None:
        """Parameters that stay unsharded: apply their update and attach them."""
        leftovers = self.parts.leftovers
        if any(g.pending or g.outdated or g.flat is None for g in leftovers.groups):
            if leftovers.groups[0].flat is not None:
                self.parts.sharder.reshard(leftovers)
            self.parts.sharder.unshard(leftovers)

    def check_usable(self) -> None:
        broken = self.broken or self.parts.fetcher.failed
        if broken is not None:
            raise RuntimeError(
                f"this engine stopped in the middle of an update ({broken}); resume from the last checkpoint"
            ) from broken

    def _recover(self, error: BaseException) -> None:
        """Leave the engine ready for a clean step: nothing half unsharded, no gradients, pending updates still pending."""
        parts = self.parts
        parts.world.fail_once(error)
        parts.fetcher.catch_up(error)
        parts.gradients.abandon()
        for unit in parts.units:
            if any(group.flat is not None for group in unit.needed):
                parts.sharder.force_reshard(unit)
        try:
            parts.fetcher.settle()
        except RankError:
            pass  # of the rank whose error this is, or of this one's own, told already
        except BaseException as update_error:
            self.broken = update_error
        if self.immediate and not isinstance(error, ZftError):
            self.broken = error

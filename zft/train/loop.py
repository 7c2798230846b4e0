"""The loop: next micro-batches, learning rate, step, evaluate, log, save, stop.

All that changes is in TrainState, so that a resumed run goes on as if it had not stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum

from zft.api import Engine
from zft.checkpoint.manifest import DamagedCheckpoint
from zft.config import RunConfig, ZftError
from zft.dist import World
from zft.engine.step import EvalResult, StepResult
from zft.observe.metrics import Metrics, StepMetrics, drop_after
from zft.observe.progress import Progress
from zft.optim.schedules import lr_at
from zft.status import DONE, STOPPED, complain
from zft.train import checkpoints
from zft.train.folder import RunFolder
from zft.train.setup import together
from zft.train.signals import StopRequest
from zft.train.state import TrainState
from zft.tree import to_tree


class Outcome(StrEnum):
    """How a loop ended: at its last step, at `train.stop_after`, or by a signal. There is a checkpoint each time."""

    finished = "finished"
    paused = "paused"
    interrupted = "interrupted"


@dataclass
class Job:
    """What a loop works with."""

    run: RunConfig
    engine: Engine
    loader: object
    """zft.data's Loader: this rank's micro-batches, step by step."""
    world: World
    folder: RunFolder
    evaluate: Callable[[], EvalResult] | None = None
    state: TrainState | None = None


def restore(job: Job) -> None:
    """Load the newest checkpoint that is whole, if there is any, and drop the metrics after it.

    Raises ZftError where there are checkpoints and none is whole.
    """
    found = job.world.broadcast_object(checkpoints.candidates(job.folder.checkpoints))
    for folder in found:
        try:
            job.state = TrainState.from_dict(job.engine.load(folder))
        except DamagedCheckpoint as error:
            if job.world.is_main:
                print(f"warning: {error}", flush=True)
            continue
        job.loader.load_state_dict(job.state.loader)
        break
    else:
        if found:
            raise ZftError(f"no checkpoint in {job.folder.checkpoints} is whole; start a new run")
    with together(job.world):
        if job.world.is_main:
            drop_after(job.folder.metrics, job.state.step)


def fit(job: Job, total_steps: int, resume: bool = False) -> Outcome:
    """Train to the end, to `stop_after` or to a signal, with a checkpoint there.

    Raises ZftError if the schedule of a resumed run would be shorter than what is done.
    """
    job.state = TrainState()
    if resume:
        restore(job)
    state, train = job.state, job.run.train
    if state.step > total_steps:
        raise ZftError(f"train.steps={total_steps}, but {state.step} steps are done; give more, or start a new run")
    state.total_steps = total_steps
    last_step = min(total_steps, train.stop_after or total_steps)
    saved_step = state.step if resume else None
    main = job.world.is_main
    metrics = Metrics(job.folder.metrics, job.run.track, to_tree(job.run)) if main else None
    with StopRequest() as stop, Progress(last_step, state.step) if main else nullcontext() as progress:
        while state.step < last_step and not _any_rank(job.world, stop.received):
            row = _step(job)
            if main:
                metrics.log(row)
                progress.show(row)
            if train.save_every and state.step % train.save_every == 0:
                saved_step = save(job)
        if saved_step != state.step:
            save(job)
    if main:
        metrics.close()
    if state.is_finished:
        return Outcome.finished
    return Outcome.paused if state.step == train.stop_after else Outcome.interrupted


def ended_early(job: Job, outcome: Outcome) -> int:
    """Say how to go on; returns the exit status: 0 after `stop_after`, 130 after a signal."""
    line = f"stopped after step {job.state.step} of {job.state.total_steps}; `zft resume {job.folder.path}` goes on"
    if outcome is Outcome.interrupted:
        return complain(line, STOPPED)
    if job.world.is_main:
        print(line, flush=True)
    return DONE


def save(job: Job) -> int:
    """A checkpoint of this step; older ones go. Returns the step."""
    state, folder = job.state, job.folder.checkpoints
    state.loader = job.loader.state_dict()
    earlier = [row for row in state.saved if row[0] != state.step]
    state.saved = [*earlier, [state.step, state.eval_loss if state.eval_step == state.step else None]]
    job.engine.save(checkpoints.step_folder(folder, state.step), state.to_dict())
    with together(job.world):
        kept = checkpoints.prune(folder, state.saved, job.run.train.keep) if job.world.is_main else None
    state.saved = job.world.broadcast_object(kept)
    return state.step


def _step(job: Job) -> StepMetrics:
    state, train, engine = job.state, job.run.train, job.engine
    micro_batches = job.loader.next_step()
    assert micro_batches is not None, f"the loader ended before step {state.step + 1} of {state.total_steps}"
    lr = lr_at(
        engine.step_count, train.schedule, train.lr, train.warmup_steps, state.total_steps, train.min_lr_ratio
    )  # fmt: skip
    result = engine.step(micro_batches, lr=lr)
    state.step += 1
    state.tokens += result.tokens
    state.skipped += result.skipped
    state.seconds += result.seconds
    state.loss = result.loss
    every = train.eval_every
    is_due = job.evaluate is not None and (state.step == state.total_steps or (every and state.step % every == 0))
    return _metrics(job, result, lr, _evaluate(job) if is_due else None)


def _evaluate(job: Job) -> float:
    loss = job.evaluate().loss
    job.state.eval_step, job.state.eval_loss = job.state.step, loss
    if loss < job.state.best_loss:
        job.state.best_loss, job.state.best_step = loss, job.state.step
    return loss


def _metrics(job: Job, result: StepResult, lr: float, eval_loss: float | None) -> StepMetrics:
    return StepMetrics(
        step=job.state.step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=lr,
        tokens=result.tokens,
        tokens_per_s=result.tokens / result.seconds,
        seconds=result.seconds,
        skipped=result.skipped,
        peak_bytes=job.engine.peak_bytes(),
        traffic_bytes=result.traffic,
        eval_loss=eval_loss,
    )


def _any_rank(world: World, flag: bool) -> bool:
    return flag if world.size == 1 else any(row[0] for row in world.gather_ints([int(flag)]))


def evaluator(prepared, run: RunConfig, world: World, engine: Engine) -> Callable[[], EvalResult] | None:
    """Evaluates on all of the held-out data, a step's micro-batches at a time; None without any."""
    if prepared.eval is None:
        return None
    train = run.train

    def evaluate() -> EvalResult:
        loader = prepared.eval.loader(world.rank, world.size, train.micro_batch_size, train.grad_accum_steps, 1)
        loss_sum, tokens = 0.0, 0
        while (micro_batches := loader.next_step()) is not None:
            result = engine.evaluate(micro_batches)
            loss_sum, tokens = loss_sum + result.loss * result.tokens, tokens + result.tokens
        return EvalResult(loss_sum / tokens, tokens)

    return evaluate

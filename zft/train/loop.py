"""The loop: next micro-batches, learning rate, step, evaluate, log, save, stop.

All that changes is in TrainState, so that a resumed run goes on as if it had not stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import StrEnum

from zft.api import Engine
from zft.checkpoint.manifest import DamagedCheckpoint
from zft.config import RunConfig, ZftError
from zft.dist import World
from zft.engine.step import EvalResult, StepResult
from zft.observe.metrics import Metrics, StepMetrics, drop_after, read
from zft.observe.progress import Progress
from zft.observe.report import write_report
from zft.observe.trace import Trace
from zft.optim.schedules import lr_at
from zft.status import DONE, STOPPED, complain
from zft.train import checkpoints
from zft.train.evaluate import mean_loss
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
    trace: Trace = field(default_factory=Trace)
    """Takes the engine's spans: `record=trace.add`."""
    stop_ids: list[int] = field(default_factory=list)
    """Tokens that end an answer in the data, for exports."""


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
        if job.world.is_main:
            print(f"going on after step {job.state.step}, from {folder}", flush=True)
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
    shown = Progress(last_step, state.step) if main else nullcontext()
    with StopRequest() as stop, _reported(job, metrics), shown as progress, _begun_saves_end(job):
        while state.step < last_step and not _any_rank(job.world, stop.received):
            row = _step(job)
            if main:
                metrics.log(row)
                progress.show(row)
            settle(job, wait=False)
            if train.save_every and state.step % train.save_every == 0:
                saved_step = save(job)
        if saved_step != state.step:
            save(job)
        settle(job)
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
    """Begin a checkpoint of this step; it is written while the next steps run, and `settle` completes it. Returns the step."""
    settle(job)
    state = job.state
    state.loader, state.stop_ids = job.loader.state_dict(), job.stop_ids
    earlier = [row for row in state.saved if row[0] != state.step]
    state.saved = [*earlier, [state.step, state.eval_loss if state.eval_step == state.step else None]]
    job.engine.save(checkpoints.step_folder(job.folder.checkpoints, state.step), state.to_dict(), wait=False)
    return state.step


def settle(job: Job, wait: bool = True) -> None:
    """Complete the checkpoint that was begun, if it is copied (or wait for that); then older ones go."""
    if not job.engine.finish_save(wait):
        return
    with together(job.world):
        main = job.world.is_main
        kept = checkpoints.prune(job.folder.checkpoints, job.state.saved, job.run.train.keep) if main else None
    job.state.saved = job.world.broadcast_object(kept)


@contextmanager
def _reported(job: Job, metrics: Metrics | None) -> Iterator[None]:
    """Rank 0 leaves trace.json and report.html, of a run that fails too."""

    def report() -> None:
        if metrics is None:
            return
        metrics.close()
        job.trace.write(job.folder.path)
        if read(job.folder.metrics):
            write_report(job.folder.path)

    try:
        yield
    except Exception:
        with suppress(Exception):  # the first error says more
            report()
        raise
    with together(job.world):
        report()


@contextmanager
def _begun_saves_end(job: Job) -> Iterator[None]:
    """A step that fails does not take the checkpoint with it that was being written meanwhile; other ranks are told."""
    try:
        yield
    except Exception as error:
        job.world.fail_once(error)
        if job.world.size == 1:  # several ranks are no longer in step
            with suppress(Exception):  # the first error says more
                job.engine.finish_save()
        raise


def _step(job: Job) -> StepMetrics:
    state, train, engine = job.state, job.run.train, job.engine
    micro_batches = job.loader.next_step()
    assert micro_batches is not None, f"the loader ended before step {state.step + 1} of {state.total_steps}"
    lr = lr_at(
        engine.step_count, train.schedule, train.lr, train.warmup_steps, state.total_steps, train.min_lr_ratio
    )  # fmt: skip
    with job.trace.step(state.step + 1):
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
    return lambda: mean_loss(prepared.eval, run, world, engine)

"""Runs a function on several gloo ranks, each a real process forked from one warm parent, under a hard time-out.

losses = run_ranks(2, train, "llama", config)      # train(world_size, "llama", config) on each rank
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GROUP_TIMEOUT_S = 60.0
"""Of collectives on the payload group; an engine's own group has `EngineConfig.timeout_s`."""


class RanksFailed(AssertionError):
    """Some rank raised, died or hung; the text has each one's traceback. `errors`: {rank: text}."""

    def __init__(self, errors: dict[int, str]):
        super().__init__("".join(f"\n--- rank {rank}\n{text}" for rank, text in sorted(errors.items())))
        self.errors = errors


@dataclass
class Rank:
    """One started process and the pipe its outcome comes through."""

    number: int
    process: multiprocessing.Process
    pipe: Connection
    stacks: Path
    outcome: tuple[str, Any] | None = None


def run_ranks(
    size: int, function: Callable, *args: Any, timeout_s: float = 120.0, group_timeout_s: float = GROUP_TIMEOUT_S
) -> list:
    """[function(*args) of rank 0, 1, …]; each rank sees RANK and WORLD_SIZE, and the process group if size > 1.

    `function` is a module-level one. Raises RanksFailed if a rank raises, dies or isn't through after `timeout_s`; then
    none is left running. Arguments and results travel by plain pickle: torch's own shares memory with a dead process.
    """
    outcomes = run_ranks_to_end(size, function, *args, timeout_s=timeout_s, group_timeout_s=group_timeout_s)
    errors = {rank: text for rank, (kind, text) in enumerate(outcomes) if kind != "value"}
    if errors:
        raise RanksFailed(errors)
    return [value for _, value in outcomes]


def run_ranks_to_end(
    size: int, function: Callable, *args: Any, timeout_s: float = 120.0, group_timeout_s: float = GROUP_TIMEOUT_S
) -> list[tuple[str, Any]]:
    """Per rank ("value", result), ("error", traceback), ("died", exit status) or ("hung", stacks)."""
    context = _warm_context()
    with tempfile.TemporaryDirectory(prefix="zft-ranks-") as folder:
        ranks = [
            _start(context, Path(folder), (number, size), group_timeout_s, function, args) for number in range(size)
        ]
        try:
            _collect(ranks, time.monotonic() + timeout_s)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()
                rank.pipe.close()
        return [rank.outcome for rank in ranks]


def _warm_context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm"])
    os.environ["PYTHONPATH"] = os.pathsep.join(
        dict.fromkeys([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    return context


def _start(
    context: Any, folder: Path, place: tuple[int, int], group_timeout_s: float, function: Callable, args: tuple
) -> Rank:
    ours, theirs = context.Pipe(duplex=False)
    stacks = folder / f"stacks-{place[0]}"
    task = (theirs, place, str(folder / "store"), str(stacks), group_timeout_s, pickle.dumps((function, args)))
    process = context.Process(target=_rank_main, args=task, daemon=True)
    process.start()
    theirs.close()
    return Rank(place[0], process, ours, stacks)


def _collect(ranks: list[Rank], deadline: float) -> None:
    while open_ranks := [rank for rank in ranks if rank.outcome is None]:
        ready = wait([rank.pipe for rank in open_ranks], timeout=max(0.0, deadline - time.monotonic()))
        for rank in open_ranks:
            if rank.pipe in ready:
                rank.outcome = _receive(rank)
        if not ready:
            for rank in open_ranks:
                rank.outcome = ("hung", _stacks(rank))
            return


def _receive(rank: Rank) -> tuple[str, Any]:
    try:
        return pickle.loads(rank.pipe.recv_bytes())
    except EOFError:
        rank.process.join(5)
        return ("died", f"ended with exit status {rank.process.exitcode} and no result")


def _stacks(rank: Rank) -> str:
    """Where a hanging rank is: its own threads' stacks, written at a signal."""
    if rank.process.is_alive():
        os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
    return "hung; its stacks:\n" + (rank.stacks.read_text() if rank.stacks.exists() else "not written")


def _rank_main(pipe, place: tuple[int, int], store: str, stacks: str, group_timeout_s: float, task: bytes) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    number, size = place
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        os.environ.update(RANK=str(number), WORLD_SIZE=str(size), LOCAL_RANK=str(number), LOCAL_WORLD_SIZE=str(size))
        try:
            function, args = pickle.loads(task)
            if size > 1:
                timeout = timedelta(seconds=group_timeout_s)
                dist.init_process_group(
                    "gloo", init_method=f"file://{store}", rank=number, world_size=size, timeout=timeout
                )
            outcome = ("value", function(*args))
        except BaseException:
            outcome = ("error", traceback.format_exc())
        pipe.send_bytes(pickle.dumps(outcome))
        pipe.close()
        sys.stdout.flush()
        os._exit(0)  # a group whose other members are gone may never shut down

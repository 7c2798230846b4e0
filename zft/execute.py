"""Runs a resolved configuration: in this process, or as `nproc` ranks, and turns what happens into an exit status."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

from zft.compose import find_recipe
from zft.config import RunConfig, ZftError
from zft.status import DONE, FAILED, STOPPED, WRONG_INPUT, complain, rank_count
from zft.train.folder import RunFolder
from zft.tree import build, to_tree


def execute(run: RunConfig, resume: bool = False) -> int:
    """Run the recipe; returns the exit status. Nothing is written where the input is wrong (ZftError)."""
    ranks = rank_count()
    if run.nproc > 1 and ranks == 1:
        from zft.launch import launch

        return launch(run, resume)
    if run.nproc > 1 and run.nproc != ranks:
        raise ZftError(f"nproc={run.nproc}, but torchrun started {ranks} ranks; leave nproc out under torchrun")
    folder = RunFolder(run.out)
    try:
        recipe = _load(find_recipe(run.recipe, Path.cwd()))
        return recipe.main(run, resume) or DONE
    except ZftError as error:
        if folder.is_run and os.environ.get("RANK", "0") == "0" and _is_of_another_rank(error):
            folder.log_error(error)
        raise
    except KeyboardInterrupt:
        return complain("stopped" + (f"; `zft resume {folder.path}` goes on" if folder.is_run else ""), STOPPED)
    except Exception as error:
        folder.log_error(error)
        return complain(f"{_summary(error)}; the traceback is in {folder.error_log}", FAILED)


def compose_for_ranks(make: Callable[[], RunConfig]) -> RunConfig:
    """What `make` returns; under torchrun rank 0 makes it for all, so that they agree (on `out`, for one)."""
    if rank_count() == 1:
        return make()
    import json

    from torch.distributed import rendezvous

    store, rank, _ = next(rendezvous("env://"))
    if rank != 0:
        answer = json.loads(store.get("zft/run"))
        if "error" in answer:
            sys.exit(WRONG_INPUT)  # rank 0 has said what is wrong
        return build(answer, Path.cwd())
    try:
        run = make()
    except ZftError:
        store.set("zft/run", json.dumps({"error": True}))
        raise
    store.set("zft/run", json.dumps(to_tree(run)))
    return run


def _load(script: Path):
    spec = importlib.util.spec_from_file_location(f"zft_recipe_{script.stem}", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, "main"):
        raise ZftError(f"{script} has no function main(run, resume); `zft cp sft FILE` gives one to start from")
    return module


def _is_of_another_rank(error: ZftError) -> bool:
    from zft.dist import RankInputError

    return isinstance(error, RankInputError)


def _summary(error: Exception) -> str:
    """What happened in a line; an out-of-memory error also names the setting to change."""
    line = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        line += "; try engine=zero3_cpu or engine=zero3_nvme, a smaller train.seq_len or train.micro_batch_size=1"
    return line

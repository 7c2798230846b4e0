"""What a recipe needs before its loop: the loader's length, room on the tiers, errors shared by all ranks."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from zft.config import Method, RunConfig
from zft.dist import World
from zft.models.adapters import attach_adapter
from zft.models.load import HubWeights, build_model, grow, load_tokenizer, tokenizer_rows
from zft.plan.choose import Lengths, Plan
from zft.plan.runs import place
from zft.plan.show import against
from zft.precision import resolve_precision
from zft.train.folder import RunFolder, check_nvme_dir


@contextmanager
def together(world: World) -> Iterator[None]:
    """What goes wrong on one rank in this block is raised on all."""
    try:
        yield
    except Exception as error:
        world.agree(error)
    world.agree(None)


def make_loader(prepared, run: RunConfig, world: World):
    """The loader of a run, endless where `train.steps` is given, and the number of its steps."""
    train = run.train
    epochs = None if train.steps else train.epochs
    loader = prepared.loader(world.rank, world.size, train.micro_batch_size, train.grad_accum_steps, epochs)
    return loader, train.steps or loader.total_steps


def run_tokenizer(run: RunConfig, base: Path) -> Any:
    """The model's tokenizer; where a run goes on from an adapter that has its own, that one: it may have more tokens."""
    folder = Path(run.method.adapter) if run.method.adapter and run.method.name is not Method.full else base
    own = (folder / "tokenizer_config.json").is_file()
    return load_tokenizer(folder if own else base, run.trust_remote_code)


def structure(run: RunConfig, base: Path, tokenizer: Any, world: World) -> tuple[torch.nn.Module, Any]:
    """The model on meta, with room for every token and the adapter that `method` asks for, and the source of its weights."""
    dtype = resolve_precision(run.engine, world.device).hi_dtype
    model = build_model(base, dtype, trust_remote_code=run.trust_remote_code)
    rows = model.get_input_embeddings().weight.shape[0]
    grown = range(rows, tokenizer_rows(tokenizer)) if grow(model, tokenizer_rows(tokenizer)) else ()
    source = HubWeights(base, model)
    if run.method.name is Method.full:
        return model, source
    return attach_adapter(model, source, run.method, run.train.seed, list(grown))


def placed(run: RunConfig, model: torch.nn.Module, world: World, report: Any) -> tuple[RunConfig, Plan | None]:
    """`run` with the tiers chosen that the user left open, and the plan (rank 0's). report: of the data, for its lengths.

    Raises ZftError, with numbers, where nothing fits.
    """
    whole = report.packs is not None
    lengths = (
        Lengths(report.seq_len, report.seq_len)
        if whole
        else Lengths(int(report.lengths["max"]), report.lengths["mean"])
    )
    run, plan = place(run, model, world, lengths)
    check_nvme_dir(run)
    return run, plan


def keep_plan(plan: Plan | None, folder: RunFolder) -> None:
    """OUT/plan.json, for `zft report`."""
    if plan is not None:
        folder.plan.write_text(json.dumps(plan.to_dict()), encoding="utf-8")


def planned_and_measured(plan: Plan, folder: RunFolder, peak_bytes: dict[str, int]) -> str:
    """One line. The step is the median of those in metrics.jsonl after the first, which compiles."""
    rows = [json.loads(line)["seconds"] for line in folder.metrics.read_text(encoding="utf-8").splitlines()]
    return against(plan, statistics.median(rows[1:] or rows), peak_bytes)


def trained_numel(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def facts(run: RunConfig, state) -> dict:
    """Training facts for the model card."""
    train = run.train
    return {
        "base_model": run.model,
        "datasets": [source.path for source in run.data],
        "recipe": run.recipe if "/" not in run.recipe else Path(run.recipe).name,
        "method": str(run.method.name),
        "steps": state.step,
        "supervised_tokens": state.tokens,
        "final_loss": f"{state.loss:.4f}",
        "learning_rate": f"{train.lr:g}, {train.schedule}, {train.warmup_steps} warm-up steps",
        "sequence_length": train.seq_len,
        "sequences_per_step": f"{train.micro_batch_size} x {train.grad_accum_steps} on each rank",
        "precision": str(run.engine.precision),
    }

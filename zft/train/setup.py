"""What a recipe needs before its loop: the loader's length, room on the tiers, errors shared by all ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from zft.config import Hardware, Method, RunConfig, Tier
from zft.dist import World
from zft.models.adapters import attach_adapter
from zft.models.load import HubWeights, build_model, grow, tokenizer_rows
from zft.precision import resolve_precision
from zft.tiers.plan import place
from zft.train.folder import check_nvme_dir


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


def placed(run: RunConfig, model: torch.nn.Module, world: World) -> RunConfig:
    """`run` with the tiers chosen that the user left open. Raises ZftError where nothing fits."""
    free = free_bytes(world, run.hardware, run.engine.nvme_dir)
    engine = place(run.engine, run.auto_tiers, trained_numel(model), world.size, free)
    run = replace(run, engine=engine, auto_tiers=())
    check_nvme_dir(run)
    return run


def free_bytes(world: World, hardware: Hardware, nvme_dir: str) -> dict[str, int]:
    """Free bytes of each tier for one rank, or what `hardware=` says. Without a GPU, device and cpu are the same RAM."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    host = psutil.virtual_memory().available // here
    device = torch.cuda.mem_get_info(world.device)[0] if world.device.type == "cuda" else host
    there = next(parent for parent in (Path(nvme_dir), *Path(nvme_dir).parents) if parent.exists())
    free = {Tier.device: device, Tier.cpu: host, Tier.nvme: shutil.disk_usage(there).free // here}
    named = {Tier.device: hardware.device_gib, Tier.cpu: hardware.host_gib, Tier.nvme: hardware.nvme_gib}
    return {tier: free[tier] if gib is None else int(gib * 2**30) for tier, gib in named.items()}


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

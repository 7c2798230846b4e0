"""From a RunConfig to its plan: the world, the machine and the model's shape, joined for the commands and the recipes."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import nn

from zft.config import RunConfig
from zft.dist import World
from zft.plan.choose import Choice, Lengths, Plan, candidates, choose
from zft.plan.here import rates_here
from zft.plan.models import shape_for
from zft.plan.rates import Rates, named
from zft.plan.shapes import planned_world, shape_of
from zft.precision import resolve_precision
from zft.schema import AUTO_TIERS


def plan_run(run: RunConfig, ranks: int | None = None) -> Choice:
    """The plan of a run by its model's config alone. ranks: null: nproc. Raises ZftError where nothing fits."""
    world = world_of(run, ranks or run.nproc)
    rates = rates_of(run, world)
    return choose(run, shape_for(run, world), world, rates, shape_for)


def place(
    run: RunConfig, model: nn.Module, world: World, lengths: Lengths | None = None
) -> tuple[RunConfig, Plan | None]:
    """The run with the tiers that it left open, and its plan (on rank 0): of the model at hand, for the ranks that there are.

    Collective. Raises ZftError on every rank where nothing fits.
    """
    plan, error = None, None
    if world.is_main:
        try:
            planned = planned_world(world.size, run.engine.shard_ranks, world.device)
            rates = rates_of(run, planned, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), real=True)
            plan = choose(run, shape_of(model, run.engine, planned), planned, rates, shape_for, lengths).plan
        except Exception as raised:  # told to the other ranks, which wait
            error = raised
    world.agree(error)
    engine = world.broadcast_object(plan.config if plan else None)
    return replace(run, engine=engine, auto_tiers=()), plan


def world_of(run: RunConfig, ranks: int) -> World:
    """Rank 0 of the planned ranks, on the device that the named hardware has."""
    return planned_world(ranks, run.engine.shard_ranks, planned_device(run))


def planned_device(run: RunConfig) -> str:
    if run.engine.compute_device is not None:
        return torch.device(run.engine.compute_device).type
    return "cuda" if run.hardware.name != "this" or torch.cuda.is_available() else "cpu"


def rates_of(run: RunConfig, world: World, local_ranks: int | None = None, real: bool = False) -> Rates:
    """What `hardware=` names and, for the rest, this machine. real: for a run here, which can't have more room than there is."""
    dtype = resolve_precision(run.engine, world.device).compute_dtype
    here = rates_here(run.engine.nvme_dir, dtype).shared(local_ranks or world.size)
    rates = replace(named(run.hardware, here), is_gpu=world.device.type == "cuda")
    if not real:
        return rates
    rooms = {name: min(getattr(rates, name), getattr(here, name)) for name in ("device_room", "host_room", "nvme_room")}
    return replace(rates, **rooms)


def compare_run(run: RunConfig, ranks: int | None = None) -> list[Plan]:
    """Stages 0 to 3 times every placement, those that fit first, each by step time. Stages differ with several ranks only."""
    world = world_of(run, ranks or run.nproc)
    rates, shape = rates_of(run, world), shape_for(run, world)
    run = replace(run, auto_tiers=AUTO_TIERS)
    stages = (0, 1, 2, 3) if world.size > 1 else (run.engine.stage,)
    plans = []
    for stage in stages:
        staged = replace(run, engine=replace(run.engine, stage=stage))
        plans += [Plan(replace(staged, engine=config), shape, world, rates) for config in candidates(staged, rates)]
    return sorted(plans, key=lambda plan: (not plan.fits, plan.time.seconds))

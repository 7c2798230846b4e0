"""The time of a step: for the forward and the backward phase each, the largest of compute, h2d, d2h, DRAM and NVMe.

Clipped updates belong to the forward phase. On a machine without a GPU the update, the copies and the elementwise work run
on the cores that multiply, so they add to compute instead of running beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from zft.config import Activation, EngineConfig, Tier
from zft.dist import World
from zft.plan.memory import Batch, graph_bytes
from zft.plan.rates import Rates
from zft.plan.shapes import GroupShape, Kind, ModelShape, UnitShape
from zft.plan.traffic import (
    Bytes,
    StepTraffic,
    backward_units,
    carrying_units,
    fetch,
    finish,
    is_immediate,
    step_traffic,
    update,
)

GRADIENT_ADD_BYTES = 20
"""A weight gradient of one micro-batch is written, read and added to the float32 sum (read, written)."""
ELEMENTWISE_PASSES = 2.0
"""Times that what a layer saves goes through memory in one forward pass, beside its products."""


@dataclass(frozen=True)
class Phase:
    """Seconds that each resource is busy."""

    busy_s: dict[str, float]

    @property
    def limit(self) -> str:
        return max(self.busy_s, key=self.busy_s.get)

    @property
    def seconds(self) -> float:
        return max(self.busy_s.values())


@dataclass(frozen=True)
class StepTime:
    """A step in steady state."""

    forward: Phase
    backward: Phase
    edges_s: float
    """Fill and drain: the first unit's bytes before anything computes, the last gradient's after everything has."""

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds + self.edges_s

    @property
    def limit(self) -> str:
        """What limits the longer phase."""
        return max(self.forward, self.backward, key=lambda phase: phase.seconds).limit


def time_of(shape: ModelShape, config: EngineConfig, world: World, batch: Batch, rates: Rates) -> StepTime:
    """Seconds of one step of one rank."""
    traffic = step_traffic(shape, config, world, (batch.waves(config.wave), batch.tokens))
    products = _products(shape, config, batch, rates)
    updates = sum(update_bytes(g, config, world) for g in shape.groups if g.trainable)
    link = _collectives(shape, config, world, batch.waves(config.wave), rates)
    immediate = is_immediate(config)
    phases = []
    for name in ("forward", "backward"):
        moved = getattr(traffic, name)
        has_updates = (name == "backward") is immediate
        busy = {
            "compute": products[name],
            "nvme": moved.nvme_read / rates.nvme_read + moved.nvme_write / rates.nvme_write,
        }
        memory = updates / rates.update if has_updates else 0.0
        host_bytes = moved.nvme_read + moved.nvme_write + moved.h2d + moved.d2h
        if rates.is_gpu:
            busy |= {"h2d": moved.h2d / rates.h2d, "d2h": moved.d2h / rates.d2h}
            on_gpu = config.state_tier is Tier.device
            busy["dram"] = (0.0 if on_gpu else memory) + host_bytes / rates.dram
            if world.mesh.shard > 1:
                busy["link"] = link[name]
        else:
            busy["compute"] += memory + _copies(shape, config, world, batch, name) / rates.dram + link[name]
        phases.append(Phase(busy))
    return StepTime(*phases, edges_s=_edges(shape, config, world, rates))


def _products(shape: ModelShape, config: EngineConfig, batch: Batch, rates: Rates) -> dict[str, float]:
    """Seconds of the matrix products and attention of all micro-batches, and of the elementwise work between them."""
    dims, reached = shape.dims, backward_units(shape)
    carrying = carrying_units(shape)
    speed = rates.flops(dims.hidden)
    # of a token, in a layer; causal: half of 4 T
    attention = 2.0 * (batch.mean_len or batch.seq_len) * dims.heads * dims.head_dim
    forward = backward = 0.0
    for unit in shape.units:
        numel, trained = unit.matmul_numel, _trained_share(unit)
        dx = 2.0 * numel if unit in carrying else 0.0
        dw = 2.0 * numel * trained if unit in reached else 0.0
        own = 2.0 * numel
        if unit.kind is Kind.HEAD:
            forward += own + dx + dw
            continue
        if unit.kind is Kind.LAYER:
            own += attention
            dx += 2.5 * attention if unit in carrying else 0.0
        again = own if unit in reached and config.activation is not Activation.none else 0.0
        forward += own
        backward += again + dx + dw
    seconds = {"forward": forward * batch.tokens / speed, "backward": backward * batch.tokens / speed}
    passes = {"forward": 1.0, "backward": 3.0 if config.activation is not Activation.none else 2.0}
    layers = sum(unit.kind is Kind.LAYER for unit in shape.units)
    elementwise = ELEMENTWISE_PASSES * layers * batch.tokens * graph_bytes(shape)
    if not rates.is_gpu:
        seconds = {name: s + passes[name] * elementwise / rates.dram for name, s in seconds.items()}
    return seconds


def _trained_share(unit: UnitShape) -> float:
    total = sum(g.numel for g in unit.needed)
    return sum(g.numel for g in unit.needed if g.trainable) / total if total else 0.0


def update_bytes(group: GroupShape, config: EngineConfig, world: World) -> int:
    """Bytes of a record that one update reads and writes in memory."""
    numel = group.ranges(config.stage, world).state_numel
    return 2 * sum(f.bytes(numel) for f in group.fields) + numel * group.grad_bytes


def _copies(shape: ModelShape, config: EngineConfig, world: World, batch: Batch, phase: str) -> float:
    """Bytes through host memory that the cores move themselves, on a machine without a GPU."""
    waves, total = batch.waves(config.wave), 0.0
    reached = backward_units(shape)
    for unit in shape.units:
        is_head, twice = unit.kind is Kind.HEAD, unit.kind in (Kind.LAYER, Kind.LOOKUP)
        if phase == "forward" or (twice and unit in reached):
            wide = sum(
                g.hi_size(g.padded_numel) + g.padded_numel * g.compute_bytes
                for g in unit.needed
                if g.hi_bytes != g.compute_bytes
            )
            total += wide * waves
        if (phase == "forward") is is_head and unit in reached:
            trained = sum(g.padded_numel for g in unit.needed if g.trainable)
            adds = 8 if is_head or unit.kind is Kind.EMBEDDING else GRADIENT_ADD_BYTES
            total += trained * (4 * waves + adds * (batch.micro_batches if twice else 1))
            total += trained * (4 + 2 * 2 + 2)
    return total


def _collectives(shape: ModelShape, config: EngineConfig, world: World, waves: int, rates: Rates) -> dict[str, float]:
    """Seconds of gathering weights and reducing gradients over ranks, at the rate of the bus (or of a copy)."""
    ranks = world.mesh.shard
    if ranks == 1 or config.stage == 0 and world.size == 1:
        return {"forward": 0.0, "backward": 0.0}
    speed, away = (rates.d2h if rates.is_gpu else rates.dram / 4), (ranks - 1) / ranks
    gathered = (
        sum(g.hi_size(g.padded_numel) for u in shape.units for g in u.needed) * (config.stage == 3) * waves * away
    )
    reduced = sum(g.padded_numel * 4 for g in shape.groups if g.trainable and not g.replicated) * waves * away
    return {"forward": gathered / speed, "backward": (gathered + reduced * (1 if config.stage >= 2 else 2)) / speed}


def _edges(shape: ModelShape, config: EngineConfig, world: World, rates: Rates) -> float:
    """The first unit's fetch with its update, and the last gradient's way home: nothing computes beside them."""
    seconds = 0.0
    if shape.units:
        first = shape.units[0]
        for group in first.groups:
            ranges = group.ranges(config.stage, world)
            if group.trainable and not is_immediate(config):
                seconds += _seconds(update(group, ranges, config, ranges.state_numel), rates)
            else:
                seconds += _seconds(fetch(group, ranges, config), rates)
            if group.trainable:
                seconds += _seconds(finish(group, ranges, config), rates)
    return seconds


def _seconds(moved: Bytes, rates: Rates) -> float:
    disk = moved.nvme_read / rates.nvme_read + moved.nvme_write / rates.nvme_write
    return disk + (max(moved.h2d / rates.h2d, moved.d2h / rates.d2h) if rates.is_gpu else 0.0)


__all__ = ["Phase", "StepTime", "StepTraffic", "time_of", "update_bytes"]

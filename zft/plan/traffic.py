"""Traffic as sums over visits, in payload bytes: what the engine's counters must show, row by row.

a wave: every unit forward, every unit backward   (head: one visit; plain embedding: no weights in the backward pass)
unshard                    h2d hi                 nvme_read hi
first unshard of a step    the pending update     nvme_read hi lo m v (g), nvme_write hi lo m v; leaves hi in place
gradient finished          d2h g                  nvme_write g
gradient parked            d2h float32            nvme_write float32, and back at the next visit
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zft.config import Activation, EngineConfig, Nonfinite, Precision, Tier
from zft.dist import World
from zft.engine.record import Ranges
from zft.engine.update import CHUNK_NUMEL
from zft.plan.shapes import GroupShape, Kind, ModelShape, UnitShape


@dataclass(frozen=True)
class Bytes:
    """Payload per route, named as in StepResult.traffic."""

    nvme_read: int = 0
    nvme_write: int = 0
    h2d: int = 0
    d2h: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(*(getattr(self, name) + getattr(other, name) for name in ROUTES))

    def __mul__(self, times: int) -> Bytes:
        return Bytes(*(getattr(self, name) * times for name in ROUTES))

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ROUTES}


ROUTES = ("nvme_read", "nvme_write", "h2d", "d2h")
NOTHING = Bytes()


@dataclass(frozen=True)
class StepTraffic:
    """A step's bytes in its two phases. Updates that wait for the norm belong to the next step's forward pass."""

    forward: Bytes
    backward: Bytes

    @property
    def total(self) -> Bytes:
        return self.forward + self.backward


def is_immediate(config: EngineConfig) -> bool:
    """Do updates run in the backward pass? (zft.engine.step.Stepper.immediate)"""
    return (
        config.max_grad_norm is None and config.nonfinite is Nonfinite.raise_ and config.precision is not Precision.fp16
    )


def step_traffic(
    shape: ModelShape, config: EngineConfig, world: World, batch: tuple[int, int], first: bool = False
) -> StepTraffic:
    """One step of one rank. batch: (waves, tokens of all micro-batches of this rank).

    first: no update is pending, as in the first step and after a drain or a skipped step.
    """
    waves, tokens = batch
    entering = backward_units(shape)
    forward, backward = leftovers_row(shape.leftovers, config, world, first)
    for group in (g for unit in shape.units for g in unit.groups):
        users = [unit for unit in shape.units if group in unit.needed]
        more = group_rows(group, config, world, _Visits(users, [u for u in users if u in entering], waves, first))
        forward, backward = forward + more.forward, backward + more.backward
    out, back = boundary_rows(shape, config, tokens)
    return StepTraffic(forward + out, backward + back)


def backward_units(shape: ModelShape) -> list[UnitShape]:
    """Units that gradients reach: those from the first trained one on, and the head."""
    first = next((i for i, unit in enumerate(shape.units) if unit.trainable), len(shape.units))
    return [unit for i, unit in enumerate(shape.units) if i >= first]


@dataclass(frozen=True)
class _Visits:
    """Who uses a group, and how often."""

    users: list[UnitShape]
    reached: list[UnitShape]
    """Those of them that gradients reach: their backward visits add to its own, if it is trained."""
    waves: int
    first: bool


def group_rows(group: GroupShape, config: EngineConfig, world: World, visits: _Visits) -> StepTraffic:
    """Layers, embedding, head and tied records alike: they differ in who visits them, and how often.

    bf16 layer, all on NVMe, W waves, per parameter: read 12 + 4W - 2 + g, written 12 + g, h2d 4W, d2h 2.
    """
    ranges = group.ranges(config.stage, world)
    forward = fetch(group, ranges, config) * (len(visits.users) * visits.waves)
    again = sum(unit.kind in (Kind.LAYER, Kind.LOOKUP) for unit in visits.reached)
    backward = fetch(group, ranges, config) * (again * visits.waves)
    if not group.trainable:
        return StepTraffic(forward, backward)
    if not visits.first:
        forward += _instead_of_fetch(group, ranges, config)
    heads = sum(unit.kind is Kind.HEAD for unit in visits.reached)
    in_forward, in_backward = parking(group, ranges, config, (heads, len(visits.reached) - heads, visits.waves))
    if heads == len(visits.reached):
        in_forward += finish(group, ranges, config)
    else:
        in_backward += finish(group, ranges, config)
    return StepTraffic(forward + in_forward, backward + in_backward)


def leftovers_row(groups: Iterable[GroupShape], config: EngineConfig, world: World, first: bool) -> tuple[Bytes, Bytes]:
    """Parameters that stay unsharded: attached once a step, closed once, never parked."""
    groups = list(groups)
    forward, backward = NOTHING, NOTHING
    if not first and not any(group.trainable for group in groups):
        return forward, backward
    for group in groups:
        ranges = group.ranges(config.stage, world)
        forward += fetch(group, ranges, config)
        if group.trainable:
            forward += NOTHING if first else _instead_of_fetch(group, ranges, config)
            backward += finish(group, ranges, config)
    return forward, backward


def boundary_rows(shape: ModelShape, config: EngineConfig, tokens: int) -> tuple[Bytes, Bytes]:
    """activation=offload: every layer's input out of the device in the forward pass and back in the backward pass."""
    if config.activation is not Activation.offload:
        return NOTHING, NOTHING
    kept = sum(unit.kind is Kind.LAYER for unit in carrying_units(shape)) * boundary_bytes(shape, tokens)
    disk = kept if config.activation_tier is Tier.nvme else 0
    return Bytes(nvme_write=disk, d2h=kept), Bytes(nvme_read=disk, h2d=kept)


def carrying_units(shape: ModelShape) -> list[UnitShape]:
    """Units whose input carries a gradient: those after the first trained one."""
    return backward_units(shape)[1:]


def boundary_bytes(shape: ModelShape, tokens: int) -> int:
    """The input of one unit, for so many tokens."""
    return tokens * shape.dims.hidden * shape.compute_bytes


def drain_traffic(shape: ModelShape, config: EngineConfig, world: World) -> Bytes:
    """Every pending update, without a forward pass."""
    total = NOTHING
    for group in shape.groups:
        if group.trainable and not is_immediate(config):
            ranges = group.ranges(config.stage, world)
            total += update(group, ranges, config, _active_numel(group, ranges))
    return total


def evaluate_traffic(shape: ModelShape, config: EngineConfig, world: World, waves: int) -> Bytes:
    """Forward passes of weights that are drained already and attached where they stay."""
    total = NOTHING
    for unit in shape.units:
        for group in unit.needed:
            total += fetch(group, group.ranges(config.stage, world), config) * waves
    return total


# single moves


def fetch(group: GroupShape, ranges: Ranges, config: EngineConfig) -> Bytes:
    """One unshard of weights that are up to date."""
    size = group.hi_size(ranges.hi_numel)
    return Bytes(
        nvme_read=size if config.param_tier is Tier.nvme else 0, h2d=0 if config.param_tier is Tier.device else size
    )


def update(group: GroupShape, ranges: Ranges, config: EngineConfig, read_numel: int) -> Bytes:
    """The streamed pass over a record. read_numel: with weights on NVMe a fetch reads the padding's chunks, too."""
    written_numel = _active_numel(group, ranges)
    read = write = 0
    for field in group.fields:
        if (config.param_tier if field.name == "hi" else config.state_tier) is Tier.nvme:
            read += field.bytes(read_numel)
            write += field.bytes(written_numel)
    if config.grad_tier is Tier.nvme and not is_immediate(config):
        read += read_numel * group.grad_bytes
    return Bytes(nvme_read=read, nvme_write=write)


def finish(group: GroupShape, ranges: Ranges, config: EngineConfig) -> Bytes:
    """A gradient that is complete: to where it waits, or into the update at once."""
    size = ranges.grad_numel * group.grad_bytes
    if is_immediate(config):
        return Bytes(d2h=size) + update(group, ranges, config, _active_numel(group, ranges))
    on_disk = config.grad_tier is Tier.nvme
    return Bytes(nvme_write=size if on_disk else 0, d2h=0 if config.grad_tier is Tier.device else size)


def parking(
    group: GroupShape, ranges: Ranges, config: EngineConfig, counts: tuple[int, int, int]
) -> tuple[Bytes, Bytes]:
    """float32 partial gradients between visits: (in the forward pass, in the backward pass).

    counts: (closing visits of the head, other closing visits, waves); each but the last parks, each but the first adds.
    """
    heads, others, waves = counts
    size = ranges.grad_numel * 4
    disk = size if config.grad_tier is Tier.nvme else 0
    bus = 0 if config.grad_tier is Tier.device else size
    out, back = Bytes(nvme_write=disk, d2h=bus), Bytes(nvme_read=disk, h2d=bus)
    forward, backward = NOTHING, NOTHING
    closes = (["head"] * heads + ["other"] * others) * waves
    for place, who in enumerate(closes):
        moved = (back if place > 0 else NOTHING) + (out if place < len(closes) - 1 else NOTHING)
        forward, backward = (forward + moved, backward) if who == "head" else (forward, backward + moved)
    return forward, backward


def _instead_of_fetch(group: GroupShape, ranges: Ranges, config: EngineConfig) -> Bytes:
    """What the first unshard of a step adds to a plain fetch.

    The pending update leaves the weights in place, so that they are not read again; at stages 1 and 2 they are, and the
    other ranks' slices are stored.
    """
    on_disk = config.param_tier is Tier.nvme
    whole = ranges.hi_numel == ranges.state_numel
    more = NOTHING
    if not is_immediate(config):
        read_numel = ranges.state_numel if on_disk else _active_numel(group, ranges)
        more += update(group, ranges, config, read_numel)
        more += Bytes(nvme_read=-group.hi_size(ranges.hi_numel)) if on_disk and whole else NOTHING
    if on_disk and not whole and not group.replicated:
        more += Bytes(nvme_write=group.hi_size(ranges.hi_numel))
    return more


def _active_numel(group: GroupShape, ranges: Ranges) -> int:
    """Elements of this rank's chunks that hold any parameter: only whole chunks of padding at the end hold none."""
    end = max((span.end for span in group.layout.spans if span.numel), default=0) - ranges.state_start
    if end <= 0:
        return 0
    return min(ranges.state_numel, -(-end // CHUNK_NUMEL) * CHUNK_NUMEL)

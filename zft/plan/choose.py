"""The fastest placement that fits; a refusal with numbers and the nearest setting that would fit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from zft.config import Activation, AdamW, EngineConfig, Method, RunConfig, Tier, ZftError
from zft.dist import World
from zft.plan.memory import Batch, Memory, memory_of
from zft.plan.rates import GIB, Rates
from zft.plan.shapes import ModelShape
from zft.plan.step_time import StepTime, time_of
from zft.plan.traffic import StepTraffic, step_traffic

HEADROOM = 0.95
"""Share of free memory that a chosen plan may fill."""
TOLERANCE = 1.05
"""Excess over free memory from which on a placement that the user named is refused; the plan may err by so much."""
NEARLY = 1.03
"""Placements whose step is this close to the fastest are told apart by wear, then by how near the device they are."""

ShapeFor = Callable[[RunConfig, World], ModelShape]


@dataclass(frozen=True)
class Lengths:
    """Tokens of a sequence, where the data is known."""

    longest: int
    mean: float


@dataclass(frozen=True)
class Plan:
    """One placement of one run, with its cost."""

    run: RunConfig
    shape: ModelShape
    world: World
    rates: Rates
    lengths: Lengths | None = None

    @property
    def config(self) -> EngineConfig:
        return self.run.engine

    @property
    def batch(self) -> Batch:
        train, lengths = self.run.train, self.lengths or Lengths(self.run.train.seq_len, self.run.train.seq_len)
        return Batch(train.micro_batch_size, lengths.longest, train.grad_accum_steps, lengths.mean)

    @cached_property
    def memory(self) -> Memory:
        return memory_of(self.shape, self.config, self.world, self.batch)

    @cached_property
    def time(self) -> StepTime:
        return time_of(self.shape, self.config, self.world, self.batch, self.rates)

    @cached_property
    def traffic(self) -> StepTraffic:
        return step_traffic(
            self.shape, self.config, self.world, (self.batch.waves(self.config.wave), self.batch.tokens)
        )

    @property
    def rooms(self) -> dict[Tier, int]:
        rates = self.rates
        return {Tier.device: rates.device_room, Tier.cpu: rates.host_room, Tier.nvme: rates.nvme_room}

    @property
    def short(self) -> dict[Tier, int]:
        """Bytes that are missing, by tier; empty where the plan fits."""
        missing = {}
        memory_share = HEADROOM if self.run.auto_tiers else TOLERANCE
        for tier, room in self.rooms.items():
            share = 1.0 if tier is Tier.nvme else memory_share
            lack = self.memory.total(tier) - int(room * share)
            if lack > 0:
                missing[tier] = lack
        return missing

    @property
    def fits(self) -> bool:
        return not self.short

    @property
    def placement(self) -> str:
        return describe(self.config)

    def to_dict(self) -> dict:
        """The object of `zft plan --json`."""
        memory, time, total = self.memory, self.time, self.traffic.total
        return {
            "model": self.shape.name,
            "parameters": self.shape.numel,
            "trained_parameters": self.shape.trained_numel,
            "hardware": self.rates.name,
            "ranks": self.world.size,
            "placement": {
                "stage": self.config.stage,
                **{
                    name: str(getattr(self.config, name))
                    for name in ("param_tier", "state_tier", "grad_tier", "activation")
                },
            },
            "fits": self.fits,
            "short_bytes": {str(tier): lack for tier, lack in self.short.items()},
            "peak_device_bytes": memory.total(Tier.device),
            "peak_host_bytes": memory.total(Tier.cpu),
            "nvme_bytes": memory.total(Tier.nvme),
            "room_bytes": {str(tier): room for tier, room in self.rooms.items()},
            "bytes": {"device": memory.device, "host": memory.host, "nvme": memory.nvme},
            "step_s": time.seconds,
            "limit": time.limit,
            "forward_s": time.forward.busy_s,
            "backward_s": time.backward.busy_s,
            "edges_s": time.edges_s,
            "tokens": self.batch.tokens * self.world.size,
            "traffic_bytes": total.as_dict(),
            "nvme_wear_bytes": total.nvme_write,
        }


@dataclass(frozen=True)
class Choice:
    """What was chosen, why, and what came next."""

    plan: Plan
    why: str
    others: list[Plan]
    """The next best placements that fit, then those that don't, each in order of time."""


def describe(config: EngineConfig) -> str:
    """`stage 3, weights cpu, state nvme, gradients cpu`."""
    line = f"stage {config.stage}, weights {config.param_tier}, state {config.state_tier}, gradients {config.grad_tier}"
    return line + ("" if config.activation is Activation.full else f", activation {config.activation}")


def choose(
    run: RunConfig, shape: ModelShape, world: World, rates: Rates, shape_for: ShapeFor | None = None,
    lengths: Lengths | None = None,
) -> Choice:  # fmt: skip
    """The fastest of the placements that the run leaves open and that fit.

    shape_for: builds the shapes of other settings, for the refusal's advice. Raises ZftError where nothing fits.
    """
    plans = [Plan(replace(run, engine=config), shape, world, rates, lengths) for config in candidates(run, rates)]
    fitting = sorted((plan for plan in plans if plan.fits), key=lambda plan: plan.time.seconds)
    if not fitting:
        raise ZftError(refusal(plans, run, shape_for))
    best_s = fitting[0].time.seconds
    near = [plan for plan in fitting if plan.time.seconds <= best_s * NEARLY]
    chosen = min(near, key=lambda plan: (plan.traffic.total.nvme_write, _distance(plan), plan.time.seconds))
    others = [plan for plan in fitting if plan is not chosen]
    others += sorted((plan for plan in plans if not plan.fits), key=lambda plan: plan.time.seconds)
    return Choice(chosen, _why(chosen, fitting, plans), others)


def candidates(run: RunConfig, rates: Rates) -> Iterator[EngineConfig]:
    """The run's own engine with every choice for the tiers that it leaves open."""
    tiers = (Tier.device, Tier.cpu, Tier.nvme) if rates.is_gpu else (Tier.device, Tier.nvme)
    for choice in itertools.product(tiers, repeat=len(run.auto_tiers)):
        yield replace(run.engine, **dict(zip(run.auto_tiers, choice, strict=True)))


def _distance(plan: Plan) -> int:
    """How far from the device its tiers are, together."""
    order = list(Tier)
    return sum(order.index(getattr(plan.config, name)) for name in ("param_tier", "state_tier", "grad_tier"))


def _why(chosen: Plan, fitting: list[Plan], plans: list[Plan]) -> str:
    if len(plans) == 1:
        return "the only placement that the configuration allows"
    faster = [plan for plan in plans if not plan.fits and plan.time.seconds < chosen.time.seconds]
    text = f"the fastest of {len(fitting)} placements that fit"
    if faster:
        best = min(faster, key=lambda plan: plan.time.seconds)
        lack = ", ".join(f"{tier} by {bytes_text(n)}" for tier, n in best.short.items())
        text += f"; {best.time.seconds:.3g} s with {best.placement} would lack {lack}"
    return text


def refusal(plans: list[Plan], run: RunConfig, shape_for: ShapeFor | None) -> str:
    """One line: what is short by how much in the placement that is nearest, and a setting that would fit."""
    nearest = min(plans, key=lambda plan: max(lack / max(plan.rooms[tier], 1) for tier, lack in plan.short.items()))
    lacks = ", ".join(
        f"{tier} {bytes_text(nearest.memory.total(tier))} of {bytes_text(nearest.rooms[tier])} (short by {bytes_text(lack)})"
        for tier, lack in nearest.short.items()
    )
    line = (
        f"{run.model} ({nearest.shape.numel / 1e9:.2f} B parameters, {nearest.shape.trained_numel / 1e9:.2f} B trained) does not "
        f"fit: the nearest placement ({nearest.placement}) needs {lacks} on {nearest.rates.name}"
    )
    advice = nearest_setting(run, nearest.world, nearest.rates, shape_for) if shape_for else None
    return (
        f"{line}; {advice} would fit"
        if advice
        else f"{line}; no setting known to zft would fit: use more ranks or a smaller model"
    )


def nearest_setting(run: RunConfig, world: World, rates: Rates, shape_for: ShapeFor) -> str | None:
    """The first change, in the order of what it costs, with which some placement fits."""
    shapes: dict = {}
    for label, changed in changes(run):
        key = (changed.method.name, changed.engine.optim)
        if key not in shapes:
            try:
                shapes[key] = shape_for(changed, world)
            except ZftError:  # a change that this model does not allow is no advice
                shapes[key] = None
        if shapes[key] is None:
            continue
        for config in candidates(changed, rates):
            if Plan(replace(changed, engine=config), shapes[key], world, rates).fits:
                return label
    return None


def changes(run: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """(key=value …, the changed run), from the cheapest to the dearest."""
    open_tiers = ("param_tier", "state_tier", "grad_tier")
    if run.auto_tiers != open_tiers:
        run = replace(run, auto_tiers=open_tiers)
        yield "engine=auto", run
    prefix = "" if run.auto_tiers == open_tiers else "engine=auto "
    full = run.engine.activation in (Activation.none, Activation.selective)
    steps: list[tuple[str, Callable[[RunConfig], RunConfig]]] = []
    if full:
        steps.append(("activation=full", lambda r: _engine(r, activation=Activation.full)))
    if run.engine.activation is not Activation.offload:
        steps.append(
            ("activation=offload", lambda r: _engine(r, activation=Activation.offload, activation_tier=Tier.cpu))
        )
    nvme = {"activation": Activation.offload, "activation_tier": Tier.nvme}
    steps.append(("activation=offload engine.activation_tier=nvme", lambda r: _engine(r, **nvme)))
    if run.train.micro_batch_size > 1:
        steps.append(("train.micro_batch_size=1", lambda r: replace(r, train=replace(r.train, micro_batch_size=1))))
    if run.train.grad_accum_steps > 1:
        steps.append(("engine.wave=1", lambda r: _engine(r, wave=1)))
    if run.train.seq_len > 512:
        half = run.train.seq_len // 2
        steps.append((f"train.seq_len={half}", lambda r: replace(r, train=replace(r.train, seq_len=half))))
    if isinstance(run.engine.optim, AdamW) and not run.engine.optim.compact and run.method.name is Method.full:
        steps.append(("optimizer=adamw_compact", lambda r: _engine(r, optim=replace(r.engine.optim, compact=True))))
    if run.method.name is Method.full:
        steps.append(("method=lora", lambda r: replace(r, method=replace(r.method, name=Method.lora))))
    for label, change in steps:
        yield prefix + label, change(run)
    together, labels = run, []
    for label, change in steps:
        if label.startswith(("activation=offload engine", "train.micro", "engine.wave", "method")):
            together = change(together)
            labels.append(label)
            yield prefix + " ".join(labels), together


def _engine(run: RunConfig, **values) -> RunConfig:
    return replace(run, engine=replace(run.engine, **values))


def bytes_text(count_bytes: int) -> str:
    return f"{count_bytes / GIB:.2f} GiB"

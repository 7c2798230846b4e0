"""The parts of one engine, built in order: layout, records, tiers, then the machinery that moves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from zft.config import Activation, AdamW, EngineConfig, Precision, Tier, ZftError
from zft.dist import World
from zft.engine.backward import Backward
from zft.engine.context import TorchContext
from zft.engine.gate import Gates, Objective
from zft.engine.gradient import Gradients
from zft.engine.partition import GroupSpec, build_units, unit_modules
from zft.engine.pool import PinnedMemory
from zft.engine.record import Memory, Ranges, Record
from zft.engine.schedule import Fetcher, Order
from zft.engine.unit import Codec, ParamGroup
from zft.engine.unshard import Sharder
from zft.engine.update import Updater
from zft.optim.rules import make_rule
from zft.precision import LossScaler, PrecisionPlan, resolve_precision
from zft.tiers.activations import ActivationStore
from zft.tiers.device import Streams
from zft.tiers.nvme import NvmeFolder
from zft.tiers.slab import Traffic


@dataclass(frozen=True)
class Anatomy:
    """What the engine has to be told about a model, since it knows no library: gathered by zft/api.py."""

    no_split: Sequence[str] = ()
    """Class names of decoder layers."""
    embedding: nn.Module | None = None
    head: nn.Module | None = None
    sideways: Sequence[tuple[nn.Module, int]] = ()
    """(module, output index) pairs that the model's recorder takes tensors from."""
    keep_float32: Callable[[str], bool] = field(default=lambda _name: False)
    """Parameter names that the model wants in float32."""
    codec: Callable[[str], Codec | None] = field(default=lambda _name: None)
    """How frozen parameters are quantized at rest, by name."""
    arguments: frozenset[str] = frozenset()
    """Names that the model's forward takes."""


class Parts:
    """Everything a step needs, each part with one job."""

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, config: EngineConfig, world: World, objective: Objective | None,
        record: Callable[[str, str, float, float], None] = lambda *_: None,
    ):  # fmt: skip
        self.model, self.world, self.objective, self.record = model, world, objective, record
        self.plan = resolve_precision(config, world.device)
        self.takes_use_cache = "use_cache" in anatomy.arguments
        spec = GroupSpec(world.mesh.shard, group_dtypes(self.plan, anatomy))
        modules = unit_modules(model, anatomy.no_split, (anatomy.embedding, anatomy.head))
        self.units, self.leftovers = build_units(model, modules, spec)
        self.records = self._records(config)
        self.traffic = Traffic()
        self.folder = self._folder(config)
        self.streams = Streams(world.device, record)
        self.pinned = PinnedMemory(world.device, config.pin_memory)
        for rec in self.records.values():
            rec.allocate(config, self.folder, Memory(world.device, self.pinned), self.traffic)
        self.updater = Updater(config, world.device, self.traffic, record)
        self.fetcher = Fetcher(self.records, self.updater, self.streams, self.pinned, world)
        self.sharder = Sharder(self.records, self.fetcher, world, record)
        self.gradients = Gradients(self.records, world, config, self.fetcher, self.pinned)
        self.gradients.folder = self.folder
        self.gates = Gates(self.units, anatomy.sideways, config, world.device)
        if config.activation is Activation.offload:
            self.gates.store = ActivationStore(config.activation_tier, self.folder, self.traffic, record)
        self.backward = Backward(self.gates, self.sharder, self.fetcher, self.gradients, world, record)
        self.order = Order(self.units)
        self.scaler = LossScaler() if config.precision is Precision.fp16 else None

    def outside_context(self) -> TorchContext:
        """The torch context that a micro-batch starts from: the caller's, with grad mode as it is now."""
        return TorchContext.capture(self.world.device)

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale if self.scaler is not None else 1.0

    def rest(self) -> None:
        """Give back the memory that only steps need; the next one takes it again. On a GPU its buffers stay: they are pinned."""
        if self.streams.is_cuda:
            return
        gradients, fetcher = self.gradients, self.fetcher
        for pool in (
            fetcher.host,
            fetcher.gathered,
            self.sharder.slots,
            gradients.flats,
            gradients.small_flats,
            gradients.staged,
        ):
            pool.forget()
        self.updater.forget()
        self.sharder.heap.trim()

    def close(self) -> None:
        """Stop the threads, give the model its own forwards back, remove the files."""
        self.fetcher.close()
        self.gradients.close_threads()
        self.updater.close()
        self.gates.remove()
        self.pinned.close()
        if self.folder is not None:
            self.folder.close()

    def _records(self, config: EngineConfig) -> dict[ParamGroup, Record]:
        records = {}
        for group in [g for unit in [*self.units, self.leftovers] for g in unit.groups]:
            plan = group_plan(group.hi_dtype, config, self.world.device)
            rule = make_rule(config.optim, plan) if group.trainable else None
            records[group] = Record(group, rule, plan.grad_dtype, Ranges.of(group, config.stage, self.world))
        return records

    def _folder(self, config: EngineConfig) -> NvmeFolder | None:
        tiers = {config.param_tier, config.state_tier, config.grad_tier}
        if config.activation is Activation.offload:
            tiers.add(config.activation_tier)
        if Tier.nvme not in tiers:
            return None
        if not config.nvme_dir:
            raise ZftError("a tier is nvme but engine.nvme_dir is not set; name a folder on a fast disk")
        folder = NvmeFolder(config.nvme_dir, self.world.rank, config.nvme_threads, recorder=self.record)
        try:
            folder.require_free(sum(record.nvme_bytes(config) for record in self.records.values()))
        except BaseException:
            folder.close()
            raise
        return folder


def group_dtypes(plan: PrecisionPlan, anatomy: Anatomy) -> Callable:
    """(fqn, parameter) -> (hi dtype, compute dtype, codec), for zft.engine.partition."""

    def dtypes(name: str, parameter: nn.Parameter) -> tuple[torch.dtype, torch.dtype, Codec | None]:
        codec = None if parameter.requires_grad else anatomy.codec(name)
        if codec is not None:
            return torch.uint8, plan.compute_dtype, codec
        if anatomy.keep_float32(name):
            return torch.float32, torch.float32, None
        return plan.hi_dtype, plan.compute_dtype, None

    return dtypes


def group_plan(hi_dtype: torch.dtype, config: EngineConfig, device: torch.device) -> PrecisionPlan:
    """The record of a group: the run's, or float32's where the model keeps its parameters in float32."""
    plan = resolve_precision(config, device)
    if hi_dtype == plan.hi_dtype:
        return plan
    optim = replace(config.optim, compact=False) if isinstance(config.optim, AdamW) else config.optim
    return resolve_precision(replace(config, precision=Precision.fp32, compute_dtype="auto", optim=optim), device)

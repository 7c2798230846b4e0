"""A model as the planner sees it: units and groups with their layouts, as plain numbers, cut by the engine's own code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from zft.api import anatomy_of
from zft.config import EngineConfig
from zft.dist import Mesh, World
from zft.engine.backward import is_plain_embedding
from zft.engine.layout import FlatLayout
from zft.engine.partition import GroupSpec, build_units, unit_modules
from zft.engine.parts import group_dtypes, group_plan
from zft.engine.record import Ranges
from zft.engine.unit import Codec, ParamGroup, Unit
from zft.optim.rules import make_rule
from zft.precision import Field, resolve_precision


class Kind(Enum):
    EMBEDDING = "one visit a wave: its gradient needs no weights"
    HEAD = "one visit a wave: forward and backward in one"
    LOOKUP = "two visits a wave; its input carries no gradient (other embeddings)"
    LAYER = "two visits a wave; keeps its input for the second"


@dataclass(frozen=True)
class GroupShape:
    """One flat buffer: what `zft.engine.unit.ParamGroup` holds, as numbers."""

    name: str
    layout: FlatLayout
    trainable: bool
    replicated: bool
    hi_bytes: int
    """Of one entry at rest."""
    compute_bytes: int
    """Of one element while unsharded."""
    fields: tuple[Field, ...]
    """The record, `hi` first; of a frozen group nothing."""
    grad_bytes: int
    """Of one element of a finished gradient."""
    codec: Codec | None = None
    """How frozen weights are quantized at rest."""

    @property
    def numel(self) -> int:
        """Parameters, without padding."""
        return sum(span.numel for span in self.layout.spans)

    @property
    def padded_numel(self) -> int:
        return self.layout.padded_numel

    def hi_size(self, numel: int) -> int:
        """Bytes that `numel` weights take at rest."""
        return (numel if self.codec is None else self.codec.nbytes(numel)) * self.hi_bytes

    @property
    def state_fields(self) -> tuple[Field, ...]:
        return self.fields[1:]

    def ranges(self, stage: int, world: World) -> Ranges:
        return Ranges.of(self, stage, world)


@dataclass(frozen=True)
class UnitShape:
    """One unit. `borrowed`: groups of other units that hold parameters tied to its own."""

    name: str
    kind: Kind
    groups: tuple[GroupShape, ...]
    borrowed: tuple[GroupShape, ...]
    matmul_numel: float
    """Elements of matrices that each token is multiplied with (of experts: the active share)."""

    @property
    def needed(self) -> tuple[GroupShape, ...]:
        return self.groups + self.borrowed

    @property
    def trainable(self) -> bool:
        return any(group.trainable for group in self.needed)


@dataclass(frozen=True)
class Dims:
    """The sizes that activations depend on."""

    hidden: int
    layers: int
    vocab: int
    heads: int
    head_dim: int
    kv_heads: int
    intermediate: int
    """Width of the MLP that one token passes through (all of its experts together)."""


@dataclass(frozen=True)
class ModelShape:
    """All that the planner knows of a model."""

    name: str
    units: tuple[UnitShape, ...]
    leftovers: tuple[GroupShape, ...]
    dims: Dims
    compute_bytes: int
    """Of one element of an activation."""

    @property
    def groups(self) -> list[GroupShape]:
        """Every group once."""
        return [group for unit in self.units for group in unit.groups] + list(self.leftovers)

    @property
    def numel(self) -> int:
        return sum(group.numel for group in self.groups)

    @property
    def trained_numel(self) -> int:
        return sum(group.numel for group in self.groups if group.trainable)


def planned_world(ranks: int, shard_ranks: int | None, device: str | torch.device) -> World:
    """Rank 0 of a world that need not exist. Raises AssertionError if `shard_ranks` does not divide it."""
    shard = shard_ranks or ranks
    assert ranks % shard == 0, f"{shard} does not divide {ranks}"
    return World(0, ranks, torch.device(device), Mesh(shard, ranks // shard, 0, None, None))


def shape_of(model: nn.Module, config: EngineConfig, world: World) -> ModelShape:
    """The shape of a transformers model (meta is enough) under the dtypes of `config`. The model is left as it was."""
    anatomy = anatomy_of(model, config)
    plan = resolve_precision(config, world.device)
    spec = GroupSpec(world.mesh.shard, group_dtypes(plan, anatomy))
    with _parameters_back(model):
        modules = unit_modules(model, anatomy.no_split, (anatomy.embedding, anatomy.head))
        units, leftovers = build_units(model, modules, spec)
        known: dict[ParamGroup, GroupShape] = {}
        for group in [g for unit in [*units, leftovers] for g in unit.groups]:
            known[group] = _group(group, config, world)
        made = []
        for unit in units:
            kind = Kind.HEAD if unit.module is anatomy.head else _kind(unit)
            own, borrowed = (tuple(known[g] for g in groups) for groups in (unit.groups, unit.borrowed))
            made.append(
                UnitShape(
                    unit.name, kind, own, borrowed, _matmul_numel(own + borrowed, kind, active_share(model.config))
                )
            )
        rest = tuple(known[g] for g in leftovers.groups)
    name = getattr(model.config, "name_or_path", "") or type(model).__name__
    layers = sum(unit.kind is Kind.LAYER for unit in made)
    return ModelShape(name, tuple(made), rest, dims_of(model.config, layers), plan.compute_dtype.itemsize)


def _kind(unit: Unit) -> Kind:
    if is_plain_embedding(unit):
        return Kind.EMBEDDING
    return Kind.LOOKUP if isinstance(unit.module, nn.Embedding) else Kind.LAYER


def _group(group: ParamGroup, config: EngineConfig, world: World) -> GroupShape:
    plan = group_plan(group.hi_dtype, config, world.device)
    fields = make_rule(config.optim, plan).fields if group.trainable else ()
    return GroupShape(
        group.name, group.layout, group.trainable, group.replicated, group.hi_dtype.itemsize, group.compute_dtype.itemsize,
        tuple(fields), plan.grad_dtype.itemsize, group.codec,
    )  # fmt: skip


@contextmanager
def _parameters_back(model: nn.Module) -> Iterator[None]:
    """Building units hands the parameters over to them; take them back."""
    held = [(m, name, p) for m in model.modules() for name, p in m._parameters.items()]
    try:
        yield
    finally:
        for module, name, parameter in held:
            module._parameters[name] = parameter


def _matmul_numel(groups: tuple[GroupShape, ...], kind: Kind, share: float) -> float:
    if kind in (Kind.EMBEDDING, Kind.LOOKUP):
        return 0.0
    spans = [span for group in groups for span in group.layout.spans if len(span.shape) >= 2]
    return sum(span.numel * (share if "expert" in span.name and "shared" not in span.name else 1.0) for span in spans)


def active_share(config: Any) -> float:
    """The share of its experts that a token passes through; 1 for a dense model."""
    text = config.get_text_config()
    experts = _first(text, "num_experts", "num_local_experts", "n_routed_experts")
    chosen = _first(text, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
    return chosen / experts if isinstance(experts, int) and isinstance(chosen, int) and experts > 0 else 1.0


def dims_of(config: Any, layers: int) -> Dims:
    """From a transformers config, whatever its family calls the fields; what it lacks is taken as for a small layer."""
    text = config.get_text_config()
    hidden = _first(text, "hidden_size", "d_model", "n_embd") or 1024
    heads = _first(text, "num_attention_heads", "n_head") or 1
    head_dim = _first(text, "head_dim") or hidden // heads
    wide = _first(text, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size") or 4 * hidden
    wide = max(wide) if isinstance(wide, list | tuple) else wide
    chosen = _first(text, "num_experts_per_tok", "num_experts_per_token", "top_k")
    if isinstance(chosen, int) and active_share(config) < 1.0:
        wide = chosen * (_first(text, "moe_intermediate_size") or wide)
    kv_heads = _first(text, "num_key_value_heads", "num_kv_heads") or heads
    return Dims(hidden, layers, _first(text, "vocab_size") or 1, heads, head_dim, kv_heads, wide)


def _first(config: Any, *names: str) -> Any:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if value is not None), None)

"""Cut a model into units: decoder layers, embedding, head, large leftovers; the rest stays unsharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zft.engine.layout import FlatLayout
from zft.engine.unit import Codec, ParamGroup, Unit

LARGE_NUMEL = 8_000_000
"""A leftover module with more elements than this becomes a unit."""
NORM_NAMES = ("norm", "ln_", "layernorm", "layer_norm", "ln1", "ln2")


@dataclass(frozen=True)
class GroupSpec:
    """How groups are made: over how many ranks, and the two dtypes of a parameter with its codec at rest."""

    ranks: int
    dtypes: Callable[[str, nn.Parameter], tuple[torch.dtype, torch.dtype, Codec | None]]
    """(fqn, parameter) -> (hi dtype, compute dtype, codec)."""


def unit_modules(
    model: nn.Module, no_split: Sequence[str], ends: Sequence[nn.Module | None]
) -> list[tuple[str, nn.Module]]:
    """(name, module) of every unit in module order. `ends` are the embedding and the head, where the model has them."""
    names = dict(model.named_modules())
    layers = [n for n, m in names.items() if type(m).__name__ in set(no_split)]
    if not layers:
        lists = [(n, m) for n, m in names.items() if isinstance(m, nn.ModuleList)]
        longest = max(lists, key=lambda item: len(item[1]), default=None)
        layers = [f"{longest[0]}.{i}" for i in range(len(longest[1]))] if longest else []
    chosen = {n for n in layers if not any(n.startswith(other + ".") for other in layers)}
    chosen |= {n for n, m in names.items() if any(m is end for end in ends if end is not None)}
    chosen |= set(_large_leftovers(model, names, chosen))
    return [(n, m) for n, m in names.items() if n in chosen]


def build_units(model: nn.Module, modules: list[tuple[str, nn.Module]], spec: GroupSpec) -> tuple[list[Unit], Unit]:
    """Units in module order with their groups, and the unit of the leftovers. Every parameter has exactly one owner."""
    sites: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                sites.setdefault(id(parameter), []).append((module, attribute))
    owners: dict[int, ParamGroup] = {}
    units = []
    for index, (name, module) in enumerate(modules):
        fresh = [(f"{name}.{n}", p) for n, p in module.named_parameters() if id(p) not in owners]
        known = [owners[id(p)] for _, p in module.named_parameters() if id(p) in owners]
        groups = _groups(name, model, fresh, sites, spec)
        for group, parameters in groups:
            owners.update((id(p), group) for p in parameters)
        units.append((index, name, module, [g for g, _ in groups], list(dict.fromkeys(known))))
    rest = [(n, p) for n, p in model.named_parameters() if id(p) not in owners]
    leftover_spec = GroupSpec(1, spec.dtypes)
    leftovers = Unit(
        "leftovers", None, len(units), [g for g, _ in _groups("leftovers", model, rest, sites, leftover_spec)]
    )
    made = [Unit(name, module, index, groups, known) for index, name, module, groups, known in units]
    for group in [g for unit in [*made, leftovers] for g in unit.groups]:
        group.place_meta()
    return made, leftovers


def _groups(unit: str, model: nn.Module, parameters, sites, spec: GroupSpec):
    """[(group, its original parameters)], one for each (dtypes, codec, requires_grad)."""
    keyed: dict[tuple, list] = {}
    for fqn, parameter in parameters:
        keyed.setdefault((*spec.dtypes(fqn, parameter), parameter.requires_grad), []).append((fqn, parameter))
    norms = {id(p) for m in model.modules() if is_norm(m) for p in m._parameters.values() if p is not None}
    made = []
    for number, ((hi, compute, codec, trainable), members) in enumerate(keyed.items()):
        rows = [(fqn, tuple(p.shape), decays(fqn, p, norms)) for fqn, p in members]
        group = ParamGroup(
            name=f"{unit}#{number}",
            layout=FlatLayout.of(rows, spec.ranks),
            sites=[sites[id(p)] for _, p in members],
            trainable=trainable,
            replicated=unit == "leftovers",
            hi_dtype=hi,
            compute_dtype=compute,
            codec=codec,
        )
        made.append((group, [p for _, p in members]))
    return made


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def decays(fqn: str, parameter: nn.Parameter, norms: set[int]) -> bool:
    """Weight decay is for matrices: not for norms (by module type or name) and not for biases and other vectors."""
    leaf = fqn.lower().rsplit(".", 2)[-2:]
    named_norm = any(part in leaf[0] for part in NORM_NAMES) if len(leaf) == 2 else False
    return id(parameter) not in norms and not named_norm and parameter.dim() >= 2 and not leaf[-1].endswith("bias")


def _large_leftovers(model: nn.Module, names: dict[str, nn.Module], chosen: set[str]) -> list[str]:
    """Modules outside `chosen` whose own parameters (not their children's) are large."""
    inside = {id(p) for n in chosen for p in names[n].parameters()}
    found = []
    for name, module in names.items():
        own = [p for p in module._parameters.values() if p is not None and id(p) not in inside]
        if name and sum(p.numel() for p in own) > LARGE_NUMEL:
            found.append(name)
    return found

"""The tape: which unit saw which micro-batch with which inputs, and how gradients travel between visits.

A unit's outputs are cut from the graph: what the model goes on with is an alias whose gradient lands in a Slot. What the
model computes between two units keeps its own small graph ("glue"); its gradients add up and are walked backwards once
everything downstream is done, before the visit that feeds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from zft.engine.context import TorchContext
    from zft.engine.unit import Unit
    from zft.tiers.activations import ActivationStore, Boundary


class Slot:
    """The gradient of one cut output, added up as it arrives."""

    __slots__ = ("visit", "gradient")

    def __init__(self, visit: int):
        self.visit = visit
        self.gradient: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient


class Cut(torch.autograd.Function):
    """An alias of a tensor that may be changed in place, holds no graph of it, and gives its gradient to a slot."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, slot: Slot, tensor: torch.Tensor, in_place: bool) -> torch.Tensor:
        ctx.slot = slot
        if not in_place:
            return tensor.detach()
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        ctx.slot.add(gradient)
        return None, None, None, None


def direct_slot(tensor: torch.Tensor) -> Slot | None:
    """The slot of a tensor that is a cut output itself, unchanged."""
    return getattr(tensor.grad_fn, "slot", None)


@dataclass
class KeptTensor:
    """A unit's input as the backward pass needs it: its value, and where its gradient goes."""

    value: torch.Tensor | Boundary
    version: int
    slot: Slot | None
    edge: GradientEdge | None
    requires_grad: bool

    @staticmethod
    def keep(tensor: torch.Tensor, store: ActivationStore | None) -> KeptTensor:
        if not tensor.requires_grad:
            return KeptTensor(tensor, tensor._version, None, None, False)
        slot = direct_slot(tensor)
        edge = None if slot else get_gradient_edge(tensor)
        value = store.put(tensor.detach()) if store else tensor.detach()
        return KeptTensor(value, tensor._version, slot, edge, True)

    def fetch(self, unit_name: str) -> torch.Tensor:
        """The value, as a leaf; raises RuntimeError if somebody changed it in place since it was kept."""
        here = self.value if isinstance(self.value, torch.Tensor) else self.value.shared
        if here is not None and here._version != self.version:
            raise RuntimeError(
                f"an input of {unit_name} was changed in place after the unit had used it; "
                "the model must not modify hidden states in place after handing them to a layer"
            )
        value = self.value if isinstance(self.value, torch.Tensor) else self.value.get()
        return value.detach().requires_grad_(self.requires_grad)


@dataclass
class Entry:
    """One micro-batch's pass through a unit."""

    leaves: list[Any]
    """Flattened (args, kwargs); tensors are KeptTensor, shared between leaves that are the same tensor."""
    spec: TreeSpec
    context: TorchContext
    outputs: list[Slot | None] = field(default_factory=list)
    """One for each tensor the unit returned (None: it carries no gradient)."""
    sideways: list[Slot] = field(default_factory=list)
    """Tensors that left through a recorder, in order of creation."""
    graph: Kept | None = None
    """activation=none: the graph kept from the forward pass."""
    selective: Any = None
    """activation=selective: what the recompute need not compute again."""

    @staticmethod
    def of(args: tuple, kwargs: dict, context: TorchContext, store: ActivationStore | None) -> Entry:
        flat, spec = tree_flatten((args, kwargs))
        kept: dict[int, KeptTensor] = {}
        leaves = []
        for leaf in flat:
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in kept:
                    kept[id(leaf)] = KeptTensor.keep(leaf, store)
                leaf = kept[id(leaf)]
            leaves.append(leaf)
        return Entry(leaves, spec, context)

    def inputs(self, unit_name: str) -> tuple[tuple, dict, list[tuple[KeptTensor, torch.Tensor]]]:
        """(args, kwargs, [(kept, leaf)]) for a run with a graph; each kept tensor is one leaf."""
        made: dict[int, torch.Tensor] = {}
        flat, pairs = [], []
        for leaf in self.leaves:
            if isinstance(leaf, KeptTensor):
                if id(leaf) not in made:
                    made[id(leaf)] = leaf.fetch(unit_name)
                    if leaf.requires_grad:
                        pairs.append((leaf, made[id(leaf)]))
                leaf = made[id(leaf)]
            flat.append(leaf)
        args, kwargs = tree_unflatten(flat, self.spec)
        return args, kwargs, pairs

    @property
    def wanted(self) -> bool:
        """Has any gradient arrived for this pass?"""
        return any(slot is not None and slot.gradient is not None for slot in [*self.outputs, *self.sideways])


@dataclass
class Kept:
    """A unit's graph from the forward pass: its input leaves, outputs, and tensors that left sideways."""

    pairs: list[tuple[KeptTensor, torch.Tensor]]
    outputs: list[torch.Tensor]
    sideways: list[torch.Tensor]


@dataclass
class Visit:
    """One unit, unsharded once, for all micro-batches of the wave that were waiting for it."""

    unit: Unit
    number: int
    entries: list[Entry] = field(default_factory=list)
    is_entered: bool = False
    """Does any rank have entries? Known once the backward pass begins."""


class Tape:
    """The visits of one wave, in order, and the glue between them."""

    def __init__(self) -> None:
        self.visits: list[Visit] = []
        self.glue: dict[tuple[int, int], tuple[int, GradientEdge, torch.Tensor]] = {}
        """(node, output) -> (latest visit it comes from, edge, gradient so far)."""

    def visit(self, unit: Unit) -> Visit:
        self.visits.append(Visit(unit, len(self.visits)))
        return self.visits[-1]

    def deliver(self, kept: KeptTensor, gradient: torch.Tensor | None) -> None:
        """Send the gradient of a unit's input to where the input came from."""
        if gradient is None:
            return
        if kept.slot is not None:
            kept.slot.add(gradient)
            return
        key = (id(kept.edge.node), kept.edge.output_nr)
        if key in self.glue:
            source, edge, so_far = self.glue[key]
            self.glue[key] = (source, edge, so_far + gradient)
        else:
            self.glue[key] = (latest_source(kept.edge.node), kept.edge, gradient)

    def flush(self, visit_number: int) -> None:
        """Walk the glue that visits from `visit_number` on feed; -1 walks all that is left."""
        due = [key for key, (source, _, _) in self.glue.items() if source >= visit_number]
        rows = [self.glue.pop(key) for key in due]
        if rows:
            # [Note: glue graphs] two due edges may share a part of the graph with edges that are walked later
            torch.autograd.backward([edge for _, edge, _ in rows], [g for _, _, g in rows], retain_graph=True)


def latest_source(node) -> int:
    """The latest visit whose cut outputs the graph below `node` reaches; -1 if none."""
    latest, seen, stack = -1, set(), [node]
    while stack:
        current = stack.pop()
        if current is None or current in seen:
            continue
        seen.add(current)
        slot = getattr(current, "slot", None)
        if isinstance(slot, Slot):
            latest = max(latest, slot.visit)
            continue
        stack.extend(parent for parent, _ in current.next_functions)
    return latest


def tensors_of(output: Any) -> tuple[list[torch.Tensor], list, TreeSpec, list[int]]:
    """(tensors that can carry a gradient, flat leaves, spec, positions of those tensors)."""
    flat, spec = tree_flatten(output)
    positions = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return [flat[i] for i in positions], flat, spec, positions

"""Gates: each unit's forward is wrapped so that a micro-batch waits there until the unit is unsharded, and so that what the
backward pass needs is written on the tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zft.config import Activation, EngineConfig, ZftError
from zft.engine.context import TorchContext
from zft.engine.tape import Cut, Entry, Kept, Slot, Tape, Visit
from zft.engine.unit import ParamGroup, Unit
from zft.engine.wave import MicroBatch


class Objective(Protocol):
    """The default loss as the engine sees it (zft/models/loss.py implements it)."""

    head: nn.Module

    def targets(self, labels: torch.Tensor) -> torch.Tensor: ...
    def forward(self, hidden: torch.Tensor, targets: torch.Tensor, call: Callable) -> torch.Tensor: ...
    def forward_backward(
        self, hidden: torch.Tensor, targets: torch.Tensor, scale: float, grads: dict, call: Callable
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def placeholder(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def extra(self, output: Any) -> torch.Tensor | None: ...


class Mode(Enum):
    IDLE = "no engine call is running; a unit's forward raises"
    TRAIN = "forward of a step: cut, keep inputs"
    EVALUATE = "forward only"
    RECOMPUTE = "a unit runs again, with a graph"


@dataclass
class Pass:
    """What the running wave needs at every gate."""

    tape: Tape
    objective: Objective | None
    scale: float


class Gates:
    """Wraps the units of one model. `sideways`: (module, output index) pairs whose outputs a recorder takes away."""

    def __init__(
        self,
        units: Sequence[Unit],
        sideways: Sequence[tuple[nn.Module, int]],
        config: EngineConfig,
        device: torch.device,
    ):
        self.device, self.activation = device, config.activation
        self.mode = Mode.IDLE
        self.wave: Pass | None = None
        self.visit: Visit | None = None
        self.store = None
        self.entry: Entry | None = None
        self.recomputed: list[torch.Tensor] = []
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.inner: dict[Unit, Callable] = {}
        self.hooks = []
        for unit in units:
            forward = unit.module.forward
            self.inner[unit] = torch.compile(forward) if config.compile else forward
            unit.module.forward = self._gate(unit)
        inside = {m for unit in units for m in unit.module.modules() if m is not unit.module}
        for module, index in sideways:
            if module in inside:
                self.hooks.append(module.register_forward_hook(self._splice(index), prepend=True))

    def remove(self) -> None:
        """Give the modules their own forward back."""
        for unit in self.inner:
            unit.module.__dict__.pop("forward", None)
        for hook in self.hooks:
            hook.remove()

    def _gate(self, unit: Unit) -> Callable:
        def forward(*args, **kwargs):
            micro_batch = MicroBatch.current()
            if micro_batch is None or self.mode is Mode.IDLE:
                raise RuntimeError(
                    f"{unit.name} was called outside of an engine step; its weights are not in memory. "
                    "Use engine.step, engine.evaluate or an export"
                )
            micro_batch.park(unit)
            if self.wave.objective is not None and unit.module is self.wave.objective.head:
                return self._head(unit, micro_batch, args[0] if args else kwargs["input"])
            if self.mode is Mode.EVALUATE:
                return self.inner[unit](*args, **kwargs)
            return self._train(unit, args, kwargs)

        return forward

    def _train(self, unit: Unit, args: tuple, kwargs: dict) -> Any:
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        if not torch.is_grad_enabled() or not (unit.trainable or any(t.requires_grad for t in tensors)):
            with torch.no_grad():
                return self.inner[unit](*args, **kwargs)
        if self.activation is not Activation.none and any(
            hasattr(value, "get_seq_length") for value in (*args, *kwargs.values())
        ):
            raise ZftError(
                f"{unit.name} got a key-value cache in a training step; the recompute would extend it a second time and the "
                "gradients would be wrong: leave use_cache and past_key_values out, or set activation=none"
            )
        # the model's own checkpointing hooks are for its own graph, not for the recompute's
        context = replace(TorchContext.capture(self.device), saved_hooks=[])
        entry = Entry.of(args, kwargs, context, self.store)
        self.visit.entries.append(entry)
        self.entry = entry
        try:
            if self.activation is Activation.none:
                output = self._run_keeping_graph(unit, entry)
            elif self.activation is Activation.selective:
                output = self._run_saving_attention(unit, entry)
            else:
                with torch.no_grad():
                    output = self.inner[unit](*args, **kwargs)
            return self._cut(output, entry, {tensor.untyped_storage().data_ptr() for tensor in tensors})
        finally:
            self.entry = None

    def _cut(self, output: Any, entry: Entry, inputs: set[int]) -> Any:
        """The output with every floating tensor replaced by an alias whose gradient lands in a slot.

        inputs: storages of the unit's inputs. One that it hands on is copied: the alias may change in place, the input not.
        """
        keeps = entry.graph is not None
        flat, spec = tree_flatten(output)
        for place, leaf in enumerate(flat):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                carries = leaf.requires_grad if keeps else True
                slot = Slot(self.visit.number) if carries else None
                entry.outputs.append(slot)
                if keeps:
                    entry.graph.outputs.append(leaf)
                if slot is not None:
                    handed_on = not keeps and leaf.untyped_storage().data_ptr() in inputs
                    flat[place] = Cut.apply(
                        self.anchor, slot, leaf.detach().clone() if handed_on else leaf.detach(), not keeps
                    )
        return tree_unflatten(flat, spec)

    def _head(self, unit: Unit, micro_batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        """Loss, and in training its whole backward pass through the head, in this one visit."""
        wave = self.wave
        targets = wave.objective.targets(micro_batch.labels)
        call = self.inner[unit]
        if self.mode is Mode.EVALUATE:
            micro_batch.loss_sum = wave.objective.forward(hidden, targets, call)
            return wave.objective.placeholder(hidden)
        entry = Entry.of((hidden,), {}, TorchContext.capture(self.device), None)
        grads = {}
        for name, parameter in unit.module.named_parameters(recurse=False):
            group = group_of(unit, parameter)
            if group is not None and group.trainable:
                grads[name] = group.gradient(parameter)
        loss, gradient = wave.objective.forward_backward(hidden.detach(), targets, wave.scale, grads, call)
        micro_batch.loss_sum = loss
        kept = entry.leaves[0]
        if kept.requires_grad:
            wave.tape.deliver(kept, gradient)
        return wave.objective.placeholder(hidden)

    def recompute(self, unit: Unit, entry: Entry) -> tuple[list[torch.Tensor], list, list[torch.Tensor]]:
        """Run the unit again with a graph: (floating outputs, [(kept input, leaf)], sideways tensors)."""
        args, kwargs, pairs = entry.inputs(unit.name)
        outside = TorchContext.capture(self.device)
        entry.context.restore(self.device)
        self.mode, self.recomputed = Mode.RECOMPUTE, []
        try:
            with torch.enable_grad(), entry.selective or nullcontext():
                output = self.inner[unit](*args, **kwargs)
        finally:
            outside.restore(self.device)
            self.mode = Mode.TRAIN
        return _floating(output), pairs, self.recomputed

    def _run_keeping_graph(self, unit: Unit, entry: Entry) -> Any:
        """activation=none: run with a graph whose saved weights are handles into the unit, not views of its buffer."""
        args, kwargs, pairs = entry.inputs(unit.name)
        entry.graph = Kept(pairs, [], [])
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(weight_handles(unit), resolve_handle):
            return self.inner[unit](*args, **kwargs)

    def _run_saving_attention(self, unit: Unit, entry: Entry) -> Any:
        """activation=selective: what the policy names is saved, the rest of the graph is thrown away.

        With a graph, so that the same operators run as in the recompute, which replays the saved ones.
        """
        args, kwargs, _ = entry.inputs(unit.name)
        caching, entry.selective = create_selective_checkpoint_contexts(_dear)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda _tensor: None, _never), caching:
            return self.inner[unit](*args, **kwargs)

    def _splice(self, index: int) -> Callable:
        def hook(_module, _args, output):
            is_tuple = isinstance(output, (tuple, list))
            tensor = output[index] if is_tuple else output
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                return None
            if self.mode is Mode.RECOMPUTE:
                self.recomputed.append(tensor)
                return None
            if self.mode is not Mode.TRAIN or self.entry is None:
                return None
            slot = Slot(self.visit.number)
            self.entry.sideways.append(slot)
            keeps = self.entry.graph is not None
            if keeps:
                self.entry.graph.sideways.append(tensor)
            with torch.enable_grad():
                alias = Cut.apply(self.anchor, slot, tensor.detach(), not keeps)
            if not is_tuple:
                return alias
            return type(output)(alias if i == index % len(output) else x for i, x in enumerate(output))

        return hook


def _never(_saved):
    raise AssertionError("the graph of a selective forward pass is never walked")


def _dear(_context, op, *_args, **_kwargs) -> CheckpointPolicy:
    """Attention is what costs most to compute again for what it costs to keep."""
    dear = "attention" in str(op) and "backward" not in str(op)
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True)
class WeightHandle:
    """A view of a unit's flat buffer, to be looked up again when the unit is unsharded for the backward pass."""

    group: ParamGroup
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


def weight_handles(unit: Unit) -> Callable:
    storages = {g.flat.untyped_storage().data_ptr(): g for g in unit.needed}

    def pack(tensor: torch.Tensor) -> torch.Tensor | WeightHandle:
        group = storages.get(tensor.untyped_storage().data_ptr())
        if group is None or tensor.dtype != group.compute_dtype:
            return tensor
        return WeightHandle(group, tensor.storage_offset() - group.flat.storage_offset(), tensor.shape, tensor.stride())

    return pack


def resolve_handle(saved: torch.Tensor | WeightHandle) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    flat = saved.group.flat
    assert flat is not None, f"{saved.group.name} is not unsharded in its own backward pass"
    return flat.as_strided(saved.shape, saved.stride, flat.storage_offset() + saved.offset)


def group_of(unit: Unit, parameter: nn.Parameter) -> ParamGroup | None:
    return next((g for g in unit.needed if any(p is parameter for p in g.live)), None)


def _floating(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]

"""Units and their parameter groups: what is unsharded together, and how a module's parameters come and go.

While a unit is resharded, the module holds meta parameters: shape and dtype are right, reading a value raises. Unsharding
puts live parameters (views of one flat buffer) in their place; they are the same objects at every visit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from torch import nn

from zft.engine.absent import absent_parameter
from zft.engine.layout import FlatLayout


class UnitState(Enum):
    RESHARDED = "parameters on meta; costs nothing"
    UNSHARDED = "parameters usable; costs the unit's padded_numel in the compute dtype"


@dataclass
class Pending:
    """A finished gradient that waits for its update: once each, with the numbers of its own step."""

    step: int
    lr: float
    grad_scale: float
    used: tuple[bool, ...]
    missed: tuple[int, ...]
    """Per span: earlier steps that left it out. Bias corrections go by its own count, step - missed, as in torch.optim."""


class Codec(Protocol):
    """How frozen weights lie at rest in fewer bytes (zft/models/nf4.py): `hi` is then a blob of uint8."""

    def nbytes(self, numel: int) -> int: ...
    def encode(self, values: torch.Tensor, blob: torch.Tensor) -> None: ...
    def decode(self, blob: torch.Tensor, out: torch.Tensor) -> None: ...


@dataclass(eq=False)
class ParamGroup:
    """Parameters of one unit with equal dtype and requires_grad: one flat buffer, one record, one collective."""

    name: str
    layout: FlatLayout
    sites: list[list[tuple[nn.Module, str]]]
    """For each span, every (module, attribute) that holds the parameter; tied parameters have several."""
    trainable: bool
    replicated: bool
    """True for the leftovers that stay unsharded on every rank."""
    hi_dtype: torch.dtype
    compute_dtype: torch.dtype
    codec: Codec | None = None
    """For a frozen group that is quantized at rest; hi_dtype is uint8."""
    live: list[nn.Parameter] = field(default_factory=list)
    meta: list[nn.Parameter] = field(default_factory=list)
    flat: torch.Tensor | None = None
    """[padded_numel] compute dtype, while unsharded."""
    grad_flat: torch.Tensor | None = None
    """[padded_numel] float32, while gradients of the unit at hand add up."""
    used: list[bool] = field(default_factory=list)
    """Per span: has a gradient arrived on this rank since the step began?"""
    missed: list[int] = field(default_factory=list)
    """Per span: optimizer steps in which it got no gradient on any rank."""
    pending: Pending | None = None
    stale: bool = False
    """Stages 1 and 2: other ranks' slices of the replica are older than their masters."""
    outdated: bool = False
    """The record was updated while the parameters were attached (only leftovers stay attached)."""
    awaited: int = 0
    """Backward visits still to come in this step's tape."""
    parked: bool = False
    """A float32 partial gradient waits in the gradient tier."""

    def __post_init__(self) -> None:
        for span in self.layout.spans:
            self.live.append(nn.Parameter(torch.empty(0, dtype=self.compute_dtype), requires_grad=self.trainable))
            self.meta.append(absent_parameter(span.shape, self.compute_dtype, self.trainable))
        self.used, self.missed = [False] * len(self.live), [0] * len(self.live)
        if self.trainable:
            for index, parameter in enumerate(self.live):
                parameter.register_post_accumulate_grad_hook(self._collector(index))

    def entries(self, numel: int) -> int:
        """Entries of hi_dtype that `numel` weights take at rest."""
        return numel if self.codec is None else self.codec.nbytes(numel)

    def place_meta(self) -> None:
        """Hand the parameters over to the engine: the model keeps shapes only."""
        self._place(self.meta)

    def attach(self, flat: torch.Tensor) -> None:
        """Make the parameters usable as views of flat [padded_numel]."""
        assert self.flat is None, f"{self.name} is unsharded already"
        self.flat, self.outdated = flat, False
        for parameter, span in zip(self.live, self.layout.spans, strict=True):
            parameter.data = flat[span.offset : span.end].view(span.shape)
        self._place(self.live)
        self._bind_gradients()

    def detach(self) -> torch.Tensor:
        """Put meta parameters back; returns the flat buffer."""
        assert self.flat is not None, f"{self.name} is not unsharded"
        flat, self.flat = self.flat, None
        self._place(self.meta)
        # whoever has kept one of them computes with NaN from here on, not with what the buffer holds next
        gone = torch.full((), torch.nan, dtype=self.compute_dtype, device=flat.device)
        for parameter, span in zip(self.live, self.layout.spans, strict=True):
            parameter.grad = None
            parameter.data = gone.expand(span.shape)
        return flat

    def open_gradients(self, buffer: torch.Tensor) -> None:
        """Collect gradients in buffer [padded_numel] float32, already zero."""
        self.grad_flat = buffer
        self._bind_gradients()

    def _bind_gradients(self) -> None:
        """Where autograd can add up in float32 itself, let it do so in place."""
        if self.grad_flat is None or self.flat is None or not self.trainable:
            return
        buffer = self.grad_flat
        if self.compute_dtype == torch.float32:
            for parameter, span in zip(self.live, self.layout.spans, strict=True):
                parameter.grad = self._grad_view(buffer, span)

    def pending_update(self, step: int, lr: float, grad_scale: float) -> Pending:
        """The update that belongs to the gradients collected since the step began."""
        return Pending(step, lr, grad_scale, tuple(self.used), tuple(self.missed))

    def count_missed(self) -> None:
        """A step is done: note what it left out."""
        self.missed = [count + (not used) for count, used in zip(self.missed, self.used, strict=True)]

    def take_gradients(self) -> torch.Tensor:
        """Stop collecting; returns the buffer."""
        assert self.grad_flat is not None, f"{self.name} collects no gradients"
        buffer, self.grad_flat = self.grad_flat, None
        for parameter in self.live:
            parameter.grad = None
        return buffer

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """The float32 gradient of one of `live` or `meta`, of its shape, to be added to by hand; marks it used."""
        index = next(
            i for i, pair in enumerate(zip(self.live, self.meta, strict=True)) if any(p is parameter for p in pair)
        )
        self.used[index] = True
        return self._grad_view(self.grad_flat, self.layout.spans[index])

    @staticmethod
    def _grad_view(buffer: torch.Tensor, span) -> torch.Tensor:
        return buffer[span.offset : span.end].view(span.shape)

    def _collector(self, index: int):
        def collect(parameter: torch.Tensor) -> None:
            self.used[index] = True
            target = self._grad_view(self.grad_flat, self.layout.spans[index])
            if parameter.grad.data_ptr() != target.data_ptr() or parameter.grad.dtype != torch.float32:
                target.add_(parameter.grad)
                parameter.grad = target if self.compute_dtype == torch.float32 else None

        return collect

    def _place(self, parameters: Iterable[nn.Parameter]) -> None:
        for sites, parameter in zip(self.sites, parameters, strict=True):
            for module, attribute in sites:
                module._parameters[attribute] = parameter


@dataclass(eq=False)
class Unit:
    """Modules that are unsharded together."""

    name: str
    module: nn.Module | None
    """None for the leftovers, which have no forward of their own."""
    index: int
    groups: list[ParamGroup]
    """Groups this unit owns."""
    borrowed: list[ParamGroup] = field(default_factory=list)
    """Groups of other units that hold parameters tied to this one's."""
    state: UnitState = UnitState.RESHARDED

    @property
    def needed(self) -> list[ParamGroup]:
        return self.groups + self.borrowed

    @property
    def trainable(self) -> bool:
        return any(group.trainable for group in self.needed)

    def move(self, state: UnitState) -> None:
        assert self.state is not state, f"unit {self.name} is {state.name.lower()} already"
        self.state = state

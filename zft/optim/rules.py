"""Update rules: what a step does to a chunk of a record, the same call for every rule, precision and device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from zft.config import AdamW, Lion, Optim
from zft.optim import torch_update
from zft.precision import PrecisionPlan


@dataclass(frozen=True)
class Hyper:
    """One update's numbers. `step` counts from 1; the gradient is multiplied by `grad_scale` (unscale and clip)."""

    step: int
    lr: float
    grad_scale: float = 1.0


@dataclass(frozen=True)
class Segments:
    """The used elements of a chunk: [start, end) each, with a factor on the weight decay. Others stay untouched."""

    start: np.ndarray  # int64 [n]
    end: np.ndarray  # int64 [n]
    decay: np.ndarray  # float32 [n], 1 or 0

    @staticmethod
    def of(rows: Iterable[tuple[int, int, float]]) -> Segments:
        """From (start, end, decay) rows, in elements of the chunk."""
        rows = list(rows)
        start, end, decay = zip(*rows, strict=True) if rows else ((), (), ())
        return Segments(np.array(start, np.int64), np.array(end, np.int64), np.array(decay, np.float32))

    @staticmethod
    def whole(numel: int, decay: float = 1.0) -> Segments:
        return Segments.of([(0, numel, decay)])


@dataclass(frozen=True)
class _Numbers:
    """A step's scalars as the kernels take them."""

    factors: np.ndarray  # float32, one per segment
    grad_scale: np.float32
    constants: tuple[np.float32, ...]
    salt: int
    """Of the compact record's rounding: [0, 2^32), another one for each step."""


class Rule:
    """Base of the rules. A new one has a kernel in kernels.py, the same lines in torch_update.py, and a class below.

    `views` maps each of `fields` to a 1-D tensor of one chunk. The update runs where `m` is; what lies elsewhere (`hi`
    or the gradient on the device, the state on the CPU) is copied there and back. Chunks of a compact record start at
    multiples of `align` elements of the shard, as do parameters and shards.
    """

    kernel: str

    def __init__(self, optim: Optim, plan: PrecisionPlan):
        self.optim = optim
        self.fields = plan.fields
        self.align = plan.align
        self._compact = plan.compact

    def constants(self, hyper: Hyper) -> tuple[float, ...]:
        """The kernel's scalars, in its order."""
        raise NotImplementedError

    def factors(self, hyper: Hyper, decay: np.ndarray) -> np.ndarray:
        """Each segment's decay in the form the kernel takes. Decoupled: what the weight is multiplied by."""
        return 1.0 - hyper.lr * self.optim.weight_decay * decay.astype(np.float64)

    def init(self, views: dict[str, torch.Tensor], weights: torch.Tensor) -> None:
        """Fills a chunk: the weights (any float dtype) as its master, zero moments. bfloat16 weights give lo = 0."""
        for field in self.fields:
            views[field.name].zero_()
        torch_update.store_weights(views, weights.to(torch.float32))

    def master(self, views: dict[str, torch.Tensor]) -> torch.Tensor:
        """The chunk's float32 weights. For fp32 and fp16 this is the record itself, not a copy."""
        return torch_update.load_weights(views)

    def update(self, views: dict[str, torch.Tensor], grad: torch.Tensor, segments: Segments, hyper: Hyper) -> None:
        """One step on a chunk, in place. grad: 1-D, bfloat16 or float32; it is not changed.

        On the CPU the GIL is released; call it for different chunks from several threads.
        """
        assert hyper.step >= 1, f"steps count from 1, got {hyper.step}"
        if self._compact:
            assert not (segments.start % self.align).any(), "segments of a compact record start at block boundaries"
        numbers = _Numbers(
            factors=self.factors(hyper, segments.decay).astype(np.float32),
            grad_scale=np.float32(hyper.grad_scale),
            constants=tuple(map(np.float32, self.constants(hyper))),
            salt=hyper.step * 0x85EBCA6B % 2**32,
        )
        home = views["m"].device
        here = {name: view.to(home) for name, view in views.items()}
        (self._update_torch if home.type == "cuda" else self._update_cpu)(here, grad.to(home), segments, numbers)
        for name, view in views.items():
            if view.device != home:
                view.copy_(here[name])

    def _update_cpu(self, views, grad, segments: Segments, numbers: _Numbers) -> None:
        from zft.optim import kernels  # numba takes a while to import

        rows = (segments.start, segments.end, numbers.factors)
        arrays = {name: _array(view) for name, view in views.items()}
        grads = _gradients(grad)
        split = (arrays["hi"], arrays["lo"]) if "lo" in arrays else None
        if self._compact:
            moments = arrays["m"], arrays["v"], (arrays["m_scale"], arrays["v_scale"], self.align)
            salt = np.uint32(numbers.salt)
            kernels.update_compact(split, *moments, *grads, rows, numbers.grad_scale, salt, numbers.constants)
            return
        master = None if split else arrays.get("master", arrays["hi"])
        slots = [numbers.constants if name == self.kernel else None for name in kernels.RULES]
        kernels.update(split, master, arrays["m"], arrays.get("v"), *grads, rows, numbers.grad_scale, *slots)
        if "master" in views:
            for start, end in zip(segments.start, segments.end, strict=True):
                views["hi"][start:end].copy_(views["master"][start:end])

    def _update_torch(self, views, grad, segments: Segments, numbers: _Numbers) -> None:
        step = getattr(torch_update, self.kernel)
        blocks = {field.name: field.block for field in self.fields}
        salt = numbers.salt - 2**32 if numbers.salt >= 2**31 else numbers.salt
        for start, end, factor in zip(segments.start, segments.end, numbers.factors, strict=True):
            part = {name: view[start // blocks[name] : -(-end // blocks[name])] for name, view in views.items()}
            master, moments = torch_update.load_weights(part), torch_update.load_moments(part)
            scaled = grad[start:end].to(torch.float32) * float(numbers.grad_scale)
            step(master, scaled, *moments, float(factor), numbers.constants)
            torch_update.store_moments(part, moments, salt)
            torch_update.store_weights(part, master, salt)


class AdamWRule(Rule):
    kernel = "adamw"

    def constants(self, hyper: Hyper) -> tuple[float, ...]:
        beta1, beta2 = self.optim.betas
        step_size = hyper.lr / (1 - beta1**hyper.step)
        return 1 - beta1, beta2, 1 - beta2, 1 / math.sqrt(1 - beta2**hyper.step), self.optim.eps, step_size


class SGDRule(Rule):
    kernel = "sgd"

    def constants(self, hyper: Hyper) -> tuple[float, ...]:
        return hyper.lr, self.optim.momentum

    def factors(self, hyper: Hyper, decay: np.ndarray) -> np.ndarray:
        return self.optim.weight_decay * decay.astype(np.float64)


class LionRule(Rule):
    kernel = "lion"

    def constants(self, hyper: Hyper) -> tuple[float, ...]:
        beta1, beta2 = self.optim.betas
        return hyper.lr, 1 - beta1, 1 - beta2


def make_rule(optim: Optim, plan: PrecisionPlan) -> Rule:
    """The rule of `optim` for records of `plan`."""
    kind = AdamWRule if isinstance(optim, AdamW) else LionRule if isinstance(optim, Lion) else SGDRule
    return kind(optim, plan)


def _array(tensor: torch.Tensor) -> np.ndarray:
    """numpy has no bfloat16: its bits, as int16."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _gradients(grad: torch.Tensor) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(bfloat16 bits, float32): one of the two, as the kernels take them."""
    if grad.dtype == torch.bfloat16:
        return grad.view(torch.uint16).numpy(), None
    return None, grad.to(torch.float32).numpy()

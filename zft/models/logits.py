"""What a model does to its logits after the output head: a factor (Granite, Cohere), a soft cap (Gemma), or nothing.

Found by asking the model's own forward rather than by attribute names, which differ between families: the decoder and
the head are replaced for one call, the head answers with known numbers, and what comes out as `logits` gives the form.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zft.config import ZftError

PROBE = (0.0, 1e-3, -1.0, 1.0, 3.0, -40.0, 500.0, 1e30)


@dataclass(frozen=True)
class LogitTransform:
    """logits -> cap * tanh(scale * logits / cap), or scale * logits without a cap."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Differentiable; returns a new tensor where anything is done."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits

    def forward_(self, logits: Tensor) -> Tensor:
        """In place."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits

    def keep(self, transformed: Tensor) -> Tensor | None:
        """What `backward_` needs of the transformed logits: a copy under a cap, else nothing."""
        return transformed.clone() if self.cap is not None else None

    def backward_(self, grad: Tensor, kept: Tensor | None) -> Tensor:
        """Gradient with respect to the raw logits, in place: d tanh(u) = 1 - tanh(u)^2. Overwrites `kept`."""
        if self.cap is not None:
            assert kept is not None, "a capped backward needs keep()'s copy"
            grad.mul_(kept.div_(self.cap).square_().neg_().add_(1.0))
        if self.scale != 1.0:
            grad.mul_(self.scale)
        return grad


def logit_transform(model: nn.Module) -> LogitTransform:
    """The transform of a causal LM (any device, meta too; PEFT wrappers looked through). Raises ZftError if unknown."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = type(model).__name__
    try:
        answer = _ask(model, torch.tensor(PROBE, dtype=torch.float64).view(1, 1, -1))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ZftError(f"cannot see what {name} does to its logits ({reason}); pass your own loss_fn") from error
    found = _fit(answer.flatten().tolist()) if answer.numel() == len(PROBE) else None
    if found is None:
        raise ZftError(f"{name} changes its logits in a way the default loss does not know; pass your own loss_fn")
    return found


def _fit(values: list[float]) -> LogitTransform | None:
    """Closed form of the answers to PROBE, or None."""
    at_one, at_end = values[PROBE.index(1.0)], values[-1]
    if at_one == 0.0 or not math.isfinite(at_one):
        return None
    if abs(at_end) > 1e20:
        found = LogitTransform(scale=_tidy(at_one))
    elif at_end != 0.0 and abs(at_one / at_end) < 1.0:
        cap = _tidy(abs(at_end))
        found = LogitTransform(scale=_tidy(cap * math.atanh(at_one / cap)), cap=cap)
    else:
        return None
    expected = found(torch.tensor(PROBE, dtype=torch.float64)).tolist()
    close = all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12) for a, b in zip(expected, values, strict=True))
    return found if close else None


def _tidy(value: float) -> float:
    """Undo the last bits that the round trip through tanh or float32 has cost."""
    return float(f"{value:.9g}")


class _DecoderOutput:
    """Stands for a decoder's output: hidden states, and None for all else that a forward may look at."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


def _ask(model: nn.Module, probe: Tensor) -> Tensor:
    """`output.logits` of the model's forward when its decoder is skipped and its head answers `probe` [1, 1, n]."""
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError("it has no output head")
    children = [child for child in model.children() if hasattr(child, "get_input_embeddings")]
    decoders = {model.base_model, model.get_decoder(), *children} - {None, model}
    hidden = torch.zeros(1, 1, 1, dtype=probe.dtype)
    arguments = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "use_cache": False, "return_dict": True}
    accepted = inspect.signature(model.forward).parameters
    arguments = {key: value for key, value in arguments.items() if key in accepted}
    with ExitStack() as replaced, torch.no_grad():
        for decoder in decoders:
            replaced.enter_context(_forward(decoder, lambda *_, **__: _DecoderOutput(hidden)))
        replaced.enter_context(_forward(head, lambda *_, **__: probe.clone()))
        return model(**arguments).logits


@contextmanager
def _forward(module: nn.Module, forward: Callable) -> Iterator[None]:
    """Replaces the forward of one module object; one that was replaced already (by an engine) comes back."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before

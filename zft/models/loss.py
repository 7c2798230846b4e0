"""The default loss: cross-entropy through the output head in token chunks, never the full logits.

hidden [B, T, H], labels shifted left -> rows with a label -> chunks of <= chunk_bytes float32 logits
logits = h @ W.T (+ b) -> scale -> soft cap -> logsumexp - logit of the label, summed
backward in the same visit: (softmax - onehot) * scale -> chain rule -> rows of grad_hidden, grad_weight += in place
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zft.config import ZftError
from zft.models.logits import LogitTransform, logit_transform

IGNORE = -100


def shift_labels(labels: Tensor) -> Tensor:
    """Labels [B, T] moved one to the left, so that position t holds the token to predict there; the last is -100."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)


def aux_loss(output: Any, config: Any) -> Tensor | None:
    """Router loss of a forward pass, already times its coefficient; None unless the model computed one.

    transformers fills `output.aux_loss` when config.output_router_logits is set (Switch Transformers, arXiv 2101.03961,
    eq. 4-6). It is a mean over the micro-batch's tokens: weight it by the micro-batch's share of the step's tokens.
    """
    value = getattr(output, "aux_loss", None)
    if not isinstance(value, Tensor):
        return None
    return value * getattr(config.get_text_config(), "router_aux_loss_coef", 1.0)


@dataclass(frozen=True)
class _Rows:
    """The supervised rows of a micro-batch."""

    index: Tensor  # [n] int64, into the flattened B * T, on hidden's device
    label: Tensor  # [n] int64, on hidden's device


class HeadLoss:
    """Summed cross-entropy of a causal LM, computed at its output head.

    `chunk_bytes` bounds one chunk of float32 logits; at most two such buffers live at once. Raises ZftError at
    construction when the model post-processes its logits in a way that is not `cap * tanh(scale * x / cap)`.
    """

    def __init__(self, model: nn.Module, chunk_bytes: int = 64 << 20):
        self.transform: LogitTransform = logit_transform(model)
        self.chunk_bytes = chunk_bytes

    def targets(self, micro_batch: dict[str, Tensor]) -> Tensor:
        """Shifted labels [B, T] int64 of a micro-batch, -100 where nothing is predicted. Keep them on the CPU."""
        return shift_labels(micro_batch["labels"])

    def placeholder(self, hidden: Tensor, head: nn.Module) -> Tensor:
        """What the head returns to the rest of the model's forward instead of logits: [B, 0, V]."""
        return hidden.new_zeros(hidden.shape[0], 0, head_rows(head))

    @torch.no_grad()
    def forward(self, head: nn.Module, hidden: Tensor, targets: Tensor, call: Callable | None = None) -> Tensor:
        """Sum of the cross-entropy (float64 scalar on hidden's device). hidden [B, T, H], targets [B, T]."""
        rows = self._rows(head, hidden, targets)
        flat = hidden.reshape(-1, hidden.shape[-1])
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for part in self._chunks(rows, head):
            logits = _logits(head, flat.index_select(0, part.index), call)
            total += _cross_entropy(self.transform.forward_(logits), part.label)
        return total

    def forward_backward(
        self,
        head: nn.Module,
        hidden: Tensor,
        targets: Tensor,
        scale: float,
        grads: dict[str, Tensor] | None = None,
        call: Callable | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Loss sum and gradient of `scale * loss sum`.

        hidden [B, T, H] (detached), targets [B, T] from `targets`. Returns (float64 scalar, unscaled; grad_hidden
        [B, T, H] in hidden's dtype). Gradients of head.weight [V, H] and head.bias [V] are added to `grads["weight"]`
        and `grads["bias"]` (float32 or the weight's dtype) or, without `grads`, to `.grad`, which is created if None;
        frozen ones get none. A head that is not exactly nn.Linear goes through `call` (default: the head itself) and
        autograd, chunk by chunk, into `.grad`.
        """
        rows = self._rows(head, hidden, targets)
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        grad_hidden = torch.zeros_like(flat)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        plain = type(head) is nn.Linear
        into = _accumulators(head, grads) if plain else {}
        for part in self._chunks(rows, head):
            h = flat.index_select(0, part.index)
            if plain:
                loss, grad = self._linear_chunk(head, h, part.label, scale, into)
            else:
                loss, grad = self._autograd_chunk(call or head, h, part.label, scale)
            total += loss
            grad_hidden.index_copy_(0, part.index, grad)
        return total, grad_hidden.view(hidden.shape)

    @torch.no_grad()
    def _linear_chunk(
        self, head: nn.Linear, h: Tensor, label: Tensor, scale: float, into: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        logits = self.transform.forward_(_logits(head, h, None))
        kept = self.transform.keep(logits)
        rows = torch.arange(len(label), device=label.device)
        top = logits.amax(dim=-1, keepdim=True)
        picked = logits[rows, label].double()
        # in place from here: logits becomes softmax, then its gradient
        total = logits.sub_(top).exp_().sum(dim=-1, keepdim=True)
        loss = (total.log().double() + top.double()).squeeze(-1).sub_(picked).sum()
        logits.div_(total)
        logits[rows, label] -= 1.0
        grad = self.transform.backward_(logits.mul_(scale), kept).to(h.dtype)
        if "weight" in into:
            _add_outer(into["weight"], grad, h)
        if "bias" in into:
            into["bias"] += grad.sum(dim=0, dtype=torch.float32).to(into["bias"].dtype)
        return loss, grad @ head.weight

    def _autograd_chunk(self, call: Callable, h: Tensor, label: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = h.detach().requires_grad_(True)
            loss = F.cross_entropy(self.transform(call(leaf).float()), label, reduction="sum")
            (loss * scale).backward()
        return loss.detach().double(), leaf.grad

    def _rows(self, head: nn.Module, hidden: Tensor, targets: Tensor) -> _Rows:
        # chosen where the targets are (the CPU), so that a GPU is not waited for
        flat = targets.reshape(-1)
        index = (flat != IGNORE).nonzero().squeeze(-1)
        label = flat[index]
        vocab = head_rows(head)
        if label.device.type == "cpu" and label.numel() and not 0 <= int(label.min()) <= int(label.max()) < vocab:
            bad = int(label.max()) if int(label.max()) >= vocab else int(label.min())
            raise ZftError(f"label {bad} is outside the model's vocabulary of {vocab}; check the tokenizer of the data")
        device = hidden.device
        return _Rows(index.to(device, non_blocking=True), label.to(device, non_blocking=True))

    def _chunks(self, rows: _Rows, head: nn.Module) -> list[_Rows]:
        size = max(1, self.chunk_bytes // (4 * head_rows(head)))
        return [_Rows(i, t) for i, t in zip(rows.index.split(size), rows.label.split(size), strict=True) if len(i)]


def head_rows(head: nn.Module) -> int:
    """Number of logits of an output head: rows of its (base) weight."""
    # through PEFT's wrappers, which may build a weight anew whenever it is asked for
    base = getattr(head, "original_module", None) or head
    base = getattr(base, "base_layer", base)
    features = getattr(base, "out_features", None)
    return features if isinstance(features, int) else base.weight.shape[0]


def _logits(head: nn.Module, h: Tensor, call: Callable | None) -> Tensor:
    """Raw float32 logits [n, V], owned by the caller."""
    if type(head) is nn.Linear:
        return F.linear(h, head.weight, head.bias).float()
    return (call or head)(h).float()


def _cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """Sum over rows in float64; overwrites logits."""
    top = logits.amax(dim=-1, keepdim=True)
    picked = logits.gather(-1, label[:, None]).double()
    total = logits.sub_(top).exp_().sum(dim=-1, keepdim=True)
    return (total.log().double() + top.double() - picked).sum()


def _accumulators(head: nn.Linear, grads: dict[str, Tensor] | None) -> dict[str, Tensor]:
    into = {}
    for name, parameter in (("weight", head.weight), ("bias", head.bias)):
        if parameter is None or not parameter.requires_grad:
            continue
        if grads is not None and name in grads:
            into[name] = grads[name]
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        into[name] = parameter.grad
    return into


def _add_outer(into: Tensor, grad: Tensor, h: Tensor) -> None:
    """into [V, H] += grad [n, V].T @ h [n, H], without a second [V, H]."""
    if into.dtype == h.dtype:
        into.addmm_(grad.T, h)
        return
    # a float32 accumulator under half-precision compute: a strip of rows at a time
    strip = max(1, (32 << 20) // (4 * into.shape[1]))
    for start in range(0, into.shape[0], strip):
        into[start : start + strip] += grad[:, start : start + strip].T @ h

"""The reference: a plain PyTorch loop over all rows, one process, float32 masters. Shares no code with the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from zft.config import SGD, AdamW, Optim

Batch = dict[str, torch.Tensor]


@dataclass
class Run:
    """What a loop left: one entry for each step, and the masters."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Of each step, before clipping, as they rest (bfloat16 for bf16)."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv 2302.06675, algorithm 2."""

    def __init__(self, params, lr: float, betas: tuple[float, float]):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(
                    group["lr"] * (beta1 * m + (1 - beta1) * p.grad).sign()
                )
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def plain_loop(
    model: nn.Module, steps: list[list[Batch]], optim: Optim, precision: str = "fp32",
    max_grad_norm: float | None = None, loss_fn: Callable | None = None,
) -> Run:  # fmt: skip
    """Train `model` (float32) on all micro-batches of each step; it computes with the rounded masters, in float32.

    loss_fn(model, micro_batch) -> (sum, weight) replaces the cross-entropy.
    """
    run, model = Run(), model.train()
    masters = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters() if p.requires_grad}
    optimizer = _optimizer(masters, optim)
    for micro_batches in steps:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in masters:
                    p.copy_(rounded(masters[name], precision))
        tokens = 0 if loss_fn else sum(int((mb["labels"][:, 1:] != -100).sum()) for mb in micro_batches)
        run.losses.append(0.0)
        sums = [loss_fn(model, mb) for mb in micro_batches] if loss_fn else ()
        weight = sum(weight for _, weight in sums)
        for mb in micro_batches if loss_fn is None else sums:
            loss = loss_of(model, mb, tokens) if loss_fn is None else mb[0] / weight
            run.losses[-1] += loss.item()
            loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        grads = {n: g.bfloat16() if precision == "bf16" else g for n, g in grads.items()}
        run.gradients.append({n: g.clone() for n, g in grads.items()})
        run.norms.append(sum(g.double().square().sum().item() for g in grads.values()) ** 0.5)
        clip = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (run.norms[-1] + 1e-6))
        for name, master in masters.items():
            master.grad = grads[name].float() * clip if name in grads else None
        optimizer.step()
        model.zero_grad()
    run.weights = {n: p.detach() for n, p in masters.items()}
    return run


def loss_of(model: nn.Module, mb: Batch, tokens: int) -> torch.Tensor:
    """Sum of the cross-entropy / all tokens of the step, and the router loss by this micro-batch's share of them."""
    out = model(**{k: v for k, v in mb.items() if k != "labels"}, use_cache=False)
    targets = mb["labels"][:, 1:].reshape(-1)
    loss = F.cross_entropy(out.logits[:, :-1].float().flatten(0, 1), targets, reduction="sum") / tokens
    if getattr(out, "aux_loss", None) is not None:
        loss = loss + model.config.router_aux_loss_coef * out.aux_loss * ((targets != -100).sum() / tokens)
    return loss


def rounded(master: torch.Tensor, precision: str) -> torch.Tensor:
    """What the model computes with: float16 to nearest even; bfloat16 to nearest, ties away from zero."""
    if precision == "fp16":
        return master.half().float()
    if precision == "bf16":
        return ((master.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)
    return master


def _optimizer(masters: dict[str, nn.Parameter], optim: Optim) -> torch.optim.Optimizer:
    # the tiny models' norms are vectors
    decaying = {n: p.dim() > 1 and not n.endswith("bias") for n, p in masters.items()}
    groups = [
        {"params": [p for n, p in masters.items() if decaying[n]], "weight_decay": optim.weight_decay},
        {"params": [p for n, p in masters.items() if not decaying[n]], "weight_decay": 0.0},
    ]
    if isinstance(optim, AdamW):
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
    if isinstance(optim, SGD):
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
    return Lion(groups, lr=optim.lr, betas=optim.betas)

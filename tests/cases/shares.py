"""For cases that compare splits of the same rows: rows with a given number of targets, and one step on some ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from tests.adapters import gradients
from tests.harness import run_ranks
from tests.tiny import tiny_model
from zft.api import Engine
from zft.config import AdamW, EngineConfig

Batch = dict[str, torch.Tensor]
OPTIM = AdamW(lr=1e-2, eps=1e-3)


def row(targets: int, seed: int = 0, length: int = 10) -> Batch:
    """One row of tokens of which the last `targets` are supervised."""
    ids = torch.randint(5, 60, (1, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, : length - targets] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def rows(*targets: int, length: int = 10) -> list[Batch]:
    """Different rows, one for each number of targets."""
    return [row(count, 100 + index, length) for index, count in enumerate(targets)]


def stacked(parts: list[Batch]) -> Batch:
    """Rows of one length as one micro-batch."""
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(**{"precision": "fp32", "compute_device": "cpu", "optim": OPTIM, "timeout_s": 60.0, **settings})


def one_step(shares: list[list[Batch]], arch: str, settings: dict, loss_fn: Callable | None = None) -> dict[str, Any]:
    """On each rank: a step on its share. {loss, tokens, norm, skipped, gradients, weights}."""
    with Engine(tiny_model(arch), config(**settings)) as engine:
        result = engine.step(shares[int(os.environ.get("RANK", 0))], loss_fn=loss_fn)
        found = {"loss": result.loss, "tokens": result.tokens, "norm": result.grad_norm, "skipped": result.skipped}
        scale = result.tokens if loss_fn is not None else 1  # a custom loss's gradients rest as those of its sum
        grads = {name: gradient / scale for name, gradient in gradients(engine).items()}
        return {**found, "gradients": grads, "weights": dict(engine.named_parameters())}


def on_ranks(shares: list[list[Batch]], arch: str = "llama", loss_fn: Callable | None = None, **settings: Any) -> dict:
    """What rank 0 found in one step over all shares; every rank found the same."""
    found = run_ranks(len(shares), one_step, shares, arch, settings, loss_fn)
    for other in found[1:]:
        assert all(other[key] == found[0][key] for key in ("loss", "tokens", "norm", "skipped"))
    return found[0]


def alone(micro_batches: list[Batch], arch: str = "llama", loss_fn: Callable | None = None, **settings: Any) -> dict:
    """The same step in this process."""
    return one_step([micro_batches], arch, settings, loss_fn)


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference of two sets of tensors with the same names."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)

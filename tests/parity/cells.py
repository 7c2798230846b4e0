"""One cell of the parity matrix: the engine at some setting against the plain loop, and against itself at home."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from tests.harness import run_ranks
from tests.parity.cover import Cell, cover, fill_up
from tests.plain import Batch, Run, plain_loop
from tests.tiny import FAMILIES, tiny_model
from zft.api import Engine
from zft.config import SGD, AdamW, EngineConfig, Lion, Optim
from zft.engine.fill import get_field

AXES = {
    "model": ("llama", "llama_tied", "mixtral"),
    "world": (1, 2, 3, 4),  # 4: two copies of two shards each
    "rows": ("even", "uneven"),  # uneven: the last rank has none
    "stage": (0, 1, 2, 3),
    "accumulation": (1, 4),
    "wave": ("all", 1),
    "activation": ("none", "full", "selective", "offload-cpu", "offload-nvme"),
    "param_tier": ("device", "cpu", "nvme"),
    "state_tier": ("device", "cpu", "nvme"),
    "grad_tier": ("device", "cpu", "nvme"),
    "precision": ("fp32", "bf16", "fp16"),
    "optimizer": ("adamw", "compact", "sgd", "lion"),
    "update": ("clipped", "unclipped", "backward"),
}
OPTIMIZERS: dict[str, Optim] = {
    "adamw": AdamW(lr=1e-2, eps=1e-3, weight_decay=0.1),
    "compact": AdamW(lr=1e-2, eps=1e-3, weight_decay=0.1, compact=True),
    "sgd": SGD(lr=3e-2, momentum=0.9, weight_decay=0.1),
    "lion": Lion(lr=1e-3, weight_decay=0.1),
}
STEPS, EXACT_STEPS = 20, 5
"""Where rounding takes the runs apart, and where it doesn't."""
EXACT = 1e-6
"""Absolute, on losses, gradients and weights."""


def allowed(cell: Cell) -> bool:
    """8-bit records exist for bf16 only; fp16 looks for overflows, so that it can't update in the backward pass; a rank
    without rows needs another that has some."""
    compact = cell["optimizer"] != "compact" or cell["precision"] == "bf16"
    overflow = cell["update"] != "backward" or cell["precision"] != "fp16"
    return compact and overflow and (cell["rows"] == "even" or cell["world"] > 1)


def matrix(strength: int, count: int = 0) -> list[Cell]:
    """2: every pair of values occurs; 3: every triple. Filled up to `count` cells."""
    return fill_up(cover(AXES, strength, allowed), count, AXES, allowed)


def name_of(cell: Cell) -> str:
    return " ".join(f"{value}" for value in cell.values())


def config_of(cell: Cell, nvme_dir: str) -> EngineConfig:
    activation, _, where = str(cell["activation"]).partition("-")
    return EngineConfig(
        stage=cell["stage"],
        param_tier=cell["param_tier"],
        state_tier=cell["state_tier"],
        grad_tier=cell["grad_tier"],
        nvme_dir=nvme_dir,
        precision=cell["precision"],
        compute_dtype="float32",  # as the plain loop
        activation=activation,
        activation_tier=where or "cpu",
        max_grad_norm=1.0 if cell["update"] == "clipped" else None,
        nonfinite="raise" if cell["update"] == "backward" else "skip",
        wave=None if cell["wave"] == "all" else cell["wave"],
        shard_ranks=2 if cell["world"] == 4 else None,
        optim=OPTIMIZERS[cell["optimizer"]],
        timeout_s=60.0,
    )


def batches(count: int, steps: int, vocab: int = 64) -> list[list[Batch]]:
    """The same `count` micro-batches in each step, of odd shapes, every third one padded."""
    made = []
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(3, vocab, (1 + i % 2, 9 + i % 4), generator=generator)
        mask, labels = torch.ones_like(ids), ids.clone()
        labels[:, :3] = -100
        if i % 3 == 1:
            ids[:, -2:], mask[:, -2:], labels[:, -2:] = 0, 0, -100
        made.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return [made] * steps


@dataclass
class RankRun:
    """What one rank saw."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, tuple[int, torch.Tensor]] | None
    """After the first step, {group: (start, own range of the gradient)}."""
    first: dict[str, torch.Tensor]
    """Masters after the first step; empty unless asked for."""
    weights: dict[str, torch.Tensor]
    digest: str
    """Of every field of every record."""
    spans: dict[str, list[tuple[str, int, tuple[int, ...]]]]


def working_ranks(cell: Cell) -> int:
    return cell["world"] - (cell["rows"] == "uneven")


def train(
    config: EngineConfig, build: Callable[[], nn.Module], rows: tuple[int, int], steps: int, look: bool
) -> RankRun:
    """Runs on each rank: `steps` steps on its share. rows: (micro-batches of a step, ranks that they are dealt to).

    The model is built here: transformers' recorder of router logits doesn't survive pickling.
    """
    rank, (count, working) = int(os.environ["RANK"]), rows
    data = [mbs[rank::working] if rank < working else [] for mbs in batches(count, steps)]
    with Engine(build(), config) as engine:
        results = [engine.step(data[0])]
        gradients = first_gradients(engine)
        first = dict(engine.named_parameters()) if look else {}
        results += [engine.step(mbs) for mbs in data[1:]]
        weights = dict(engine.named_parameters())
        spans = {
            r.group.name: [(s.name, s.offset, s.shape) for s in r.group.layout.spans]
            for r in engine.parts.records.values()
        }
        losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
        return RankRun(losses, norms, gradients, first, weights, digest_of(engine), spans)


def first_gradients(engine: Engine) -> dict[str, tuple[int, torch.Tensor]] | None:
    """This rank's ranges of the first step's gradients, where they wait; where they have stepped, from the moments."""
    optim, found = engine.config.optim, {}
    if getattr(optim, "compact", False) and engine.stepper.immediate:
        return None  # 8-bit moments don't tell
    share = {AdamW: lambda: 1 - optim.betas[0], Lion: lambda: 1 - optim.betas[1], SGD: lambda: 1.0}[type(optim)]()
    for group, record in engine.parts.records.items():
        if not group.trainable:
            continue
        ranges = record.ranges
        if engine.stepper.immediate:
            found[group.name] = (ranges.state_start, get_field(record, "m", 0, ranges.state_numel) / share)
        else:
            found[group.name] = (
                ranges.grad_start,
                get_field(record, "grad", 0, ranges.grad_numel) / engine.parts.loss_scale,
            )
    return found


def digest_of(engine: Engine) -> str:
    """Of all bits that the optimizer keeps on this rank."""
    total = hashlib.sha256()
    for record in engine.parts.records.values():
        for name, _, entries in record.fields():
            if name != "grad":
                total.update(get_field(record, name, 0, entries).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def start_of(model: str, optimizer: str, **overrides) -> nn.Module:
    """The model that both train. An 8-bit record rounds other weights than bfloat16 ones by chance."""
    made = tiny_model(model, **overrides)
    return made.bfloat16().float() if optimizer == "compact" else made


def joined(ranks: list[RankRun], cell: Cell) -> dict[str, torch.Tensor] | None:
    """The ranks' ranges put together: {parameter: gradient}."""
    if ranks[0].gradients is None:
        return None
    made = {}
    for group, spans in ranks[0].spans.items():
        parts = [rank.gradients[group] for rank in ranks if group in rank.gradients]
        end = max((start + part.numel() for start, part in parts), default=0)
        flat = torch.full((end,), torch.nan)
        for start, part in parts:
            flat[start : start + part.numel()] = part
        made.update((name, flat[at : at + torch.Size(shape).numel()].view(shape)) for name, at, shape in spans if parts)
    if cell["update"] == "backward":  # read off the first moments
        decay = OPTIMIZERS["sgd"].weight_decay if cell["optimizer"] == "sgd" else 0.0
        for name, weight in start_of(cell["model"], cell["optimizer"]).named_parameters():
            made[name] -= decay * weight.detach() if weight.dim() > 1 else 0.0
            made[name] = made[name].bfloat16().float() if cell["precision"] == "bf16" else made[name]
    return made


@functools.cache
def reference(model: str, count: int, steps: int, precision: str, optimizer: str, clipped: bool) -> Run:
    clip = 1.0 if clipped else None
    return plain_loop(start_of(model, optimizer), batches(count, steps), OPTIMIZERS[optimizer], precision, clip)


def check_cell(cell: Cell, steps: int = STEPS) -> str:
    """Run a cell and compare; returns the differences in words. Raises AssertionError, naming what differs."""
    exact = cell["precision"] == "fp32" and cell["optimizer"] in ("adamw", "sgd")
    steps = EXACT_STEPS if exact else steps
    rows = (cell["accumulation"] * working_ranks(cell), working_ranks(cell))
    key = (cell["model"], rows[0])
    build = partial(start_of, cell["model"], cell["optimizer"])
    how = (cell["precision"], cell["optimizer"], cell["update"] == "clipped")
    plain, plain_first = reference(*key, steps, *how), reference(*key, 1, *how)
    with tempfile.TemporaryDirectory(prefix="zft-parity-") as folder:
        config = config_of(cell, folder)
        ranks = run_ranks(cell["world"], train, config, build, rows, steps, cell["precision"] != "fp32")
        bits = check_bits(cell, config, rows)
    for rank in ranks[1:]:
        assert rank.losses == ranks[0].losses and rank.norms == ranks[0].norms, "ranks report different losses"
        same = all(torch.equal(rank.weights[n], w) for n, w in ranks[0].weights.items())
        assert same, "ranks see different weights"
    words = [compare_first(cell, ranks, plain, plain_first)]
    words.append(compare_all(ranks[0], plain) if exact else compare_losses(ranks[0], plain))
    return "; ".join([*words, bits])


def compare_first(cell: Cell, ranks: list[RankRun], plain: Run, plain_first: Run) -> str:
    """Loss, gradients and (for half precision) weights after the first step."""
    loss = abs(ranks[0].losses[0] - plain.losses[0])
    assert loss <= EXACT, f"first loss differs by {loss:.2e}"
    norm = abs(ranks[0].norms[0] / plain.norms[0] - 1)
    assert norm <= (1e-4 if cell["precision"] == "bf16" else EXACT), f"first norm differs by {norm:.2e} of it"
    gradients = joined(ranks, cell)
    worst, flipped = 0.0, {}
    for name, expected in plain.gradients[0].items():
        if gradients is None:
            flipped[name] = torch.ones(expected.shape, dtype=torch.bool)
            continue
        difference = (gradients[name] - expected.float()).abs()
        flipped[name] = difference > 0 if expected.dtype == torch.bfloat16 else expected.abs() <= EXACT
        ulp = expected.float().abs() * 2**-7 if expected.dtype == torch.bfloat16 else 0.0
        assert (difference <= ulp + EXACT).all(), f"gradient of {name} differs by {difference.max():.2e}"
        worst = max(worst, difference.max().item())
    total = sum(f.numel() for f in flipped.values())
    share = sum(int(f.sum()) for f in flipped.values()) / total
    if cell["precision"] != "fp32" or cell["optimizer"] == "lion":
        _compare_first_weights(cell, ranks[0], plain_first, flipped)
    words = "" if gradients is None else f", gradients {worst:.1e}"
    rounding = f" ({share:.2%} one bfloat16 apart)" if cell["precision"] == "bf16" and gradients is not None else ""
    return f"first step: loss {loss:.1e}{words}{rounding}"


def _compare_first_weights(cell: Cell, rank: RankRun, plain: Run, flipped: dict[str, torch.Tensor]) -> None:
    """Where the gradients are the same, so are the weights; where the gradient was rounded the other way, or so small
    that its sign is noise, a step's length bounds the difference."""
    lr = OPTIMIZERS[cell["optimizer"]].lr
    for name, expected in plain.weights.items():
        if not rank.first:
            return
        difference = (rank.first[name] - expected).abs()
        slack = expected.abs() * 2**-15 if cell["optimizer"] == "compact" else 0.0
        same, other = difference <= EXACT + slack, difference <= 2 * lr + EXACT + slack
        unsure = flipped.get(name, torch.zeros(expected.shape, dtype=torch.bool))
        assert torch.where(unsure, other, same).all(), f"{name} differs by {difference.max():.2e} after the first step"


def compare_all(rank: RankRun, plain: Run) -> str:
    """Losses and weights to the end."""
    loss = max(abs(a - b) for a, b in zip(rank.losses, plain.losses, strict=True))
    assert loss <= EXACT, f"losses differ by {loss:.2e}"
    weight = max((rank.weights[n] - w).abs().max().item() for n, w in plain.weights.items())
    assert weight <= EXACT, f"weights differ by {weight:.2e}"
    return f"{len(rank.losses)} steps: losses {loss:.1e}, weights {weight:.1e}"


def compare_losses(rank: RankRun, plain: Run) -> str:
    """Rounding takes the two runs apart; the losses stay close."""
    apart = abs(rank.losses[-1] - plain.losses[-1])
    fallen = plain.losses[0] - plain.losses[-1]
    assert fallen > 0.1, f"the plain loss fell by {fallen:.3f} only: nothing to compare"
    assert apart <= 0.02 * fallen, (
        f"last losses {rank.losses[-1]:.5f} and {plain.losses[-1]:.5f} after a fall of {fallen:.3f}"
    )
    return f"{len(rank.losses)} steps: last loss {apart:.1e} of a fall of {fallen:.2f}"


def check_bits(cell: Cell, config: EngineConfig, rows: tuple[int, int]) -> str:
    """The cell's placement and everything on the device leave the same bits; AdamW with eps = 1e-8."""
    optim = replace(config.optim, eps=1e-8) if isinstance(config.optim, AdamW) else config.optim
    placed = replace(config, optim=optim)
    at_home = replace(placed, param_tier="device", state_tier="device", grad_tier="device")
    build = partial(start_of, cell["model"], cell["optimizer"])
    runs = run_ranks(cell["world"], _train_both, placed, at_home, build, rows)
    for mine, home in runs:
        assert mine.losses == home.losses and mine.norms == home.norms, "losses depend on the placement"
        assert mine.digest == home.digest, "the record's bits depend on the placement"
    return "same bits as on the device"


def _train_both(
    placed: EngineConfig, at_home: EngineConfig, build: Callable, rows: tuple[int, int]
) -> tuple[RankRun, RankRun]:
    return train(placed, build, rows, 2, False), train(at_home, build, rows, 2, False)


ROUTER_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
ARCHITECTURES: dict[str, tuple[str, dict]] = {
    **{name: (name, {}) for name in [*FAMILIES, "gemma3n"]},
    # the plain loop has another random stream
    "gpt2": ("gpt2", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "opt": ("opt", {"dropout": 0.0}),
    "mixtral with router loss": ("mixtral", ROUTER_LOSS),
    "qwen3_moe with router loss": ("qwen3_moe", ROUTER_LOSS),
}


def check_architecture(name: str, world: int, activation: str = "full") -> str:
    """Losses, gradients and weights of a tiny model of one architecture in float32, stage 3."""
    arch, overrides = ARCHITECTURES[name]
    cell = {"model": arch, "precision": "fp32", "optimizer": "adamw", "update": "clipped"}
    config = EngineConfig(precision="fp32", activation=activation, optim=OPTIMIZERS["adamw"], timeout_s=60.0)
    rows = (2 * world, world)
    plain = plain_loop(tiny_model(arch, **overrides), batches(rows[0], EXACT_STEPS), config.optim, "fp32", 1.0)
    ranks = run_ranks(world, train, config, partial(tiny_model, arch, **overrides), rows, EXACT_STEPS, False)
    return "; ".join([compare_first(cell, ranks, plain, plain), compare_all(ranks[0], plain)])

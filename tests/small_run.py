"""A real loop around a real engine on a tiny model, without the command: for tests that stop and resume it many times."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from tests.tiny import tiny_model
from zft.api import Engine
from zft.compose import compose
from zft.config import RunConfig
from zft.dist import World
from zft.observe.metrics import read
from zft.train import checkpoints
from zft.train.folder import RunFolder
from zft.train.loop import Job, fit

STEPS = 3


class Shuffled:
    """Two micro-batches a step on all ranks together, drawn from 5 rows in an order of each epoch; its position is state."""

    def __init__(self, rank: int, ranks: int):
        self.rank, self.ranks, self.position = rank, ranks, 0
        self.rows = torch.randint(5, 64, (5, 8), generator=torch.Generator().manual_seed(7))

    def next_step(self) -> list[dict[str, torch.Tensor]]:
        numbers = [self.position, self.position + 1]
        self.position += 2
        return [self._row(number) for number in numbers[self.rank :: self.ranks]]

    def _row(self, number: int) -> dict[str, torch.Tensor]:
        epoch, place = divmod(number, len(self.rows))
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(epoch))
        row = self.rows[order[place]][None]
        return {"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}

    def state_dict(self) -> dict:
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]


def configured(folder: Path, *overrides: str) -> RunConfig:
    """A run in `folder`/out that saves at every step and keeps one checkpoint."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "a.jsonl").write_text("{}\n")
    settings = ["train.save_every=1", "train.keep=1", "train.lr=0.01", "train.warmup_steps=2", "compute_device=cpu"]
    settings = [s if not s.startswith("compute") else f"engine.{s}" for s in settings]
    return compose("sft", ["model=model", "data=a.jsonl", "out=out", *settings, *overrides], folder)


def train(folder: Path, *overrides: str, resume: bool = False, steps: int = STEPS) -> dict[str, Any]:
    """Run or resume to step `steps`. Returns what can be compared: losses, digest of the float32 weights, checkpoints."""
    run = configured(folder, *overrides)
    world = World.from_env("cpu")
    out = RunFolder(run.out)
    with out.opened(run, resume, world):
        pass
    engine = Engine(tiny_model("llama", attention_dropout=0.1, num_hidden_layers=1), run.engine, world=world)
    with engine:
        fit(Job(run, engine, Shuffled(world.rank, world.size), world, out), steps, resume)
        return {"losses": losses(out.path), "weights": digest(engine), "steps": checkpoints.steps(out.checkpoints)}


def losses(run: Path) -> list[tuple]:
    return [(row["step"], row["loss"], row["grad_norm"], row["lr"]) for row in read(run / "metrics.jsonl")]


def digest(engine: Engine) -> str:
    """Of every float32 master's bytes, by name."""
    total = hashlib.sha256()
    for name, tensor in engine.named_parameters():
        total.update(json.dumps([name, list(tensor.shape)]).encode() + tensor.numpy().tobytes())
    return total.hexdigest()


def names(folder: Path) -> list[str]:
    """Everything in a run's checkpoints folder."""
    return sorted(path.name for path in (folder / "out" / "checkpoints").iterdir())

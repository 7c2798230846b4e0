"""What every peer's process shares: arguments, micro-batches, and a line of JSON for each step."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--variant", default="")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--gpu-memory", type=float, help="GiB that the process may take of the GPU")
    options = parser.parse_args()
    if options.gpu_memory and torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.gpu_memory / whole))
    return options


def micro_batches(options: argparse.Namespace, device: str = "cpu") -> list[dict[str, torch.Tensor]]:
    """The same random tokens for every peer; every token is a target."""
    config = json.loads((Path(options.model) / "config.json").read_text(encoding="utf-8"))
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(options.micro_batches):
        ids = torch.randint(5, config["vocab_size"], (1, options.tokens), generator=generator)
        made.append({"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)})
    return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in made]


def targets(batches: list[dict[str, torch.Tensor]]) -> int:
    """Supervised tokens of a step: the first of a sequence is none."""
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def disk_bytes() -> dict[str, int]:
    """The kernel's own counters of this process."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {"read": int(rows["read_bytes"]), "write": int(rows["write_bytes"])}


def say(**row: object) -> None:
    print(json.dumps(row), flush=True)


def run_steps(
    options: argparse.Namespace, step: Callable[[], float], parameters: int, more: Callable[[], dict] = dict
) -> None:
    """Warm-up and timed steps; `step` returns the loss, `more` what else its row says."""
    say(event="ready", parameters=parameters, torch=torch.__version__, threads=torch.get_num_threads())
    for number in range(options.warmup + options.steps):
        before, started = disk_bytes(), time.perf_counter()
        loss = step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds, after = time.perf_counter() - started, disk_bytes()
        moved = {name: after[name] - before[name] for name in after}
        device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        row = {"number": number, "warmup": number < options.warmup, "seconds": seconds, "loss": loss}
        say(event="step", **row, disk=moved, device=device, **more())
    sys.stdout.flush()


def fresh(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def single_rank(port: int = 29541) -> None:
    """One rank of torch.distributed, for peers that want a process group."""
    values = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**values, "MASTER_PORT": str(port + os.getpid() % 1000)}.items():
        os.environ.setdefault(name, value)

"""Exports, each in a process of its own; the last line says how long the export itself took and its own peak memory.

export_peer.py save MODEL CHECKPOINT       a checkpoint of a trained state, by an engine on NVMe
export_peer.py run MODEL OUT               from a live run: everything on NVMe, after a step
export_peer.py checkpoint MODEL CHECKPOINT OUT   without an engine, as `zft export` does
export_peer.py copy FOLDER OUT             a plain copy of FOLDER's bytes that are not in the page cache, made durable
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]


def main() -> None:
    verb, *folders = sys.argv[1:]
    work = {"save": save, "run": run, "checkpoint": checkpoint, "copy": copy}[verb](*map(Path, folders))
    print(json.dumps({"event": "done", **work}), flush=True)


def measured(action: Callable[[], None]) -> dict[str, float]:
    """Seconds of the action, and the kernel's resident peak of this process while it ran."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    started = time.perf_counter()
    action()
    seconds = time.perf_counter() - started
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return {"seconds": seconds, "peak_bytes": int(peak.split()[1]) * 1024}


def save(model: Path, target: Path) -> dict:
    return with_engine(model, target, lambda engine: engine.save(target))


def run(model: Path, out: Path) -> dict:
    return with_engine(model, out, lambda engine: engine.export(out))


def with_engine(model: Path, target: Path, action: Callable) -> dict:
    """`action(engine)`, measured, after one step; the tiers' files lie beside `target`."""
    import torch

    from zft.api import Engine, EngineConfig

    with tempfile.TemporaryDirectory(dir=target.parent) as nvme:
        config = EngineConfig(param_tier="nvme", state_tier="nvme", grad_tier="nvme", nvme_dir=nvme)
        with Engine.from_pretrained(model, config) as engine:
            ids = torch.arange(5, 37).view(1, -1)
            engine.step([{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}], lr=1e-5)
            engine.drain()  # so that the export is timed, and not the step's updates
            engine.parts.rest()  # as an export does first: the peak so far is the step's
            return measured(lambda: action(engine))


def checkpoint(model: Path, stored: Path, out: Path) -> dict:
    from zft.checkpoint.hf import base_dtype, export_folder
    from zft.checkpoint.source import StoredWeights
    from zft.models.load import build_model

    structure = build_model(model)  # imports the model's module
    dtype = base_dtype(structure, model)
    return measured(lambda: export_folder(out, StoredWeights(stored).units(dtype), structure, model, dtype=dtype))


def copy(folder: Path, out: Path) -> dict:
    files = [path for path in folder.iterdir() if path.is_file()]
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def work() -> None:
        out.mkdir()
        for path in files:
            shutil.copyfile(path, out / path.name)
            with (out / path.name).open("rb") as file:
                os.fsync(file.fileno())

    return measured(work)


main()

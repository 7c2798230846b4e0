"""What a run knows of itself when it begins, for its report page."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from zft.config import RunConfig
from zft.observe.report import write_facts
from zft.train.folder import RunFolder


def keep_about(run: RunConfig, model: torch.nn.Module, report: Any, total_steps: int) -> None:
    """Write OUT/report.json, on rank 0. report: zft.data's DataReport."""
    recipe, train, engine = Path(run.recipe).stem, run.train, run.engine
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    trained, whole = sum(n for n, wanted in counts if wanted), sum(n for n, _ in counts)
    tiers = f"weights {engine.param_tier}, state {engine.state_tier}, gradients {engine.grad_tier}"
    rows = f"{train.micro_batch_size} rows of up to {train.seq_len:,} tokens"
    facts = [
        ("model", run.model),
        ("data", ", ".join(source.path for source in run.data)),
        ("method", str(run.method.name)),
        ("parameters", f"{trained:,} trained" + (f" of {whole:,}" if whole != trained else "")),
        ("tiers", f"stage {engine.stage}; {tiers}"),
        ("precision", str(engine.precision)),
        ("activations", str(engine.activation)),
        ("optimizer", f"{type(engine.optim).__name__}, learning rate {train.lr:g}, {train.schedule}"),
        ("a step", f"{train.grad_accum_steps} × {rows} on a rank"),
        ("torch", torch.__version__),
        ("transformers", version("transformers")),
    ]
    title = f"{recipe} of {Path(run.model).name or run.model}"
    about = {"title": title, "facts": facts, "total_steps": total_steps, "data": report.to_dict()}
    write_facts(RunFolder(run.out).path, about)

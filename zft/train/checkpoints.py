"""Which checkpoints a run has, which one is newest, and which stay."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8})")


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def steps(checkpoints: Path) -> list[int]:
    """Steps with a complete checkpoint, in order. A folder without a manifest is not one."""
    found = checkpoints.iterdir() if checkpoints.is_dir() else ()
    named = [(match, path) for path in found if (match := _NAME.fullmatch(path.name))]
    return sorted(int(match[1]) for match, path in named if (path / MANIFEST).is_file())


def prune(checkpoints: Path, keep: int, best_step: int | None) -> None:
    """Remove all but the `keep` newest and the best."""
    for step in steps(checkpoints)[:-keep]:
        if step != best_step:
            shutil.rmtree(step_folder(checkpoints, step))

"""Which checkpoints a run has, which one is newest, and which stay.

checkpoints/step-00000040       complete if its manifest says so
checkpoints/step-00000040.old   what was there before, in the moment of replacing it
checkpoints/.tmp-step-00000040  being built or removed; never looked at
"""

from __future__ import annotations

import re
from pathlib import Path

from zft.checkpoint.disk import remove_checkpoint
from zft.checkpoint.manifest import MANIFEST, is_complete

__all__ = ["MANIFEST", "candidates", "newest", "prune", "step_folder", "steps"]

_NAME = re.compile(r"step-(\d{8})(\.old)?")


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def candidates(checkpoints: Path) -> list[Path]:
    """Folders that may be checkpoints, newest first; one that was set aside comes after its successor."""
    found = checkpoints.iterdir() if checkpoints.is_dir() else ()
    named = [(int(match[1]), not match[2], path) for path in found if (match := _NAME.fullmatch(path.name))]
    return [path for *_, path in sorted(named, reverse=True)]


def newest(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint."""
    return next((path for path in candidates(checkpoints) if is_complete(path)), None)


def steps(checkpoints: Path) -> list[int]:
    """Steps with a complete checkpoint, in order."""
    return sorted({int(_NAME.fullmatch(path.name)[1]) for path in candidates(checkpoints) if is_complete(path)})


def prune(checkpoints: Path, record: list[tuple[int, float | None]], keep: int) -> list[tuple[int, float | None]]:
    """Remove what this run has saved, but for the `keep` newest and the best; returns the record of those that stay.

    record: (step, evaluation loss of that step or None) of every checkpoint that the run has written and not removed.
    Folders that it does not name are somebody else's and stay.
    """
    there = sorted((step, loss) for step, loss in record if step_folder(checkpoints, step).is_dir())
    best = min((row for row in there if row[1] is not None), key=lambda row: row[1], default=None)
    stay = there[-keep:] + ([best] if best in there[:-keep] else [])
    for step, _ in [row for row in there if row not in stay]:
        remove_checkpoint(step_folder(checkpoints, step))
    return sorted(stay)

"""A run's folder: what it holds, when it may be made, and what a failure leaves in it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from zft.config import RunConfig, Tier, ZftError
from zft.tree import to_yaml

if TYPE_CHECKING:  # it imports torch, and the command checks folders before that
    from zft.dist import World


class RunFolder:
    """`OUT`: config.yaml, plan.json, metrics.jsonl, checkpoints/, export/, tiers/ and, after a failure, error.log."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "export"
        self.error_log = self.path / "error.log"
        self.plan = self.path / "plan.json"

    @property
    def is_run(self) -> bool:
        return self.config.is_file()

    @property
    def is_exported(self) -> bool:
        return any((self.export / name).is_file() for name in ("config.json", "adapter_config.json"))

    @property
    def is_empty(self) -> bool:
        """Nothing that anyone would miss: no such folder, or only the log of a run that failed before it began."""
        return not self.path.exists() or (self.path.is_dir() and not set(os.listdir(self.path)) - {self.error_log.name})

    def check(self, run: RunConfig) -> None:
        """Whether a new run may write here; writes nothing. Raises ZftError."""
        if self.path.exists() and not self.path.is_dir():
            raise ZftError(f"out is a file, got {self.path}; give a folder")
        _check_writable(self.path, "out")
        if not self.is_empty and not run.overwrite:
            resume = f", `zft resume {self.path}`" if self.is_run else ""
            raise ZftError(f"out is not empty, got {self.path}; choose another folder{resume} or overwrite=true")
        if not self.is_empty and not self.is_run:
            raise ZftError(f"overwrite=true removes only folders of zft runs, and {self.path} has no config.yaml")
        for name in (run.model, *(source.path for source in run.data + run.eval_data)):
            if not self.is_empty and Path(name).is_relative_to(self.path):
                raise ZftError(f"overwrite=true would remove {name}, which this run reads; choose another out")
        check_nvme_dir(run)

    @contextmanager
    def opened(self, run: RunConfig, resume: bool, world: World) -> Iterator[None]:
        """Make the folder on rank 0 (or rewrite config.yaml to resume); as it was before, if the block says ZftError.

        `overwrite` moves an earlier run aside and removes it once the block has passed.
        """
        error, aside = None, None
        is_new = not resume and world.is_main
        if world.is_main:
            try:
                aside = self._move_aside(run) if is_new else None
                self.path.mkdir(parents=True, exist_ok=True)
                self.error_log.unlink(missing_ok=True)
                self.write_config(run)
            except Exception as raised:  # told to the other ranks, which wait
                error = raised
        world.agree(error)
        try:
            yield
        except ZftError:
            if is_new:
                shutil.rmtree(self.path)
                if aside:
                    aside.rename(self.path)
            raise
        if aside:
            shutil.rmtree(aside)

    def _move_aside(self, run: RunConfig) -> Path | None:
        if self.is_empty or not (run.overwrite and self.is_run):
            return None
        aside = self.path.with_name(f".{self.path.name}.replaced-{os.getpid()}")
        self.path.rename(aside)
        return aside

    def write_config(self, run: RunConfig) -> None:
        partial = self.config.with_name(".config.yaml")
        partial.write_text(to_yaml(run), encoding="utf-8")
        partial.replace(self.config)

    def log_error(self, error: BaseException) -> None:
        """Append the traceback to error.log."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self.error_log.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(sys.argv)}\n{''.join(traceback.format_exception(error))}\n")


def check_nvme_dir(run: RunConfig) -> None:
    """Whether the NVMe tier's folder can be written to, if the run uses one; writes nothing. Raises ZftError."""
    engine = run.engine
    tiers = [getattr(engine, name) for name in ("param_tier", "state_tier", "grad_tier") if name not in run.auto_tiers]
    if Tier.nvme in tiers or (engine.activation == "offload" and engine.activation_tier == Tier.nvme):
        _check_writable(Path(engine.nvme_dir), "engine.nvme_dir")


def _check_writable(path: Path, key: str) -> None:
    """Whether `path`, or the nearest folder above that exists, is a folder that this process may write to."""
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not there.is_dir():
        raise ZftError(f"{key} can't be made, got {path}: {there} is a file; choose another folder")
    try:
        # not os.access: it tells root that /proc is writable
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ZftError(
            f"{key} is not writable, got {path} ({error.strerror}); choose a folder that you may write to"
        ) from None

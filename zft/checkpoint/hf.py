"""Export: a folder that `from_pretrained` loads, written while units stream by, then checked against plan and base.

plan names, shapes, shards from meta shapes -> files at their final size -> unit by unit: Hub layout, one rounding,
written at its offset -> config, generation config, tokenizer, code, card -> fsync -> verify -> rename into place
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zft.checkpoint.card import write_card
from zft.checkpoint.names import ExportError, aliases, base_model, export_dtypes, plan_tensors, to_hub
from zft.checkpoint.sidecar import write_code, write_config, write_generation_config, write_tokenizer
from zft.checkpoint.verify import verify_export
from zft.checkpoint.writer import TensorFileWriter, TensorSpec
from zft.config import ZftError
from zft.models.load import load_config, stored_dtype
from zft.models.source import INDEX
from zft.tiers.direct import WriteBehind

__all__ = ["ExportError", "ExportOptions", "ExportReport", "Exporter", "export_folder", "verify_export"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportReport:
    """What was written. `total_bytes` is the sum of numel * itemsize over tensors, as in the index."""

    folder: Path
    files: list[str]
    total_bytes: int
    tensors: int
    dtype: torch.dtype
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ExportOptions:
    """Everything about an export but the weights."""

    tokenizer: Any = None
    """None: the base's tokenizer files are copied."""
    dtype: torch.dtype | None = None
    """None: the base's."""
    max_shard_size: str | int = "5GB"
    facts: dict[str, Any] | None = None
    """For the model card: base_model, datasets, license, and anything to list under Training."""
    chat_template: str | None = None
    """The template trained with; None: the tokenizer's own."""
    stop_ids: Sequence[int] = ()
    """Tokens that end an answer: generation has to stop at them, as at the base's own."""
    check_values: bool = True
    """Re-read every byte when verifying."""


def export_folder(
    folder: str | Path,
    units: Iterator[dict[str, Tensor]],
    model: nn.Module,
    base: str | Path | None,
    **options: Any,
) -> ExportReport:
    """Writes `model` (structure only; may be on meta) with the values that `units` streams into a new `folder`.

    units: dicts of the model's own names -> CPU tensors that stay unchanged while the next unit is prepared (it is read
    while this one is written); a tied weight once, under any of its names. base: the folder the model is from (config,
    tokenizer, code, licence), or None. options: see ExportOptions. Nothing appears at `folder` unless everything was
    written and verified; raises ZftError if it exists and is not empty, ExportError if the result would not load.
    """
    exporter = Exporter(folder, model, base, ExportOptions(**options))
    try:
        with ThreadPoolExecutor(1, "zft-export") as writer:
            written = None
            for unit in units:
                if written is not None:
                    written.result()
                written = writer.submit(exporter.write, unit)
                del unit
            if written is not None:
                written.result()
        return exporter.finish()
    except BaseException:
        exporter.abort()
        raise


class Exporter:
    """The steps of `export_folder` for callers that hold the loop: write(unit), ..., then finish() or abort()."""

    def __init__(self, folder: str | Path, model: nn.Module, base: str | Path | None, options: ExportOptions):
        self.folder, self.base, self.options = Path(folder), Path(base) if base is not None else None, options
        check_target(self.folder)
        self.model = base_model(model)
        self.dtype = options.dtype or base_dtype(self.model, self.base)
        self._dtypes = export_dtypes(self.model, self.dtype)
        self._alias = aliases(self.model)
        self.specs = plan_tensors(self.model, self.dtype)
        self._left = set(self._dtypes)
        self._work = Workspace(self.folder)
        self._writers: dict[str, TensorFileWriter] = {}
        self._behind = WriteBehind()
        try:
            self._file_of = self._open_files()
        except BaseException:
            self.abort()
            raise

    def _open_files(self) -> dict[str, str]:
        from huggingface_hub.serialization import split_state_dict_into_shards_factory

        try:
            plan = split_state_dict_into_shards_factory(
                self.specs,
                get_storage_size=lambda spec: spec.nbytes,
                filename_pattern="model{suffix}.safetensors",
                max_shard_size=self.options.max_shard_size,
            )
        except ValueError as error:
            raise ZftError(f"max_shard_size is like 5GB or 500MB, got {self.options.max_shard_size!r}") from error
        for filename, names in plan.filename_to_tensors.items():
            self._writers[filename] = TensorFileWriter(
                self._work.path / filename, {name: self.specs[name] for name in names}, self._behind
            )
        if plan.is_sharded:
            numel = sum(tensor.numel() for tensor in self.model.parameters())
            metadata = {"total_parameters": numel, "total_size": self.total_bytes}
            index = {"metadata": metadata, "weight_map": plan.tensor_to_filename}
            (self._work.path / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return plan.tensor_to_filename

    @property
    def total_bytes(self) -> int:
        """Sum of numel * itemsize over the tensors written."""
        return sum(spec.nbytes for spec in self.specs.values())

    @torch.no_grad()
    def write(self, unit: dict[str, Tensor]) -> None:
        """One unit's tensors, by the model's own names. Raises ExportError for one that the plan does not have."""
        part: dict[str, Tensor] = {}
        for name, tensor in unit.items():
            written = self._alias.get(name)
            if written is None:
                raise ExportError(f"{name} is not a weight of {type(self.model).__name__}")
            if written in self._left and written not in part:
                part[written] = tensor
        self._left -= part.keys()
        for name, tensor in to_hub(self.model, part).items():
            spec = self.specs.get(name)
            if spec is None or tuple(tensor.shape) != spec.shape:
                raise ExportError(f"{name} {list(tensor.shape)} does not fit the planned {_describe(spec)}")
            self._writers[self._file_of[name]].write(name, tensor.cpu())

    def finish(self) -> ExportReport:
        """Completes the folder, verifies it and moves it into place."""
        if self._left:
            raise ExportError(f"{len(self._left)} weights were never given, among them {sorted(self._left)[0]}")
        for writer in self._writers.values():
            writer.finish()
        self._behind.close()
        warnings = self._write_rest()
        checksums = {name: total for writer in self._writers.values() for name, total in writer.checksums.items()}
        verify_export(
            self._work.path,
            self.base,
            specs=self.specs,
            checksums=checksums if self.options.check_values else None,
            trust_remote_code=_is_remote(self.model),
        )
        files = self._work.commit()
        return ExportReport(self.folder, files, self.total_bytes, len(self.specs), self.dtype, warnings)

    def _write_rest(self) -> list[str]:
        work, model, options = self._work.path, self.model, self.options
        write_config(work, model, self.base, self.dtype)
        warnings = write_generation_config(work, model, self.base, options.stop_ids)
        write_tokenizer(work, options.tokenizer, options.chat_template, self.base)
        write_code(work, model, self.base)
        numel = sum(tensor.numel() for tensor in model.parameters())
        write_card(
            work, self.base, {"dtype": str(self.dtype).removeprefix("torch."), "parameters": numel}, options.facts
        )
        for warning in warnings:
            log.warning(warning)
        return warnings

    def abort(self) -> None:
        """Removes everything written so far."""
        self._behind.close()
        for writer in self._writers.values():
            writer.abort()
        self._work.remove()


def check_target(folder: Path) -> None:
    """Raises ZftError if an export to `folder` would touch something that is there."""
    if folder.is_dir() and any(folder.iterdir()):
        raise ZftError(f"{folder} is not empty; give a new folder for the export")
    if folder.exists() and not folder.is_dir():
        raise ZftError(f"{folder} is a file; give a new folder for the export")


def base_dtype(model: Any, base: Path | None) -> torch.dtype:
    """The dtype of the base's files; the model itself may have been built in the engine's dtype."""
    if base is not None and (base / "config.json").is_file():
        return stored_dtype(base, load_config(base, _is_remote(model)))
    dtype = getattr(model.config, "dtype", None) or model.config.get_text_config().dtype or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _is_remote(model: nn.Module) -> bool:
    return type(model).__module__.startswith("transformers_modules")


def _describe(spec: TensorSpec | None) -> str:
    return f"shape {list(spec.shape)}" if spec is not None else "export, which has no such tensor"


class Workspace:
    """A hidden folder beside the target that becomes the target by one rename, or goes away.

    It is locked while in use: one that a killed export left behind is unlocked and is removed by the next export.
    """

    def __init__(self, target: Path):
        self.target = target
        target.parent.mkdir(parents=True, exist_ok=True)
        self._prefix = f".tmp-{target.name}-"
        for old in target.parent.glob(self._prefix.replace("[", "[[]") + "*"):
            if old.is_dir() and (lock := _lock(old)) is not None:
                shutil.rmtree(old, ignore_errors=True)
                os.close(lock)
        self.path = Path(tempfile.mkdtemp(prefix=self._prefix, dir=target.parent))
        self._held = _lock(self.path)

    def commit(self) -> list[str]:
        """fsync of every file and of the folder, then the rename. Returns the file names."""
        from zft.models.hub import current_umask

        files = sorted(each.name for each in self.path.iterdir())
        for name in files:
            (self.path / name).chmod(0o666 & ~current_umask())
            _fsync(self.path / name)
        self.path.chmod(0o777 & ~current_umask())
        _fsync(self.path)
        os.rename(self.path, self.target)  # also onto an empty folder
        _fsync(self.target.parent)
        self._release()
        return files

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None


def _lock(folder: Path) -> int | None:
    """A file descriptor that holds an exclusive lock on the folder until closed; None if someone else holds it."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        os.close(fd)
        return None
    return fd


def _fsync(path: Path) -> None:
    with contextlib.suppress(PermissionError):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

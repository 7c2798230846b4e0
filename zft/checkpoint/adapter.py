"""An adapter's export: the folder that PEFT loads on the untouched base, written while units stream by, then checked.

adapter_model.safetensors (PEFT's names, float32 masters unless asked) · adapter_config.json · tokenizer · card
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zft.checkpoint.card import write_card
from zft.checkpoint.hf import ExportOptions, ExportReport, Workspace, check_target
from zft.checkpoint.names import ExportError
from zft.checkpoint.sidecar import write_tokenizer
from zft.checkpoint.verify import tensor_checksum
from zft.checkpoint.writer import TensorFileWriter, TensorSpec
from zft.models.adapter_weights import ADAPTER, WEIGHTS, adapter_keys
from zft.models.hub import is_hub_id
from zft.models.tensorfile import TensorFile
from zft.tiers.direct import WriteBehind

CONFIG = "adapter_config.json"


def is_adapter(model: Any) -> bool:
    """Whether a model is PEFT's wrapper around another."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def export_adapter(
    folder: str | Path, units: Iterator[dict[str, Tensor]], model: Any, base: str | Path | None, **options: Any
) -> ExportReport:
    """Write the adapter of `model` (a PeftModel; structure only) with the trained values that `units` streams.

    units: dicts of the model's own names -> CPU tensors. base: the folder the base model is from. options: see
    ExportOptions; dtype None is float32, `facts["base_model"]` names the base in the files where it is a Hub id.
    Nothing appears at `folder` unless everything was written and verified. Raises ZftError if it exists and isn't
    empty, ExportError if the result would not load.
    """
    settings, base = ExportOptions(**options), Path(base) if base is not None else None
    check_target(Path(folder))
    dtype, keys = settings.dtype or torch.float32, adapter_keys(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
    specs = {key: TensorSpec(dtype, shapes[name]) for name, key in keys.items()}
    work = Workspace(Path(folder))
    try:
        checksums = _write_weights(work.path / WEIGHTS, units, keys, specs)
        _write_config(work.path, model, base, settings.facts)
        write_tokenizer(work.path, settings.tokenizer, settings.chat_template, base)
        numel = sum(spec.nbytes // dtype.itemsize for spec in specs.values())
        measured = {"dtype": str(dtype).removeprefix("torch."), "adapter_parameters": numel}
        write_card(work.path, base, measured, settings.facts, library="peft")
        verify_adapter(work.path, specs, checksums)
        files = work.commit()
    except BaseException:
        work.remove()
        raise
    return ExportReport(Path(folder), files, sum(spec.nbytes for spec in specs.values()), len(specs), dtype)


def _write_weights(
    path: Path, units: Iterator[dict[str, Tensor]], keys: dict[str, str], specs: dict[str, TensorSpec]
) -> dict[str, int]:
    """Every tensor of the adapter, once; returns checksums. Raises ExportError for a value that is not finite."""
    behind = WriteBehind()
    writer = TensorFileWriter(path, specs, behind)
    try:
        for unit in units:
            for name, tensor in unit.items():
                if name not in keys:
                    continue
                if not torch.isfinite(tensor).all():
                    raise ExportError(f"{name} is not finite; the adapter is not exported")
                writer.write(keys[name], tensor)
        writer.finish()
    finally:
        behind.close()
        writer.abort()
    return writer.checksums


def _write_config(folder: Path, model: Any, base: Path | None, facts: dict[str, Any] | None) -> None:
    config = copy.deepcopy(model.peft_config[ADAPTER])
    origin = str((facts or {}).get("base_model") or "")
    config.base_model_name_or_path = origin if origin and is_hub_id(origin) else str(base) if base is not None else None
    config.inference_mode = True
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # the same file each time
    config.save_pretrained(str(folder))


def verify_adapter(folder: Path, specs: dict[str, TensorSpec], checksums: dict[str, int] | None = None) -> None:
    """Reopen what was written: names, shapes, dtypes, values, a configuration that PEFT reads. Raises ExportError."""
    from peft import PeftConfig

    with TensorFile(folder / WEIGHTS) as file:
        found = {name: TensorSpec(entry.dtype, entry.shape) for name, entry in file.entries.items()}
        if found != specs:
            odd = min({*found.items()} ^ {*specs.items()}, key=str)
            raise ExportError(f"{folder / WEIGHTS} does not hold the adapter: {odd}")
        for name, total in (checksums or {}).items():
            if tensor_checksum(file, name) != total:
                raise ExportError(f"{folder / WEIGHTS}: {name} reads back differently from what was written")
    PeftConfig.from_pretrained(str(folder))
    json.loads((folder / CONFIG).read_text(encoding="utf-8"))

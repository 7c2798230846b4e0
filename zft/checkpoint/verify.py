"""Proof that an export is what it should be, in the memory of one chunk: structure, bytes, names, a load on meta."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from zft.checkpoint.names import ExportError
from zft.checkpoint.writer import TensorSpec, byte_view, checksum
from zft.config import ZftError
from zft.models.source import INDEX, weight_files
from zft.models.tensorfile import TensorFile
from zft.tiers.direct import Reader

READ_BYTES = 64 << 20
"""A multiple of 8, as `checksum` wants its parts."""


def verify_export(
    folder: str | Path,
    base: str | Path | None = None,
    *,
    specs: dict[str, TensorSpec] | None = None,
    checksums: dict[str, int] | None = None,
    trust_remote_code: bool = False,
) -> int:
    """Raises ExportError, saying why, unless the folder loads and agrees with its base and with what was written.

    Every file is reopened. base: names and shapes must agree (rows of a grown vocabulary aside). specs and checksums:
    what the writer planned and wrote; without checksums no tensor bytes are read. Returns the number of tensors.
    """
    folder = Path(folder)
    try:
        found = _check_files(folder, checksums)
    except (ZftError, OSError) as error:
        raise ExportError(f"export of {folder.name} cannot be read back: {error}") from error
    if specs is not None:
        _same_names(set(specs), set(found), "planned", "written")
        for name, spec in specs.items():
            if found[name] != spec:
                raise ExportError(f"{name} was written as {_text(found[name])}, planned as {_text(spec)}")
    model = _check_load(folder, found, trust_remote_code)
    if base is not None and (Path(base) / "config.json").is_file():
        _check_base(Path(base), found, model)
    return len(found)


def _check_files(folder: Path, checksums: dict[str, int] | None) -> dict[str, TensorSpec]:
    files = weight_files(folder)
    on_disk = {each.name for each in folder.glob("*.safetensors")}
    _same_names({path.name for path in files.values()}, on_disk, "indexed", "on disk")
    found: dict[str, TensorSpec] = {}
    reader = Reader() if checksums is not None else None  # what is on the disk, not what the cache remembers
    for path in dict.fromkeys(files.values()):
        with TensorFile(path, reader) as file:
            for name, entry in file.entries.items():
                if name in found or files.get(name) != path:
                    raise ExportError(f"{name} is in {path.name} but the index says {files.get(name)}")
                found[name] = TensorSpec(entry.dtype, entry.shape)
                if checksums is not None and tensor_checksum(file, name) != checksums.get(name):
                    raise ExportError(f"{name} in {path.name} does not hold the bytes that were written")
    _same_names(set(files), set(found), "indexed", "in the files")
    if (folder / INDEX).is_file():
        claimed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["metadata"]["total_size"]
        total = sum(spec.nbytes for spec in found.values())
        if claimed != total:
            raise ExportError(f"the index claims {claimed} bytes, the tensors have {total}")
    return found


def tensor_checksum(file: TensorFile, name: str) -> int:
    """The checksum of a tensor's bytes as they lie in the file, read in chunks."""
    entry, total = file.entries[name], 0
    buffer = torch.empty(min(entry.nbytes, READ_BYTES), dtype=torch.uint8)
    for at in range(0, entry.nbytes, READ_BYTES):
        part = buffer[: min(READ_BYTES, entry.nbytes - at)]
        file.read_into(entry.start + at, part)
        total = checksum(byte_view(part), total)
    return total


def _check_load(folder: Path, found: dict[str, TensorSpec], trust_remote_code: bool) -> Any:
    """transformers' own loading of config and names, with meta tensors in place of the bytes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        tensors = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in found.items()}
        cls = _model_class(config, AutoModelForCausalLM, folder, trust_remote_code)
        with _silent():
            model, info = cls.from_pretrained(
                None, config=config, state_dict=tensors, device_map={"": "meta"}, output_loading_info=True
            )
    except Exception as error:
        raise ExportError(f"transformers cannot load the export: {' '.join(str(error).split())[:300]}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            raise ExportError(f"loading the export reports {kind}: {sorted(map(str, info[kind]))[:3]}")
    stated = getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype
    floats = {spec.dtype for spec in found.values() if spec.dtype.is_floating_point}
    if stated not in floats:
        raise ExportError(f"config.json states {stated}, the tensors are {sorted(map(str, floats))}")
    return model


def _model_class(config: Any, auto: Any, folder: Path, trust_remote_code: bool) -> Any:
    reference = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if reference and trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(reference, str(folder), local_files_only=True)
    return auto._model_mapping[type(config)]


def _check_base(base: Path, found: dict[str, TensorSpec], model: Any) -> None:
    """The base has the same tensors, by the model's own names for them: those it needs and no others."""
    from zft.models.load import build_model
    from zft.models.weights import HubWeights

    try:
        source = build_model(base, trust_remote_code=type(model).__module__.startswith("transformers_modules"))
        HubWeights(base, source).close()
    except ZftError as error:
        raise ExportError(f"the base cannot be read for comparison: {error}") from error
    ours, theirs = dict(model.named_parameters()), dict(source.named_parameters())
    untied = {
        name for name in ours.keys() ^ theirs.keys() if name in source.state_dict() and name in model.state_dict()
    }
    _same_names(theirs.keys() - untied, ours.keys() - untied, "in the base", "in the export")
    vocabulary = {id(each.weight) for each in (source.get_input_embeddings(), source.get_output_embeddings())}
    for name in theirs.keys() & ours.keys():
        a, b = theirs[name], ours[name]
        grown = id(a) in vocabulary and a.shape[1:] == b.shape[1:] and b.shape[0] > a.shape[0]
        if a.shape != b.shape and not grown and not name.endswith("bias"):
            raise ExportError(f"{name} has shape {list(b.shape)}, in the base {list(a.shape)}")


def _same_names(a: set[str], b: set[str], what_a: str, what_b: str) -> None:
    if a != b:
        only_a, only_b = sorted(a - b), sorted(b - a)
        raise ExportError(
            f"{len(only_a)} {what_a} but not {what_b} {only_a[:3]}, "
            f"{len(only_b)} {what_b} but not {what_a} {only_b[:3]}"
        )


def _text(spec: TensorSpec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}"


class _silent:
    """No progress bar and no loading report: the result is judged here."""

    def __enter__(self) -> None:
        from transformers.utils import logging as hf_logging

        self._level = hf_logging.get_verbosity()
        self._hook = hf_logging.set_tqdm_hook(lambda factory, args, kwargs: hf_logging.EmptyTqdm(*args, **kwargs))
        hf_logging.set_verbosity_error()

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging as hf_logging

        hf_logging.set_tqdm_hook(self._hook)
        hf_logging.set_verbosity(self._level)

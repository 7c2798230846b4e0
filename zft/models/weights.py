"""Weights of a Hugging Face folder, streamed: one unit's tensors at a time, under the model's own names.

Renaming and conversion (experts fused from many Hub tensors, qkv split, ...) are transformers' own
(`core_model_loading`), given only the tensors of the unit at hand.

    folder -> index (key -> file) -> renamed (target -> keys) -> read(names): convert those keys -> (name, tensor)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zft.config import ZftError
from zft.models.source import LazyTensor, TensorSource, open_folder

log = logging.getLogger(__name__)


def stored_name(key: str, model: nn.Module, names: dict[str, Any]) -> str:
    """The model's name for a checkpoint key, as far as only the base model's prefix differs."""
    from transformers.core_model_loading import rename_source_key

    return key if key in names else rename_source_key(key, [], [], model.base_model_prefix, names)[0]


@dataclass
class _Group:
    """Checkpoint keys that are converted together, and the model's names they fill."""

    keys: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)


class HubWeights:
    """The weight source of a folder of safetensors (or another `source`), for a model built on meta by `build_model`.

    Raises ZftError at construction when a parameter of the model has no tensor in the folder; tensors that the model
    has no use for are listed in `unexpected` (a warning, as in from_pretrained). Sets `model._weight_conversions`, so
    that an export writes the folder's own layout.
    """

    def __init__(self, folder: str | Path, model: nn.Module, source: TensorSource | None = None):
        self.folder = Path(folder)
        self._config, self._prefix = model.config, model.base_model_prefix
        self._tensors = source if source is not None else open_folder(self.folder)
        self._shapes = {name: each for name, each in model.state_dict(keep_vars=True).items()}
        self._buffers = {name for name, _ in model.named_buffers()}
        self._dequantizer = getattr(model, "_dequantizer", None)
        self._mapping = _conversion_mapping(model, self._dequantizer)
        self._groups, self.unexpected = self._rename(model)
        if self._dequantizer is None:  # else an export takes transformers' plain mapping: it writes full weights
            model._weight_conversions = [each for each in self._mapping if each.was_used()]
        self._alias = _tied_names(model)
        self._growable: set[str] = getattr(model, "_grown_names", set())  # set by zft.models.load.grow
        self._check_missing(model)

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, CPU tensor) of parameters and persistent buffers, in the checkpoint's dtype.

        Holds one conversion group at a time (a fused expert tensor and its parts); what is yielded is the caller's.
        Rows that the model has beyond the checkpoint (an embedding grown for new tokens) are the mean of the old rows.
        """
        groups: dict[int, tuple[_Group, dict[str, str]]] = {}
        for name in names:
            source = self._source(name)
            group = self._groups[source]
            groups.setdefault(id(group), (group, {}))[1][source] = name
        for group, wanted in groups.values():
            converted = self._convert(group)
            for source, name in wanted.items():
                if source not in converted:
                    raise ZftError(f"{self.folder}: no tensor for {name} came out of converting {group.keys[0]}")
                yield name, self._fit(name, converted.pop(source))
            del converted

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which `read` yields a parameter."""
        return self._dtype(self._groups[self._source(name)])

    def close(self) -> None:
        self._tensors.close()

    def _rename(self, model: nn.Module) -> tuple[dict[str, _Group], list[str]]:
        """Checkpoint keys -> groups by the model's names, as the first loop of convert_and_load_state_dict_in_model."""
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        renamings = [each for each in self._mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in self._mapping if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        groups: dict[str, _Group] = {}
        unexpected = []
        for key in sorted(self._tensors.names(), key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, self._prefix, self._shapes)
            if target not in self._shapes and key in self._shapes:
                target, pattern = rename_source_key(key, [], [], self._prefix, self._shapes)
            if target not in self._shapes:
                unexpected.append(key)
                continue
            group = groups.setdefault(target, _Group())
            group.keys.append(key)
            if not group.targets:
                patterns = by_pattern[pattern].target_patterns if pattern is not None else [""]
                group.targets = [target.replace(patterns[0], each) if each else target for each in patterns]
        for group in list(groups.values()):
            for target in group.targets:
                groups.setdefault(target, group)
        return groups, _without(unexpected, _ignored_unexpected(model))

    def _source(self, name: str) -> str:
        """The name under which a parameter's tensor is found: its own, or that of a parameter it is tied to."""
        if name in self._groups:
            return name
        for other in self._alias.get(name, ()):
            if other in self._groups:
                return other
        raise ZftError(f"{self.folder} has no tensor for {name}; the folder does not match its config.json")

    def _check_missing(self, model: nn.Module) -> None:
        missing = []
        for name in _without(self._shapes, model._keys_to_ignore_on_load_missing or ()):
            try:
                self._source(name)
            except ZftError:
                missing.append(name)
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ZftError(
                f"{self.folder} has no tensor for {', '.join(missing[:3])}{more}; the weights do not match config.json"
            )
        if self.unexpected:
            log.warning(
                "%s: %d tensors are not used, among them %s", self.folder, len(self.unexpected), self.unexpected[0]
            )

    def _dtype(self, group: _Group) -> torch.dtype:
        if self._dequantizer is not None:
            return self._shapes[group.targets[0]].dtype
        dtype = self._tensors.dtype(group.keys[0])
        for key in group.keys[1:]:
            dtype = torch.promote_types(dtype, self._tensors.dtype(key))
        return dtype

    def _convert(self, group: _Group) -> dict[str, Tensor]:
        """All tensors of a group, through transformers' own conversion on a skeleton that has only their names."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        if len(group.keys) == 1 and len(group.targets) == 1 and group.keys[0] == group.targets[0]:
            return {group.targets[0]: self._tensors.read(group.keys[0])}
        dtype = self._dtype(group)
        shapes = {name: self._shapes[name] for name in group.targets if name in self._shapes}
        skeleton = _skeleton(shapes, self._buffers, dtype)
        skeleton.config, skeleton.base_model_prefix = self._config, self._prefix
        lazy = {key: LazyTensor(self._tensors, key) for key in group.keys}
        load = LoadStateDictConfig(dtype=dtype, weight_mapping=self._mapping, hf_quantizer=self._dequantizer)
        with _quiet():
            info, _ = convert_and_load_state_dict_in_model(skeleton, lazy, load)
        if info.conversion_errors:
            reason = next(iter(info.conversion_errors.values())).strip().splitlines()[-1]
            raise ZftError(f"{self.folder}: cannot convert {group.keys[0]} to {group.targets[0]} ({reason})")
        if info.mismatched_keys:
            name, got, want = sorted(info.mismatched_keys)[0]
            if name not in self._growable:
                raise ZftError(f"{self.folder}: {name} has shape {list(got)} where config.json asks for {list(want)}")
        out = {name: each.data for name, each in skeleton.state_dict(keep_vars=True).items()}
        return {name: each for name, each in out.items() if each.device.type != "meta"}

    def _fit(self, name: str, tensor: Tensor) -> Tensor:
        want = tuple(self._shapes[name].shape)
        if tuple(tensor.shape) == want:
            return tensor
        if name in self._growable and tensor.shape[1:] == want[1:] and tensor.shape[0] < want[0]:
            return grow_rows(tensor, want[0])
        raise ZftError(f"{self.folder}: {name} has shape {list(tensor.shape)} where config.json asks for {list(want)}")


def grow_rows(tensor: Tensor, rows: int) -> Tensor:
    """A tensor [rows, ...] that starts with the old rows, bit for bit; each new row is their float32 mean.

    The mean leaves the model's predictions for old tokens nearly unchanged (Hewitt 2021,
    https://www.cs.columbia.edu/~johnhew/vocab-expansion.html) and needs no random numbers: every rank gets the same.
    """
    out = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype)
    out[: len(tensor)] = tensor
    total = torch.zeros(tensor.shape[1:], dtype=torch.float64)
    for part in tensor.split(4096):
        total += part.sum(dim=0, dtype=torch.float64)
    out[len(tensor) :] = (total / len(tensor)).float().to(tensor.dtype)
    return out


def _skeleton(shapes: dict[str, Tensor], buffers: set[str], dtype: torch.dtype) -> nn.Module:
    """Nested empty modules that hold just these parameters, on meta, in the checkpoint's dtype."""
    root = nn.Module()
    for name, like in shapes.items():
        module = root
        *path, leaf = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        empty = torch.empty(like.shape, dtype=dtype, device="meta")
        if name in buffers:
            module.register_buffer(leaf, empty)
        else:
            module.register_parameter(leaf, nn.Parameter(empty, requires_grad=False))
    return root


def _conversion_mapping(model: nn.Module, dequantizer: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model, hf_quantizer=dequantizer)


def _tied_names(model: nn.Module) -> dict[str, list[str]]:
    """name -> the other names of the same Parameter."""
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name)
    return {name: [n for n in names if n != name] for names in by_tensor.values() if len(names) > 1 for name in names}


def _ignored_unexpected(model: nn.Module) -> set[str]:
    """Patterns of keys that from_pretrained silently ignores (PreTrainedModel._adjust_missing_and_unexpected_keys)."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    names = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in names):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in names):
        patterns.add(r"(^|\.)position_ids$")
    return patterns


def _without(names: Any, patterns: Any) -> list[str]:
    regexes = [re.compile(pattern) for pattern in patterns]
    return [name for name in names if not any(regex.search(name) for regex in regexes)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar, which would be drawn once for each unit."""
    from transformers.utils import logging as hf_logging

    before = hf_logging.set_tqdm_hook(lambda factory, args, kwargs: hf_logging.EmptyTqdm(*args, **kwargs))
    try:
        yield
    finally:
        hf_logging.set_tqdm_hook(before)

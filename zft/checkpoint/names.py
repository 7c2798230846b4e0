"""From a model's own parameter names to the Hub's: tied weights once, transformers' weight conversions reversed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zft.checkpoint.writer import TensorSpec
from zft.models.load import dtype_plan


class ExportError(Exception):
    """An export that would not load, or would not equal the model; the message says why."""


def base_model(model: nn.Module) -> Any:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def export_names(model: nn.Module) -> dict[str, Tensor]:
    """The model's own names that an export writes: parameters and persistent buffers, a tied weight under one name.

    Of tied names the one that transformers declares as the source (`_tied_weights_keys`) is kept, as in its own saves.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    alias = aliases(model)
    tensors = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in tensors.items() if alias[name] == name and name not in ignored}


def aliases(model: nn.Module) -> dict[str, str]:
    """Every name of the model's parameters and persistent buffers -> the name under which it is written."""
    declared = dict(getattr(model, "all_tied_weights_keys", None) or {})
    by_tensor: dict[int, list[str]] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    alias = {}
    for names in by_tensor.values():
        owner = next((name for name in names if name not in declared), names[0])
        alias.update(dict.fromkeys(names, owner))
    # declared ties hold even if an engine has put separate stand-ins in their places
    return {name: alias.get(declared.get(name, ""), owner) for name, owner in alias.items()}


def export_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of each written tensor: `dtype` for floats, float32 where transformers insists, others as they are."""
    keep = dtype_plan(model, dtype)
    return {
        name: (keep(name) or dtype) if tensor.is_floating_point() else tensor.dtype
        for name, tensor in export_names(model).items()
    }


def to_hub(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A part of the state dict in the Hub's names and layout (views where possible)."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(tensors)))


def plan_tensors(model: nn.Module, dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Hub name -> dtype and shape of everything that an export of `model` writes, from shapes alone."""
    dtypes = export_dtypes(model, dtype)
    meta = {
        name: torch.empty(tensor.shape, dtype=dtypes[name], device="meta")
        for name, tensor in export_names(model).items()
    }
    return {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in to_hub(model, meta).items()}

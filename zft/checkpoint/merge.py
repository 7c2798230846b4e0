"""Merging an adapter into its base, one unit at a time: W + scale * B A in float32, by PEFT's own layers, one rounding.

The base's weights come from its folder, not from an engine that may hold them rounded or quantized.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zft.checkpoint.names import ExportError, export_dtypes
from zft.models.adapter_weights import ADAPTER, AdapterWeights
from zft.models.load import build_model, grow


def plain_model(model: Any, base: Path, trust_remote_code: bool) -> nn.Module:
    """The base of an adapted model again, on meta and without the adapter, with as many token rows."""
    plain = build_model(base, trust_remote_code=trust_remote_code)
    embedding = model.get_input_embeddings()
    while hasattr(embedding, "original_module") or hasattr(embedding, "base_layer"):
        embedding = getattr(embedding, "original_module", None) or embedding.base_layer
    grow(plain, embedding.weight.shape[0])
    return plain


Units = Iterable[tuple[list[str], dict[str, Tensor]]]
"""(names of all parameters of a unit, those of them that are trained), one unit at a time."""


def merged_units(
    model: Any, weights: AdapterWeights, units: Units, plain: nn.Module, dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """{name in the plain model: CPU tensor} of one unit at a time.

    units: all parameter names of a unit in the PeftModel, and its trained tensors in float32. The base's buffers come
    last. Raises ExportError for a merged weight that is not finite.
    """
    dtypes = export_dtypes(plain, dtype)
    buffers = [name for name, _ in plain.named_buffers() if name in dtypes]
    for names, trained in units:
        out = dict(weights.read_base([name for name in names if name not in trained]))
        for name, tensor in trained.items():
            if name in weights.base_of:  # a module trained in full
                out[weights.base_of[name]] = tensor
        for path, module in _adapters(model, trained):
            name = weights.base_of[f"{path}.{_base_parameter(module)}"]
            merged = merged_weight(module, out[name], _local(trained, path))
            if not torch.isfinite(merged).all():
                raise ExportError(f"{name} is not finite after merging; the adapter or its scale is broken")
            out[name] = merged.to(dtypes.get(name, dtype))
        yield out
    if buffers:
        yield dict(weights.base.read(buffers))


@torch.no_grad()
def merged_weight(layer: Any, weight: Tensor, values: dict[str, Tensor]) -> Tensor:
    """float32 weight of a layer with its adapter folded in. values: the layer's own adapter tensors, float32.

    LoRA: W + scale * B A (arXiv 2106.09685, section 4.1); DoRA: that, its rows scaled to the magnitudes (2402.09353).
    """
    if hasattr(layer, "token_indices"):
        rows = values[f"trainable_tokens_delta.{ADAPTER}"]
        return weight.float().index_copy(0, torch.tensor(layer.token_indices[ADAPTER]), rows)
    base, leaf = layer.get_base_layer(), getattr(layer, "parameter_name", "weight")
    with lent(layer, values), lent(base, {leaf: weight.to(torch.float32, copy=True)}):
        layer.merge(adapter_names=[ADAPTER])
        layer.merged_adapters.clear()
        layer._caches.clear()
        return base._parameters[leaf].data


@contextmanager
def lent(module: nn.Module, values: dict[str, Tensor]) -> Iterator[None]:
    """A module's parameters with these values for a while."""
    places = []
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        places.append((owner, leaf, owner._parameters[leaf]))
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    try:
        yield
    finally:
        for owner, leaf, parameter in places:
            owner._parameters[leaf] = parameter


def _adapters(model: Any, trained: dict[str, Tensor]) -> Iterator[tuple[str, Any]]:
    """(path, layer) of every adapter layer that has one of the trained tensors, inner ones first."""
    paths: dict[str, None] = {}
    for name in trained:
        for marker in (".lora_", ".trainable_tokens_delta."):
            if marker in name:
                paths[name.rpartition(marker)[0]] = None
    return ((path, model.get_submodule(path)) for path in sorted(paths, key=len, reverse=True))


def _base_parameter(layer: Any) -> str:
    """Local name of the parameter that a layer adapts."""
    name, inner = "base_layer", layer.base_layer
    while hasattr(inner, "base_layer"):
        name, inner = f"{name}.base_layer", inner.base_layer
    return f"{name}.{getattr(layer, 'parameter_name', 'weight')}"


def _local(trained: dict[str, Tensor], path: str) -> dict[str, Tensor]:
    """A layer's own adapter tensors, by their names inside it; not those of a layer that it wraps."""
    inside = {name[len(path) + 1 :]: tensor for name, tensor in trained.items() if name.startswith(f"{path}.")}
    return {name: tensor.float() for name, tensor in inside.items() if not name.startswith("base_layer.")}

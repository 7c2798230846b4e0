"""The weights of a checkpoint, one layer at a time, without an engine: for exports."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from zft.checkpoint.manifest import Manifest
from zft.checkpoint.restore import ShardFiles
from zft.checkpoint.sharded import VALUE
from zft.models.tensorfile import DTYPES
from zft.optim.torch_update import load_weights
from zft.precision import Field

WEIGHT_FIELDS = ("hi", "lo", "master")
"""The fields that make up a weight; the others are moments."""
_WRAPPED = re.compile(r"\.(?:lora_|base_layer|token_adapter|modules_to_save|original_module)")
"""What PEFT puts behind the name of a module that it wraps."""


class StoredWeights:
    """The weights in a checkpoint: each tensor is checked as it is read, moments are not read. Raises DamagedCheckpoint."""

    def __init__(self, folder: Path):
        self.manifest = Manifest.read(folder)
        self._files = ShardFiles(folder, self.manifest)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A parameter or buffer by its torch fqn: as it computes where that has `dtype`, else the float32 master."""
        stored = self.manifest.tensors[name]
        numel = math.prod(stored.shape)
        kinds = {field: DTYPES[text.partition("/")[0]] for field, text in stored.fields.items()}
        as_is = VALUE if VALUE in kinds else "hi" if kinds["hi"] == dtype else None
        wanted = [as_is] if as_is else [field for field in WEIGHT_FIELDS if field in kinds]
        views = {field: torch.empty(numel, dtype=kinds[field]) for field in wanted}
        for field, out in views.items():
            self._files.read_checked(name, Field(field, out.dtype), out)
        weight = views[as_is] if as_is else load_weights(views)
        return weight.view(stored.shape)

    def units(self, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
        """{torch fqn: CPU tensor}, those of one numbered layer together."""
        for names in by_layer(self.manifest.tensors):
            yield {name: self.read(name, dtype) for name in names}

    def units_of(self, names: Iterable[str]) -> Iterator[tuple[list[str], dict[str, Tensor]]]:
        """All of a model's names, layer by layer, with the float32 masters of those that the checkpoint has."""
        for layer in by_layer(names):
            yield layer, {name: self.read(name, torch.float32) for name in layer if name in self.manifest.tensors}

    def close(self) -> None:
        self._files.close()


def by_layer(names: Iterable[str]) -> Iterator[list[str]]:
    """Runs of names that belong to the same numbered layer: `model.layers.3`; others stand alone, with their adapter."""
    return (list(run) for _, run in groupby(names, key=_layer))


def _layer(name: str) -> str:
    parts = name.split(".")
    at = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return _WRAPPED.split(name)[0] if at is None else ".".join(parts[: at + 1])

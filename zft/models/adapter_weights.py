"""The weights of a model with an adapter, one unit at a time: the base's under PEFT's names, and first values.

The first A of a layer depends on the seed and the layer's name alone: the same on every rank, at every world size, in
whatever order units are read. DoRA's magnitudes are the norms of the base's rows, taken as their unit streams in.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zft.config import ZftError
from zft.models.tensorfile import TensorFile

ADAPTER = "default"
"""PEFT's own name for a model's only adapter; it is in the names of parameters, not in files."""
WEIGHTS = "adapter_model.safetensors"


class AdapterFile:
    """The tensors of a saved adapter, under the names in the file. Raises ZftError."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        for name in ("adapter_config.json", WEIGHTS):
            if not (self.folder / name).is_file():
                raise ZftError(f"method.adapter={folder} has no {name}; name a folder that PEFT or zft saved")
        self.file = TensorFile(self.folder / WEIGHTS)

    def read(self, key: str) -> Tensor:
        return self.file.read(key)

    def check(self, keys: dict[str, tuple[int, ...]], beside: set[str]) -> None:
        """Exactly these tensors with these shapes, but for those of `beside`, or ZftError."""
        there = {name: entry.shape for name, entry in self.file.entries.items() if name not in beside}
        problems = [f"{name} is missing" for name in keys.keys() - there.keys()]
        problems += [f"{name} has no place in this model" for name in there.keys() - keys.keys()]
        problems += [
            f"{name} is {list(there[name])} where the model has {list(shape)}"
            for name, shape in keys.items() if name in there and there[name] != shape
        ]  # fmt: skip
        if problems:
            more = f" and {len(problems) - 2} more" if len(problems) > 2 else ""
            raise ZftError(f"{self.folder} doesn't fit this model: {'; '.join(sorted(problems)[:2])}{more}")


class AdapterWeights:
    """A weight source for a PeftModel on meta: `read` as HubWeights has it."""

    def __init__(self, model: Any, base: Any, names: dict[int, str], seed: int, saved: AdapterFile | None = None):
        self.model, self.base, self.seed, self.saved = model, base, seed, saved
        self.folder = base.folder
        self.base_of = self._wrapped_names(names)
        """Parameter or buffer of the PeftModel -> the base's name for it."""
        self._keys = adapter_keys(model)
        if saved is not None:
            parameters = model.state_dict(keep_vars=True)
            # PEFT saves the base's embedding too where an adapter sits on it
            beside = {key for key in saved.file.entries if key in self.base_of and key not in self._keys.values()}
            saved.check({key: tuple(parameters[name].shape) for name, key in self._keys.items()}, beside)
            self._check_unchanged(sorted(beside))

    def _check_unchanged(self, keys: Sequence[str]) -> None:
        for key in keys:
            (own,) = (tensor for _, tensor in self.base.read([self.base_of[key]]))
            if not torch.equal(self.saved.read(key).float(), own.float()):
                raise ZftError(
                    f"{self.saved.folder} was trained on another {self.base_of[key]}; name its own base model"
                )

    @staticmethod
    def base_names(model: nn.Module) -> dict[int, str]:
        """{id of parameter or buffer: name} before PEFT wraps the model."""
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return {id(tensor): name for name, tensor in reversed(tensors)}

    def _wrapped_names(self, names: dict[int, str]) -> dict[str, str]:
        """PEFT's name -> base's name, of all whose first value is the base's: frozen, or a copy to be trained."""
        found = {}
        for name, tensor in [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers()]:
            original = name.replace(f".modules_to_save.{ADAPTER}.", ".original_module.")
            if id(tensor) in names:
                found[name] = names[id(tensor)]
            elif original != name:
                found[name] = names[id(_tensor(self.model, original))]
        return found

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, CPU tensor) of parameters and buffers: the adapter's in float32, the base's in its files' dtype."""
        inside = {self.base_of[name]: name for name in names if name in self.base_of}
        trained = [name for name in names if name not in self.base_of or self._is_saved(name)]
        inside = {base: name for base, name in inside.items() if name not in trained}
        if inside:
            yield from ((inside[name], tensor) for name, tensor in self.base.read(list(inside)))
        for name in trained:
            yield name, self._saved(name) if self._is_saved(name) else self._first(name)

    def read_base(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """(the base's name, CPU tensor) of those names that stand for the base's own parameters or buffers."""
        inside = list(dict.fromkeys(self.base_of[name] for name in names if name in self.base_of))
        return self.base.read(inside) if inside else iter(())

    def close(self) -> None:
        self.base.close()
        if self.saved is not None:
            self.saved.file.close()

    def _is_saved(self, name: str) -> bool:
        return self.saved is not None and name in self._keys

    def _saved(self, name: str) -> Tensor:
        return self.saved.read(self._keys[name])

    def _first(self, name: str) -> Tensor:
        """An adapter tensor's value before training."""
        path = name.rpartition(".")[0]
        parts = path.split(".")
        for depth in range(len(parts), 0, -1):
            owner = self.model.get_submodule(".".join(parts[:depth]))
            if hasattr(owner, "reset_lora_parameters"):
                local = name[len(".".join(parts[:depth])) + 1 :]
                return self._layer_value(owner, ".".join(parts[:depth]), local)
            if hasattr(owner, "token_indices"):
                return self._token_rows(owner)
        raise AssertionError(f"{name} is neither the base's nor an adapter's")

    def _layer_value(self, layer: Any, path: str, local: str) -> Tensor:
        if local.startswith("lora_magnitude_vector."):
            return self._magnitude(layer)
        init = self.model.peft_config[ADAPTER].init_lora_weights
        return first_values(layer, f"{self.seed} {path}", init)[local]

    @torch.no_grad()
    def _magnitude(self, layer: Any) -> Tensor:
        """Norms of the rows of the base's weight (B is zero, arXiv 2402.09353 section 4.1), float32."""
        weight = self._base_tensor(layer.get_base_layer().weight).float()
        return layer.lora_magnitude_vector[ADAPTER].get_weight_norm(weight, torch.zeros(()), 0.0)

    def _token_rows(self, layer: Any) -> Tensor:
        return self._base_tensor(layer.base_layer.weight)[layer.token_indices[ADAPTER]].clone()

    def _base_tensor(self, parameter: Tensor) -> Tensor:
        """The value of a frozen parameter, looked up by its place in the model as it is now."""
        name = next(n for n, p in self.model.named_parameters(remove_duplicate=False) if p is parameter)
        return dict(self.base.read([self.base_of[name]]))[self.base_of[name]]


@torch.no_grad()
def first_values(layer: Any, key: str, init: bool | str = True) -> dict[str, Tensor]:
    """{local name: float32 CPU tensor} of a LoRA layer's A and B, by PEFT's initialisation with a seed from `key`."""
    places = [
        (name, module, leaf)
        for name, module in layer.named_modules()
        if name.startswith("lora_") and not name.startswith("lora_magnitude_vector")
        for leaf, parameter in module._parameters.items()
        if parameter is not None
    ]
    before = [module._parameters[leaf] for _, module, leaf in places]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(key.encode()))
        try:
            for (_, module, leaf), parameter in zip(places, before, strict=True):
                module._parameters[leaf] = nn.Parameter(torch.empty(parameter.shape), requires_grad=False)
            layer.reset_lora_parameters(ADAPTER, init)
            return {f"{name}.{leaf}": module._parameters[leaf].detach() for name, module, leaf in places}
        finally:
            for (_, module, leaf), parameter in zip(places, before, strict=True):
                module._parameters[leaf] = parameter


def adapter_keys(model: Any) -> dict[str, str]:
    """{parameter name: name in PEFT's files} of all that an adapter consists of, as PEFT itself names them."""
    from peft import get_peft_model_state_dict

    parameters = model.state_dict(keep_vars=True)
    names = {id(p): name for name, p in model.named_parameters()}  # tied ones under their first name
    saved = get_peft_model_state_dict(model, state_dict=parameters, adapter_name=ADAPTER, save_embedding_layers=False)
    return {names[id(tensor)]: key for key, tensor in saved.items()}


def _tensor(model: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    return module._parameters[leaf] if leaf in module._parameters else module._buffers[leaf]

"""Checkpoints of other engines, consolidated into a Hub folder: DeepSpeed ZeRO (stages 1-3) and torch DCP (FSDP2).

Their files are pickles. None is unpickled the ordinary way: tensors load with torch's weights-only reader, every class
it does not know becomes an inert stand-in, and DCP's metadata may name torch's own metadata classes only.

    folder -> ZeroSource or DcpSource (names, shapes, one tensor at a time) -> HubWeights -> export_folder
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zft.checkpoint.dcp import DcpSource
from zft.checkpoint.hf import ExportReport, check_target, export_folder
from zft.checkpoint.zero import ZeroSource
from zft.config import ZftError
from zft.models.load import HubWeights, build_model, grow
from zft.models.source import TensorSource

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def foreign_kind(folder: str | Path) -> str | None:
    """'deepspeed', 'dcp', or None if the folder is neither."""
    folder = Path(folder)
    if DcpSource.find(folder) is not None:
        return "dcp"
    return "deepspeed" if ZeroSource.find(folder) is not None else None


def consolidate(
    folder: str | Path, out: str | Path, base: str | Path, trust_remote_code: bool = False, **options: Any
) -> ExportReport:
    """Writes what another engine saved in `folder` as a Hub folder `out`; structure, tokenizer and dtype are `base`'s.

    base: local folder of the model that was trained. options: as in export_folder. One tensor (or one group that is
    converted together) is in memory at a time. Raises ZftError for a checkpoint that is incomplete or not of this base.
    """
    folder, base = Path(folder), Path(base)
    check_target(Path(out))
    source = _open(folder)
    try:
        model = build_model(base, trust_remote_code=trust_remote_code)
        named = Renamed(source, folder, model)
        embedding = named.key_of(named.anchor)
        grow(model, named.shape(embedding)[0])
        weights = HubWeights(folder, model, source=named)
        return export_folder(out, by_layer(weights, model), model, base, **options)
    finally:
        source.close()


def _open(folder: Path) -> TensorSource:
    kind = foreign_kind(folder)
    if kind is None:
        raise ZftError(
            f"{folder} is no checkpoint that zft knows: not DeepSpeed (latest, *_optim_states.pt), not DCP (.metadata)"
        )
    return DcpSource(folder) if kind == "dcp" else ZeroSource(folder)


def by_layer(weights: HubWeights, model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """All weights of a model, those of one numbered layer together (what is converted together is in one layer)."""
    persistent = model.state_dict(keep_vars=True)
    names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()] if name in persistent]
    layers: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        layers.setdefault(name if at is None else ".".join(parts[: at + 1]), []).append(name)
    for layer in layers.values():
        yield dict(weights.read(layer))


class Renamed:
    """A source whose keys have lost wrappers (torch.compile, FSDP1) and the prefix under which a trainer saved them."""

    def __init__(self, source: TensorSource, folder: Path, model: nn.Module):
        self._source = source
        embedding = model.get_input_embeddings().weight
        self.anchor = next(name for name, parameter in model.named_parameters() if parameter is embedding)
        bare = {_unwrapped(key): key for key in source.names()}
        self._keys = self._without_prefix(bare, folder, model.base_model_prefix)

    def _without_prefix(self, bare: dict[str, str], folder: Path, base_prefix: str) -> dict[str, str]:
        names = (self.anchor, self.anchor.removeprefix(base_prefix + "."))
        for anchor in names:
            found = sorted({key.removesuffix(anchor) for key in bare if key == anchor or key.endswith("." + anchor)})
            if found:
                prefix = next((p for p in ("", "model.", "module.", "app.model.") if p in found), found[0])
                if prefix not in ("", "model.", "module.", "app.model.") and len(found) > 1:
                    raise ZftError(
                        f"{folder} holds several models ({', '.join(found[:3])}); zft cannot tell which to export"
                    )
                return {key.removeprefix(prefix): full for key, full in bare.items() if key.startswith(prefix)}
        raise ZftError(
            f"{folder} has no {self.anchor} among its {len(bare)} tensors; is --base the model it was trained from?"
        )

    def key_of(self, name: str) -> str:
        """The key of a parameter by the model's name for it."""
        return next(key for key in self._keys if key == name or name.endswith("." + key))

    def names(self) -> list[str]:
        return list(self._keys)

    def dtype(self, key: str):
        return self._source.dtype(self._keys[key])

    def shape(self, key: str) -> tuple[int, ...]:
        return self._source.shape(self._keys[key])

    def read(self, key: str) -> Tensor:
        return self._source.read(self._keys[key])

    def close(self) -> None:
        self._source.close()


def _unwrapped(key: str) -> str:
    for wrapper in WRAPPERS:
        key = key.replace(wrapper, "")
    return key

"""Reading a DeepSpeed ZeRO checkpoint without DeepSpeed and without running anything that is in it.

Layout (deepspeed/utils/zero_to_fp32.py): each rank's `*_optim_states.pt` holds its part of the float32 masters, flat.
Stage 3: every parameter is split over all ranks, ceil(numel / ranks) elements each, one after the other.
Stages 1 and 2: a parameter group is flattened as a whole and that is split over the ranks.
Shapes, frozen parameters and buffers are in rank 0's (frozen fragments in every rank's) `*_model_states.pt`.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zft.config import ZftError
from zft.models.source import is_inside

RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt$")


class Inert:
    """Stands for an object of a class that is not loaded: takes anything, does nothing."""

    def __init__(self, *args: Any, **_: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load_inert(path: Path) -> Any:
    """torch.load(weights_only=True, mmap=True) where classes that it would refuse become `Inert`. Raises ZftError."""
    from torch import serialization

    try:
        unknown = serialization.get_unsafe_globals_in_checkpoint(path)
        stand_ins = [(type("Inert", (Inert,), {}), name) for name in unknown]
        with serialization.safe_globals(stand_ins):
            return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise ZftError(
            f"{path} cannot be read safely ({reason}); only complete zip-format torch files are accepted"
        ) from error


class ZeroSource:
    """Float32 masters of a DeepSpeed checkpoint; frozen parameters and buffers in their own dtype."""

    def __init__(self, folder: Path):
        self.folder = self.find(folder)
        assert self.folder is not None, f"{folder} is no DeepSpeed checkpoint"
        files = self._files(self.folder)
        optim = [load_inert(path)["optimizer_state_dict"] for path in files["optim"]]
        models = [load_inert(path) for path in files["model"]]
        count = optim[0].get("partition_count", len(optim))
        count = max(count) if isinstance(count, (list, tuple)) else count
        if count != len(optim):
            raise ZftError(
                f"{self.folder} has the files of {len(optim)} of {count} ranks; copy all *_optim_states.pt there"
            )
        if "fp32_flat_groups" in optim[0]:
            self._parts = self._stage_3(optim, models)
        elif "single_partition_of_fp32_groups" in optim[0]:
            self._parts = self._stage_2(optim, models)
        else:
            raise ZftError(f"{self.folder} holds no float32 masters (keys: {', '.join(sorted(optim[0]))[:120]})")
        self._add_rest(models)

    @staticmethod
    def find(folder: Path) -> Path | None:
        """The folder with the `*_optim_states.pt`: `folder` itself, or the one that its `latest` names."""
        if any(folder.glob("*_optim_states.pt")):
            return folder
        latest = folder / "latest"
        if not latest.is_file():
            return None
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
        if not tag or not is_inside(tag):
            raise ZftError(f"{latest} points to {tag!r}, outside its folder; refused")
        if not any((folder / tag).glob("*_optim_states.pt")):
            raise ZftError(f"{latest} names {tag}, which has no *_optim_states.pt; the checkpoint is not complete")
        return folder / tag

    @staticmethod
    def _files(folder: Path) -> dict[str, list[Path]]:
        found: dict[str, list[tuple[int, Path]]] = {"optim": [], "model": []}
        for path in folder.glob("*_states.pt"):
            if match := RANK.search(path.name):
                if int(match[2]) != 0:
                    raise ZftError(
                        f"{folder} was saved with tensor parallelism ({path.name}), which zft cannot consolidate"
                    )
                found[match[3]].append((int(match[1]), path))
            elif path.name.endswith("model_states.pt"):
                found["model"].append((0, path))
        for kind, ranked in found.items():
            if not ranked or (kind == "optim" and [rank for rank, _ in sorted(ranked)] != list(range(len(ranked)))):
                raise ZftError(f"{folder} lacks some *_{kind}_states.pt files; copy those of all ranks there")
        return {kind: [path for _, path in sorted(ranked)] for kind, ranked in found.items()}

    @staticmethod
    def _stage_3(optim: list[dict], models: list[dict]) -> dict[str, tuple[tuple[int, ...], list[Tensor]]]:
        """name -> shape and each rank's part (views into the mapped files)."""
        ranks = len(optim)
        shapes = {name: tuple(shape) for group in models[0]["param_shapes"] for name, shape in group.items()}
        flats = [_Joined(each["fp32_flat_groups"]) for each in optim]
        parts, at = {}, 0
        for name, shape in shapes.items():
            share = math.ceil(math.prod(shape) / ranks)
            parts[name] = (shape, [piece for flat in flats for piece in flat.pieces(at, share)])
            at += share
        return parts

    @staticmethod
    def _stage_2(optim: list[dict], models: list[dict]) -> dict[str, tuple[tuple[int, ...], list[Tensor]]]:
        parts = {}
        for index, group in enumerate(models[0]["param_shapes"]):
            flat = _Joined([each["single_partition_of_fp32_groups"][index] for each in optim])
            at = 0
            for name, shape in group.items():
                numel = math.prod(shape)
                parts[name] = (tuple(shape), flat.pieces(at, numel))
                at += numel
        return parts

    def _add_rest(self, models: list[dict]) -> None:
        frozen = models[0].get("frozen_param_shapes") or {}
        for name, shape in frozen.items():
            fragments = [each["frozen_param_fragments"][name] for each in models if each.get("frozen_param_fragments")]
            self._parts[name] = (tuple(shape), fragments)
        module = models[0].get("module") or {}
        for name in models[0].get("buffer_names") or ():
            if isinstance(module.get(name), Tensor):
                self._parts[name] = (tuple(module[name].shape), [module[name].reshape(-1)])
        for name, (shape, pieces) in self._parts.items():
            if sum(piece.numel() for piece in pieces) < math.prod(shape):
                raise ZftError(
                    f"{self.folder} holds only part of {name} {list(shape)}; files of some ranks are missing"
                )

    def names(self) -> list[str]:
        return list(self._parts)

    def dtype(self, key: str) -> torch.dtype:
        return self._parts[key][1][0].dtype

    def shape(self, key: str) -> tuple[int, ...]:
        return self._parts[key][0]

    def read(self, key: str) -> Tensor:
        shape, pieces = self._parts[key]
        return torch.cat([piece.reshape(-1) for piece in pieces])[: math.prod(shape)].view(shape)

    def close(self) -> None:
        self._parts = {}


class _Joined:
    """Several flat tensors seen as one, without copying them together."""

    def __init__(self, tensors: list[Tensor]):
        self._tensors = tensors

    def pieces(self, start: int, numel: int) -> list[Tensor]:
        """Views that together are elements [start, start + numel); fewer where the tensors end."""
        out = []
        for tensor in self._tensors:
            take = max(0, min(numel, tensor.numel() - start))
            if take:
                out.append(tensor.reshape(-1)[start : start + take])
            numel, start = numel - take, max(0, start - tensor.numel())
        return out

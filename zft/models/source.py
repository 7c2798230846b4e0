"""Where tensors come from: a folder of safetensors, or anything else that answers the same five questions."""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import torch
from torch import Tensor

from zft.config import ZftError
from zft.models.tensorfile import NAMES, TensorEntry, TensorFile

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ALLOW_PICKLE = "ZFT_ALLOW_PICKLE"
"""Environment variable that lets weights be read from pickles, by torch's weights-only reader."""


class TensorSource(Protocol):
    """Named tensors on a disk, read one at a time."""

    def names(self) -> list[str]: ...
    def dtype(self, key: str) -> torch.dtype: ...
    def shape(self, key: str) -> tuple[int, ...]: ...
    def read(self, key: str) -> Tensor: ...
    def close(self) -> None: ...


class LazyTensor:
    """A tensor that is still in its source; `lazy[...]` reads it, as with safetensors' `get_slice`."""

    def __init__(self, source: TensorSource, key: str):
        self._source, self._key = source, key

    def get_shape(self) -> list[int]:
        return list(self._source.shape(self._key))

    def get_dtype(self) -> str:
        return NAMES[self._source.dtype(self._key)]

    def __getitem__(self, index: Any) -> Tensor:
        return self._source.read(self._key)[index]


class SafetensorsFolder:
    """`model.safetensors`, or shards and their index. Raises ZftError when they contradict each other."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files = weight_files(folder)
        self._open: dict[Path, TensorFile] = {}
        try:
            for key, path in self.files.items():
                if key not in self._file(path).entries:
                    raise ZftError(f"{path} lacks tensor {key}, which {INDEX} says it has; download it again")
        except BaseException:
            self.close()
            raise

    def names(self) -> list[str]:
        return list(self.files)

    def dtype(self, key: str) -> torch.dtype:
        return self._entry(key).dtype

    def shape(self, key: str) -> tuple[int, ...]:
        return self._entry(key).shape

    def read(self, key: str) -> Tensor:
        return self._file(self.files[key]).read(key)

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors have the same dtype, shape and bytes; read in chunks."""
        a, b = self._entry(first), self._entry(second)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return self._file(self.files[first]).equal(first, self._file(self.files[second]), second)

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _file(self, path: Path) -> TensorFile:
        if path not in self._open:
            self._open[path] = TensorFile(path)
        return self._open[path]

    def _entry(self, key: str) -> TensorEntry:
        return self._file(self.files[key]).entries[key]


class PickleFolder:
    """`pytorch_model*.bin`, mapped and read by torch's weights-only reader, which runs no code. Raises ZftError."""

    def __init__(self, folder: Path):
        self._tensors: dict[str, Tensor] = {}
        for path in pickle_files(folder):
            try:
                state = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
            except Exception as error:
                reason = " ".join(str(error).split())[:120]
                raise ZftError(f"{path} holds more than tensors or is damaged ({reason}); refused") from error
            self._tensors |= {name: each for name, each in state.items() if isinstance(each, Tensor)}

    def names(self) -> list[str]:
        return list(self._tensors)

    def dtype(self, key: str) -> torch.dtype:
        return self._tensors[key].dtype

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensors[key].shape)

    def read(self, key: str) -> Tensor:
        return self._tensors[key].clone()

    def same(self, first: str, second: str) -> bool:
        """As SafetensorsFolder.same."""
        return torch.equal(self._tensors[first], self._tensors[second])

    def close(self) -> None:
        self._tensors = {}


def open_folder(folder: Path) -> SafetensorsFolder | PickleFolder:
    """The weights of a folder; pickles only where the user has allowed them. Raises ZftError."""
    safe = (folder / INDEX).is_file() or (folder / SINGLE).is_file()
    if not safe and os.environ.get(ALLOW_PICKLE) == "1" and pickle_files(folder):
        return PickleFolder(folder)
    return SafetensorsFolder(folder)


def pickle_files(folder: Path) -> list[Path]:
    """The pickled weights of a folder."""
    return sorted(folder.glob("pytorch_model*.bin"))


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file, from the index or from the single file.

    Raises ZftError for pickle weights, a missing shard, and index entries that point outside the folder.
    """
    index = folder / INDEX
    if index.is_file():
        return _from_index(folder, index)
    single = folder / SINGLE
    if not single.is_file():
        if pickles := pickle_files(folder):
            raise ZftError(
                f"{folder} has its weights in {pickles[0].name}, a pickle; convert it to safetensors, or set "
                f"{ALLOW_PICKLE}=1 to read its tensors (and nothing else in it)"
            )
        raise ZftError(f"{folder} has no {SINGLE} and no {INDEX}; give a folder that from_pretrained can load")
    with TensorFile(single) as file:
        return dict.fromkeys(file.entries, single)


def _from_index(folder: Path, index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ZftError(f"{index} is not a valid weight index ({error}); download it again") from error
    for name in names:
        if not name.endswith(".safetensors") or not is_inside(name):
            raise ZftError(f"{index} points to {name!r}, which is not a safetensors file inside its folder; refused")
        if not (folder / name).is_file():
            raise ZftError(f"{folder} lacks {name}, which {INDEX} names; download it again")
    return {key: folder / name for key, name in weight_map.items()}


def is_inside(name: str) -> bool:
    """Whether a relative file name stays inside the folder it is relative to."""
    pure = PurePosixPath(name)
    return not pure.is_absolute() and ".." not in pure.parts and "\\" not in name and ":" not in name

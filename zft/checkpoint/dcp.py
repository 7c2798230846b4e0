"""Reading a torch Distributed Checkpoint (FSDP2, torchtitan, accelerate) one tensor at a time, in one process.

torch's own reader does the work; only its metadata, which it would unpickle freely, is read by an unpickler that knows
the metadata classes and nothing else.
"""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from zft.config import ZftError
from zft.models.source import is_inside

METADATA = ".metadata"
ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype))},
    "collections": {"OrderedDict", "defaultdict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
    "builtins": {"set", "frozenset", "dict", "list", "tuple", "int", "str"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def read_metadata(path: Path) -> Metadata:
    """The metadata of a DCP folder. Raises ZftError if it holds anything but metadata, or points outside the folder."""
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        assert isinstance(metadata, Metadata), f"it holds a {type(metadata).__name__}"
        files = {info.relative_path for info in metadata.storage_data.values()}
    except Exception as error:
        raise ZftError(
            f"{path} is not the metadata of a torch checkpoint ({' '.join(str(error).split())[:120]})"
        ) from error
    for name in sorted(files):
        if not is_inside(name):
            raise ZftError(f"{path} points to {name!r}, outside its folder; refused")
        if not (path.parent / name).is_file():
            raise ZftError(f"{path.parent} lacks {name}, which its metadata names; copy the files of all ranks there")
    return metadata


class _Reader(FileSystemReader):
    """torch's reader with metadata that was read safely, once."""

    def __init__(self, folder: Path, metadata: Metadata):
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        if getattr(self._metadata, "storage_meta", None) is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class DcpSource:
    """The tensors of a DCP folder under their saved names."""

    def __init__(self, folder: Path):
        found = self.find(folder)
        assert found is not None, f"{folder} is no DCP checkpoint"
        self.folder = found
        self._metadata = read_metadata(found / METADATA)
        entries = self._metadata.state_dict_metadata
        self._entries = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    @staticmethod
    def find(folder: Path) -> Path | None:
        """The folder with `.metadata`: `folder` itself, or its only subfolder that has one (accelerate, torchtitan)."""
        if (folder / METADATA).is_file():
            return folder
        inner = sorted(each.parent for each in folder.glob(f"*/{METADATA}")) if folder.is_dir() else []
        models = [each for each in inner if "optim" not in each.name]
        return models[0] if len(models) == 1 else None

    def names(self) -> list[str]:
        return list(self._entries)

    def dtype(self, key: str) -> torch.dtype:
        return self._entries[key].properties.dtype

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._entries[key].size)

    def read(self, key: str) -> Tensor:
        from torch.distributed import checkpoint

        state = {key: torch.empty(self.shape(key), dtype=self.dtype(key))}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                checkpoint.load(state, storage_reader=_Reader(self.folder, self._metadata), no_dist=True)
        except Exception as error:
            reason = " ".join(str(error).split())[:160]
            raise ZftError(f"{self.folder}: {key} cannot be read ({reason}); the checkpoint is damaged") from error
        return state[key]

    def close(self) -> None:
        self._entries = {}

"""Tensors in a folder, by torch.distributed.checkpoint; read without running code of the files."""

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

INDEX = ".metadata"
# What the pickle of torch.distributed.checkpoint's metadata consists of.
INDEX_TYPES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "StorageMeta", "ChunkStorageMetadata", "MetadataIndex", "TensorProperties"),
        *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # of Python 3.13
    "collections": ("OrderedDict",),
}


def save(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """Write `tensors`, of which those that are sharded are this rank's; all ranks call it."""
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), process_group=group)


def load(folder: Path, tensors: dict[str, Tensor], no_dist: bool) -> None:
    """Read into `tensors`; all ranks call it, unless `no_dist` is set."""
    dcp.load(tensors, storage_reader=_Reader(folder), no_dist=no_dist)


def read_index(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return shapes and types of the tensors in `folder`. Raises any error for an altered file."""
    index = _Reader(folder).read_metadata().state_dict_metadata
    tensors = {name: one for name, one in index.items() if isinstance(one, TensorStorageMetadata)}
    if len(tensors) < len(index):
        raise TypeError("it holds more than tensors")
    return tensors


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata without running code that the file may hold."""
        with Path(self.path, INDEX).open("rb") as file:
            return _Unpickler(file).load()


class _Unpickler(pickle.Unpickler):
    """Unpickler of torch.distributed.checkpoint's metadata alone."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in INDEX_TYPES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is none of its types")

"""The index of a sharded checkpoint, read without running code of the file."""

import pickle
import sys
import types
from pathlib import Path, PosixPath

import pytest
from engine.checkpoint.tensor_storage import INDEX, read_index
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta


def write_index(folder: Path, checkpoint_id: object) -> bytes:
    content = pickle.dumps(Metadata({}, storage_meta=StorageMeta(checkpoint_id=checkpoint_id)))
    (folder / INDEX).write_bytes(content)
    return content


def test_paths_are_read_as_python_3_13_writes_them(tmp_path: Path, monkeypatch) -> None:
    content = write_index(tmp_path, tmp_path)
    assert read_index(tmp_path) == {}
    if sys.version_info < (3, 13):
        module = types.ModuleType("pathlib._local")
        module.PosixPath = PosixPath
        monkeypatch.setitem(sys.modules, "pathlib._local", module)
        monkeypatch.setattr(PosixPath, "__module__", "pathlib._local")
        assert write_index(tmp_path, tmp_path) != content
        assert read_index(tmp_path) == {}


def test_other_objects_are_refused(tmp_path: Path) -> None:
    write_index(tmp_path, print)
    with pytest.raises(pickle.UnpicklingError):
        read_index(tmp_path)

"""Sharded checkpoints: a folder ``step-N`` to which each process writes its own shards.

torch.distributed.checkpoint writes the tensors (``*.distcp`` and ``.metadata``), rank 0 the other
entries (``state.pt``) and, when all are on the disk, ``manifest.json`` with the size and the
checksum of each file. The folder gets its name last, so that it is complete or does not exist.

The module `tensor_storage` is imported where it is used: that takes a second, which runs without
sharded checkpoints don't need.
"""

import json
import os
import secrets
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine import SUFFIX, UserError, replacing
from engine.checkpoint.archive import read as read_file

MANIFEST, STATE, INDEX = "manifest.json", "state.pt", ".metadata"
MANIFEST_VERSION = 1
CHUNK = 2**24  # bytes
PARTS = ("model", "ema", "optimizer")


def flatten(entries: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of model, average and optimizer by names such as model.fc.weight."""
    tensors = {
        f"{part}.{name}": value
        for part in PARTS[:2]
        for name, value in entries.get(part, {}).items()
    }
    for index, state in entries["optimizer"]["state"].items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}"] = value
    return tensors


def templates(entries: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors of a run that a checkpoint's are sharded like.

    Args:
        entries: of the run, as `engine.checkpoint.format.collect` returns them.
        optimizer: whose parameters are named optimizer.0 and so on.
    """
    tensors = {name: value for name, value in flatten(entries).items() if "optimizer." not in name}
    parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    return tensors | {f"optimizer.{index}": value for index, value in enumerate(parameters)}


def write(path: Path, entries: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Write the folder `path` atomically. All ranks of `group` call this together.

    Args:
        path: in a folder that all hosts share.
        entries: tensors in the CPU's memory; those of rank 0 are complete.
        group: of gloo, which nothing else uses at the same time.

    Raises ValueError if the weights or the optimizer hold nan, and OSError if a rank cannot write,
    both on all ranks.
    """
    temporary = path.with_name(path.name + SUFFIX)
    rank = dist.get_rank(group)
    tensors = flatten(entries)
    bad = next((name for name, value in tensors.items() if _has_nan(value)), "")
    _raise_together(ValueError, f"{bad} is not finite" if bad else "", group)
    problem = ""
    if rank == 0:
        with _reported(OSError) as problems:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        problem = problems.text
    _raise_together(OSError, problem, group)
    if not temporary.is_dir():
        problem = f"rank {rank} has no {temporary}: put --output on a disk that all hosts share"
    _raise_together(OSError, problem, group)
    from engine.checkpoint import tensor_storage

    with _reported(Exception) as problems:  # torch wraps the errors of all ranks in its own
        tensor_storage.save(temporary, tensors, group)
    _raise_together(OSError, problems.text, group)
    with _reported(OSError) as problems:
        own = {one.name: _describe(one) for one in sorted(temporary.glob(f"__{rank}_*.distcp"))}
    _raise_together(OSError, problems.text, group)
    files: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(files, own, group)
    with _reported(OSError) as problems:
        if rank == 0:
            _complete(path, temporary, entries, {k: v for one in files for k, v in one.items()})
    _raise_together(OSError, problems.text, group)


def _complete(
    path: Path, temporary: Path, entries: dict[str, Any], files: dict[str, list[int]]
) -> None:
    """Add the entries of rank 0 and the manifest, and give the folder its name."""
    identity = secrets.token_hex(8)
    files[INDEX] = _describe(temporary / INDEX)
    _write_state(temporary / STATE, entries, identity)
    manifest = {"version": MANIFEST_VERSION, "id": identity, "files": files}
    with replacing(temporary / MANIFEST) as file:
        file.write_text(json.dumps(manifest, indent=1))
    if path.exists():  # of another run, or damaged
        remove(path)
    temporary.rename(path)
    with suppress(OSError):  # some shared file systems cannot flush a folder
        descriptor = os.open(path.parent, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def update(path: Path, entries: dict[str, Any]) -> None:
    """Replace the entries other than tensors of a complete checkpoint, atomically; on rank 0."""
    _write_state(path / STATE, entries, _read_manifest(path)["id"])


def _write_state(path: Path, entries: dict[str, Any], identity: str) -> None:
    plain: dict[str, Any] = {name: value for name, value in entries.items() if name not in PARTS}
    plain["model"] = {}
    plain["optimizer"] = {"param_groups": entries["optimizer"]["param_groups"], "state": {}}
    with replacing(path) as file:
        torch.save(plain | {"manifest": identity}, file)


def remove(path: Path) -> None:
    """Remove a sharded checkpoint; until the end of that, it has the name of an incomplete one."""
    temporary = path.with_name(path.name + SUFFIX)
    shutil.rmtree(temporary, ignore_errors=True)
    path.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def validate(path: Path) -> None:
    """Raise UserError if a file is missing, or has another size or checksum than it was written."""
    for name, (size, checksum) in _read_manifest(path)["files"].items():
        try:
            found = _describe(path / name)
        except OSError as error:
            raise UserError(
                f"{path}: its {name} can't be read ({error.strerror}); use another one"
            ) from None
        if found != [size, checksum]:
            raise UserError(f"{path}: its {name} is torn or altered; use another one")


def read_state(path: Path) -> dict[str, Any]:
    """Return the entries of a checkpoint other than its tensors.

    Raises UserError if one of the files is missing or altered, or of another checkpoint.
    """
    validate(path)
    entries = read_file(path / STATE)
    identity = _read_manifest(path)["id"]
    if not isinstance(entries, dict) or entries.pop("manifest", None) != identity:
        raise UserError(f"{path}: its {MANIFEST} is that of another checkpoint; use another one")
    return entries


def read(path: Path) -> dict[str, Any]:
    """Return all entries of a checkpoint, with whole tensors in the CPU's memory."""
    entries = read_state(path)
    index = _read_index(path)
    tensors = {
        name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in index.items()
    }
    return _load(path, entries, tensors, no_dist=True)


def read_shards(path: Path, entries: dict[str, Any], own: Mapping[str, Tensor]) -> None:
    """Add this rank's shards of the tensors to the `entries` of `read_state`; all ranks call it.

    Args:
        own: as `templates` returns them. An average that the run does not have is left out.

    Raises UserError on all ranks if the tensors cannot be read, or have other shapes.
    """
    tensors = {}
    for name, one in _read_index(path).items():
        part, _, rest = name.partition(".")
        like = own.get(f"{part}.{rest.partition('.')[0]}" if part == "optimizer" else name)
        if part == "ema" and like is None:
            continue
        if part != "optimizer" and like is not None and like.shape != one.size:
            shapes = f"{tuple(one.size)} there and {tuple(like.shape)} here"
            raise UserError(f"--resume {path}: {name} is {shapes}; use the --arch it was made with")
        if like is not None and like.shape == one.size:
            tensors[name] = torch.empty_like(like, dtype=one.properties.dtype).detach()
        else:
            tensors[name] = torch.empty(one.size, dtype=one.properties.dtype)
    _load(path, entries, tensors, no_dist=False)


def _load(
    path: Path, entries: dict[str, Any], tensors: dict[str, Tensor], no_dist: bool
) -> dict[str, Any]:
    """Read `tensors` in place and add them to `entries`, under their names in a checkpoint."""
    from engine.checkpoint import tensor_storage

    try:
        tensor_storage.load(path, tensors, no_dist)
    except Exception as error:  # torch wraps the errors of all ranks in its own
        reason = str(error).strip().splitlines()[-1][:160]
        raise UserError(f"{path}: its tensors can't be read ({reason}); use another one") from None
    for name, value in tensors.items():
        part, _, rest = name.partition(".")
        if part == "optimizer":
            number, _, key = rest.partition(".")
            entries[part]["state"].setdefault(int(number), {})[key] = value
        else:
            entries.setdefault(part, {})[rest] = value
    return entries


def _read_index(path: Path) -> dict[str, Any]:
    from engine.checkpoint import tensor_storage

    try:
        return tensor_storage.read_index(path)
    except Exception:  # a file of any bytes raises anything
        raise UserError(f"{path}: its {INDEX} is torn or altered; use another one") from None


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        is_valid = manifest["version"] == MANIFEST_VERSION and isinstance(manifest["id"], str)
        names = manifest["files"]
        is_valid = is_valid and all(Path(name).name == name for name in names) and INDEX in names
        assert is_valid and all(len(one) == 2 for one in names.values())
    except (OSError, ValueError, TypeError, LookupError, AttributeError, AssertionError):
        raise UserError(
            f"{path}: it has no valid {MANIFEST}, so it is incomplete or no checkpoint; use "
            "another one"
        ) from None
    return manifest


def _describe(path: Path) -> list[int]:
    """Return the size and the CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return [size, checksum]


def _has_nan(value: Any) -> bool:
    local = value.to_local() if hasattr(value, "to_local") else value
    return bool(local.is_floating_point() and local.isnan().any())


class _reported:  # noqa: N801, used as a context manager
    """Context that catches errors of a type, of which `text` is the message."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind
        self.text = ""

    def __enter__(self) -> "_reported":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if not isinstance(error, self.kind):
            return False
        lines = str(error).strip().splitlines()
        self.text = getattr(error, "strerror", None) or (lines or [type(error).__name__])[-1]
        return True


def _raise_together(kind: type[Exception], problem: str, group: dist.ProcessGroup) -> None:
    """Raise the first problem that any rank has, on all ranks."""
    problems = [""] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group)
    if any(problems):
        raise kind(next(filter(None, problems)))

"""Sharded checkpoints: a folder ``step-N`` to which each process writes its own shards.

`tensor_storage` writes the tensors (``*.distcp``) and ``index.json``, rank 0 the other entries
(``state.pt``) and, when all are on the disk, ``manifest.json`` with the size and the checksum of
each file. The folder gets its name last, so that it is complete or does not exist.

The module `tensor_storage` is imported where it is used: that takes a second, which runs without
sharded checkpoints don't need.
"""

import copy
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine import OUTPUT_FIX, SUFFIX, UserError, exists, flush_folder, writing
from engine.backend import local_shard
from engine.checkpoint import archive, manifest, validation
from engine.checkpoint.manifest import INDEX, MANIFEST
from engine.distributed import all_gather, own_part

if TYPE_CHECKING:
    from engine.checkpoint.tensor_storage import Entry

STATE = "state.pt"
PARTS = ("model", "ema", "optimizer")


def require_shared(folder: Path, group: dist.ProcessGroup) -> None:
    """Raise UserError on all ranks if one of them does not see what rank 0 writes to `folder`.

    All ranks of `group` call this together, before a run that could not save anything.
    """
    rank = dist.get_rank(group)
    own = f"{secrets.token_hex(8)}.pt{SUFFIX}"  # one that a save removes, if this process ends
    probe = folder / all_gather(own, group)[0]
    with _together(group):
        if rank == 0:
            with writing(folder, OUTPUT_FIX):
                folder.mkdir(parents=True, exist_ok=True)
                probe.touch()
    try:
        with _together(group):
            if not probe.exists():
                raise UserError(
                    f"--output {folder}: rank {rank}, on {socket.gethostname()}, does not see what "
                    "rank 0 writes there; FSDP needs a disk that all hosts share"
                )
    finally:
        if rank == 0:
            probe.unlink(missing_ok=True)


def flatten(entries: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of model, average and optimizer by names such as model.fc.weight."""
    parts = {part: entries.get(part, {}) for part in PARTS[:2]}
    moments = entries["optimizer"]["state"].items()
    parts |= {f"optimizer.{index}": one for index, one in moments if isinstance(index, int)}
    return {
        f"{part}.{name}": value
        for part, values in parts.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def templates(
    entries: Mapping[str, Any], optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    """Return the tensors of a run that a checkpoint's are sharded like.

    Args:
        entries: of the run, as `engine.checkpoint.format.collect` returns them.
        optimizer: whose parameters are named optimizer.0 and so on; None to leave them out.
    """
    tensors = flatten({**entries, "optimizer": {"state": {}}})
    groups = optimizer.param_groups if optimizer else []
    parameters = [tensor for group in groups for tensor in group["params"]]
    return tensors | {f"optimizer.{index}": value for index, value in enumerate(parameters)}


def write(path: Path, entries: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Write the folder `path` atomically. All ranks of `group` call this together.

    Args:
        path: in a folder that all hosts share.
        entries: tensors in the CPU's memory; those of rank 0 are complete.
        group: of gloo, which nothing else uses at the same time.

    Raises FloatingPointError if the weights or the optimizer hold nan, UserError if other values
    can't be resumed, and OSError if a rank cannot write, all on all ranks. Nothing is left then.
    """
    temporary = path.with_name(path.name + SUFFIX)
    try:
        _write(path, temporary, entries, group)
    except Exception:
        if dist.get_rank(group) == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write(path: Path, temporary: Path, entries: dict[str, Any], group: dist.ProcessGroup) -> None:
    from engine.checkpoint import tensor_storage

    rank = dist.get_rank(group)
    tensors = flatten(entries)
    with _together(group):
        named = tensors.items()
        if bad := next((name for name, one in named if validation.has_nan(local_shard(one))), None):
            raise FloatingPointError(f"{bad} is not finite")
        if rank == 0:
            validation.check_savable(path, entries)  # or the checkpoint could not be resumed
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir(mode=0o700)  # torch follows links that others put there
    with _together(group):
        if not temporary.is_dir():
            raise ValueError(
                f"rank {rank} has no {temporary}: put --output on a disk that all hosts share"
            )
    with _together(group):
        tensor_storage.save(temporary, tensors, group)
        shards = (one for one in temporary.iterdir() if one.match(f"__{rank}_*.distcp"))
        own = {one.name: manifest.describe(one) for one in shards}
    files = all_gather(own, group)
    with _together(group):
        if rank == 0:
            _complete(path, temporary, entries, {k: v for one in files for k, v in one.items()})


def _complete(
    path: Path, temporary: Path, entries: dict[str, Any], files: dict[str, list[int]]
) -> None:
    """Add the entries of rank 0 and the manifest, and give the folder its name."""
    identity = secrets.token_hex(8)
    files[INDEX] = manifest.describe(temporary / INDEX)
    _write_state(temporary / STATE, entries, identity)
    manifest.write(temporary, identity, files)
    replaced = _set_aside(path) if is_checkpoint(path) else None  # damaged, or of other weights
    if path.exists():
        path.rmdir()  # an error, if it holds files of the user
    with suppress(OSError):  # a file system without modes; else, that of other folders
        mode = (temporary / STATE).stat().st_mode & 0o666
        temporary.chmod(temporary.stat().st_mode | mode | (mode & 0o444) >> 2)
    temporary.rename(path)
    flush_folder(path.parent)
    if replaced:  # only now: that may take long
        remove(replaced)


def update(path: Path, entries: dict[str, Any]) -> None:
    """Replace the entries other than tensors of a complete checkpoint, atomically; on rank 0."""
    _write_state(path / STATE, entries, manifest.read(path)["id"])


def _write_state(path: Path, entries: dict[str, Any], identity: str) -> None:
    plain: dict[str, Any] = {name: value for name, value in entries.items() if name not in PARTS}
    for part in PARTS[:2]:  # without tensors, they have extra states and the modules' versions
        if part in entries:
            plain[part] = copy.copy(entries[part])
            plain[part].clear()
            plain[part] |= _without_tensors(entries[part])
    moments = entries["optimizer"].get("state", {}).items()
    state = {key: _without_tensors(one) if isinstance(key, int) else one for key, one in moments}
    plain["optimizer"] = {**entries["optimizer"], "state": state}
    archive.write(path, plain | {"manifest": identity})


def _without_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not isinstance(value, Tensor)}


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint, perhaps a damaged one, and not one of the user's."""
    return manifest.exists(path) or all(exists(path / name) for name in (INDEX, STATE))


def remove(path: Path) -> None:
    """Remove a sharded checkpoint; until the end of that, it has the name of an incomplete one."""
    if path.is_symlink():  # to a folder that the user keeps elsewhere
        path.unlink()
        return
    if path.suffix != SUFFIX:
        path = _set_aside(path)
    shutil.rmtree(path, ignore_errors=True)


def _set_aside(path: Path) -> Path:
    """Give a sharded checkpoint the name of an incomplete one, which is returned."""
    temporary = path.with_name(f"{path.name}-removed{SUFFIX}")  # not that of one being written
    shutil.rmtree(temporary, ignore_errors=True)
    return path.rename(temporary)


def read_state(path: Path, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Return the entries of a checkpoint other than its tensors.

    Args:
        group: of all ranks, which call this together; those of a host share its validation.

    Raises UserError, on all ranks of `group`, if one of the files is missing or altered, or of
    another checkpoint.
    """
    path = path.resolve()  # once: a run that goes on replaces links such as best
    with _together(group):
        manifest.validate(path, own_part() if group else slice(None))
    if (path / STATE).is_symlink():
        raise UserError(f"{path}: its {STATE} is no regular file; use another one")
    entries = archive.read(path / STATE)
    identity = manifest.read(path)["id"]
    if not isinstance(entries, dict) or entries.pop("manifest", None) != identity:
        raise UserError(f"{path}: its {MANIFEST} is that of another checkpoint; use another one")
    parts = [entries.get(part, {}) for part in PARTS]
    are_dicts = all(isinstance(part, dict) for part in parts)
    if not are_dicts or not isinstance(parts[-1].get("state"), dict):
        raise UserError(f"{path}: its {STATE} is altered; use another one")
    return entries


def read(path: Path) -> dict[str, Any]:
    """Return all entries of a checkpoint, with whole tensors in the CPU's memory."""
    path = path.resolve()  # as in `read_state`
    entries = read_state(path)
    read_tensors(path, entries, {})
    return entries


def read_tensors(path: Path, entries: dict[str, Any], own: Mapping[str, Tensor]) -> None:
    """Add the tensors to the `entries` of `read_state`.

    Args:
        own: as `templates` returns them. All ranks call this, and read their shards of what is
            sharded there. What the run does not have of an average and of the optimizer is left
            out. Empty for all tensors as a whole, in this process alone.

    Raises UserError on all ranks if the tensors cannot be read, or have other shapes.
    """
    from engine.checkpoint import tensor_storage

    sizes = {name: size for name, (size, _) in manifest.read(path)["files"].items()}
    try:
        index = tensor_storage.read_index(path, sizes)
    except Exception:  # a file of any bytes raises anything
        raise UserError(f"{path}: its {INDEX} is torn or altered; use another one") from None
    for name in list(index):
        part = name.partition(".")[0]
        if own and part in PARTS[1:] and _template_name(name) not in own:
            del index[name]
            entries.setdefault(part, {})
    likes = {name: own.get(_template_name(name)) for name in index}
    for name, like in likes.items():
        shape = index[name].shape
        if like is not None and like.shape != shape and not name.startswith("optimizer."):
            shapes = f"{shape} there and {tuple(like.shape)} here"
            raise UserError(f"{path}: {name} is {shapes}; use the --arch it was made with")
    try:
        tensors = {name: _empty(one, likes[name]) for name, one in index.items()}
        tensor_storage.load(path, index, tensors, alone=not own)
        for name, value in tensors.items():
            _place(entries, name, value)
    except Exception as error:  # altered tensors raise anything
        text = getattr(error, "strerror", None) or str(error)
        reason = (text.strip().splitlines() or [type(error).__name__])[-1][:160]
        raise UserError(f"{path}: its tensors can't be read ({reason}); use another one") from None


def _template_name(name: str) -> str:
    """Return the name in `templates` of what the tensor `name` is sharded like."""
    return ".".join(name.split(".")[:2]) if name.startswith("optimizer.") else name


def _empty(entry: "Entry", like: Tensor | None) -> Tensor:
    """Return a tensor to read into, sharded as `like` is, if that has the shape."""
    if like is not None and like.shape == entry.shape:
        return torch.empty_like(like, dtype=entry.dtype).detach()
    return torch.empty(entry.shape, dtype=entry.dtype)


def _place(entries: dict[str, Any], name: str, value: Tensor) -> None:
    """Add the tensor `name` to the entries of a checkpoint. Raises ValueError for other names."""
    part, _, rest = name.partition(".")
    if part == "optimizer":
        number, _, key = rest.partition(".")
        entries[part]["state"].setdefault(int(number), {})[key] = value
    elif part in PARTS:
        entries.setdefault(part, {})[rest] = value
    else:
        raise ValueError(f"{name} is no tensor of a checkpoint")


@contextmanager
def _together(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Context after which all ranks of `group` raise the first error of any of them."""
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    if first := next(filter(None, all_gather(own, group)), None):
        raise first from None

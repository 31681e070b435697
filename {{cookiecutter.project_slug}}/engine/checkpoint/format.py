"""Checkpoint files: tensors and plain types only, written atomically, for either backend."""

import copy
import io
import math
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from engine import UserError, distributed
from engine.backend import Backend
from engine.checkpoint import archive, sharded
from engine.checkpoint.archive import UnreadableError, read
from engine.checkpoint.validation import check_sizes, check_values, first_nan, is_same
from engine.optim import Ema

KEYS = ("model", "optimizer", "amp", "epoch", "step", "samples", "best", "ranks")
FORMAT_VERSION = 1  # of the files that `write` writes; those of version 0.9 have none


@dataclass
class Progress:
    """Position of a run."""

    epoch: int = 0  # completed epochs
    step: int = 0  # optimizer steps in all
    samples: int = 0  # of the current epoch, consumed by all processes together
    best: float = -math.inf  # score of best.pt (engine.monitoring.metric)
    weights: str = "model"  # or "ema": which of them had the better metric
    # Of the validations of whole epochs; a file also has that of its own state.
    scores: list[float] = field(default_factory=list)
    # Training results of an epoch that is saved but not validated yet.
    pending_row: dict[str, float] = field(default_factory=dict)


@dataclass
class TrainingState:
    """State that a checkpoint saves and restores together."""

    model: nn.Module  # in its DistributedDataParallel, if any
    optimizer: Optimizer
    backend: Backend
    ema: Ema | None = None
    progress: Progress = field(default_factory=Progress)


def collect(state: TrainingState) -> dict[str, Any]:
    """Return the entries of a checkpoint for model, optimizer, loss scalers and average.

    ``scale_is_dynamic`` completes ``amp``, whose form is Apex's. Waits for the device.
    """
    entries: dict[str, Any] = {
        "model": state.backend.fp32_state_dict(state.model, state.optimizer),
        "optimizer": state.optimizer.state_dict(),
        "amp": dict(state.backend.apex.amp.state_dict()),
        "scale_is_dynamic": state.backend.has_dynamic_loss_scale(),
    }
    if state.ema:
        entries["ema"] = state.ema.module.state_dict()
    return entries


def trained_settings(fresh: list[dict[str, Any]], optimizer: Optimizer) -> list[str]:
    """Return the settings that training has changed or added since `fresh`, as Prodigy its d."""
    changed = {  # in these groups; training may add others
        name
        for before, group in zip(fresh, optimizer.param_groups, strict=False)
        for name, value in group.items()
        if name != "params" and not is_same(value, (optimizer.defaults | before).get(name))
    }
    return sorted(changed - {"lr", "step"})


def to_cpu(value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples with all tensors in the CPU's memory.

    NumPy's scalars become Python's, since a checkpoint holds no other library's types.

    Copies from a GPU are enqueued on the current stream: no later step changes them, nothing waits,
    and they are complete when the stream has reached this point.
    """
    if isinstance(value, Tensor):
        value = value.detach()
        if type(value) is not Tensor and not hasattr(value, "to_local"):  # as tv_tensors
            value = value.as_subclass(Tensor)
        return value.to("cpu", non_blocking=True) if value.is_cuda else value.clone()
    if isinstance(value, Mapping):
        # A state dict has its modules' versions; other classes can't be read.
        made = copy.copy(value) if type(value) is OrderedDict else {}
        made.update((name, to_cpu(item)) for name, item in value.items())
        return made
    if isinstance(value, list | tuple):
        return type(value)(map(to_cpu, value))
    return value.item() if isinstance(value, np.generic) else value


def write(path: Path, entries: dict[str, Any]) -> None:
    """Write a checkpoint to `path` atomically; torch adds a checksum for each tensor.

    Raises FloatingPointError if the weights or the optimizer hold nan, and OSError for a full disk
    and the like.
    """
    if bad := first_nan(entries):
        raise FloatingPointError(f"{bad} is not finite")
    archive.write(path, {"format_version": FORMAT_VERSION} | entries)


def load(path: Path, content: io.BytesIO | None = None) -> dict[str, Any]:
    """Read a checkpoint into the CPU's memory without running any code that it may hold.

    A checkpoint of another script, in the form that Apex documents (``model``, ``optimizer``,
    ``amp``) or that of its ImageNet example (``state_dict``, ``optimizer``, ``epoch``), is
    completed, and ``origin`` has what it holds. ``about``, which version 0.9 wrote, is
    returned as ``metadata``, which is empty if there is none, as is ``history``.

    Args:
        path: of the file, or the folder of a sharded checkpoint, whose tensors are put together.
        content: of the file, if it was read before.

    Raises UserError if the file is missing, truncated or altered, too large when unpacked, not a
    checkpoint, or holds nan.
    """
    return check(path, sharded.read(path) if path.is_dir() else read(path, content))


def load_state(path: Path) -> dict[str, Any]:
    """Return the entries of a checkpoint; of a sharded one, without reading its tensors.

    The checksums of all files are compared nevertheless. Raises UserError as `load` does.
    """
    return check(path, sharded.read_state(path)) if path.is_dir() else load(path)


def check(path: Path, entries: Any) -> dict[str, Any]:
    """Return the content of the checkpoint `path`, checked and completed as for `load`."""
    parts = entries if isinstance(entries, dict) else {}
    if "model" not in parts and "state_dict" in parts:  # as Apex's ImageNet example saves it
        parts["model"] = parts.pop("state_dict")
    if missing := [key for key in KEYS[:2] if not isinstance(parts.get(key), dict)]:
        raise UserError(
            f"{path}: it is not a checkpoint, a dict of model, optimizer and amp "
            f"(it has no {' and no '.join(missing)})"
        )
    version = entries.get("format_version", 0)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise UserError(
            f"{path}: its format {version} is newer than {FORMAT_VERSION}, which is read here; use "
            "the version of the project that wrote it"
        )
    entries["origin"] = {}
    if any(key not in entries for key in KEYS):
        _complete(entries)
    check_sizes(path, entries)
    if bad := first_nan(entries):
        raise UserError(f"{path}: {bad} is not finite; use an earlier one")
    entries["metadata"] = entries.pop("about", entries.get("metadata", {}))
    entries.setdefault("history", [])
    check_values(path, entries)
    return entries


def read_step(path: Path) -> float:
    """Return the step of a checkpoint, -1 if there is none.

    Returns infinity if the file is damaged: it may be the newest, and the user should know. Raises
    UnreadableError if the system can't read it.
    """
    try:
        entries = read(path / sharded.STATE if path.is_dir() else path)
    except UnreadableError:
        raise
    except UserError:
        return math.inf
    step = entries.get("step") if isinstance(entries, dict) else None
    return step if isinstance(step, int) else -1


def best_weights(entries: dict[str, Any]) -> str:
    """Return the key of the weights with the better metric: "ema" or "model".

    Checkpoints without metrics of both, such as those of version 0.9, prefer the average.
    """
    return "ema" if "ema" in entries and entries.get("weights") != "model" else "model"


def broadcast_file(path: Path, source: int, group: dist.ProcessGroup) -> io.BytesIO | None:
    """Return rank `source`'s file at `path`, which other hosts may lack or have changed.

    Returns None on a single host, and if the file cannot be read.
    """
    if distributed.is_single_host():
        return None
    content = bytearray()
    if dist.get_rank() == source:
        with suppress(OSError):  # `load` reports it
            content = bytearray(path.read_bytes())
    size = torch.tensor(len(content))
    dist.broadcast(size, source, group)
    if not size:
        return None
    content = content or bytearray(int(size))
    dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), source, group)
    return io.BytesIO(content)


def _complete(entries: dict[str, Any]) -> None:
    """Add the entries that a checkpoint of another script lacks.

    Its ``epoch``, if it is an integer, counts completed epochs, as most scripts save it. Others may
    have the name of one of this engine's, such as ``history``, and another meaning: they are left
    out, unless the metadata is this engine's.
    """
    has_epoch = isinstance(entries.get("epoch"), int)
    epoch = entries["epoch"] if has_epoch else 0
    held = {"weights": True, "optimizer": True, "loss scale": "amp" in entries, "epoch": has_epoch}
    metadata = entries.get("metadata")
    is_own = isinstance(metadata, dict) and "metric" in metadata
    if not is_own:
        for name in entries.keys() - {"model", "optimizer", "amp"}:
            del entries[name]
    entries.update(origin=held, epoch=epoch, step=None, samples=0, best=-math.inf, ranks=[])


def require_own_format(path: Path, entries: dict[str, Any], is_own: bool) -> None:
    """Raise UserError for another script's checkpoint, if it is in the run's own folder."""
    if is_own and entries["origin"]:
        raise UserError(
            f"--resume {path}: another script wrote it, and the first save would replace the "
            "checkpoints in its folder: choose another --output"
        )


def describe_origin(held: dict[str, bool]) -> str:
    """Return a description of another script's checkpoint; "" for one of this engine's."""
    taken = ", ".join(name for name in held if held[name])
    missing = " and no ".join(name for name in held if not held[name])
    origin = f", a checkpoint of another script: its {taken}" if held else ""
    return f"{origin}; it has no {missing}" if missing else origin

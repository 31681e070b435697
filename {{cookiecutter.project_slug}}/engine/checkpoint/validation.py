"""Validation of a checkpoint's entries, before any of them is restored."""

import math
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from engine import UserError
from engine.backend import local_shard
from engine.data.images import is_image_spec
from engine.monitoring.run_files import MAX_CELLS, MAX_COUNT, POSITION
from engine.monitoring.trackers import is_run_id

PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)
# Types of the entries of the metadata, each of which may be missing.
TEXTS = ("arch", "data", "metric", "metric_mode", "opt_level", "optimizer")
METADATA: dict[str, type] = {
    **dict.fromkeys(TEXTS, str),
    **dict.fromkeys(("by_shard", "flip_tta"), bool),
    **dict.fromkeys(("classes", "frozen"), list),
    **dict.fromkeys(("files", "fingerprints", "model_options", "samples"), dict),
}
MAX_TEXT = 4096  # characters of each of TEXTS: the arch is compared with all names of models
FEW_CLASSES = 10_000  # which a model of any size can be of
MAX_OVERLAP = 16  # times that tensors may share the same bytes, on average
NUM_WORDS = 624  # of a Mersenne Twister, the random-number generator of all libraries on the CPU
ROUNDING = 2.0**-7  # relative, of bfloat16, with a margin
SMALLEST_HALF, LARGEST_HALF = 2.0**-24, 65504.0  # of float16, above 0
MAX_DIMS = 64  # of a tensor that torch computes with
TORCH_HEADER = struct.Struct("=QiiQ")  # of torch's: seed, left, seeded, next


def require_plain(value: Any, name: str) -> None:
    """Raise UserError for a value that could be saved, but not read again.

    NumPy's numbers are no problem: saving converts them.

    Args:
        name: of the value, for the message.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            require_plain(key, f"a key of {name}")
            require_plain(item, f"{key!r} in {name}")
    elif type(value) in (list, tuple, set):
        for item in value:
            require_plain(item, name)
    else:
        is_sparse = isinstance(value, Tensor) and value.layout != torch.strided
        kind = "sparse tensor" if is_sparse else type(value).__name__
        if is_sparse or (type(value) not in PLAIN and not isinstance(value, Tensor | np.generic)):
            raise UserError(
                f"{name} is a {kind}, which a checkpoint can't hold: use numbers, texts, dense "
                "tensors, lists or dicts"
            )


def check_savable(path: Path, entries: dict[str, Any]) -> None:
    """Raise UserError if a checkpoint of these entries could not be read again."""
    require_plain(entries | {"ranks": None}, str(path))  # the ranks' are not the user's, and many
    check_values(path, entries)


def check_values(path: Path, entries: dict[str, Any]) -> None:
    """Raise UserError if entries other than tensors are altered."""
    moments = entries["optimizer"].get("state", {})
    parts = moments.items() if isinstance(moments, dict) else [(0, None)]
    if not all(isinstance(one, dict) for key, one in parts if isinstance(key, int)):
        raise UserError(f"{path}: its optimizer's state is none; use another one")
    if not _is_valid_history(entries):
        raise UserError(f"{path}: its history of metrics is altered; use another one")
    if not is_run_id(entries.get("run_id", "")):
        raise UserError(f"{path}: its run_id is altered; use another one")
    counts = [entries["epoch"], entries["samples"]]
    if entries["step"] is not None:  # as in a checkpoint of another script
        counts.append(entries["step"])
    if not all(map(_is_count, counts)):
        raise UserError(f"{path}: its epoch and step are no counts; use another one")
    best = entries["best"]
    # It is -inf before the first validation; no result is better than inf.
    if not (is_number(best) and best < math.inf and isinstance(entries["ranks"], list)):
        raise UserError(f"{path}: its best or its ranks are altered; use another one")
    are_valid = all(map(_is_rank, entries["ranks"]))
    if not are_valid or (entries["samples"] and not any(map(_has_losses, entries["ranks"]))):
        raise UserError(f"{path}: the state of its processes is altered; use another one")
    metadata = entries["metadata"]
    weights = sum(tensor.numel() for _, tensor in _named_tensors(entries["model"]))
    # A model of many classes has more weights. Here, it has none if the checkpoint is sharded.
    most = max(weights, FEW_CLASSES) if weights else math.inf
    if not is_metadata(metadata) or len(metadata.get("classes", [])) > most:
        raise UserError(f"{path}: its metadata is altered; use another one")
    scalers = entries.get("amp", {})
    scalers = scalers.values() if isinstance(scalers, dict) else [{}]
    if not all(_is_scaler(part) for part in scalers if isinstance(part, dict)):
        raise UserError(f"{path}: its loss scale is altered; use another one")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < MAX_COUNT


def _is_scaler(value: dict[str, Any]) -> bool:
    """Return whether `value` holds the state of a loss scaler."""
    scale, unskipped = value.get("loss_scale"), value.get("unskipped", 0)
    is_scale = isinstance(scale, int | float) and is_number(scale) and 0 < scale < math.inf
    return is_scale and isinstance(unskipped, int) and 0 <= unskipped < 2**31


def _is_valid_history(entries: dict[str, Any]) -> bool:
    pending_row, scores = entries.get("pending_row", {}), entries.get("scores", [])
    results = entries.get("results", {})
    return (
        _are_rows(entries["history"])
        and isinstance(pending_row, dict)
        and (not pending_row or ("images_per_second" in pending_row and _are_rows([pending_row])))
        and isinstance(results, dict)
        and all(_is_metric(name) and is_number(value) for name, value in results.items())
        and isinstance(scores, list)
        and all(isinstance(score, float) for score in scores)
    )


def _are_rows(value: object) -> bool:
    """Return whether `value` is a list of rows of metrics.csv, in a table of limited size."""
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        return False
    if len(value) * len(set(chain.from_iterable(value))) > MAX_CELLS:
        return False
    return all(
        all(_is_count(row.get(name)) for name in ("epoch", "step"))
        and all(_is_metric(name) and is_number(value) for name, value in row.items())
        for row in value
    )


def _is_metric(name: object) -> bool:
    return isinstance(name, str) and name.isprintable()


def _is_rank(value: object) -> bool:
    """Return whether `value` holds a process's random-number state and the sums of its meter."""
    if not isinstance(value, dict):
        return False
    sums = value.get("meter", {"": value.get("losses")})  # as version 0.9 called those of the loss
    return (
        isinstance(sums, dict)
        and all(_is_metric(name) and _is_sum(one) for name, one in sums.items())
        and not sums.keys() & set(POSITION)  # they would replace those of a row
        and is_rng_state(value.get("rng"))
    )


def _has_losses(rank: dict[str, Any]) -> bool:
    """Return whether a process has trained in this epoch, whose means would be nan otherwise."""
    sums = rank["meter"].values() if "meter" in rank else [rank["losses"]]
    return any(count > 0 for _, count in sums)


def _is_sum(value: object) -> bool:
    match value:
        case (total, count):
            return is_number(total) and _is_count(count)
    return False


def is_rng_state(value: object) -> bool:
    """Return whether `value` is a result of `get_rng_state` that it is safe to draw from.

    NumPy and torch accept a position behind the words of a generator, and then draw what the memory
    holds there, or crash. Python and CUDA check all that they restore.
    """
    return (
        isinstance(value, dict)
        and _is_python_rng_state(value.get("python"))
        and _is_torch_rng_state(value.get("torch"))
        and ("numpy" not in value or _is_numpy_rng_state(value["numpy"]))
    )


def _is_python_rng_state(value: object) -> bool:
    match value:
        case (int(), (*words, position), None | float()):
            return _are_words(words) and _is_position(position)
    return False


def _is_numpy_rng_state(value: object) -> bool:
    match value:
        case (str(), words, position, int(), float()):
            return _are_words(words) and _is_position(position)
    return False


def _is_position(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= NUM_WORDS


def _are_words(value: object) -> bool:
    if not isinstance(value, list | tuple) or len(value) != NUM_WORDS:
        return False
    return all(isinstance(word, int) and 0 <= word < 2**32 for word in value)


def _is_torch_rng_state(value: object) -> bool:
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
        return False
    if len(value) < TORCH_HEADER.size:
        return False
    _, left, _, position = TORCH_HEADER.unpack(bytes(value[: TORCH_HEADER.size].tolist()))
    # It draws left - 1 words from the position on, and then generates new ones.
    return 1 <= left <= NUM_WORDS + 1 - position


def is_metadata(value: object) -> bool:
    """Return whether `value` describes a model and its data, or is empty."""
    if not isinstance(value, dict):
        return False
    entries = {name: value.get(name, kind()) for name, kind in METADATA.items()}
    if not all(isinstance(entries[name], kind) for name, kind in METADATA.items()):
        return False
    fingerprints = entries["fingerprints"].values()
    return (
        all(isinstance(name, str) for name in [*entries["classes"], *entries["frozen"]])
        and all(map(_is_count, entries["samples"].values()))
        and is_image_spec(entries["model_options"].get("image", {}))
        and all(isinstance(one, dict) for one in fingerprints)
        and all(isinstance(text, str) for one in fingerprints for text in one.values())
        and all(len(entries[name]) <= MAX_TEXT for name in TEXTS)
    )


def is_number(value: object) -> bool:
    """Return whether `value` is a float, or an integer that can be converted to one."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < MAX_COUNT)


def check_sizes(path: Path, entries: dict[str, Any]) -> None:
    """Raise UserError for a tensor without values of its own, such as a sparse or expanded one.

    Also for one of a subclass, or of a type that torch cannot convert, and if tensors overlap.
    """
    for name, tensor in _named_tensors(entries):
        if type(tensor) not in (Tensor, nn.Parameter):  # whose methods can be any
            raise UserError(f"{path}: {name} is a {type(tensor).__name__}; use another one")
        is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        is_plain = is_plain and not (tensor.is_quantized or tensor.is_nested)
        is_plain = is_plain and not vars(tensor)  # attributes of a file hide torch's methods
        # Strides can repeat one element without end.
        if not is_plain or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise UserError(f"{path}: {name} is larger than what is stored; use another one")
        if tensor.dim() > MAX_DIMS:
            raise UserError(f"{path}: {name} has {tensor.dim()} dimensions; use another one")
        if not _is_convertible(tensor.dtype):
            raise UserError(f"{path}: {name} is {tensor.dtype}, of parts of bytes; use another one")
    distinct = [tensor for _, tensor in _distinct_tensors(entries)]
    storages = {one.data_ptr(): one.nbytes() for one in map(Tensor.untyped_storage, distinct)}
    if sum(tensor.nbytes for tensor in distinct) > MAX_OVERLAP * sum(storages.values()):
        raise UserError(f"{path}: its tensors overlap; use another one")


@cache
def _is_convertible(dtype: torch.dtype) -> bool:
    """Return whether torch can convert values of `dtype`; some of less than a byte it can't."""
    try:
        torch.empty(1, dtype=dtype).to(torch.complex128)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def check_like(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ValueError for a tensor of another shape or kind than the one of its name in `own`.

    torch would convert it without a warning: complex numbers would lose their imaginary parts.
    """
    for name, ours in own.items():
        is_extra = name.endswith("_extra_state")  # of any type and size
        if name not in state or is_extra or not isinstance(ours, Tensor) or is_lazy(ours):
            continue
        theirs = state[name]
        if theirs.shape != ours.shape:
            raise ValueError(f"{name} is {tuple(theirs.shape)}, not {tuple(ours.shape)}")
        if _kind(theirs.dtype) != _kind(ours.dtype):
            raise ValueError(f"{name} is {theirs.dtype}, not {ours.dtype}")


def check_loaded(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ValueError if `own`, the state of a model that has loaded `state`, has other values.

    A half type may have rounded them, or made them infinite. A class's own load_state_dict may
    leave some out, or write to what state_dict() returns, which is a copy at O2.
    """
    for name, value in own.items():
        ours = local_shard(value)
        is_comparable = isinstance(ours, Tensor) and not is_lazy(ours) and ours.itemsize > 1
        if name not in state or name.endswith("_extra_state") or not is_comparable:
            continue
        theirs = local_shard(state[name]).to(ours.device, ours.dtype)
        is_same = torch.isclose(ours, theirs, ROUNDING, SMALLEST_HALF, equal_nan=True)
        if not (is_same | (ours.isinf() & (theirs.abs() > LARGEST_HALF))).all():
            raise ValueError(f"{name} has other values after the model's own load_state_dict")


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """Return a value that floats of all widths share, as do integers and complex numbers."""
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def is_same(value: object, other: object) -> bool:
    """Return whether two plain values or tensors, also in lists, tuples or dicts, are equal."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value.cpu(), other.cpu())
    if isinstance(value, Tensor | np.ndarray) or isinstance(other, Tensor | np.ndarray):
        return False  # arrays are refused elsewhere
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(is_same, value, other))
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        names = value.keys()
        return names == other.keys() and all(is_same(value[name], other[name]) for name in names)
    return value == other


def first_nan(entries: dict[str, Any]) -> str | None:
    """Return the name of the first tensor of model, average or optimizer that holds nan."""
    parts = {key: entries.get(key) for key in ("model", "ema", "optimizer")}
    return next((name for name, tensor in _distinct_tensors(parts) if has_nan(tensor)), None)


def has_nan(tensor: Tensor) -> bool:
    """Return whether a tensor of any type, such as float8, holds nan."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    values = tensor.float() if is_number and tensor.itemsize == 1 else tensor
    return bool(is_number and values.isnan().any())


def _distinct_tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, but each of those that share the same values only once."""
    seen = set()
    for name, tensor in _named_tensors(value):
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        key = *place, tensor.shape, tensor.stride(), tensor.dtype
        if key not in seen:
            seen.add(key)
            yield name, tensor


def _named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dicts, lists and tuples, each with the path of its keys."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _named_tensors(item, f"{name}.{key}" if name else str(key))

"""Pretrained weights, from a file or from torchvision."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from engine import UserError, distributed
from engine.checkpoint import format, sharded, validation
from engine.checkpoint.archive import read, security_warning
from engine.checkpoint.compatibility import describe_difference
from engine.monitoring.console import has_terminal

COUNTERS = "num_batches_tracked"  # buffers of batch norms, which old files lack
EXTRA = "_extra_state"  # of a module, of any type
CLASSIFIERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # layers that a head can end with


def load_pretrained(
    model: nn.Module,
    source: str,
    arch: str,
    classes: list[str],
    build_model: Callable[[int], nn.Module],
) -> str:
    """Load the weights of `source` into `model`; return a message for the log.

    If they share no name with the model, but have the names of exactly one of its direct children,
    that child is loaded. The last layers of a head for other classes are left out, those for the
    same classes in another order are permuted; the names of classes are known of checkpoints.

    Args:
        source: a file that holds a state dict or a checkpoint, or the folder of one; or the name of
            torchvision's weights, such as IMAGENET1K_V1 or ResNet50_Weights.DEFAULT, which are
            downloaded unless torch hub has cached them.
        arch: torchvision's name of the model or of its child.
        classes: names of the model's classes.
        build_model: returns such a model for a number of classes.

    Raises UserError if the weights cannot be read, or are those of another model.
    """
    if next(model.parameters()).is_meta:  # rank 0 loads them for all
        return ""
    state, kind, saved_classes = _read(source, arch)
    state = _without_wrappers(state, model)
    merged = copy.copy(state)  # with the versions of its modules, if it has them
    extra = {name: state.pop(name) for name in [*state] if name.endswith(EXTRA)}
    child = _matching_child(model, state)
    target = model.get_submodule(child)
    own = target.state_dict()
    state = _renamed(state, own)
    _check_finite(source, state, own)
    unmatched = _unmatched(state, own)
    shared = [name for name in own if name in state]
    head = [name for name in shared if own[name].shape != state[name].shape]
    counts = {(*state[name].shape[:1], *own[name].shape[:1]) for name in head}
    is_head = len(counts) <= 1 and all(_may_be_head(target, name, state[name]) for name in head)
    if unmatched or not is_head:
        raise UserError(
            f"--weights {source}: they are of another model than --arch {arch} "
            f"({min(unmatched or head)} does not fit); choose those of the same"
        )
    note = ""
    if head:
        ((theirs, ours),) = counts
        note = f", but for {', '.join(head)}: {theirs} classes there, {ours} here"
    elif saved_classes and saved_classes != classes:
        other = build_model(len(classes) + 1).get_submodule(child).state_dict()
        shapes = {name: other[name].shape for name in shared}
        layers = {name: shape for name, shape in shapes.items() if shape != own[name].shape}
        head, note = _adapt_head(state, layers, saved_classes, classes)
    try:
        loaded = {name: state[name] for name in shared if name not in head}
        validation.check_like(loaded, own)
        merged.clear()
        merged.update(own | loaded | extra)
        target.load_state_dict(merged)
    except (RuntimeError, ValueError) as error:  # a type that cannot be converted
        reason = shorten(str(error), 160)
        raise UserError(f"--weights {source}: they can't be loaded ({reason})") from None
    warning = security_warning(Path(source)) if Path(source).exists() else ""
    if warning:
        note += f"; warning: {warning}"
    return f"{kind} of {source}{f' for {child}' if child else ''}{note}"


def _adapt_head(
    state: dict[str, Tensor], layers: dict[str, torch.Size], saved: list[str], own: list[str]
) -> tuple[list[str], str]:
    """Return the tensors of `layers` not to load, and a note; or permute their rows in `state`.

    Args:
        layers: the tensors of `state` whose shape depends on the number of classes, with their
            shapes for another number.
        saved, own: names of the classes there and here.
    """
    difference = describe_difference(saved, own)
    names = ", ".join(layers)
    if not layers:
        return [], f"; its classes are others ({difference or 'in another order'})"
    has_rows = all(  # and no classes elsewhere, such as in the channels of an upsampling
        len(state[name]) == len(own) and state[name].shape[1:] == shape[1:]
        for name, shape in layers.items()
    )
    if difference or len(set(own)) < len(own) or not has_rows:
        return [*layers], f", but for {names}: other classes ({difference or 'in another order'})"
    order = [saved.index(name) for name in own]
    state.update({name: state[name][order] for name in layers})
    return [], f", with the rows of {names} in the order of these classes"


def _matching_child(model: nn.Module, state: dict[str, Tensor]) -> str:
    """Return the name of the only child that `state` belongs to; "" for the model itself."""
    own = model.state_dict()
    if own.keys() & _renamed(state, own).keys():
        return ""
    matching = []
    for name, child in model.named_children():
        own = child.state_dict()
        if own and not _unmatched(_renamed(state, own), own):
            matching.append(name)
    return matching[0] if len(matching) == 1 else ""


def _unmatched(state: dict[str, Tensor], own: dict[str, Tensor]) -> list[str]:
    """Return the names that only one of the two has."""
    return [name for name in own.keys() ^ state.keys() if not name.endswith((COUNTERS, EXTRA))]


def _renamed(state: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `state` with the names of `own`, where a norm may be split from its activation."""
    split = {name.replace(".norm.", "."): name for name in own}
    return {name if name in own else split.get(name, name): state[name] for name in state}


def _may_be_head(model: nn.Module, name: str, theirs: Tensor) -> bool:
    """Return whether a tensor differs from that of a last layer in the number of classes alone."""
    layer = model.get_submodule(name.rpartition(".")[0])
    ours = model.state_dict()[name]
    return isinstance(layer, CLASSIFIERS) and ours.shape[1:] == theirs.shape[1:]


def _read(source: str, arch: str) -> tuple[dict[str, Tensor], str, list[str]]:
    """Return the weights, whether they are an average as a text, and the classes if known."""
    path = Path(source)
    if not path.exists():
        return _from_torchvision(source, arch), "weights", []
    try:
        loaded = sharded.read(path) if path.is_dir() else read(path)
        content: Any = loaded if isinstance(loaded, dict) else {}
        key = format.best_weights(content)
        state = _find_weights(content, key)
        validation.check_sizes(path, state)
    except UserError as error:
        raise UserError(f"--weights {error}") from None
    if not state:
        raise UserError(
            f"--weights {source}: it holds no weights, which are a dict of names and tensors, "
            "saved by torch.save; use another file"
        )
    metadata = content.get("metadata", content.get("about"))
    classes = metadata.get("classes", []) if validation.is_metadata(metadata) else []
    return state, "moving average of the weights" if key == "ema" else "weights", classes


def _find_weights(content: dict[str, Any], key: str) -> dict[str, Tensor]:
    """Return the weights in the content of a file; an empty dict if there are none.

    Args:
        key: of the weights in a checkpoint of this project.
    """
    keys = (key, "state_dict", "model_state_dict")
    state = next((content[one] for one in keys if one in content), content)
    is_state = isinstance(state, dict) and all(
        isinstance(name, str) and (isinstance(value, Tensor) or name.endswith(EXTRA))
        for name, value in state.items()
    )
    return state if is_state else {}


def _without_wrappers(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return `state` without the prefixes of DDP, torch.compile and Lightning, in any order.

    If the model or one of its children has the names as they are, they stay.
    """
    state = copy.copy(state)  # with the versions of its modules, if it has them
    own = model.state_dict()
    for prefix in 2 * ("module.", "_orig_mod.", "model."):
        is_known = own.keys() & _renamed(state, own).keys() or _matching_child(model, state)
        if not is_known and all(name.startswith(prefix) for name in state):
            consume_prefix_in_state_dict_if_present(state, prefix)
    return state


def _check_finite(source: str, state: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Raise UserError for a value that is not finite, unless the model's own is none, as a mask."""
    for name, value in state.items():
        if _is_finite(value):
            continue
        if _is_finite(own.get(name, torch.zeros(1))) or value.isnan().any():
            raise UserError(f"--weights {source}: {name} is not finite; use another file")


def _is_finite(value: Tensor) -> bool:
    try:
        return not value.is_floating_point() or bool(value.isfinite().all())
    except RuntimeError:  # a type that has no comparisons
        return False


def _from_torchvision(source: str, arch: str) -> dict[str, Tensor]:
    models = torchvision.models
    try:
        if "." in source:
            weights = models.get_weight(source)
        else:
            weights = models.get_model_weights(arch)[source]
    except (ValueError, LookupError, AttributeError):
        raise UserError(
            f"--weights {source}: there is no such file, and torchvision has no weights of that "
            f"name for {arch}; name a file, or DEFAULT"
        ) from None
    progress = distributed.is_rank_zero() and has_terminal()
    folder = Path(torch.hub.get_dir(), "checkpoints")
    try:
        return weights.get_state_dict(
            progress=progress, check_hash=True, map_location="cpu", weights_only=True
        )
    except pickle.UnpicklingError:
        raise UserError(
            f"--weights {source}: {folder / Path(weights.url).name} holds no weights; remove it, "
            "and it is downloaded again"
        ) from None
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            f"--weights {source}: {weights.url} can't be downloaded ({reason}); put that file into "
            f"{folder}"
        ) from None

"""Weights to begin with, from a file or from torchvision."""

import pickle
import sys
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from engine import distributed
from engine.errors import UserError

PARTS = ("ema", "model", "state_dict")
COUNTERS = "num_batches_tracked"  # of batch norms, which old files lack


def load(model: nn.Module, source: str, arch: str, part: str = "") -> str:
    """Gives `model` the weights of `source`; returns what there is to say of it.

    A head for another number of classes is left out: entries whose first dimension alone differs,
    and is the same in all of them. A whole that has a `part` has no such head.

    Args:
        source: a file, of a state dict or of a checkpoint, whose "ema" is taken if there is one,
            else "model" or "state_dict"; or the name of torchvision's weights, such as
            IMAGENET1K_V1 or ResNet50_Weights.DEFAULT, which are downloaded if torch hub has not
            kept them.
        arch: torchvision's name of the model, or of its `part`.
        part: of the model, which the weights are of if they share no name with the whole.

    Raises UserError if they can't be read, or are another model's.
    """
    state, own = _read(source, arch), model.state_dict()
    # A norm that task.py has split from its activation has the one's names elsewhere.
    split = {name.replace(".norm.", "."): name for name in own}
    state = {name if name in own else split.get(name, name): state[name] for name in state}
    said = f"weights of {source}"
    of_part = bool(part) and not own.keys() & state.keys()
    if of_part:
        model, said = model.get_submodule(part), f"{said} for {part}"
        own = model.state_dict()
    alone = [name for name in own.keys() ^ state.keys() if not name.endswith(COUNTERS)]
    shared = own.keys() & state.keys()
    others = [name for name in own if name in shared and own[name].shape != state[name].shape]
    classes = {(*state[name].shape[:1], *own[name].shape[:1]) for name in others}
    is_head = all(own[name].shape[1:] == state[name].shape[1:] for name in others)
    has_head = of_part or not part
    if alone or others and not (len(classes) == 1 and is_head and has_head):
        name = min(alone or others)
        raise UserError(
            f"--weights {source}: they are of another model than --arch {arch} ({name} does not "
            "fit); choose those of the same"
        )
    model.load_state_dict(own | {name: state[name] for name in shared.difference(others)})
    if not others:
        return said
    ((theirs, ours),) = classes
    return f"{said}, but for {', '.join(others)}: {theirs} classes there, {ours} here"


def _read(source: str, arch: str) -> dict[str, Tensor]:
    if not Path(source).is_file():
        return _of_torchvision(source, arch)
    try:
        state = torch.load(source, map_location="cpu", weights_only=True)
        state = dict(next((state[part] for part in PARTS if part in state), state))
        consume_prefix_in_state_dict_if_present(state, "module.")
        if not all(map(_has_numbers, state.values())):
            raise TypeError
    except Exception:  # a file of any bytes raises anything
        raise UserError(
            f"--weights {source}: it holds no weights, which are a dict of names and tensors, "
            "saved by torch.save; use another file"
        ) from None
    return state


def _has_numbers(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta


def _of_torchvision(source: str, arch: str) -> dict[str, Tensor]:
    models = torchvision.models
    try:
        weights = models.get_weight(source) if "." in source else models.get_model_weights(arch)
        weights = weights if "." in source else weights[source]
    except (ValueError, LookupError, AttributeError):
        raise UserError(
            f"--weights {source}: there is no such file, and torchvision has no weights of that "
            f"name for {arch}; name a file, or DEFAULT"
        ) from None
    progress = distributed.is_speaker() and sys.stderr.isatty()
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

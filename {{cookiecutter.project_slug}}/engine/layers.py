"""Numbers of a model's layers, from its input to its output, for --layer-decay."""

from typing import Any

from torch import nn

from engine.blocks import CONTAINERS


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Return the number of the layer of each parameter, by its name.

    A layer is the stem, a block such as a residual one, or the head. timm's models define theirs
    (``group_matcher``); those of other models follow from their containers. Layer 0 is the first.
    """
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher:
        from timm.models import group_parameters  # only its models have the method

        return group_parameters(model, matcher(coarse=False), reverse=True)
    numbers: dict[str, int] = {}
    number = 0
    for layer in _layers(model):
        parameters = dict(model.get_submodule(layer).named_parameters(layer))
        if not parameters or _is_auxiliary(layer):
            continue
        # A norm belongs to the layer before it.
        has_weights = any(parameter.dim() > 1 for parameter in parameters.values())
        if has_weights and numbers:
            number += 1
        numbers |= dict.fromkeys(parameters, number)
    # What is left, such as a position embedding, is part of the input; but a single number, such as
    # a temperature, scales the output, and auxiliary heads are trained as the head is.
    return {
        name: numbers.get(name, number if p.numel() == 1 or _is_auxiliary(name) else 0)
        for name, p in model.named_parameters()
    }


def _is_auxiliary(name: str) -> bool:
    return "aux" in name.lower()  # torchvision's aux_classifier, aux1 and AuxLogits


def _layers(module: nn.Module, prefix: str = "") -> list[str]:
    """Return the names of the submodules that are layers, in the order of their definition."""
    found = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_split = _is_stack(child) or any(_is_stack(part) for part in child.children())
        found += _layers(child, f"{path}.") if is_split else [path]
    return found


def _is_stack(module: nn.Module) -> bool:
    """Return whether `module` is a container of blocks or of other stacks.

    The operations of a block may be in a container, too, but are convolutions, norms and the like,
    or containers of these; so a container of at least two other modules is a stack.
    """
    if not isinstance(module, CONTAINERS):
        return False
    parts = list(module.children())
    blocks = [part for part in parts if any(part.children()) and not isinstance(part, CONTAINERS)]
    return len(blocks) > 1 or any(map(_is_stack, parts))

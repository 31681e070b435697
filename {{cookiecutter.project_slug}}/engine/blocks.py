"""Parts of a model: blocks, to shard or to recompute one by one, and layers, for --layer-decay."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # no public class is a base of Apex's too
from torch.utils.checkpoint import checkpoint

from engine import UserError

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, class_names: Sequence[str] = ()) -> list[nn.Module]:
    """Return the outermost blocks of `model`, in the order of its submodules.

    Args:
        model: before it is sharded.
        class_names: of the blocks, such as EncoderBlock. By default a block is a module with
            submodules of which a Sequential, ModuleList or ModuleDict holds several of one class,
            as transformer layers and the blocks of a ResNet are.

    Raises UserError for a name in `class_names` that no submodule's class has.
    """
    found = list(_find(model, class_names))
    if missing := set(class_names).difference(type(block).__name__ for block in found):
        raise UserError(
            f"BLOCKS in task.py: the model has no {min(missing)}, or only inside of another block; "
            "name classes of its submodules, or leave BLOCKS empty"
        )
    return found


def _find(module: nn.Module, class_names: Sequence[str]) -> Iterator[nn.Module]:
    children = list(module.children())
    counts = Counter(type(child) for child in children)
    for child in children:
        if class_names:
            is_block = type(child).__name__ in class_names
        else:
            is_repeated = type(module) in CONTAINERS and counts[type(child)] > 1
            is_composed = type(child) not in CONTAINERS and any(True for _ in child.children())
            is_block = is_repeated and is_composed
        if is_block:
            yield child
        else:
            yield from _find(child, class_names)


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """Return the batch norms in `module`, SyncBN included."""
    return [part for part in module.modules() if isinstance(part, _BatchNorm)]


def checkpoint_activations(model: nn.Module, class_names: Sequence[str] = ()) -> str:
    """Recompute the activations inside of each block in the backward pass; return a message.

    A block's class is replaced by a subclass of the same name, so that the names in the state dict
    stay, and copies of the model, such as DataParallel's, recompute their own activations.

    Raises UserError if the model has no blocks, or one holds a norm whose running statistics, or
    a spectral norm whose vectors, the second forward pass would update again.
    """
    blocks = find_blocks(model, class_names)
    if not blocks:
        raise UserError(
            "--checkpoint-activations: the model has no repeated blocks; name the classes of its "
            "blocks in BLOCKS in task.py, or leave the flag out"
        )
    for block in blocks:
        names = {name for name, _ in block.named_buffers()}
        has_vectors = any(name.endswith("_u") and f"{name[:-1]}v" in names for name in names)
        if has_vectors or any(
            getattr(one, "track_running_stats", False) for one in block.modules()
        ):
            raise UserError(
                f"--checkpoint-activations: {type(block).__name__} holds a batch norm, spectral "
                "norm or another norm with running statistics, which would count each batch twice; "
                "choose an --arch without, such as vit_b_16"
            )
        block.__class__ = _checkpointed(type(block))  # type: ignore[arg-type]  # it is hashable
    return f"the activations of {len(blocks)} blocks are recomputed in the backward pass"


@cache
def _checkpointed(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `cls` whose forward pass stores its inputs alone."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(cls.forward, self), *args, use_reentrant=False, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Return the number of the layer of each parameter, by its name.

    A layer is the stem, a block such as a residual one, or the head. timm's models define theirs
    (``group_matcher``); those of other models follow from their containers. Layer 0 is the first.
    """
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher:
        from timm.models import group_parameters  # only its models have the method

        return group_parameters(model, matcher(coarse=False), reverse=True)
    numbers: dict[nn.Parameter, int] = {}  # not by names, which a wrapper may change
    number = 0
    for layer in _layers(model):
        parameters = [*model.get_submodule(layer).parameters()]
        if not parameters or _is_auxiliary(layer):
            continue
        # A norm belongs to the layer before it.
        has_weights = any(parameter.dim() > 1 for parameter in parameters)
        if has_weights and numbers:
            number += 1
        numbers = dict.fromkeys(parameters, number) | numbers  # a shared one is of the first layer
    # What is left, such as a position embedding, is part of the input; but a single number, such as
    # a temperature, scales the output, and auxiliary heads are trained as the head is.
    return {
        name: numbers.get(p, number if p.numel() == 1 or _is_auxiliary(name) else 0)
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

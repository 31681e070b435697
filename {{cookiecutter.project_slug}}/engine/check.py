"""What can be tried before a run starts, so that it fails at once and with a sentence."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.errors import UserError


def try_out(model: nn.Module, criterion: Callable, images: Tensor, targets: Tensor) -> None:
    """Trains a copy of `model` on a small batch, up to the loss, where the model is.

    Raises UserError if it can't: images too small for it, outputs that the loss doesn't take, or a
    batch norm left with a single value by a batch of one.
    """
    try:
        loss = criterion(copy.deepcopy(model).train()(images), targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError("the loss is not one number")
    except (RuntimeError, ValueError, TypeError, AssertionError, AttributeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"this --arch can't train on a batch of {len(images)} of these images "
            f"({' × '.join(map(str, images.shape[1:]))}): {reason}; choose another --arch, or "
            "another --batch-size"
        ) from None


def sample(dataset: torch.utils.data.Dataset, count: int) -> list[Tensor]:
    """A batch of the first `count` samples of `dataset`."""
    return torch.utils.data.default_collate([dataset[index] for index in range(count)])

"""``scale_loss``, the one call of amp in the training loop."""

import contextlib
from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ._state import _amp_state, disable_casts
from .optimizer import after_backward, after_failure, before_backward


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | list[Optimizer],
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yields ``loss.float() × scale`` for the backward pass, and makes its gradients true again.

    On leaving, the new gradients are divided by the scale and added to those that were there
    before, so that they can be clipped, accumulated and stepped as if there were no scale; and
    if one of them is inf or nan, the next step of each of `optimizers` is skipped.

    Args:
        loss: of any shape, usually a scalar.
        optimizers: those whose parameters this backward pass gives gradients to.
        loss_id: which of the ``num_losses`` scalers of ``initialize`` to use.
        model: accepted as in Apex, and unused.
        delay_unscale: leaves the gradients scaled; a later block without it unscales them all.
            So it is under ``no_sync()`` of this package's DistributedDataParallel.
        delay_overflow_check: leaves the scale as it is, and skips no step.

    Raises RuntimeError if ``initialize`` was not called, or not with one of `optimizers`, and
    FloatingPointError, where Apex halves the scale for ever, if every gradient overflows.
    """
    properties = _amp_state.opt_properties
    if properties is None:
        raise RuntimeError("amp.scale_loss needs amp.initialize(model, optimizer) to come first.")
    if not properties.enabled:
        yield loss
        return

    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    for optimizer in optimizers:
        if not hasattr(optimizer, "_amp_stash"):
            raise RuntimeError(
                "amp.scale_loss was given an optimizer that amp.initialize did not return."
            )
    if not optimizers:
        raise RuntimeError("amp.scale_loss was given no optimizer.")
    if not 0 <= loss_id < len(_amp_state.loss_scalers):
        raise RuntimeError(
            f"amp.scale_loss was given loss_id={loss_id}, and amp.initialize "
            f"num_losses={len(_amp_state.loss_scalers)}: ids begin at 0."
        )
    # Gradients that wait to be unscaled are unscaled with these, by one scale.
    delaying = filter(None, (optimizer._amp_stash.delayed_by for optimizer in optimizers))
    scaler = next(delaying, _amp_state.loss_scalers[loss_id])

    # The gradients' types were settled in the forward pass: the backward pass runs without casts.
    if not (scaler.dynamic or properties.master_weights) and scaler.factor == 1.0:
        with disable_casts():
            yield loss.float()
        return

    scaler.report()
    # What is unscaled is set aside in the next backward pass, and would miss its reduction.
    delay_unscale = delay_unscale or any(_holds_unsynced(optimizer) for optimizer in optimizers)
    fresh = [optimizer for optimizer in optimizers if not optimizer._amp_stash.delayed_by]
    for optimizer in fresh:
        before_backward(optimizer)

    try:
        with disable_casts():
            yield loss.float() * scaler.factor
    except BaseException:
        for optimizer in fresh:
            after_failure(optimizer)
        raise

    if delay_unscale:
        for optimizer in optimizers:
            optimizer._amp_stash.delayed_by = scaler
        return

    found = [after_backward(optimizer, scaler) for optimizer in optimizers]
    if delay_overflow_check:
        return
    found_inf = reduce(torch.maximum, found) if scaler.dynamic else None
    scaler.update_(found_inf)
    if scaler.is_exhausted:
        raise FloatingPointError(
            f"{scaler.PATIENCE} backward passes in a row gave gradients that are not finite, and "
            f"the loss scale is down to {scaler.loss_scale():g}: no scale will mend that. The "
            f"first of them is that of {_first_non_finite_gradient()}."
        )
    if scaler.dynamic:
        for stash in (optimizer._amp_stash for optimizer in optimizers):
            earlier = stash.found_inf
            stash.found_inf = found_inf if earlier is None else earlier.maximum(found_inf)


def _holds_unsynced(optimizer: Optimizer) -> bool:
    """Whether gradients of `optimizer` wait for the end of a ``no_sync()``."""
    if not _amp_state.unsynced:  # as at nearly every step
        return False
    unsynced = {parameter for module in _amp_state.unsynced for parameter in module.parameters()}
    stash = optimizer._amp_stash
    return not unsynced.isdisjoint((*stash.plain, *(half for half, _ in stash.masters)))


def _first_non_finite_gradient() -> str:
    for model in _amp_state.models:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                return name
    return "a parameter outside the models"

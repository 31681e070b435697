"""The interface of amp before ``initialize``: ``amp.init`` and its handle."""

import contextlib
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from apex_native import amp, log_rank_zero
from apex_native.amp.handle import kept
from torch import Tensor, nn
from torch.optim import Optimizer

from .loss_scaler import AmpLossScaler


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> "AmpHandle":
    """Switch the casts of O1 on for the whole process, and return the handle for the loss.

    Args:
        enabled: False switches them off; the handle then changes nothing.
        loss_scale: a number, or "dynamic"; ``wrap_optimizer`` always has dynamic scales.
        enable_caching: accepted as in Apex and unused: no casts are cached.
        verbose: print amp's messages.
        allow_banned: compute ``binary_cross_entropy`` in fp32 instead of raising an error.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if enabled and allow_banned:
        amp.register_float_function(nn.functional, "binary_cross_entropy")
    amp.initialize(  # the casts are of the process: the model only provides the device
        nn.Linear(1, 1, device=device), enabled=enabled, opt_level="O1", verbosity=int(verbose)
    )
    return AmpHandle(enabled, loss_scale)


class AmpHandle:
    """Handle of ``amp.init``. ``scale_loss`` is for one loss, ``wrap_optimizer`` for several."""

    def __init__(self, enabled: bool, loss_scale: float | str) -> None:
        self._is_active = enabled
        self._default_scaler: AmpLossScaler | None = AmpLossScaler(loss_scale)

    def is_active(self) -> bool:
        """Return whether amp is on."""
        return self._is_active

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:  # a documented name of Apex, in spite of its form
        self._is_active, was_active = False, self._is_active
        try:
            with amp.disable_casts():
                yield
        finally:
            self._is_active = was_active

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> "OptimWrapper":
        """Return `optimizer` with a method ``scale_loss`` for each of `num_loss` losses a step."""
        self._default_scaler = None
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Optimizer) -> Iterator[Tensor]:
        """Yield ``loss × scale``; unscale the gradients, and skip the next step on overflow.

        Gradients must be zero before: this interface divides all that is there by the scale.
        """
        if not self._is_active:
            yield loss
            return
        if self._default_scaler is None:
            raise RuntimeError("After wrap_optimizer(), use optimizer.scale_loss(loss).")
        with amp.disable_casts():
            yield loss * self._default_scaler.loss_scale()
        if _unscale(self._default_scaler, optimizer):
            _skip_next_step(optimizer)


class OptimWrapper:
    """Optimizer that ``handle.wrap_optimizer`` returns; it has the attributes of `optimizer`."""

    def __init__(self, optimizer: Optimizer, amp_handle: AmpHandle, num_loss: int) -> None:
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._loss_idx = 0
        self._skip_next = False
        self._loss_scaler = [AmpLossScaler("dynamic") for _ in range(num_loss)]

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield the next loss of this step times its scale, and unscale its gradients.

        Raises RuntimeError for more losses in a step than ``wrap_optimizer`` was given.
        """
        if not self._amp_handle.is_active():
            yield loss
            return
        if self._loss_idx == len(self._loss_scaler):
            raise RuntimeError(
                f"wrap_optimizer was given num_loss={len(self._loss_scaler)}, and this step has "
                "more losses than that."
            )
        scaler = self._loss_scaler[self._loss_idx]
        # Those of earlier losses have no scale any more.
        parameters = list(amp.master_params(self._optimizer)) if self._loss_idx else []
        earlier = [(p, kept(p.grad)) for p in parameters if p.grad is not None]
        for parameter, _ in earlier:
            parameter.grad = None
        with amp.disable_casts():
            yield loss * scaler.loss_scale()
        self._skip_next |= _unscale(scaler, self._optimizer)
        self._loss_idx += 1
        for parameter, grad in earlier:
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)

    def step(self, closure: None = None) -> Any:
        """Step the optimizer, unless a gradient overflowed."""
        if not self._amp_handle.is_active():
            return self._optimizer.step(closure)
        if closure is not None:
            raise NotImplementedError("The optimizer of wrap_optimizer() takes no closure.")
        self._loss_idx = 0
        skip, self._skip_next = self._skip_next, False
        if skip:
            log_rank_zero("Gradient overflow, skipping update")
            return None
        with amp.disable_casts():
            return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        """Return the attribute `name` of the optimizer itself."""
        if name == "_optimizer":  # before __init__, as in copies
            raise AttributeError(name)
        return getattr(self._optimizer, name)


@torch.no_grad()
def _unscale(scaler: AmpLossScaler, optimizer: Optimizer) -> bool:
    """Divide the gradients of `optimizer`, and update `scaler`; return whether one overflowed."""
    grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
    overflow = scaler.unscale(grads, grads)
    scaler.update_scale(overflow)
    return overflow


def _skip_next_step(optimizer: Any) -> None:
    """Replace ``step`` until it is called once."""
    step = optimizer.step

    def skip(self: Any, *args: Any, **kwargs: Any) -> None:
        log_rank_zero("Gradient overflow, skipping update")
        self.step = step

    optimizer.step = MethodType(skip, optimizer)

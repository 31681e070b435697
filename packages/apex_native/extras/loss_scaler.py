"""Loss scalers of Apex's older interfaces, which compare and wait for the device at each update."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


def any_non_finite(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether an element of one of `tensors` is inf or nan. Waits for the device."""
    # Detached, because get_total_norm has no fused kernel for lists of nn.Parameter.
    given = [tensor.detach() for tensor in tensors if tensor is not None and tensor.numel()]
    # The largest magnitude is finite iff all elements are: sums of finite ones can overflow.
    return not bool(torch.nn.utils.get_total_norm(given, torch.inf).isfinite())


class LossScaler:
    """Static loss scale of ``apex.fp16_utils``, which never detects an overflow."""

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """The present scale."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[nn.Parameter]) -> bool:
        """Return False: a static scale checks nothing."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Do nothing."""

    def scale_gradient(
        self, module: nn.Module, grad_in: Sequence[Tensor], grad_out: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return `grad_in` times the scale; a backward hook of a module."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward pass of `loss` times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """Dynamic loss scale of ``apex.fp16_utils``, for scripts with a loop of their own.

    An overflow divides the scale by `scale_factor`, down to 1 at least; `scale_window` steps
    after the last overflow, and again after as many, it is multiplied.
    """

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[nn.Parameter]) -> bool:  # type: ignore[override]
        """Return whether a gradient of `params` has an inf or nan; callable on the class, too."""
        return any_non_finite(parameter.grad for parameter in params)

    def update_scale(self, overflow: bool) -> None:
        """Count a step, and change the scale if it is time to."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1


class AmpLossScaler:
    """Loss scale that FP16_Optimizer and the handle of ``amp.init`` keep.

    Args:
        loss_scale: a number, or "dynamic".
        init_scale, scale_factor, scale_window: of a dynamic scale: its start, the factor of a
            change, and how many clean updates in a row double it.
        min_loss_scale, max_loss_scale: its limits.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        start = min(init_scale, max_loss_scale) if loss_scale == "dynamic" else loss_scale
        self._loss_scale = float(start)
        self._unskipped = 0
        self._factor, self._window = scale_factor, scale_window
        self._limits = (min_loss_scale or 0.0, max_loss_scale)

    def loss_scale(self) -> float:
        """Return the present scale."""
        return self._loss_scale

    def unscale(self, grads: list[Tensor], targets: list[Tensor]) -> bool:
        """Write `grads`, divided by the scale, to `targets`, which may be the same tensors.

        Returns whether one has an inf or nan; False for a static scale, which checks nothing.
        """
        if not grads:
            return False
        found = self.dynamic and any_non_finite(grads)
        if targets is not grads:
            torch._foreach_copy_(targets, grads)
        torch._foreach_mul_(targets, 1.0 / self._loss_scale)
        return found

    def update_scale(self, overflow: bool) -> None:
        """Change a dynamic scale after the backward pass of a step."""
        if not self.dynamic:
            return
        lowest, highest = self._limits
        self._unskipped += 1
        if overflow:
            self._loss_scale = max(self._loss_scale / self._factor, lowest)
            self._unskipped = 0
        elif self._unskipped == self._window:
            self._loss_scale = min(self._loss_scale * self._factor, highest)
            self._unskipped = 0

    def state_dict(self) -> dict[str, float | int]:
        """Return the scale and the count of clean updates."""
        return {"loss_scale": self._loss_scale, "unskipped": self._unskipped}

    def load_state_dict(self, state: object) -> None:
        """Load that of `state_dict`, or the pickled scaler that Apex's checkpoints hold."""
        if not isinstance(state, dict):
            names = {"_loss_scale": "loss_scale", "_unskipped": "unskipped"}
            state = {names[key]: value for key, value in vars(state).items() if key in names}
        self._loss_scale = float(state.get("loss_scale", self._loss_scale))
        self._unskipped = int(state.get("unskipped", 0))

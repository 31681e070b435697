"""FP16_Optimizer of ``apex.optimizers`` and ``apex.contrib.optimizers``."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .loss_scaler import any_non_finite
from .master_weights import MasterWeights


class FP16_Optimizer(MasterWeights):
    """Optimizer of ``apex.optimizers`` (until 2019) and ``apex.contrib.optimizers``.

    Unlike that of ``apex.fp16_utils``, it leaves gradients scaled until ``step``, which checks them
    and updates the scale. A static scale skips steps, too. Any optimizer serves as the inner one.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if dynamic_loss_scale and dynamic_loss_args is not None:
            raise SystemError("This FP16_Optimizer has no dynamic_loss_args, as in Apex.")
        super().__init__(init_optimizer)
        self.verbose = verbose
        self.dynamic_loss_scale = dynamic_loss_scale
        self.cur_scale = 2.0**16 if dynamic_loss_scale else static_loss_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor, self.scale_window = 2, 1000

    def zero_grad(self, set_grads_to_None: bool = True) -> None:
        """Drop the gradients of the model, or zero them."""
        super().zero_grad(set_grads_to_None)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of ``loss.float() × scale``."""
        (loss.float() * self.cur_scale).backward()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Unscale the gradients, step the masters and copy them to the model.

        Where a gradient is not finite, only the scale is updated.
        """
        if closure is not None:
            raise RuntimeError("This FP16_Optimizer takes no closure, as in Apex.")
        halves = self.halves
        overflow = any_non_finite(parameter.grad for parameter in (*halves, *self.plain))
        if not overflow:
            for half, master in zip(halves, self.masters, strict=True):
                master.grad = None if half.grad is None else half.grad.float() / self.cur_scale
            for parameter in self.plain:
                if parameter.grad is not None:
                    parameter.grad.div_(self.cur_scale)
            self.optimizer.step()
            self.copy_masters_to_model()
            for master in self.masters:
                master.grad = None
        self._update_scale(overflow)

    def _update_scale(self, overflow: bool) -> None:
        if overflow and self.verbose:
            print(f"Grad overflow on iteration {self.cur_iter}, at loss scale {self.cur_scale}")
        if self.dynamic_loss_scale:
            if overflow:
                self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
                self.last_overflow_iter = self.cur_iter
            elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    COUNTERS = ("dynamic_loss_scale", "cur_scale", "cur_iter")
    DYNAMIC = ("last_overflow_iter", "scale_factor", "scale_window")

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of Apex's class."""
        names = self.COUNTERS + (self.DYNAMIC if self.dynamic_loss_scale else ())
        return {
            **{name: getattr(self, name) for name in names},
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_groups": self.fp32_groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this class or that of ``apex.contrib.optimizers`` has saved.

        Raises RuntimeError for one of ``apex.optimizers`` before 2019-08, whose tensors are flat.
        """
        if "fp32_groups" not in state_dict:
            raise RuntimeError(
                "This checkpoint holds all parameters of a group in one tensor (fp32_groups_flat), "
                "as apex.optimizers did before August 2019: load the model's part of it only."
            )
        for name in (*self.COUNTERS, *self.DYNAMIC):
            if name in state_dict:
                setattr(self, name, state_dict[name])
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.load_masters(state_dict["fp32_groups"])

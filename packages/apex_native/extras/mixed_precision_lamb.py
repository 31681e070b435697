"""Fused optimizers with masters of their own, and FusedMixedPrecisionLamb, which is one."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from apex_native.amp.casting import HALF_TYPES
from apex_native.optimizers import FusedLAMB
from apex_native.optimizers.elementwise import FusedOptimizer
from torch import Tensor


class FusedWithMasters(FusedOptimizer):
    """Fused optimizer that keeps fp32 masters of parameters of some types, in its state."""

    half_divisor: Tensor | None = None  # of the gradients of parameters with masters

    def _has_masters(self, dtype: torch.dtype) -> bool:
        """Return whether parameters of this type have masters."""
        return dtype in HALF_TYPES

    def _step_same(self, group: dict, parameters: list[Tensor]) -> None:
        if not self._has_masters(parameters[0].dtype):
            super()._step_same(group, parameters)
            return
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if "master" not in state:  # at the first step, and in a checkpoint of Apex
                state.update({**self._new_state(parameter), **state})
                state["master"] = torch.empty_like(state["exp_avg"]).copy_(parameter)
        masters = [state["master"] for state in states]
        for parameter, master in zip(parameters, masters, strict=True):
            # Others may have written to the parameter, such as load_state_dict of the model.
            is_current = parameter == master.to(parameter.dtype)
            master.copy_(torch.where(is_current, master, parameter))
        # The fused kernels assume the same strides for all that they are given of a parameter.
        grads = [torch.empty_like(m) for m in masters]
        torch._foreach_copy_(grads, [p.grad for p in parameters if p.grad is not None])
        if self.half_divisor is not None:
            torch._foreach_div_(grads, self.half_divisor)
        self._update(group, masters, grads, states)
        torch._foreach_copy_(parameters, masters)


class FusedMixedPrecisionLamb(FusedWithMasters, FusedLAMB):
    """FusedLAMB that keeps fp32 masters of parameters of a half type, in its state.

    ``scaler.step(optimizer)`` of torch's GradScaler leaves gradients scaled; ``step`` divides them,
    and is skipped if the scaler found an inf or nan, for which it waits. There is no argument
    `grad_scaler` of ``step``: torch no longer passes it. Unlike Apex's, ``state_dict`` has the
    masters, and a resumed run is exact.

    Args:
        step: the number of steps taken before.
        reduced_precision_dtype: the type of parameters that get masters, made in their first step.
    """

    _step_supports_amp_scaling = True  # read by GradScaler.step

    def __init__(  # noqa: PLR0913, Apex's signature
        self,
        params: Iterable,
        lr: float = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        self.reduced_precision_dtype = reduced_precision_dtype
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            grad_averaging,
            max_grad_norm=max_grad_norm,
            use_nvlamb=use_nvlamb,
        )
        for group in self.param_groups:
            group["step"] = step

    def __getstate__(self) -> dict:
        """Return the state of the base class and the type of the masters' parameters."""
        return {**super().__getstate__(), "reduced_precision_dtype": self.reduced_precision_dtype}

    def state_dict(self) -> dict:
        """Return the state; `lr` and `step` of its groups are tensors, as Apex's scripts expect."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float64)
            group["step"] = torch.tensor([int(group["step"])], dtype=torch.int)
        return saved

    def load_state_dict(self, state_dict: dict) -> None:
        """Load the state of this class, or of Apex's, which has no masters and keeps tensors."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group["lr"] = float(group["lr"])
            group["step"] = int(group["step"])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, unless the scaler found an inf or nan; return the result of `closure`."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return None
        return super().step(closure)

    def _before_step(self) -> None:
        super()._before_step()
        scale = getattr(self, "grad_scale", None)
        if scale is not None:  # the norm is that of scaled gradients
            scale = scale.to(self._norm.device)
            clip = (self._norm / scale / self.defaults["max_grad_norm"]).clamp(min=1)
            self._clip = clip * scale

    def _has_masters(self, dtype: torch.dtype) -> bool:
        return dtype == self.reduced_precision_dtype

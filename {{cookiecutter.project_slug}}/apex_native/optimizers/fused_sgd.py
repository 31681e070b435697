"""SGD with Apex's signature and defaults."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ._base import FusedOptimizer, zeros


class FusedSGD(FusedOptimizer):
    """SGD with momentum, one kernel for many parameters.

    Args:
        params: parameters or groups of them, fp32, fp16 or bf16.
        momentum, dampening, weight_decay, nesterov: as in torch.optim.SGD.
        wd_after_momentum: adds the weight decay to the update, not to the gradient.
        materialize_master_grads: accepted as in Apex; amp always makes the masters' gradients.
        set_grad_none: whether ``zero_grad`` drops gradients or sets them to zero.

    Raises ValueError for values that have no meaning.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning",
    ICML 2013.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if value < 0:
                raise ValueError(f"FusedSGD: {name} is {value}, and must not be negative.")
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError("FusedSGD: nesterov needs a momentum and no dampening.")
        self.wd_after_momentum = wd_after_momentum
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, set_grad_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the kernel may skip the update where amp's found_inf is set.

        It skips nothing but its own work, and then counts the momentum's start as done.
        """
        dampened = any(group["dampening"] for group in self.param_groups)
        return not (self.wd_after_momentum or dampened)

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {}  # without momentum there is none

    def _update(
        self, group: dict, values: list[Tensor], grads: list[Tensor], states: list[dict]
    ) -> None:
        decay, momentum = group["weight_decay"], group["momentum"]
        if decay and self.wd_after_momentum:
            torch._foreach_mul_(values, 1 - group["lr"] * decay)
            decay = 0.0
        # The momentum starts as the first gradient, which is not dampened.
        is_first = ["momentum_buffer" not in state for state in states]
        for start in set(is_first):
            chosen = [index for index, first in enumerate(is_first) if first == start]
            if momentum and start:
                for index in chosen:
                    states[index]["momentum_buffer"] = zeros(values[index])
            torch._fused_sgd_(
                [values[index] for index in chosen],
                [grads[index] for index in chosen],
                [states[index]["momentum_buffer"] for index in chosen] if momentum else [],
                weight_decay=decay,
                momentum=momentum,
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=False,
                is_first_step=start,
                grad_scale=self._handed_over("grad_scale", values[0].device),
                found_inf=self._handed_over("found_inf", values[0].device),
            )

"""FusedAdam of ``apex.contrib.optimizers``; until August 2019, ``apex.optimizers`` had it, too."""

from collections.abc import Iterable
from typing import Any

import torch
from apex_native.optimizers.elementwise import FusedOptimizer, Tensors
from torch import Tensor

from .multi_tensor_optimizers import update_moments
from .old_adam import GroupClipping


class UnclippedAdam(FusedOptimizer):
    """FusedAdam of this module without its clipping."""

    eps_inside_sqrt: bool

    def _new_state(self, parameter: Tensor) -> dict[str, Any]:
        return {"step": 0, **super()._new_state(parameter)}

    def _update(self, group: dict, values: Tensors, grads: Tensors, states: list[dict]) -> None:
        beta1, beta2 = group["betas"]
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        update_moments(list(grads), means, squares, 1 - beta1, beta1, beta2)
        if self.eps_inside_sqrt:
            denominators = torch._foreach_add(squares, group["eps"])
            torch._foreach_sqrt_(denominators)
        else:
            denominators = torch._foreach_sqrt(squares)
            torch._foreach_add_(denominators, group["eps"])
        updates = torch._foreach_div(means, denominators)
        torch._foreach_add_(updates, values, alpha=group["weight_decay"])
        rates = []
        for state in states:
            state["step"] += 1
            rate = float(group["lr"])
            if group["bias_correction"]:
                rate *= (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
            rates.append(-rate)
        torch._foreach_mul_(updates, rates)
        torch._foreach_add_(values, updates)


class FusedAdam(GroupClipping, UnclippedAdam):
    """Adam whose weight decay is a part of the update, bias correction a factor of the step size.

    Args:
        eps_inside_sqrt: add `eps` to the second moment, not to its root.
        max_grad_norm: clip the gradients of each group to this norm, if above 0.
        use_mt, amp_scale_adjustment: accepted as in Apex and unused.
    """

    def __init__(  # noqa: PLR0913, Apex's signature
        self,
        params: Iterable,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        self.eps_inside_sqrt = eps_inside_sqrt
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "max_grad_norm": max_grad_norm}
        super().__init__(params, False, amsgrad, **defaults)

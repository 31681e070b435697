"""Adagrad with Apex's signature and defaults."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ._base import FusedOptimizer, zeros


class FusedAdagrad(FusedOptimizer):
    """Adagrad, many parameters at a time.

    Args:
        params: parameters or groups of them, fp32, fp16 or bf16.
        set_grad_none: whether ``zero_grad`` drops gradients or sets them to zero.
        adagrad_w_mode: adds the weight decay to the update instead of to the gradient.

    Source: Duchi et al., "Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization", JMLR 2011.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.adagrad_w_mode = adagrad_w_mode
        super().__init__(
            params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, set_grad_none
        )

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"sum": zeros(parameter)}

    def _update(
        self, group: dict, values: list[Tensor], grads: list[Tensor], states: list[dict]
    ) -> None:
        decay, sums = group["weight_decay"], [state["sum"] for state in states]
        if decay and not self.adagrad_w_mode:
            grads = torch._foreach_add(grads, values, alpha=decay)
        torch._foreach_addcmul_(sums, grads, grads)
        denominators = torch._foreach_sqrt(sums)
        torch._foreach_add_(denominators, group["eps"])
        updates = torch._foreach_div(grads, denominators)
        if decay and self.adagrad_w_mode:
            torch._foreach_add_(updates, values, alpha=decay)
        torch._foreach_add_(values, updates, alpha=-group["lr"])

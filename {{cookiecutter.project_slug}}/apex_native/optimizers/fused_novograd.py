"""NovoGrad with Apex's signature and defaults."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ._base import FusedOptimizer, zeros


class FusedNovoGrad(FusedOptimizer):
    """Adam with one second moment for each tensor: a running norm of its gradient.

    Args:
        params: parameters or groups of them, fp32, fp16 or bf16.
        bias_correction: False leaves the moments' start-up bias in.
        amsgrad: raises RuntimeError if true, as in Apex.
        reg_inside_moment: adds the weight decay to the normalised gradient, before the first
            moment, instead of to the update.
        grad_averaging: False adds gradients to the first moment with factor 1, not 1 − beta1.
        norm_type: 2, or 0 for the largest magnitude; anything else raises RuntimeError.
        init_zero: the running norm starts at 0 instead of at the first gradient's norm.
        set_grad_none: whether ``zero_grad`` drops gradients or sets them to zero.

    Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for
    Training of Deep Networks", 2019 (arXiv 1905.11286).
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedNovoGrad does not support the AMSGrad variant.")
        if norm_type not in (0, 2):
            raise RuntimeError("FusedNovoGrad: norm_type is 2, or 0 for the largest magnitude.")
        self.reg_inside_moment = reg_inside_moment
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults, set_grad_none)

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": zeros(parameter)}

    def _before_step(self) -> None:
        self._count_step()

    def _update(
        self, group: dict, values: list[Tensor], grads: list[Tensor], states: list[dict]
    ) -> None:
        (beta1, beta2), step = group["betas"], group["step"]
        decay, lr = group["weight_decay"], group["lr"]
        correction1 = 1 - beta1**step if group["bias_correction"] else 1.0
        correction2 = (1 - beta2**step) ** 0.5 if group["bias_correction"] else 1.0

        order = 2 if group["norm_type"] == 2 else float("inf")
        norms = torch._foreach_norm(grads, order)
        for state, norm in zip(states, norms, strict=True):
            start = torch.zeros_like(norm) if group["init_zero"] else norm
            before = state.get("exp_avg_sq", start)  # the norm itself, not its square
            if order == 2:
                state["exp_avg_sq"] = (beta2 * before**2 + (1 - beta2) * norm**2).sqrt()
            else:
                state["exp_avg_sq"] = beta2 * before + (1 - beta2) * norm
        denominators = [state["exp_avg_sq"] / correction2 + group["eps"] for state in states]

        means = [state["exp_avg"] for state in states]
        added = grads
        if self.reg_inside_moment:
            added = torch._foreach_div(grads, denominators)
            torch._foreach_add_(added, values, alpha=decay)
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, added, alpha=1 - beta1 if group["grad_averaging"] else 1)
        updates = torch._foreach_div(means, correction1)
        if not self.reg_inside_moment:
            torch._foreach_div_(updates, denominators)
            torch._foreach_add_(updates, values, alpha=decay)
        torch._foreach_add_(values, updates, alpha=-lr)

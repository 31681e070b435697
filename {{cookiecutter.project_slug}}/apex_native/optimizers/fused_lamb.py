"""LAMB with Apex's signature and defaults."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ._base import FusedOptimizer, zeros


class FusedLAMB(FusedOptimizer):
    """Adam whose update of each tensor is scaled to the tensor's norm.

    All gradients together are first clipped to `max_grad_norm`. Groups without weight decay are
    not scaled, unless `use_nvlamb`.

    Args:
        params: parameters or groups of them, fp32, fp16 or bf16.
        bias_correction: False leaves the moments' start-up bias in.
        adam_w_mode: False adds the weight decay to the gradient.
        amsgrad: raises RuntimeError if true, as in Apex.
        grad_averaging: False adds gradients to the first moment with factor 1, not 1 − beta1.
        set_grad_none: whether ``zero_grad`` drops gradients or sets them to zero.

    Source: You et al., "Large Batch Optimization for Deep Learning", ICLR 2020.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedLAMB does not support the AMSGrad variant.")
        self.adam_w_mode = adam_w_mode
        self.use_nvlamb = use_nvlamb
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, set_grad_none)

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": zeros(parameter), "exp_avg_sq": zeros(parameter)}

    def _before_step(self) -> None:
        self._count_step()
        parameters = (p for group in self.param_groups for p in group["params"])
        norm = torch.nn.utils.get_total_norm(
            [p.grad.float() for p in parameters if p.grad is not None]
        )
        self._clip = (norm / self.defaults["max_grad_norm"]).clamp(min=1)

    def _update(
        self, group: dict, values: list[Tensor], grads: list[Tensor], states: list[dict]
    ) -> None:
        beta1, beta2 = group["betas"]
        lr, decay, step = group["lr"], group["weight_decay"], group["step"]
        correction1 = 1 - beta1**step if group["bias_correction"] else 1.0
        correction2 = 1 - beta2**step if group["bias_correction"] else 1.0

        grads = torch._foreach_div(grads, self._clip.to(grads[0].device))
        if decay and not self.adam_w_mode:
            torch._foreach_add_(grads, values, alpha=decay)
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, grads, alpha=1 - beta1 if group["grad_averaging"] else 1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)

        denominators = torch._foreach_div(squares, correction2)
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        updates = torch._foreach_div(means, correction1)
        torch._foreach_div_(updates, denominators)
        if decay and self.adam_w_mode:
            torch._foreach_add_(updates, values, alpha=decay)
        if decay or self.use_nvlamb:
            sizes = torch.stack(torch._foreach_norm(values))
            lengths = torch.stack(torch._foreach_norm(updates))
            ratios = torch.where((sizes > 0) & (lengths > 0), sizes / lengths, 1.0)
            torch._foreach_mul_(updates, list(ratios.unbind()))
        torch._foreach_add_(values, updates, alpha=-lr)

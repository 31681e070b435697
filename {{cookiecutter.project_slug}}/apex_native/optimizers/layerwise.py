"""Apex's fused optimizers that scale the update of each tensor by norms: LAMB and NovoGrad."""

from collections.abc import Iterable

import torch
from torch import Tensor

from .elementwise import FusedOptimizer, Tensors


class LayerwiseOptimizer(FusedOptimizer):
    """Optimizer that counts its steps in each group, as in Apex, and has a first moment."""

    def _before_step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1

    def _bias_corrections(self, group: dict) -> list[float]:
        """Return the divisors of the two moments."""
        betas = group["betas"] if group["bias_correction"] else (0.0, 0.0)
        return [1 - beta ** group["step"] for beta in betas]

    def _first_moments(self, group: dict, grads: Tensors, states: list[dict]) -> list[Tensor]:
        """Return the first moments, updated with `grads`."""
        beta = group["betas"][0]
        means = [state["exp_avg"] for state in states]
        if group["grad_averaging"]:
            torch._foreach_lerp_(means, grads, 1 - beta)
        else:
            torch._foreach_mul_(means, beta)
            torch._foreach_add_(means, grads)
        return means


class FusedLAMB(LayerwiseOptimizer):
    """Adam whose update of each tensor is scaled to the tensor's norm.

    All gradients together are first clipped to `max_grad_norm`. Groups without weight decay are
    not scaled, unless `use_nvlamb`.

    Args:
        adam_w_mode: False adds the weight decay to the gradient.

    Source: You et al., "Large Batch Optimization for Deep Learning", ICLR 2020.
    """

    def __init__(  # noqa: PLR0913, Apex's signature
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
        self.adam_w_mode = adam_w_mode
        self.use_nvlamb = use_nvlamb
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "grad_averaging": grad_averaging}
        super().__init__(params, set_grad_none, amsgrad, max_grad_norm=max_grad_norm, **defaults)

    def _before_step(self) -> None:
        super()._before_step()
        parameters = (p for group in self.param_groups for p in group["params"])
        grads = [p.grad.float() for p in parameters if p.grad is not None]
        self._norm = torch.nn.utils.get_total_norm(grads)
        self._clip = (self._norm / self.defaults["max_grad_norm"]).clamp(min=1)

    def _update(self, group: dict, values: Tensors, grads: Tensors, states: list[dict]) -> None:
        beta2 = group["betas"][1]
        decay = group["weight_decay"]
        correction1, correction2 = self._bias_corrections(group)

        grads = torch._foreach_div(grads, self._clip.to(grads[0].device))
        if decay and not self.adam_w_mode:
            torch._foreach_add_(grads, values, alpha=decay)
        means = self._first_moments(group, grads, states)
        squares = [state["exp_avg_sq"] for state in states]
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
        torch._foreach_add_(values, updates, alpha=-float(group["lr"]))


class FusedNovoGrad(LayerwiseOptimizer):
    """Adam with one second moment for each tensor: a running norm of its gradient.

    Args:
        reg_inside_moment: adds the weight decay to the normalized gradient, before the first
            moment, instead of to the update.
        norm_type: 2, or 0 for the largest magnitude; anything else raises RuntimeError.
        init_zero: the running norm starts at 0 instead of at the first gradient's norm.

    Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for
    Training of Deep Networks", 2019 (arXiv 1905.11286).
    """

    moments = ("exp_avg",)

    def __init__(  # noqa: PLR0913, Apex's signature
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
        if norm_type not in (0, 2):
            raise RuntimeError("FusedNovoGrad: norm_type is 2, or 0 for the largest magnitude.")
        self.reg_inside_moment = reg_inside_moment
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "grad_averaging": grad_averaging}
        defaults |= {"norm_type": norm_type, "init_zero": init_zero}
        super().__init__(params, set_grad_none, amsgrad, **defaults)

    def load_state_dict(self, state_dict: dict) -> None:
        """Load the state of this class or of Apex's, which has the norms of a group in the group.

        Raises ValueError if their number is not that of the parameters that have a state.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if "exp_avg_sq" in group:  # norms of the fp16 parameters, then of those in fp32
                stepped = [parameter for parameter in group["params"] if parameter in self.state]
                stepped.sort(key=lambda parameter: parameter.dtype == torch.float32)
                norms = torch.cat(group.pop("exp_avg_sq"))
                for parameter, norm in zip(stepped, norms, strict=True):
                    self.state[parameter]["exp_avg_sq"] = norm.to(parameter.device, copy=True)

    def _update(self, group: dict, values: Tensors, grads: Tensors, states: list[dict]) -> None:
        beta2 = group["betas"][1]
        decay = group["weight_decay"]
        correction1, correction2 = self._bias_corrections(group)

        order = 2 if group["norm_type"] == 2 else float("inf")
        norms = torch._foreach_norm(grads, order)
        for state, norm in zip(states, norms, strict=True):
            if "exp_avg_sq" not in state:  # the norm itself, not its square
                state["exp_avg_sq"] = torch.zeros_like(norm) if group["init_zero"] else norm.clone()
        averages = [state["exp_avg_sq"] for state in states]
        if order == 2:
            torch._foreach_mul_(averages, averages)
            torch._foreach_mul_(norms, norms)
        torch._foreach_lerp_(averages, norms, 1 - beta2)
        if order == 2:
            torch._foreach_sqrt_(averages)
        denominators = torch._foreach_div(averages, correction2**0.5)
        torch._foreach_add_(denominators, group["eps"])

        added = grads
        if self.reg_inside_moment:
            added = torch._foreach_div(grads, denominators)
            torch._foreach_add_(added, values, alpha=decay)
        updates = torch._foreach_div(self._first_moments(group, added, states), correction1)
        if not self.reg_inside_moment:
            torch._foreach_div_(updates, denominators)
            torch._foreach_add_(updates, values, alpha=decay)
        torch._foreach_add_(values, updates, alpha=-float(group["lr"]))

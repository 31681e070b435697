"""SGD with Apex's signature and defaults."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ._base import FusedOptimizer


class FusedSGD(FusedOptimizer):
    """SGD with momentum, many parameters at a time.

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

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {}  # the momentum starts as the first gradient

    def _update(
        self, group: dict, values: list[Tensor], grads: list[Tensor], states: list[dict]
    ) -> None:
        decay, momentum = group["weight_decay"], group["momentum"]
        if decay and not self.wd_after_momentum:
            grads = torch._foreach_add(grads, values, alpha=decay)
        if momentum:
            old = [index for index, state in enumerate(states) if "momentum_buffer" in state]
            if old:
                buffers = [states[index]["momentum_buffer"] for index in old]
                torch._foreach_mul_(buffers, momentum)
                new = [grads[index] for index in old]
                torch._foreach_add_(buffers, new, alpha=1 - group["dampening"])
            for state, grad in zip(states, grads, strict=True):
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = grad.clone()
            buffers = [state["momentum_buffer"] for state in states]
            nesterov = group["nesterov"]
            grads = torch._foreach_add(grads, buffers, alpha=momentum) if nesterov else buffers
        if decay and self.wd_after_momentum:
            grads = torch._foreach_add(grads, values, alpha=decay)
        torch._foreach_add_(values, grads, alpha=-group["lr"])

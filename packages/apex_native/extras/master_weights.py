"""The part that the two kinds of FP16_Optimizer share."""

from typing import Any, NoReturn

import torch
from apex_native.amp.casting import HALF_TYPES
from torch import Tensor
from torch.optim import Optimizer


class MasterWeights:
    """Optimizer of fp16 parameters, around an optimizer that steps their fp32 masters.

    ``param_groups`` and ``state`` are those of the inner optimizer, so they hold the masters.
    """

    def __init__(self, init_optimizer: Optimizer) -> None:
        self.optimizer = init_optimizer
        self.fp16_groups: list[list[Tensor]] = []  # the model's parameters that have masters
        self.fp32_groups: list[list[Tensor]] = []  # these masters
        self.plain: list[Tensor] = []  # fp32 parameters, which are stepped as they are
        for group in init_optimizer.param_groups:
            self._adopt(group)
        # Loading casts what state there is to the parameters' types, which are others by now.
        init_optimizer.load_state_dict(init_optimizer.state_dict())

    def _adopt(self, group: dict[str, Any]) -> None:
        """Replace the half parameters of `group` by masters."""
        halves, masters = [], []
        for index, parameter in enumerate(group["params"]):
            if not parameter.requires_grad:
                continue
            if parameter.dtype == torch.float32:
                self.plain.append(parameter)
                continue
            if parameter.dtype not in HALF_TYPES:
                raise TypeError(f"FP16_Optimizer takes fp16 and fp32, not {parameter.dtype}.")
            master = parameter.detach().clone().float().requires_grad_()
            group["params"][index] = master
            halves.append(parameter)
            masters.append(master)
            if parameter in self.optimizer.state:
                self.optimizer.state[master] = self.optimizer.state.pop(parameter)
        self.fp16_groups.append(halves)
        self.fp32_groups.append(masters)

    @property
    def halves(self) -> list[Tensor]:
        """The model's parameters that have masters."""
        return [parameter for group in self.fp16_groups for parameter in group]

    @property
    def masters(self) -> list[Tensor]:
        """The masters, in the same order."""
        return [master for group in self.fp32_groups for master in group]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the inner optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the inner optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def __getstate__(self) -> NoReturn:
        raise RuntimeError("FP16_Optimizer is saved by its state_dict(), not by pickle or copy.")

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Zero or drop the gradients of the model's parameters and of the masters."""
        for parameter in (*self.halves, *self.masters, *self.plain):
            if set_grads_to_None:
                parameter.grad = None
            elif parameter.grad is not None:
                if parameter.grad.grad_fn is not None:
                    parameter.grad.detach_()
                else:  # it may be a view, as in DDP's buckets, which refuses the former
                    parameter.grad.requires_grad_(False)
                parameter.grad.zero_()

    @torch.no_grad()
    def copy_masters_to_model(self) -> None:
        """Copy the masters' values to the model's parameters."""
        if self.halves:
            torch._foreach_copy_(self.halves, self.masters)

    @torch.no_grad()
    def load_masters(self, saved: list[list[Tensor]]) -> None:
        """Load the masters of each group."""
        for own, group in zip(self.fp32_groups, saved, strict=True):
            for master, value in zip(own, group, strict=True):
                master.copy_(value)

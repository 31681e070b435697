"""What Apex's fused optimizers have in common."""

from collections.abc import Callable, Iterable
from itertools import chain

import torch
from torch import Tensor


class FusedOptimizer(torch.optim.Optimizer):
    """Hands parameters to `_update` in lists, for kernels that take many tensors at once.

    Each list is of one group, one device and one type, and always fp32: half parameters are
    updated in an fp32 copy, and their state is fp32, whatever they are.
    """

    def __init__(self, params: Iterable, defaults: dict, set_grad_none: bool) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    def __getstate__(self) -> dict:
        """As torch's, with the switches that are no group's; for copy and pickle."""
        switches = {name: value for name, value in vars(self).items() if isinstance(value, bool)}
        return switches | super().__getstate__()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops the gradients, or zeroes them if `set_grad_none` was False."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Takes one step; returns what `closure` does. Raises RuntimeError for sparse gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._before_step()
        for group in self.param_groups:
            for parameters in self._with_gradient(group):
                states = [self.state[parameter] for parameter in parameters]
                for parameter, state in zip(parameters, states, strict=True):
                    if not state:
                        state.update(self._new_state(parameter))
                grads = [parameter.grad for parameter in parameters]
                if parameters[0].dtype in (torch.float16, torch.bfloat16):
                    values = [parameter.float() for parameter in parameters]
                    self._update(group, values, [grad.float() for grad in grads], states)
                    torch._foreach_copy_(parameters, values)
                else:
                    self._update(group, parameters, grads, states)
        return loss

    def _with_gradient(self, group: dict) -> Iterable[list[Tensor]]:
        by_kind: dict[tuple, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise RuntimeError(f"{type(self).__name__} does not take sparse gradients.")
            by_kind.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        return by_kind.values()

    def _before_step(self) -> None:
        """Called once a step, before any `_update`."""

    def _count_step(self) -> None:
        """Counts the step in each group, where Apex keeps it."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""
        raise NotImplementedError

    def _update(
        self, group: dict, values: list[Tensor], grads: list[Tensor], states: list[dict]
    ) -> None:
        """Updates `values` and `states` in place; `grads` must stay as they are."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict) -> None:
        """As torch's, but state stays fp32 where torch casts it to the parameter's type.

        And it comes to lie in memory as the parameter does, channels last or not, which the fused
        kernels take for granted.
        """
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and name != "step":
                    like = parameter if value.shape == parameter.shape else value
                    copy = torch.empty_like(like, dtype=torch.float32, device=parameter.device)
                    self.state[parameter][name] = copy.copy_(value)


def zeros(parameter: Tensor) -> Tensor:
    """A moment's start: fp32, in the shape and memory format of `parameter`."""
    return torch.zeros_like(parameter, dtype=torch.float32)

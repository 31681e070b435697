"""LARC around any optimizer. The module is named as in Apex."""

from typing import Any

import torch
from torch.optim import Optimizer


class LARC(Optimizer):
    """Optimizer wrapper that limits the update of each tensor relative to the tensor's norm.

    With ‖p‖ and ‖g‖ the norms of a parameter and of its gradient, both above 0, and wd the weight
    decay, which is taken from `optimizer` for the step::

        a = trust_coefficient · ‖p‖ / (‖g‖ + wd·‖p‖ + eps)
        a = min(a / lr, 1)        if clip (LARC; without it the rule is LARS)
        g = (g + wd·p) · a

    Args:
        optimizer: takes the step. Its groups and state are those of LARC.

    Source: You et al., "Large Batch Training of Convolutional Networks", 2017 (arXiv 1708.03888).
    """

    # With the optimizer's own value, amp would set found_inf on LARC, which has no kernel.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        # Not super().__init__, which would create groups and state of its own.
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __getattr__(self, name: str) -> object:
        """Return an attribute of the optimizer."""
        if name == "optim":  # not set yet, while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.optim, name)

    @property
    def param_groups(self) -> list[dict]:  # type: ignore[override]
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict]) -> None:
        self.optim.param_groups = groups

    def __getstate__(self) -> dict:
        # Without what amp and schedulers have put on the instance, as torch's optimizers.
        own = vars(self).items()
        return {key: one for key, one in own if not callable(one) and key != "_amp_stash"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)

    def state_dict(self) -> dict:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict) -> None:
        self.optim.add_param_group(param_group)

    @torch.no_grad()
    def step(self) -> Any:  # type: ignore[override]
        """Scale the gradients in place, then take a step of the optimizer."""
        decays = [group.get("weight_decay", 0) for group in self.optim.param_groups]
        for group, decay in zip(self.optim.param_groups, decays, strict=True):
            group["weight_decay"] = 0
            self._scale_gradients(group, decay)
        try:
            return self.optim.step()
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    def _scale_gradients(self, group: dict, decay: float) -> None:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            size, length = parameter.norm(), parameter.grad.norm()
            rate = self.trust_coefficient * size / (length + size * decay + self.eps)
            if self.clip:
                rate = (rate / group["lr"]).clamp(max=1)
            counts = (size > 0) & (length > 0)  # on the device: the CPU does not wait
            parameter.grad.add_(parameter * torch.where(counts, decay, 0.0))
            parameter.grad.mul_(torch.where(counts, rate, 1.0))

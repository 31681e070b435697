"""LARC, around any optimizer. The module has the name that Apex's has."""

import torch
from torch.optim import Optimizer


class LARC(Optimizer):
    """Scales each tensor's gradient so that no update is large against the tensor itself.

    With ‖p‖ and ‖g‖ the norms of a parameter and of its gradient, both above 0, and wd the weight
    decay, which is taken over from `optimizer` for the step::

        a = trust_coefficient · ‖p‖ / (‖g‖ + wd·‖p‖ + eps)
        a = min(a / lr, 1)        if clip (LARC; without it the rule is LARS)
        g = (g + wd·p) · a

    Args:
        optimizer: the one that then takes the step. Its groups and state are those of LARC.

    Source: You et al., "Large Batch Training of Convolutional Networks", 2017 (arXiv 1708.03888).
    """

    # Were it the optimizer's own answer, amp would give found_inf to LARC, which has no kernel.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        # Not super().__init__, which would make groups and state of its own.
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __getattr__(self, name: str) -> object:
        """Whatever else is asked for is the optimizer's."""
        if name == "optim":  # not there yet, while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __getstate__(self) -> dict:
        return self.__dict__.copy()

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    def state_dict(self) -> dict:
        """The optimizer's."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        """Into the optimizer."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: object, **kwargs: object) -> None:
        """The optimizer's."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict) -> None:
        """To the optimizer."""
        self.optim.add_param_group(param_group)

    @torch.no_grad()
    def step(self) -> object:
        """Scales the gradients in place, then lets the optimizer step."""
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
            counts = (size > 0) & (length > 0)  # on the device: the CPU need not know
            parameter.grad.add_(parameter * torch.where(counts, decay, 0.0))
            parameter.grad.mul_(torch.where(counts, rate, 1.0))

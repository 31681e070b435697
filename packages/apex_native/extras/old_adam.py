"""FusedAdam of ``apex.optimizers`` as old scripts and subclasses of it expect it."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from apex_native import optimizers
from apex_native.optimizers.elementwise import FusedOptimizer, Tensors
from torch import Tensor

from .multi_tensor_optimizers import multi_tensor_adam


class GroupClipping(FusedOptimizer):
    """Mixin that clips the gradients of each group to its `max_grad_norm`, if that is above 0."""

    def _before_step(self) -> None:
        super()._before_step()
        self._clips: dict[int, Tensor] = {}  # what gradients are divided by, by their group's id
        for group in self.param_groups:
            grads = [p.grad.float() for p in group["params"] if p.grad is not None]
            limit = group["max_grad_norm"]
            if limit > 0 and grads:
                norm = torch.nn.utils.get_total_norm(grads)
                self._clips[id(group)] = ((norm + 1e-6) / limit).clamp(min=1)

    def _update(self, group: dict, values: Tensors, grads: Tensors, states: list[dict]) -> None:
        clip = self._clips.get(id(group))
        if clip is not None:
            grads = torch._foreach_div(grads, clip.to(grads[0].device))
        super()._update(group, values, grads, states)


class FusedAdam(GroupClipping, optimizers.FusedAdam):
    """FusedAdam of ``apex.optimizers`` that also takes `max_grad_norm`, its argument until 2019-08.

    Scripts of that time pass it together with FP16_Optimizer: the gradients of each group are
    clipped to this norm. Without bias correction, as BERT is fine-tuned, its results are those of
    that time; with it, the eps and the weight decay are today's.

    Subclasses with a ``step`` of their own, such as fairseq's, find ``multi_tensor_adam`` and
    ``_dummy_overflow_buf``, as in Apex.
    """

    @property
    def _step_supports_amp_scaling(self) -> bool:  # type: ignore[override]
        # Otherwise GradScaler.step would leave gradients scaled when they are clipped.
        return all(group["max_grad_norm"] <= 0 for group in self.param_groups)

    # Scripts read the arguments by inspect.
    @functools.wraps(optimizers.FusedAdam.__init__)  # type: ignore[misc]
    def __init__(
        self, params: Iterable, *args: Any, max_grad_norm: float = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(params, *args, **kwargs)
        self.defaults["max_grad_norm"] = max_grad_norm
        for group in self.param_groups:
            group.setdefault("max_grad_norm", max_grad_norm)
        devices = [p.device for group in self.param_groups for p in group["params"]]
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int, device=(devices or [None])[0])
        self.counts_in_groups = False

    @property
    def multi_tensor_adam(self) -> Callable[..., None]:
        """Apex's kernel, for a subclass with a step of its own, which counts in the groups."""
        self.counts_in_groups = True
        return multi_tensor_adam

    def state_dict(self) -> dict:
        """Return the state, with the count of a subclass that has a step of its own."""
        saved = super().state_dict()
        if self.counts_in_groups:
            for group, own in zip(saved["param_groups"], self.param_groups, strict=True):
                group["step"] = int(own.get("step", 0))
        return saved

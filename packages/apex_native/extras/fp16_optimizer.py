"""FP16_Optimizer and FP16Model of ``apex.fp16_utils``."""

from collections.abc import Callable
from typing import Any

import torch
from apex_native.compat import convert_network
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from .loss_scaler import AmpLossScaler
from .master_weights import MasterWeights


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point parameters and buffers of `module` itself to `dtype`, in place."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(dtype)


class FP16Model(nn.Module):
    """`network` cast to fp16 except for its affine batch norms; casts its inputs, too."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.float16)

    def forward(self, *inputs: Tensor) -> Any:
        """Return the output for `inputs`, tensors of any shape, cast to fp16."""
        return self.network(*(tensor.half() for tensor in inputs))


class FP16_Optimizer(MasterWeights):
    """Optimizer of ``apex.fp16_utils``: fp32 masters and a loss scale around `init_optimizer`.

    ``optimizer.backward(loss)`` takes the place of ``loss.backward()``. Gradients are unscaled
    there, and ``step`` is skipped if one is not finite and the scale dynamic.

    Args:
        dynamic_loss_args: keyword arguments of the scaler: ``init_scale``, ``scale_factor``,
            ``scale_window``.
        verbose: print overflows.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        super().__init__(init_optimizer)
        self.verbose = verbose
        self.overflow = False
        self.first_closure_call_this_step = True
        self.dynamic_loss_scale = dynamic_loss_scale
        if dynamic_loss_scale:
            self.loss_scaler = AmpLossScaler("dynamic", **dynamic_loss_args or {})
        else:
            self.loss_scaler = AmpLossScaler(static_loss_scale)

    @property
    def loss_scale(self) -> float:
        """The present loss scale, which can be set."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = float(value)

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Run the backward pass of ``loss.float() × scale``, and ``update_master_grads``.

        With several losses, pass ``update_master_grads=False`` and call that method once.
        """
        (loss.float() * self.loss_scale).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Copy the model's gradients to the masters, unscaled; update the scale."""
        halves, masters = [], []
        for half, master in zip(self.halves, self.masters, strict=True):
            if half.grad is not None:
                master.grad = torch.empty_like(master) if master.grad is None else master.grad
                halves.append(half.grad)
                masters.append(master.grad)
        plain = [parameter.grad for parameter in self.plain if parameter.grad is not None]
        found = [self.loss_scaler.unscale(halves, masters), self.loss_scaler.unscale(plain, plain)]
        self.overflow = any(found)
        self.loss_scaler.update_scale(self.overflow)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Tensor | float:
        """Clip the masters' gradients; return their norm before, or -1 after an overflow."""
        if self.overflow:
            return -1
        parameters = [p for group in self.param_groups for p in group["params"]]
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the masters' gradients by group; None after an overflow."""
        if self.overflow:
            print("FP16_Optimizer.inspect_master_grad_data: the gradients overflowed.")
            return None
        return [[p.grad for p in group["params"]] for group in self.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and copy them to the model; do nothing after an overflow.

        A closure calls ``zero_grad()`` and ``backward(loss)`` of this object; it is called again
        where its gradients overflow.
        """
        if self.overflow:
            if self.verbose:
                print(
                    f"Gradient overflow.  Skipping step, reducing loss scale to {self.loss_scale}"
                )
            return None
        if closure is None:
            result = self.optimizer.step()
        else:
            result = self.optimizer.step(self._wrap(closure))
            self.first_closure_call_this_step = True
        self.copy_masters_to_model()
        return result

    def _wrap(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return `closure` for the inner optimizer, which may step between two calls."""

        def wrapped() -> Any:
            if not self.first_closure_call_this_step:
                self.copy_masters_to_model()
            self.first_closure_call_this_step = False
            loss = closure()
            while self.overflow:
                if self.verbose:
                    print(f"Gradient overflow in the closure: the loss scale is {self.loss_scale}")
                loss = closure()
            return loss

        return wrapped

    def state_dict(self) -> dict[str, Any]:
        """Return Apex's entries, with ``loss_scaler`` as plain numbers instead of an object."""
        return {
            "loss_scaler": self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.fp32_groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this class or Apex's has saved. Load the model's state before."""
        self.loss_scaler.load_state_dict(state_dict["loss_scaler"])
        self.loss_scaler.dynamic = self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.load_masters(state_dict["fp32_from_fp16"])

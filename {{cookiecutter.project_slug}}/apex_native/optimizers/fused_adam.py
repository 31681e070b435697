"""Adam and AdamW with Apex's signature and defaults."""

from collections.abc import Callable, Iterable
from itertools import chain

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay (AdamW), one kernel for many parameters.

    Unlike ``torch.optim.AdamW``, the weight decay defaults to 0. Moments are fp32 whatever the
    parameters are, and the step count is saved both ways: for each group, as Apex has it, and
    for each parameter, as torch has it, so that a checkpoint loads in either.

    Args:
        params: parameters or groups of them, fp32, fp16 or bf16.
        bias_correction: False leaves the moments' start-up bias in.
        adam_w_mode: False adds the weight decay to the gradient (Adam with L2).
        amsgrad: raises RuntimeError if true, as in Apex.
        set_grad_none: whether ``zero_grad`` drops gradients or sets them to zero.
        capturable, master_weights: raise RuntimeError if true; amp keeps the masters here.

    Source: Kingma and Ba, "Adam", ICLR 2015; Loshchilov and Hutter, "Decoupled Weight Decay
    Regularization", ICLR 2019.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if capturable or master_weights:
            raise RuntimeError(
                "FusedAdam of apex_native has neither capturable nor master_weights: "
                "amp.initialize at O2 or O5 keeps the masters."
            )
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
        )
        # amp hands found_inf over, and the kernel skips the update where it is set.
        self._step_supports_amp_scaling = True

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops the gradients, or zeroes them if `set_grad_none` was False."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Takes one step. Raises RuntimeError for sparse gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_kind: dict[tuple, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError("FusedAdam does not take sparse gradients.")
                by_kind.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            for parameters in by_kind.values():
                self._update(group, parameters)
        return loss

    def _update(self, group: dict, parameters: list[Tensor]) -> None:
        """Steps `parameters`, which are of one device and one type."""
        states = [self._state_of(parameter) for parameter in parameters]
        steps = [state["step"] for state in states]
        if group["bias_correction"]:
            counted = steps
        else:  # after so many steps the correction is a factor of one
            counted = [torch.full_like(step, 1e30) for step in steps]

        is_half = parameters[0].dtype in (torch.float16, torch.bfloat16)
        values = [p.float() for p in parameters] if is_half else list(parameters)
        grads = [p.grad.float() if is_half else p.grad for p in parameters]
        found_inf = getattr(self, "found_inf", None)
        torch._foreach_add_(steps, 1)
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        kernel(
            values,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            counted,
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=found_inf,
        )
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))
        if is_half:
            torch._foreach_copy_(parameters, values)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        return state

    def state_dict(self) -> dict:
        """As torch's, with the ``step`` of each group beside those of the parameters."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            steps = [
                int(saved["state"][index]["step"])
                for index in group["params"]
                if index in saved["state"]
            ]
            if steps:
                group["step"] = max(steps)
        return saved

    def load_state_dict(self, state_dict: dict) -> None:
        """Takes the state of this class, of Apex's FusedAdam, or of torch's Adam and AdamW."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group_step = group.pop("step", None)
            for name, default in self.defaults.items():
                group.setdefault(name, default)
            for parameter in group["params"]:
                if parameter in self.state and group_step is not None:
                    self.state[parameter].setdefault("step", group_step)
        # torch casts moments to the parameter's type; here they stay fp32, at full precision. The
        # kernel takes it that they lie in memory as the parameter does, channels last or not.
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, parameter in zip(saved, own, strict=True):
            if index not in state_dict["state"]:
                continue
            state = self.state[parameter]
            for name in ("exp_avg", "exp_avg_sq"):
                moment = state_dict["state"][index][name]
                state[name] = torch.empty_like(parameter, dtype=torch.float32).copy_(moment)
            state["step"] = torch.tensor(float(state["step"]), device=parameter.device)

"""Adam and AdamW with Apex's signature and defaults."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ._base import FusedOptimizer, zeros


class FusedAdam(FusedOptimizer):
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
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, set_grad_none)
        # amp hands found_inf over, and the kernel skips the update where it is set.
        self._step_supports_amp_scaling = True

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, "exp_avg": zeros(parameter), "exp_avg_sq": zeros(parameter)}

    def _update(
        self, group: dict, values: list[Tensor], grads: list[Tensor], states: list[dict]
    ) -> None:
        steps = [state["step"] for state in states]
        if group["bias_correction"]:
            counted = steps
        else:  # after so many steps the correction is a factor of one
            counted = [torch.full_like(step, 1e30) for step in steps]
        found_inf = self._handed_over("found_inf", values[0].device)
        grad_scale = self._handed_over("grad_scale", values[0].device)
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
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))

    def _handed_over(self, name: str, device: torch.device) -> Tensor | None:
        """What amp or a GradScaler has set on this optimizer for the step, or None."""
        value = getattr(self, name, None)
        return None if value is None else value.to(device)

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
            parameters = [parameter for parameter in group["params"] if parameter in self.state]
            steps = [self.state[parameter].get("step", group_step) for parameter in parameters]
            if group_step is not None and group_step not in steps:
                # Apex counts in the group alone, and saves again the counts that it had loaded.
                steps = [group_step] * len(steps)
            for parameter, step in zip(parameters, steps, strict=True):
                self.state[parameter]["step"] = torch.tensor(float(step), device=parameter.device)

"""Apex's fused optimizers that update each element by itself, on torch's multi-tensor kernels."""

from collections.abc import Callable, Iterable
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.optimizer import required
from torch.optim.sgd import sgd

Tensors = list[Tensor] | tuple[Tensor, ...]
MOMENTUM = "momentum_buffer"  # created by the first step of FusedSGD


def _have_one_layout(*tensors: Tensor) -> bool:
    """Return whether tensors of one shape have no gaps, and their elements in the same order."""
    # Most are contiguous, and this is called for each parameter at each step: the fastest test.
    if all(map(Tensor.is_contiguous, tensors)):
        return True
    for memory_format in (torch.channels_last, torch.channels_last_3d):
        if all(tensor.is_contiguous(memory_format=memory_format) for tensor in tensors):
            return True
    layouts = [
        [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
        for tensor in (torch.empty_like(tensors[0], device="meta"), *tensors)  # that has no gaps
    ]
    return all(layout == layouts[0] for layout in layouts)


def _with_one_layout(*tensors: Tensor) -> list[Tensor]:
    like = torch.empty_like(tensors[0])
    return [torch.empty_like(like, dtype=tensor.dtype).copy_(tensor) for tensor in tensors]


class FusedOptimizer(torch.optim.Optimizer):
    """Optimizer that passes parameters to `_update` in lists, for multi-tensor kernels.

    Each list is of one group, one device and one type, and always fp32: half parameters are
    updated in an fp32 copy, and their state is fp32, whatever they are.

    Arguments that several optimizers have:
        params: parameters or groups of them, fp32, fp16 or bf16.
        bias_correction: False leaves the moments' start-up bias in.
        amsgrad: raises RuntimeError if true, as in Apex.
        grad_averaging: False adds gradients to the first moment with factor 1, not 1 − beta1.
        set_grad_none: whether ``zero_grad`` drops gradients or sets them to zero.
    """

    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, params: Iterable, set_grad_none: bool, amsgrad: bool = False, **defaults: Any
    ) -> None:
        if amsgrad:
            raise RuntimeError(f"{type(self).__name__} does not support the AMSGrad variant.")
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    def __getstate__(self) -> dict:
        """Return torch's state and the flags that belong to no group; for copy and pickle."""
        flags = {name: value for name, value in vars(self).items() if isinstance(value, bool)}
        return flags | super().__getstate__()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or zero them if `set_grad_none` was False."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; return the result of `closure`. Raises RuntimeError for sparse gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._before_step()
        for group in self.param_groups:
            by_kind: dict[tuple, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError(f"{type(self).__name__} does not take sparse gradients.")
                by_kind.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            for parameters in by_kind.values():
                self._step_same(group, parameters)
        return loss

    def _step_same(self, group: dict, parameters: list[Tensor]) -> None:
        """Update `parameters` of one device and type."""
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state.update(self._new_state(parameter))
        values = list(parameters)
        grads: list[Any] = [parameter.grad for parameter in parameters]
        if parameters[0].dtype in (torch.float16, torch.bfloat16):
            values = [value.float() for value in values]
            grads = [grad.float() for grad in grads]
        for index, state in enumerate(states):
            moments = [name for name in (*self.moments, MOMENTUM) if state.get(name) is not None]
            tensors = values[index], grads[index], *(state[name] for name in moments)
            if not _have_one_layout(*tensors):
                # The fused kernels read memory from end to end, on the CPU without a check.
                values[index], grads[index], *kept = _with_one_layout(*tensors)
                state.update(zip(moments, kept, strict=True))
        self._update(group, values, grads, states)
        copied = [i for i, value in enumerate(values) if value is not parameters[i]]
        if copied:
            torch._foreach_copy_([parameters[i] for i in copied], [values[i] for i in copied])

    def _before_step(self) -> None:
        """Prepare a step, before any `_update`."""

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step: moments with its strides."""
        return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in self.moments}

    def _update(self, group: dict, values: Tensors, grads: Tensors, states: list[dict]) -> None:
        """Update `values` and `states` in place; leave `grads` unchanged."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict) -> None:
        """Load as torch does, but keep state fp32 where torch casts it to the parameter's type.

        It gets the strides of the parameter, channels last or not, which the fused kernels assume.
        Raises ValueError for a moment of another shape, behind which these kernels would write, and
        RuntimeError for a state with torch's amsgrad or maximize.
        """
        states: list[tuple[Tensor, dict]] = []

        def check(_: object, state_dict: dict) -> None:
            for group, option in product(state_dict["param_groups"], ("amsgrad", "maximize")):
                if group.get(option):
                    name = type(self).__name__
                    raise RuntimeError(f"{name} cannot continue a state with {option}=True.")
            saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
            own = chain.from_iterable(group["params"] for group in self.param_groups)
            pairs = zip(own, saved, strict=False)  # torch compares their numbers
            states.extend((p, state_dict["state"].get(index, {})) for p, index in pairs)
            self._check_moments(states)

        def restore(_: object) -> None:
            for parameter, state in states:
                for name, value in state.items():
                    if isinstance(value, Tensor) and name != "step":
                        like = parameter if value.shape == parameter.shape else value
                        copy = torch.empty_like(like, dtype=torch.float32, device=parameter.device)
                        self.state[parameter][name] = copy.copy_(value)

        # Between the hooks of others: those before the load, and those after it.
        with (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        ):
            super().load_state_dict(state_dict)

    def _check_moments(self, states: list[tuple[Tensor, dict]]) -> None:
        for parameter, state in states:
            for name in (*self.moments, MOMENTUM):
                value = state.get(name)
                if value is not None and value.shape != parameter.shape:
                    shapes = f"{tuple(value.shape)}, not {tuple(parameter.shape)}"
                    raise ValueError(f"{type(self).__name__}: {name} of a parameter is {shapes}.")


class FusedSGD(FusedOptimizer):
    """SGD with momentum, in multi-tensor kernels.

    Args:
        lr: learning rate; required, here or in each parameter group.
        momentum, dampening, weight_decay, nesterov: as in torch.optim.SGD.
        wd_after_momentum: adds the weight decay to the update, not to the gradient.
        materialize_master_grads: accepted as in Apex; amp always makes the masters' gradients.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning",
    ICML 2013.
    """

    moments = ()  # the momentum starts as the first gradient

    def __init__(  # noqa: PLR0913, Apex's signature
        self,
        params: Iterable,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if value is not required and value < 0:
                raise ValueError(f"FusedSGD: {name} is {value}, and must not be negative.")
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError("FusedSGD: nesterov needs a momentum and no dampening.")
        self.wd_after_momentum = wd_after_momentum
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        super().__init__(params, set_grad_none, False, weight_decay=weight_decay, **defaults)

    def _update(self, group: dict, values: Tensors, grads: Tensors, states: list[dict]) -> None:
        decay, lr = group["weight_decay"], float(group["lr"])
        if decay and self.wd_after_momentum:
            torch._foreach_mul_(values, 1 - lr * decay)
            decay = 0.0
        options = {name: group[name] for name in ("momentum", "dampening", "nesterov")}
        momenta = [state.get(MOMENTUM) for state in states]
        for is_first in (True, False):  # all parameters of a call have a momentum, or none has
            chosen = [i for i, momentum in enumerate(momenta) if (momentum is None) == is_first]
            kept = [momenta[i] for i in chosen]
            of_chosen = [values[i] for i in chosen], [grads[i] for i in chosen], kept
            sgd(*of_chosen, fused=True, lr=lr, weight_decay=decay, maximize=False, **options)
            for i, momentum in zip(chosen, kept if group["momentum"] else (), strict=False):
                states[i][MOMENTUM] = momentum


class FusedAdagrad(FusedOptimizer):
    """Adagrad, in multi-tensor kernels.

    Args:
        adagrad_w_mode: adds the weight decay to the update instead of to the gradient.

    Source: Duchi et al., "Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization", JMLR 2011.
    """

    moments = ("sum",)

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.adagrad_w_mode = adagrad_w_mode
        super().__init__(params, set_grad_none, lr=lr, eps=eps, weight_decay=weight_decay)

    def _update(self, group: dict, values: Tensors, grads: Tensors, states: list[dict]) -> None:
        decay, lr = group["weight_decay"], float(group["lr"])
        sums = [state["sum"] for state in states]
        if decay and not self.adagrad_w_mode:
            grads = torch._foreach_add(grads, values, alpha=decay)
        torch._foreach_addcmul_(sums, grads, grads)
        denominators = torch._foreach_sqrt(sums)
        torch._foreach_add_(denominators, group["eps"])
        if decay and self.adagrad_w_mode:
            torch._foreach_mul_(values, 1 - lr * decay)
        torch._foreach_addcdiv_(values, grads, denominators, -lr)


class FusedAdam(FusedOptimizer):
    """Adam with decoupled weight decay (AdamW), one kernel for many parameters.

    Unlike ``torch.optim.AdamW``, the weight decay defaults to 0. Moments are fp32 whatever the
    parameters are, and the step count is saved both ways: for each group, as Apex has it, and
    for each parameter, as torch has it, so that a checkpoint loads in either.

    Args:
        adam_w_mode: False adds the weight decay to the gradient (Adam with L2).
        capturable, master_weights: raise RuntimeError if true; amp keeps the masters here.

    Source: Kingma and Ba, "Adam", ICLR 2015; Loshchilov and Hutter, "Decoupled Weight Decay
    Regularization", ICLR 2019.
    """

    # amp and GradScaler set found_inf for a step; the kernel skips the update where it is not 0.
    _step_supports_amp_scaling = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "step" in vars(cls) and "_step_supports_amp_scaling" not in vars(cls):
            cls._step_supports_amp_scaling = False

    def __init__(  # noqa: PLR0913, Apex's signature
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
        if capturable or master_weights:
            raise RuntimeError("FusedAdam has neither capturable nor master_weights: use amp at O2")
        self.adam_w_mode = adam_w_mode
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction}
        super().__init__(params, set_grad_none, amsgrad, **defaults)

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, **super()._new_state(parameter)}

    def _before_step(self) -> None:
        """Count the step in the groups, where schedulers read it; a tensor if it may be skipped."""
        found_inf = getattr(self, "found_inf", None)
        taken = 1 if found_inf is None else 1 - found_inf
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + taken

    def _update(self, group: dict, values: Tensors, grads: Tensors, states: list[dict]) -> None:
        steps = counted = [state["step"] for state in states]
        if not group["bias_correction"]:  # after so many steps it is a factor of one
            counted = [torch.full_like(step, 1e30) for step in steps]
        found_inf = getattr(self, "found_inf", None)
        update = adamw if self.adam_w_mode else adam
        means, squares = ([state[name] for state in states] for name in self.moments)
        options: dict[str, Any] = {"weight_decay": group["weight_decay"], "eps": group["eps"]}
        options |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}
        options |= {"lr": float(group["lr"]), "amsgrad": False, "maximize": False}
        options |= {"grad_scale": getattr(self, "grad_scale", None), "found_inf": found_inf}
        update(list(values), list(grads), means, squares, [], counted, fused=True, **options)
        if counted is not steps:
            skipped = 0 if found_inf is None else found_inf.to(values[0].device)
            torch._foreach_add_(steps, 1 - skipped)

    def state_dict(self) -> dict:
        """Return torch's state with the ``step`` of each group in addition to the parameters'."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            states = [saved["state"][index] for index in group["params"] if index in saved["state"]]
            steps = [state["step"] for state in states if "step" in state]
            if steps or "step" in group:
                group["step"] = int(max(steps, default=group.get("step")))
        return saved

    def load_state_dict(self, state_dict: dict) -> None:
        """Load the state of this class, of Apex's FusedAdam, or of torch's Adam and AdamW."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group_step = group.get("step")
            for name, default in self.defaults.items():
                group.setdefault(name, default)
            parameters = [parameter for parameter in group["params"] if parameter in self.state]
            steps = [self.state[parameter].get("step", group_step) for parameter in parameters]
            if group_step is not None and group_step > max(steps, default=group_step):
                # Apex counts in the group alone, torch for the parameters alone; either saves the
                # other counts again as it had loaded them.
                steps = [group_step] * len(steps)
            group["step"] = int(max(steps, default=group_step or 0))
            for parameter, step in zip(parameters, steps, strict=True):
                self.state[parameter]["step"] = torch.tensor(float(step), device=parameter.device)

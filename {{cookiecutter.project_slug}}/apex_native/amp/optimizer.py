"""What amp adds to an optimizer: fp32 masters, gradients kept apart while a backward pass runs,
and steps that are skipped after an overflow."""

import types

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._state import disable_casts
from .models import HALF_TYPES, current_master, make_master, mark_up_to_date
from .scaler import LossScaler


class AmpStash:
    """What ``scale_loss`` and ``step`` know of one optimizer.

    masters: pairs of a half parameter of the model and the fp32 master that is stepped instead.
    plain: the parameters that are stepped as they are.
    stashed: gradients of earlier backward passes, unscaled, set aside during this one.
    found_inf: whether a gradient since the last step overflowed; None if nothing was checked.
    delayed_by: the scaler of blocks with ``delay_unscale`` whose gradients are still scaled.
    """

    def __init__(self) -> None:
        self.masters: list[tuple[Tensor, Tensor]] = []
        self.plain: list[Tensor] = []
        self.stashed: dict[Tensor, Tensor] = {}
        self.found_inf: Tensor | None = None
        self.delayed_by: LossScaler | None = None


def check(optimizers: list[Optimizer]) -> None:
    """Raises RuntimeError for an optimizer that was initialized before, or comes twice."""
    if len(set(optimizers)) < len(optimizers) or any(hasattr(o, "_amp_stash") for o in optimizers):
        raise RuntimeError("An optimizer can be passed through amp.initialize only once.")


def prepare(optimizer: Optimizer, master_weights: bool) -> None:
    """Fits `optimizer` for amp, in place."""
    optimizer._amp_stash = AmpStash()
    for group in optimizer.param_groups:
        _adopt(optimizer, group, master_weights)
    if optimizer.state:
        # Loading casts what is there to the parameters' types, which may be others by now.
        optimizer.load_state_dict(optimizer.state_dict())

    plain_step, plain_zero_grad = optimizer.step, optimizer.zero_grad
    plain_add_param_group = optimizer.add_param_group

    def step(self: Optimizer, closure: object = None) -> object:
        return _step(self, plain_step, closure)

    def zero_grad(self: Optimizer, *args: object, **kwargs: object) -> None:
        plain_zero_grad(*args, **kwargs)
        stash = self._amp_stash
        stash.stashed.clear()
        stash.delayed_by = None
        for parameter, _ in stash.masters:
            parameter.grad = None

    def add_param_group(self: Optimizer, group: dict) -> None:
        plain_add_param_group(group)
        _adopt(self, self.param_groups[-1], master_weights)

    # Bound methods, as learning rate schedulers expect to find them.
    optimizer.step = types.MethodType(step, optimizer)
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)
    optimizer.add_param_group = types.MethodType(add_param_group, optimizer)
    optimizer._lazy_init_maybe_master_weights = _nothing  # the masters are there from the start


def _nothing() -> None:
    """What scripts call before they load an optimizer, because Apex makes masters late."""


def _adopt(optimizer: Optimizer, group: dict, master_weights: bool) -> None:
    """Takes the parameters of `group` in, putting masters in place of half parameters."""
    stash = optimizer._amp_stash
    for index, parameter in enumerate(group["params"]):
        if master_weights and parameter.requires_grad and parameter.dtype in HALF_TYPES:
            master = make_master(parameter)
            group["params"][index] = master
            stash.masters.append((parameter, master))
            if parameter in optimizer.state:
                optimizer.state[master] = optimizer.state.pop(parameter)
        else:
            stash.plain.append(parameter)


def before_backward(optimizer: Optimizer) -> None:
    """Sets the gradients that are there aside, so that the pass to come brings only its own.

    Those of earlier passes are unscaled, the new ones will be scaled, perhaps by another scale.
    """
    stash = optimizer._amp_stash
    for parameter, _ in stash.masters:
        parameter.grad = None  # what it held is in the master's gradient already
    for parameter in stash.plain:
        if parameter.grad is not None:
            # DistributedDataParallel would overwrite a gradient that is a view of its bucket.
            is_view = not parameter.grad.is_sparse and parameter.grad._is_view()
            stash.stashed[parameter] = parameter.grad.clone() if is_view else parameter.grad
            parameter.grad = None


def after_backward(optimizer: Optimizer, scaler: LossScaler) -> Tensor | None:
    """Unscales what the pass brought and adds it to what was set aside.

    Returns what `LossScaler.unscale_` does: whether a new gradient was inf or nan.
    """
    stash = optimizer._amp_stash
    masters = [pair for pair in stash.masters if pair[0].grad is not None]
    master_grads = [torch.empty_like(master) for _, master in masters]
    if masters:
        grads = [parameter.grad for parameter, _ in masters]
        dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
        torch._foreach_copy_(master_grads, dense)
    plain_grads = [parameter.grad for parameter in stash.plain if parameter.grad is not None]
    found_inf = scaler.unscale_(master_grads + plain_grads)

    for (_, master), grad in zip(masters, master_grads, strict=True):
        master.grad = grad if master.grad is None else master.grad.add_(grad)
    for parameter, grad in stash.stashed.items():
        parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
    stash.stashed.clear()
    stash.delayed_by = None
    return found_inf


def after_failure(optimizer: Optimizer) -> None:
    """Drops what a backward pass that failed has left, and puts back what was set aside."""
    stash = optimizer._amp_stash
    for parameter, _ in stash.masters:
        parameter.grad = None
    for parameter in stash.plain:
        parameter.grad = stash.stashed.pop(parameter, None)


def _skips_on_device(optimizer: Optimizer) -> bool:
    """Readies the next step; whether its kernel itself skips it where `found_inf` is set."""
    is_ready = not isinstance(optimizer, torch.optim.SGD) or _ready_sgd(optimizer)
    return is_ready and getattr(optimizer, "_step_supports_amp_scaling", False)


def _ready_sgd(optimizer: torch.optim.SGD) -> bool:
    """Readies torch's SGD for its next step; returns whether it can be trusted to skip that.

    SGD(fused=True) says that it skips, but leaves its momentum buffers uninitialised when it skips
    its first step, and the weights turn to nan at the second. So it is trusted only once it has
    them all. And it fails where a parameter has its first gradient after others of its group: that
    one is given a momentum of zeros.
    """
    is_trusted = True
    for group in optimizer.param_groups:
        if not group["fused"]:
            is_trusted = False
        elif group["momentum"]:
            stepped = [p for p in group["params"] if p.grad is not None]
            new = [p for p in stepped if optimizer.state.get(p, {}).get("momentum_buffer") is None]
            if len(new) < len(stepped) and not group["dampening"]:
                for parameter in new:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            elif new:
                is_trusted = False
    return is_trusted


def _step(optimizer: Optimizer, plain_step: types.MethodType, closure: object) -> object:
    stash = optimizer._amp_stash
    if stash.delayed_by:
        raise RuntimeError(
            "optimizer.step() was called while gradients are still scaled: after blocks with "
            "delay_unscale=True or under no_sync(), take one more amp.scale_loss without them."
        )
    found_inf, stash.found_inf = stash.found_inf, None
    for parameter, _ in stash.masters:
        current_master(parameter)
    if closure is not None and (found_inf is not None or stash.masters):
        raise RuntimeError("amp does not support optimizer.step(closure): call step() without it.")
    arguments = () if closure is None else (closure,)
    skips_on_device = _skips_on_device(optimizer)

    result = None
    with disable_casts():
        if found_inf is None:
            result = plain_step(*arguments)
        elif skips_on_device:
            optimizer.grad_scale, optimizer.found_inf = None, found_inf
            try:
                result = plain_step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        elif not found_inf.item():  # the CPU waits here, as it does in torch.amp.GradScaler.step
            result = plain_step()
    if stash.masters:
        parameters, masters = zip(*stash.masters, strict=True)
        with torch.no_grad():
            torch._foreach_copy_(list(parameters), list(masters))
        for parameter in parameters:
            mark_up_to_date(parameter)
        for master in masters:
            master.grad = None  # the user's model.zero_grad() would not reach it
    return result

"""``scale_loss``, and what it needs of an optimizer: masters, stashed gradients, skipped steps."""

import contextlib
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .casting import (
    HALF_TYPES,
    current_master,
    disable_casts,
    finish_master,
    make_master,
    mark_up_to_date,
)
from .state import LossScaler, _amp_state

PACKAGE = __name__.removesuffix("amp.handle")


@dataclass(eq=False)
class AmpStash:
    """State that ``scale_loss`` and ``step`` keep for one optimizer, as its ``_amp_stash``."""

    masters: dict[Tensor, Tensor] = field(default_factory=dict)  # fp32, of half parameters
    new: list[Tensor] = field(default_factory=list)  # half parameters before their first backward
    plain: list[Tensor] = field(default_factory=list)  # parameters that are stepped as they are
    # Gradients of earlier backward passes, unscaled, set aside during this one.
    stashed: dict[Tensor, Tensor] = field(default_factory=dict)
    # 1 if a gradient since the last step overflowed, else 0; None if nothing was checked.
    found_inf: Tensor | None = None
    # Scaler, and its scale at the time, of blocks with ``delay_unscale`` whose gradients are still
    # scaled. Another optimizer's block may change the scaler's own scale meanwhile.
    delayed: tuple[LossScaler, Tensor | float] | None = None
    lazy_init_called: bool = True  # scripts read it; masters are there from the start
    open_blocks: int = 0  # of ``scale_loss``, which may be nested
    step: Any = None  # amp's, which a script may replace
    is_skipping: bool = False  # a step of the script's

    # Names of Apex's stash, which scripts with an overflow check of their own read.
    all_fp16_params = property(
        lambda self: list(self.masters) or [p for p in self.plain if p.dtype in HALF_TYPES]
    )
    all_fp32_from_fp16_params = property(lambda self: list(self.masters.values()))
    already_patched = property(lambda self: bool(self.found_inf))  # the next step is skipped
    # For each group. They are there with masters only: FusedSGD of an installed Apex asks for that.
    fp16_groups: list[list[Tensor]] = field(init=False, repr=False)
    fp32_from_fp16_groups: list[list[Tensor]] = field(init=False, repr=False)
    fp32_from_fp32_groups: list[list[Tensor]] = field(init=False, repr=False)

    def drop_master_grads(self) -> None:
        """Drop them after a step, taken or skipped: ``model.zero_grad()`` would not reach them."""
        for master in self.masters.values():
            master.grad = None


def master_pairs(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Return the model's half parameters and their fp32 masters, if `optimizer` steps any."""
    return list(getattr(optimizer, "_amp_stash", AmpStash()).masters.items())


@contextlib.contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | list[Optimizer],
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yield ``loss.float() × scale`` for the backward pass, and unscale its gradients.

    On leaving, the new gradients are divided by the scale and added to those that were there
    before, so that they can be clipped, accumulated and stepped as if there were no scale; and
    if one of them is inf or nan, the next step of each of `optimizers` is skipped.

    Args:
        loss: of any shape, usually a scalar.
        optimizers: those whose parameters this backward pass gives gradients to.
        loss_id: which of the ``num_losses`` scalers of ``initialize`` to use.
        model: accepted as in Apex, and unused.
        delay_unscale: leave the gradients scaled; a later block without it unscales them all.
            This is implied after a forward pass in this DistributedDataParallel's ``no_sync()``.
        delay_overflow_check: leave the scale to its ``update_scale()``, and skip no step.

    Raises RuntimeError if ``initialize`` was not called, or not with one of `optimizers`, or before
    the models were moved to a GPU; and FloatingPointError, where Apex halves the scale for ever, if
    every gradient overflows.
    """
    level = _amp_state.level
    if level is None:
        raise RuntimeError("amp.scale_loss needs amp.initialize(model, optimizer) first.")
    if not level.enabled:
        yield loss
        return

    if _amp_state.device_type == "cpu" and loss.device.type != "cpu":  # the opposite is allowed
        raise RuntimeError(
            f"amp.initialize prepared models on the CPU, and the loss is on {loss.device}: move "
            "the models there first, then call amp.initialize."
        )
    given = _prepared(optimizers, bool(level.master_weights))
    stashes: list[AmpStash] = [optimizer._amp_stash for optimizer in given]
    scaler, factor = _scaler_for(stashes, loss_id)
    # The gradients' types were settled in the forward pass: the backward pass runs without casts.
    if not (scaler.dynamic or level.master_weights) and factor == 1.0:
        with disable_casts():
            yield loss.float()
        return

    scaler.report()
    delay_unscale = delay_unscale or _holds_unsynced(stashes)
    with _backward_pass(stashes):
        yield loss.float() * (factor.to(loss.device) if isinstance(factor, Tensor) else factor)

    if delay_unscale:
        for stash in stashes:
            stash.delayed = scaler, factor
        return
    unscaled: set[Tensor] = set()  # optimizers may share parameters
    found: list[Any] = [_after_backward(stash, factor, unscaled) for stash in stashes] or [
        scaler.counter.new_zeros((), dtype=torch.float32)  # as for the gradient of an input alone
    ]
    if scaler.dynamic and delay_overflow_check:
        scaler._overflow_buf = reduce(torch.maximum, found).int().reshape(1)
    elif scaler.dynamic:
        _check_overflow(given, scaler, reduce(torch.maximum, found))
    elif not delay_overflow_check:
        scaler.counter += 1  # as Apex, whose scripts read it after a step


def _prepared(optimizers: Optimizer | list[Optimizer], master_weights: bool) -> list[Any]:
    """Return the optimizers as a list. Raises RuntimeError if one has no state of amp."""
    given: list[Any] = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    if not all(hasattr(optimizer, "_amp_stash") for optimizer in given):
        raise RuntimeError("amp.scale_loss needs optimizers that amp.initialize returned.")
    for optimizer in given:
        _adopt_new(optimizer, master_weights)
    return given


def _adopt_new(optimizer: Any, master_weights: bool) -> None:
    """Record parameters that a script has put into the groups itself, or has unfrozen."""
    stash: AmpStash = optimizer._amp_stash
    stepped = {*map(id, chain.from_iterable(group["params"] for group in optimizer.param_groups))}
    is_known = stepped <= {*map(id, stash.plain), *map(id, stash.masters.values())}
    if not is_known or (
        master_weights and any(p.requires_grad and p.dtype in HALF_TYPES for p in stash.plain)
    ):
        for half, master in [*stash.masters.items()]:
            if stepped.isdisjoint((id(half), id(master))):
                del stash.masters[half]
                optimizer.state.pop(master, None)
        _adopt_all(optimizer, master_weights)


def _scaler_for(stashes: list[AmpStash], loss_id: int) -> tuple[LossScaler, Tensor | float]:
    """Return the scaler of that loss and its scale, or those of gradients that are still scaled.

    Gradients that are scaled by other factors are brought to the one returned.
    """
    scalers = _amp_state.scalers
    if not 0 <= loss_id < len(scalers):
        raise RuntimeError(
            f"amp.scale_loss was given loss_id={loss_id}, and amp.initialize "
            f"num_losses={len(scalers)}: ids start at 0."
        )
    delayed = [stash.delayed for stash in stashes if stash.delayed]
    if not delayed:
        return scalers[loss_id], scalers[loss_id].factor
    scaler, factor = delayed[0]
    for stash in stashes:
        if stash.delayed and stash.delayed[1] is not factor:  # one block unscales them all
            grads = [p.grad for p in (*stash.plain, *stash.masters) if p.grad is not None]
            LossScaler.unscale_(grads, stash.delayed[1] / factor)
            stash.delayed = scaler, factor
    return scaler, factor


def _holds_unsynced(stashes: list[AmpStash]) -> bool:
    """Return whether gradients of these optimizers wait for a pass after a ``no_sync()``.

    Unscaled, they would be set aside in the next backward pass, and miss its reduction.
    """
    models = [m for m in _amp_state.parallel_models if m.is_unsynced and not m.awaits_averages]
    unsynced = {parameter for model in models for parameter in model.parameters()}
    if not unsynced:  # as at nearly every step
        return False
    return any(not unsynced.isdisjoint((*stash.plain, *stash.masters)) for stash in stashes)


def _check_overflow(optimizers: list[Any], scaler: LossScaler, found_inf: Tensor) -> None:
    """Update the scale, and have the optimizers skip their next step if a gradient overflowed."""
    if scaler.is_patched:
        scaler._overflow_buf = found_inf.int().reshape(1)
        found_inf = torch.full_like(found_inf, float(scaler.update_scale()))
    else:
        scaler.update_(found_inf)
    if scaler.overflows_in_a_row >= scaler.PATIENCE:
        raise FloatingPointError(
            f"{scaler.PATIENCE} backward passes in a row gave gradients that are not finite, and "
            f"the loss scale is down to {scaler.loss_scale():g}: a lower scale will not help. The "
            f"first gradient that is not finite is that of {_first_non_finite_gradient()}."
        )
    for optimizer in optimizers:
        stash: AmpStash = optimizer._amp_stash
        earlier = stash.found_inf
        stash.found_inf = found_inf if earlier is None else earlier.maximum(found_inf)
        _skip_replaced_step(optimizer)


def _skip_replaced_step(optimizer: Any) -> None:
    """Skip a step that a script has put in place of amp's, once, if a gradient overflowed."""
    replaced, stash = optimizer.step, optimizer._amp_stash
    inner = inspect.unwrap(replaced)  # of a scheduler's wrapper
    if (
        getattr(inner, "__func__", inner) is stash.step
        or stash.is_skipping
        or not stash.found_inf.item()
    ):
        return

    def skip(*args: object, **kwargs: object) -> None:
        optimizer.step, stash.found_inf, stash.is_skipping = replaced, None, False
        stash.drop_master_grads()

    optimizer.step, stash.is_skipping = skip, True


def _first_non_finite_gradient() -> str:
    for model in _amp_state.models:
        for name, parameter in model.named_parameters():
            grad: Any = parameter.grad
            if hasattr(grad, "to_local"):  # a DTensor; ranks come here at different times
                grad = grad.to_local()
            if grad is not None and not grad.isfinite().all():
                return name
    return "a parameter outside the models"


def check_optimizers(optimizers: list[Optimizer]) -> None:
    """Raise RuntimeError for an optimizer that was initialized before, or is given twice."""
    if len(set(optimizers)) < len(optimizers) or any(hasattr(o, "_amp_stash") for o in optimizers):
        raise RuntimeError("An optimizer can be passed through amp.initialize only once.")


def prepare_optimizer(optimizer: Any, master_weights: bool) -> None:
    """Extend `optimizer` for amp, in place."""
    optimizer._amp_stash = AmpStash()
    _adopt_all(optimizer, master_weights)
    if optimizer.state:
        # Loading casts what is there to the parameters' types, which may be others by now.
        optimizer.load_state_dict(optimizer.state_dict())

    plain_step, plain_zero_grad = optimizer.step, optimizer.zero_grad
    plain_add_param_group = optimizer.add_param_group

    def step(self: Optimizer, *args: object, **kwargs: object) -> object:
        return _step(self, plain_step, *args, **kwargs)

    def zero_grad(self: Any, *args: object, **kwargs: object) -> None:
        plain_zero_grad(*args, **kwargs)
        self._amp_stash.stashed.clear()
        self._amp_stash.delayed = None
        for parameter in self._amp_stash.masters:
            parameter.grad = None

    def add_param_group(self: Optimizer, group: dict) -> None:
        plain_add_param_group(group)
        _adopt_all(self, master_weights)

    # Bound methods, as learning rate schedulers expect to find them.
    optimizer.step = types.MethodType(step, optimizer)
    optimizer._amp_stash.step = step
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)
    optimizer.add_param_group = types.MethodType(add_param_group, optimizer)
    # Scripts call this before they load an optimizer, because Apex creates masters late.
    optimizer._lazy_init_maybe_master_weights = optimizer._amp_lazy_init = lambda: None
    if master_weights:  # scripts that change the masters call it
        masters = optimizer._amp_stash.masters
        optimizer._master_params_to_model_params = partial(_copy_masters, masters)


def _adopt(optimizer: Any, group: dict, master_weights: bool) -> None:
    """Record the parameters of `group`, replacing half parameters by masters."""
    stash: AmpStash = optimizer._amp_stash
    masters = set(stash.masters.values())
    for index, parameter in enumerate(group["params"]):
        if parameter in masters or parameter in stash.masters:  # put back by a script
            group["params"][index] = stash.masters.get(parameter, parameter)
            continue
        if master_weights and parameter.requires_grad and parameter.dtype in HALF_TYPES:
            master = make_master(parameter)
            group["params"][index] = master
            stash.masters[parameter] = master
            stash.new.append(parameter)
            if parameter in optimizer.state:
                state = optimizer.state.pop(parameter).items()
                optimizer.state[master] = {name: _to_fp32(value) for name, value in state}
        else:
            stash.plain.append(parameter)
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    stepped = {p for each in inner for group in each.param_groups for p in group["params"]}
    if not stepped.isdisjoint(stash.masters):
        raise RuntimeError(
            f"{type(optimizer).__name__} steps its parameters by an optimizer of its own, which "
            "does not train the fp32 masters: use it at opt_level O1 or O4."
        )


def _adopt_all(optimizer: Any, master_weights: bool) -> None:
    """Record the parameters of all groups."""
    stash: AmpStash = optimizer._amp_stash
    earlier, stash.plain = stash.plain, []
    for group in optimizer.param_groups:
        _adopt(optimizer, group, master_weights)
    if earlier:  # a script may step others in their place, such as flat copies of its own
        of_models = {*map(id, chain.from_iterable(m.parameters() for m in _amp_state.models))}
        present = {*map(id, (*stash.plain, *stash.masters))}
        stash.plain += [p for p in earlier if id(p) in of_models - present]
    if master_weights:
        halves = {master: half for half, master in stash.masters.items()}
        groups = [group["params"] for group in optimizer.param_groups]
        stash.fp16_groups = [[halves[p] for p in group if p in halves] for group in groups]
        stash.fp32_from_fp16_groups = [[p for p in group if p in halves] for group in groups]
        stash.fp32_from_fp32_groups = [[p for p in group if p not in halves] for group in groups]
        # FusedSGD of an installed Apex would read the gradients in a form that only Apex has.
        if hasattr(optimizer, "materialize_master_grads"):
            optimizer.materialize_master_grads = True


def _to_fp32(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in HALF_TYPES
    return value.float() if is_half else value


@contextlib.contextmanager
def _backward_pass(stashes: list[AmpStash]) -> Iterator[None]:
    """Keep earlier gradients apart during the body; if that fails, they are all that is left."""
    fresh = [stash for stash in stashes if not stash.delayed]
    for stash in fresh:
        _before_backward(stash)
    for stash in stashes:
        stash.open_blocks += 1
    try:
        with disable_casts():
            yield
    except BaseException:
        for stash in fresh:
            _after_failure(stash)
        raise
    finally:
        for stash in stashes:
            stash.open_blocks -= 1
        for model in _amp_state.parallel_models:
            model.is_due = False


def kept(gradient: Tensor) -> Tensor:
    """Return a copy of a view, of a bucket that DDP would overwrite, and others unchanged."""
    # No public function finds views; without this one, every gradient is copied.
    is_view = getattr(gradient, "_is_view", lambda: True)
    return gradient.clone() if is_view() else gradient


def _before_backward(stash: AmpStash) -> None:
    """Set existing gradients, which are unscaled, aside from the scaled ones that follow."""
    while stash.new:
        finish_master(stash.new.pop())
    for parameter in stash.masters:
        parameter.grad = None  # what it held is in the master's gradient already
    for parameter in stash.plain:
        if parameter.grad is not None:
            stash.stashed[parameter] = kept(parameter.grad)
            parameter.grad = None


def _after_backward(
    stash: AmpStash, factor: Tensor | float, unscaled: set[Tensor]
) -> Tensor | None:
    """Unscale the new gradients and add them to those set aside; return what `unscale_` does.

    Parameters in `unscaled` are left out, and the others are added to it.
    """
    halves = [p for p in stash.masters if p.grad is not None and p not in unscaled]
    plain = [p for p in stash.plain if p.grad is not None and p not in unscaled]
    unscaled.update(halves, plain)
    masters = [stash.masters[half] for half in halves]
    master_grads = [torch.empty_like(master) for master in masters]
    half_grads: list[Any] = [half.grad for half in halves]
    if halves:
        dense = [grad.to_dense() if grad.is_sparse else grad for grad in half_grads]
        torch._foreach_copy_(master_grads, dense)
    plain_grads: list[Any] = [parameter.grad for parameter in plain]
    found_inf = LossScaler.unscale_(master_grads + plain_grads, factor)

    for master, grad in zip(masters, master_grads, strict=True):
        master.grad = grad if master.grad is None else master.grad.add_(grad)
    for parameter, grad in stash.stashed.items():
        parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
    stash.stashed.clear()
    stash.delayed = None
    return found_inf


def _after_failure(stash: AmpStash) -> None:
    """Drop the gradients of a failed backward pass, and restore those set aside."""
    for parameter in stash.masters:
        parameter.grad = None
    for parameter in stash.plain:
        parameter.grad = stash.stashed.pop(parameter, None)


def _skips_on_device(optimizer: Optimizer, plain_step: types.MethodType) -> bool:
    """Prepare the next step; return whether its kernel skips it where `found_inf` is set."""
    own = inspect.unwrap(plain_step)
    if getattr(own, "__func__", own) is not inspect.unwrap(type(optimizer).step):
        return False  # a script's, which does more
    if isinstance(optimizer, torch.optim.SGD):
        ready = [_prepare_sgd(optimizer, group) for group in optimizer.param_groups]
        if not all(ready):
            return False
    # A subclass may have a step of its own, which the attribute does not describe.
    is_known = type(optimizer).step.__module__.startswith((PACKAGE, "torch."))
    return is_known and getattr(optimizer, "_step_supports_amp_scaling", False)


def _prepare_sgd(optimizer: torch.optim.SGD, group: dict) -> bool:
    """Prepare a group of torch's SGD for its next step; return whether it skips that correctly.

    SGD(fused=True) claims to skip, but leaves its momentum buffers uninitialized when it skips its
    first step, and the weights turn to nan at the second. So it is relied on only once it has them
    all. And it fails where a parameter has its first gradient after others of its group: that one
    gets a momentum of zeros.
    """
    if not group["fused"] or not group["momentum"]:
        return group["fused"]
    stepped = [p for p in group["params"] if p.grad is not None]
    new = [p for p in stepped if optimizer.state.get(p, {}).get("momentum_buffer") is None]
    if len(new) < len(stepped) and not group["dampening"]:
        for parameter in new:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return True
    return not new


def _step(optimizer: Any, plain_step: types.MethodType, *args: object, **kwargs: object) -> object:
    """Take a step of `optimizer`, unless a gradient overflowed, and copy masters to the model."""
    stash: AmpStash = optimizer._amp_stash
    if stash.open_blocks:
        raise RuntimeError(
            "optimizer.step() was called inside the block of amp.scale_loss, which unscales the "
            "gradients at its end: call step() after the block."
        )
    if stash.delayed:
        raise RuntimeError(
            "optimizer.step() was called while gradients are still scaled: after blocks with "
            "delay_unscale=True or a forward pass in no_sync(), take one more without them."
        )
    found_inf, stash.found_inf = stash.found_inf, None
    for parameter in stash.masters:
        current_master(parameter)
    has_closure = any(map(callable, (*args, *kwargs.values())))
    if has_closure and (found_inf is not None or stash.masters):
        raise RuntimeError("amp does not support optimizer.step(closure): call step() without it.")
    skips_on_device = _skips_on_device(optimizer, plain_step)

    result = None
    with disable_casts():
        if found_inf is not None and skips_on_device:
            optimizer.grad_scale, optimizer.found_inf = None, found_inf
            try:
                result = plain_step(*args, **kwargs)
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        # The CPU waits here for found_inf, as it does in torch.amp.GradScaler.step.
        elif found_inf is None or not found_inf.item():
            result = plain_step(*args, **kwargs)
    _copy_masters(stash.masters)
    stash.drop_master_grads()
    return result


@torch.no_grad()
def _copy_masters(masters: dict[Tensor, Tensor]) -> None:
    """Copy the masters to the model, if there are any."""
    if not masters:
        return
    torch._foreach_copy_(list(masters), list(masters.values()))
    for parameter in masters:
        mark_up_to_date(parameter)

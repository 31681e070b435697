"""``initialize``: from plain models and optimizers to mixed precision."""

import weakref
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from . import models as casting
from . import optimizer as stepping
from ._state import _amp_state, say_if_verbose, set_function_casts
from .functions import apply_registered
from .properties import Properties, properties_for
from .scaler import LossScaler


def initialize(
    models: nn.Module | list[nn.Module],
    optimizers: Optimizer | list[Optimizer] | None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> object:
    """Readies models and optimizers for training at `opt_level`, in place.

    Call it once, with the models on their device, and before any DistributedDataParallel.

    ====== ============ ============== ======== ============ ==========
    level  weights      functions cast BN fp32  fp32 masters loss scale
    ====== ============ ============== ======== ============ ==========
    O0     fp32         no             –        no           1.0
    O1     as they are  to fp16        –        –            dynamic
    O2     fp16         no             yes      yes          dynamic
    O3     fp16         no             no       no           1.0
    O4     as they are  to bf16        –        –            1.0
    O5     bf16         no             yes      yes          1.0
    ====== ============ ============== ======== ============ ==========

    On a CPU that cannot compute in fp16, bfloat16 serves in its place, and fp32 where that is
    missing too; one line says so.

    Args:
        models, optimizers: one, or a list; without optimizers, for inference only.
        enabled: False makes every call of amp do nothing.
        cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale:
            override what the level says, where not None. loss_scale takes "dynamic", a number,
            or a number in a string.
        cast_model_outputs: the type of the models' outputs (fp32 at levels that cast weights).
        num_losses: how many loss scalers to keep, for ``scale_loss(..., loss_id=...)``.
        verbosity: 0 silences amp.
        min_loss_scale, max_loss_scale: limits of a dynamic scale.

    Returns:
        The models, and the optimizers if any were given; each as a list if it came as one.

    Raises:
        RuntimeError: an unknown level, an override that contradicts it, a model that is fp16 or
            wrapped for parallel training already, an optimizer that was given before.
        TypeError: models or optimizers in another container than a list.
    """
    _amp_state.verbosity = verbosity
    if not enabled:
        _amp_state.opt_properties = Properties(opt_level, enabled=False)
        _amp_state.loss_scalers = []
        set_function_casts(_amp_state.device_type, None)
        return models if optimizers is None else (models, optimizers)

    model_list = _as_list(models, nn.Module, "models")
    optimizer_list = [] if optimizers is None else _as_list(optimizers, Optimizer, "optimizers")
    properties = properties_for(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    casting.check(model_list)
    stepping.check(optimizer_list)
    device = _device_of(model_list)
    if cast_model_type is None:
        properties = _for_device(properties, device)

    if properties.cast_model_type:
        for model in model_list:
            casting.cast_model(
                model,
                properties.cast_model_type,
                bool(properties.keep_batchnorm_fp32),
                cast_model_outputs or torch.float32,
            )
    elif cast_model_outputs is not None:
        for model in model_list:
            casting.cast_outputs(model, cast_model_outputs)
    for optimizer in optimizer_list:
        stepping.prepare(optimizer, bool(properties.master_weights))

    casts_functions = properties.patch_torch_functions and properties.function_type != torch.float32
    set_function_casts(device.type, properties.function_type if casts_functions else None)
    if casts_functions:
        apply_registered()
    _amp_state.opt_properties = properties
    _amp_state.models = weakref.WeakSet(model_list)
    _amp_state.loss_scalers = [
        LossScaler(properties.loss_scale, device, index, min_loss_scale, max_loss_scale)
        for index in range(num_losses)
    ]
    return models if optimizers is None else (models, optimizers)


def _as_list(value: object, kind: type, name: str) -> list:
    if isinstance(value, kind):
        return [value]
    if isinstance(value, list) and all(isinstance(item, kind) for item in value):
        return value
    raise TypeError(
        f"amp.initialize takes {name} as one {kind.__name__} or a list of them, "
        f"not {type(value).__name__}."
    )


def _device_of(models: list[nn.Module]) -> torch.device:
    tensors = (tensor for model in models for tensor in model.parameters())
    return next(tensors, torch.empty(0)).device


def _for_device(properties: Properties, device: torch.device) -> Properties:
    """`properties` with the half type that `device` computes with, saying so if it is another."""
    is_cast = properties.patch_torch_functions
    wanted = properties.function_type if is_cast else properties.cast_model_type
    if wanted is None:
        return properties
    served = casting.half_type(wanted, device)
    if served != wanted:
        say_if_verbose(
            f"amp: {properties.opt_level} computes in {_name(served)} on this CPU, "
            f"not in {_name(wanted)}"
        )
    return replace(properties, **{"function_type" if is_cast else "cast_model_type": served})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

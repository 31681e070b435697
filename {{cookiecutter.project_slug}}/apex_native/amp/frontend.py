"""``initialize``: from plain models and optimizers to mixed precision."""

import math
import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .casting import cast_model, cast_output, check_models, half_type, set_function_casts
from .handle import check_optimizers, prepare_optimizer
from .state import LossScaler, _amp_state, log_if_verbose, master_params


@dataclass(frozen=True)
class Properties:
    """Meaning of an opt_level. The names are Apex's keyword arguments."""

    opt_level: str
    cast_model_type: torch.dtype | None = None  # of weights and inputs
    patch_torch_functions: bool = False  # cast functions one by one, to the next type
    function_type: torch.dtype = torch.float16
    keep_batchnorm_fp32: bool | None = None  # None where functions are cast, not the model
    master_weights: bool | None = None  # likewise
    loss_scale: float | str = 1.0  # or "dynamic"
    enabled: bool = True

    options = property(vars)  # scripts read Apex's dictionary


OPT_LEVELS = {
    level.opt_level: level
    for level in (
        Properties("O0", cast_model_type=torch.float32, master_weights=False),
        Properties("O1", patch_torch_functions=True, loss_scale="dynamic"),
        Properties(
            "O2", torch.float16, keep_batchnorm_fp32=True, master_weights=True, loss_scale="dynamic"
        ),
        Properties("O3", torch.float16, keep_batchnorm_fp32=False, master_weights=False),
        # The next two are of ROCm's fork: O1 and O2 in bfloat16, which needs no loss scaling.
        Properties("O4", patch_torch_functions=True, function_type=torch.bfloat16),
        Properties("O5", torch.bfloat16, keep_batchnorm_fp32=True, master_weights=True),
    )
}


def initialize(  # noqa: PLR0913, Apex's signature
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
) -> Any:
    """Prepare models and optimizers for training at `opt_level`, in place.

    Call it once, with the models on their device, and before any DistributedDataParallel.
    README.md has a table of the levels. Types that a CPU cannot compute in are replaced.

    Args:
        models, optimizers: one, or a list; without optimizers, for inference only.
        enabled: False makes every call of amp do nothing.
        cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale:
            override the level's values, where not None. loss_scale takes "dynamic", a number,
            or a number in a string.
        cast_model_outputs: the type of the models' outputs (fp32 at levels that cast weights).
        num_losses: how many loss scalers to keep, for ``scale_loss(..., loss_id=...)``.
        verbosity: 0 silences amp.
        min_loss_scale, max_loss_scale: limits of a dynamic scale.

    Returns the models, and the optimizers if any were given; each as a list if it came as one.

    Raises RuntimeError for an unknown level, an override that contradicts it, a model that is fp16
    or wrapped for parallel training already, and an optimizer that was given before or, with
    masters, wraps another; TypeError for models or optimizers in a container other than a list.
    """
    _amp_state.verbosity = verbosity
    if not enabled:
        _amp_state.level = Properties(opt_level, enabled=False)
        _amp_state.scalers = []
        set_function_casts(_amp_state.device_type, torch.float32)
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
    check_models(model_list)
    check_optimizers(optimizer_list)
    tensors = [tensor for model in model_list for tensor in model.parameters()]
    tensors += [tensor for each in optimizer_list for tensor in master_params(each)]
    device = tensors[0].device if tensors else torch.device("cpu")
    if cast_model_type is None or properties.patch_torch_functions:
        if any(hasattr(tensor, "placements") for tensor in tensors):  # a DTensor: slow to import
            properties = replace(properties, cast_model_type=None)  # FSDP casts what it gathers
        properties = _for_device(properties, device)

    if properties.cast_model_type is not None:
        cast_model_outputs = cast_model_outputs or torch.float32
    for model in model_list:
        if properties.cast_model_type is not None:
            cast_model(model, properties.cast_model_type, bool(properties.keep_batchnorm_fp32))
        if cast_model_outputs is not None:
            model.register_forward_hook(partial(cast_output, dtype=cast_model_outputs))
    for optimizer in optimizer_list:
        prepare_optimizer(optimizer, bool(properties.master_weights))
    function_type = properties.function_type if properties.patch_torch_functions else torch.float32
    set_function_casts(device.type, function_type)
    _amp_state.level = properties
    _amp_state.models = weakref.WeakSet(model_list)
    limits: Any = {"min_loss_scale": min_loss_scale, "max_loss_scale": max_loss_scale}
    _amp_state.scalers = [
        LossScaler(properties.loss_scale, device=device, index=index, **limits)
        for index in range(num_losses)
    ]
    return models if optimizers is None else (models, optimizers)


def properties_for(opt_level: str, **overrides: Any) -> Properties:
    """Return the properties of `opt_level`, with every override that is not None applied."""
    if opt_level not in OPT_LEVELS:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level!r}: use one of {', '.join(OPT_LEVELS)} "
            "(the letter O, then a digit)."
        )
    level = OPT_LEVELS[opt_level]
    given = {name: value for name, value in overrides.items() if value is not None}

    if level.patch_torch_functions:
        if given.get("cast_model_type") in (False, torch.float32):
            del given["cast_model_type"]
        for name in ("cast_model_type", "keep_batchnorm_fp32", "master_weights"):
            if name in given:
                raise RuntimeError(
                    f"{name} has no meaning at {opt_level}, which casts functions and leaves the "
                    f"weights in fp32: leave {name} out, or use a level that casts the model."
                )
    elif given.get("patch_torch_functions"):
        raise RuntimeError("patch_torch_functions=True goes with opt_level O1 or O4 only.")

    if given.get("cast_model_type") is False:
        given["cast_model_type"] = None
    return replace(level, **_parse_overrides(given))


def _parse_overrides(given: dict[str, Any]) -> dict[str, Any]:
    """Convert the spellings that command lines bring ("False", "128.0") to values."""
    if "keep_batchnorm_fp32" in given:
        value = given["keep_batchnorm_fp32"]
        if value not in (True, False, "True", "False"):
            raise RuntimeError(
                f"keep_batchnorm_fp32 must be True, False, 'True' or 'False', not {value!r}."
            )
        given["keep_batchnorm_fp32"] = value in (True, "True")
    if given.get("loss_scale", "dynamic") != "dynamic":
        try:
            value = float(given["loss_scale"])
        except (TypeError, ValueError):
            value = math.nan
        if not 0 < value < math.inf:
            raise RuntimeError(
                f"loss_scale must be 'dynamic' or a number above 0, not {given['loss_scale']!r}."
            )
        given["loss_scale"] = value
    return given


def _as_list(value: Any, kind: type, name: str) -> list:
    if isinstance(value, kind):
        return [value]
    if isinstance(value, list) and all(isinstance(item, kind) for item in value):
        return value
    raise TypeError(
        f"amp.initialize takes {name} as one {kind.__name__} or a list of them, "
        f"not {type(value).__name__}."
    )


def _for_device(properties: Properties, device: torch.device) -> Properties:
    """Replace the half type of `properties` by the one that `device` computes with, if another."""
    field = "function_type" if properties.patch_torch_functions else "cast_model_type"
    wanted = getattr(properties, field)
    used = half_type(wanted, device)
    if used != wanted:
        message = f"amp: {properties.opt_level} computes in {used} on this CPU, not in {wanted}"
        log_if_verbose(message.replace("torch.", ""))
    return replace(properties, **{field: used})  # type: ignore[arg-type]

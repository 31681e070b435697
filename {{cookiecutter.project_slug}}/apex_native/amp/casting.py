"""Casts: of models, of their inputs, outputs and saved state, and of functions (O1 and O4)."""

import functools
import os
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .state import _amp_state

HALF_TYPES = (torch.float16, torch.bfloat16)
# PackedSequence's own `to` would cast integers, too.
SEARCHED = (tuple, list, dict, OrderedDict, defaultdict, PackedSequence)


def half_type(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type that serves as `dtype` on `device`: itself, except for half types on CPUs.

    A CPU without instructions for a 16-bit type emulates it, up to a hundred times slower than
    fp32; and with those for fp16, torch (2.15) still cannot train an LSTM in it. So CPUs compute
    in bfloat16 if they have instructions for it, else in float32.
    """
    if device.type != "cpu" or dtype not in HALF_TYPES:
        return dtype
    # torch has no public function for it; without this one, CPUs compute in fp32.
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    has_bfloat16 = torch.backends.mkldnn.is_available() and is_supported()
    return torch.bfloat16 if has_bfloat16 else torch.float32


def cast_tensors(value: Any, dtype: torch.dtype, device_type: str | None = None) -> Any:
    """Return `value` with every floating-point tensor in it as `dtype`.

    Tuples (named ones too), lists and mappings are searched; an object with a method ``to``, such
    as a batch of a user's class, is replaced by ``value.to(dtype)``; the rest is returned as it is.
    If `device_type` is given, tensors on devices of other types and such objects stay as they are.
    """
    if isinstance(value, Tensor):
        is_cast = value.is_floating_point() and device_type in (None, value.device.type)
        return value.to(dtype) if is_cast else value
    kind: Any = type(value)
    if kind not in SEARCHED and callable(getattr(kind, "to", None)):  # not a field of this name
        is_cast = device_type is None and not isinstance(value, nn.Module)
        return value.to(dtype) if is_cast else value
    if isinstance(value, Mapping):
        items = {key: cast_tensors(item, dtype, device_type) for key, item in value.items()}
        if isinstance(value, defaultdict):
            return defaultdict(value.default_factory, items)
        return kind(items)
    if isinstance(value, (tuple, list)):  # torch 2.6 cannot compile tuple | list
        cast = [cast_tensors(item, dtype, device_type) for item in value]
        return kind(*cast) if hasattr(value, "_fields") else kind(cast)
    return value


def check_models(models: list[nn.Module]) -> None:
    """Raise RuntimeError for a model that is already wrapped, or already half."""
    for model in models:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise RuntimeError(
                f"amp.initialize was given a model inside {type(model).__name__}: call "
                "amp.initialize first and wrap what it returns."
            )
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dtype == torch.float16 and not _amp_state.allow_incoming_model_not_fp32:
                raise RuntimeError(
                    f"amp.initialize was given a model whose {name} is fp16 already: leave the "
                    "model in fp32, initialize casts it as the opt_level requires."
                )


def cast_weights(model: nn.Module, dtype: torch.dtype, keep_batchnorm_fp32: bool) -> None:
    """Cast `model` to `dtype` in place; keep_batchnorm_fp32 spares affine batch norms."""
    for module in model.modules():
        # torch has no public base class of batch norms.
        is_batchnorm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine
        if not (keep_batchnorm_fp32 and is_batchnorm):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.data = cast_tensors(tensor.data, dtype)
            for parameter in module.parameters(recurse=False):
                parameter.grad = cast_tensors(parameter.grad, dtype)
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()


def cast_model(model: nn.Module, dtype: torch.dtype, keep_batchnorm_fp32: bool) -> None:
    """Cast the weights of `model` and, from here on, the inputs of its calls and its saved state.

    A hook casts the inputs, not a replaced ``forward``: the model can be copied and compiled.
    """
    cast_weights(model, dtype, keep_batchnorm_fp32)
    model.register_forward_pre_hook(functools.partial(_cast_inputs, dtype=dtype), with_kwargs=True)
    for module in model.modules():
        save = functools.partial(_save_as_fp32, owner=id(module))  # a copy has another one
        module.register_state_dict_post_hook(save)
        module.register_load_state_dict_pre_hook(_load_masters)


def _cast_inputs(module: nn.Module, args: tuple, kwargs: dict, dtype: torch.dtype) -> tuple:
    return cast_tensors(args, dtype), cast_tensors(kwargs, dtype)


def cast_output(module: nn.Module, args: tuple, output: object, dtype: torch.dtype) -> object:
    """Return the tensors in `output` as `dtype`; a forward hook."""
    return cast_tensors(output, dtype)


# A master belongs to its parameter, and the model's state must reach it without the optimizer:
# it is an attribute of the parameter, as is the (private) version of the parameter that it matches.
# Writes through `.data` do not change that version, so until the first backward pass, when Apex
# makes its masters, the values that the master matches are kept, too.
_MASTER, _VERSION, _VALUES = "_amp_master", "_amp_version", "_amp_values"


def make_master(parameter: Tensor) -> Tensor:
    """Return the fp32 master of a half parameter, which the first call creates."""
    if not hasattr(parameter, _MASTER):
        setattr(parameter, _MASTER, parameter.detach().clone().float().requires_grad_())
    setattr(parameter, _VERSION, None)  # since an earlier optimizer, .data may have been written to
    current_master(parameter)
    setattr(parameter, _VALUES, parameter.detach().clone())
    return getattr(parameter, _MASTER)


def finish_master(parameter: Tensor) -> None:
    """Update a master before the first backward pass: later writes to ``.data`` go unnoticed."""
    current_master(parameter)
    vars(parameter).pop(_VALUES, None)


def mark_up_to_date(parameter: Tensor) -> None:
    """Record that the master of `parameter` matches the parameter's present values."""
    setattr(parameter, _VERSION, parameter._version)
    if hasattr(parameter, _VALUES):
        getattr(parameter, _VALUES).copy_(parameter.detach())


@torch.no_grad()
def current_master(parameter: Tensor) -> Tensor | None:
    """Return the master of `parameter`, if any, updated with what others have written to that.

    DistributedDataParallel does: it broadcasts after ``initialize``. Apex includes that, because
    it makes masters as late as the first backward pass.
    """
    master = getattr(parameter, _MASTER, None)
    if master is None:
        return None
    values = getattr(parameter, _VALUES, None)
    if values is not None or parameter._version != getattr(parameter, _VERSION):
        changed = parameter != master.to(parameter.device, parameter.dtype)
        if values is not None:  # what was written to the master alone stays
            changed &= parameter != values.to(parameter.device)
        master.copy_(torch.where(changed, parameter.float(), master.to(parameter.device)))
        mark_up_to_date(parameter)
    return master


def _own_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    return {prefix + name: tensor for name, tensor in (*parameters, *buffers)}


def _save_as_fp32(
    module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict, owner: int
) -> None:
    """Replace half tensors of a saved model by fp32 ones, by the masters if the model matches them.

    Apex saves the rounded half weights, so that a resumed run continues from other weights than
    it had (apex#180, apex#480). Values that others wrote to the model are saved as they are, and
    the masters stay: scripts put averaged weights into a model, save it, and put its own back.
    """
    for key, tensor in _own_tensors(module, prefix).items():
        if key not in state_dict or tensor.dtype not in HALF_TYPES:
            continue
        master, values = getattr(tensor, _MASTER, None), tensor.detach()
        if master is None:
            state_dict[key] = values.float()
            if owner != id(module):
                warnings.warn(OF_A_COPY, stacklevel=2)
        elif state_dict[key] is tensor:  # keep_vars=True: the live tensors, without copies
            state_dict[key] = current_master(tensor)
        else:
            exact = master.detach().to(values.device)  # the model may have moved
            is_exact = values == exact.to(values.dtype)
            state_dict[key] = torch.where(is_exact, exact, values.float())


OF_A_COPY = (
    "state_dict() of a copy of a model that amp has cast returns fp32 copies: what is written to "
    "them, as by timm's ModelEma, is lost. Average weights in a copy made before amp.initialize."
)


def _load_masters(module: nn.Module, state_dict: dict, prefix: str, *_: object) -> None:
    """Load the masters of `module`, in the precision of `state_dict`."""
    for key, tensor in _own_tensors(module, prefix).items():
        master = getattr(tensor, _MASTER, None)
        loaded = state_dict.get(key)
        if master is not None and loaded is not None and loaded.shape == master.shape:
            with torch.no_grad():
                master.copy_(loaded)


def set_function_casts(device_type: str, dtype: torch.dtype) -> None:
    """Switch the O1 and O4 casts on (to `dtype`) or off (fp32) for this whole thread.

    The casts are torch's autocast, entered and never left, so that they cover the loss and
    whatever else is outside the model, as Apex's patched functions do. Autocast's cache of cast
    weights is emptied only when the outermost context is left, and would return stale weights
    after a step. It is off: a weight is cast for each use, which is once a step in most models.
    """
    torch.set_autocast_enabled(_amp_state.device_type, False)
    _amp_state.device_type = device_type
    torch.set_autocast_cache_enabled(dtype == torch.float32)
    if dtype == torch.float32:
        return
    _prepare_process(device_type)
    torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_enabled(device_type, True)
    while _amp_state.registered:  # these are replaced for good, and do nothing without casts
        _amp_state.registered.pop()()


@functools.cache
def _prepare_process(device_type: str) -> torch.library.Library:
    """Switch casts off in forks, such as loaders' workers; register kernels, which the cache keeps.

    Autocast refuses binary_cross_entropy on GPUs.
    """
    os.register_at_fork(
        after_in_child=lambda: torch.set_autocast_enabled(_amp_state.device_type, False)
    )
    library = torch.library.Library("aten", "IMPL", "AutocastCUDA")
    if device_type == "cuda":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            library.impl("binary_cross_entropy", _binary_cross_entropy)
    return library


def _binary_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    """Compute the loss of fp32 tensors; raise NotImplementedError for half ones, as in Apex."""
    if any(tensor.dtype in HALF_TYPES for tensor in nested_tensors((input, target, weight))):
        raise NotImplementedError(
            "binary_cross_entropy (BCELoss) is not safe in half precision, which amp casts to: use "
            "binary_cross_entropy_with_logits (BCEWithLogitsLoss) without the sigmoid before it, "
            "or pass the arguments as .float()."
        )
    with torch.autocast(input.device.type, enabled=False):
        return torch.ops.aten.binary_cross_entropy(input, target, weight, reduction)


def disable_casts() -> torch.autocast:
    """Run the body without the casts of O1 and O4, or of torch's autocast without amp.

    ``scale_loss`` does so in the backward pass.
    """
    return torch.autocast(_cast_device(), enabled=False)


def _cast_device() -> str:
    """Return the type of the devices on which amp casts, or torch's autocast without amp."""
    if _level():
        return _amp_state.device_type
    return "cuda" if torch.is_autocast_enabled("cuda") else "cpu"


def _level() -> Any:
    """Return the properties of the level; None if amp is not in use."""
    level = _amp_state.level
    return level if level and level.enabled else None


def half_function(function: Callable) -> Callable:
    """Make `function` run on half tensors at O1 (bfloat16 at O4), and unchanged elsewhere.

    Inside, casts are off: the types of the arguments decide. Without amp, torch's autocast takes
    the place of O1, and its type that of half. The same holds for the other three.
    """
    return _cast(function, lambda _: _half_type())


def bfloat16_function(function: Callable) -> Callable:
    """Make `function` run on bfloat16 tensors at O1 and O4 (a name of ROCm's fork)."""
    return _cast(function, lambda _: torch.bfloat16)


def float_function(function: Callable) -> Callable:
    """Make `function` run on fp32 tensors at O1 and O4."""
    return _cast(function, lambda _: torch.float32)


def promote_function(function: Callable) -> Callable:
    """Make `function` run on the widest type among its floating-point tensors at O1 and O4."""
    return _cast(function, _widest_type)


def _register(decorate: Callable, module: object, name: str) -> None:
    """Decorate ``module.name`` at ``initialize``. Raises ValueError if it is missing."""
    if not hasattr(module, name):
        raise ValueError(f"There is no function {name} in {module}.")

    def replace() -> None:
        setattr(module, name, decorate(getattr(module, name)))

    _amp_state.registered.append(replace)


register_half_function = functools.partial(_register, half_function)
register_bfloat16_function = functools.partial(_register, bfloat16_function)
register_float_function = functools.partial(_register, float_function)
register_promote_function = functools.partial(_register, promote_function)


def _cast(function: Callable, dtype_for: Callable[[tuple], torch.dtype]) -> Callable:
    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> object:
        level = _level()
        is_cast = level is None or level.patch_torch_functions
        device_type = _cast_device()  # as in Apex, which casts tensors on GPUs only
        if not (is_cast and torch.is_autocast_enabled(device_type)):
            return function(*args, **kwargs)
        dtype = dtype_for((args, tuple(kwargs.values())))
        cast_kwargs = cast_tensors(kwargs, dtype, device_type)
        with disable_casts():
            return function(*cast_tensors(args, dtype, device_type), **cast_kwargs)

    return wrapper


def _half_type() -> torch.dtype:
    level = _level()
    return level.function_type if level else torch.get_autocast_dtype(_cast_device())


def _widest_type(values: object) -> torch.dtype:
    """Return the type that all floating-point tensors in `values` promote to."""
    types = [tensor.dtype for tensor in nested_tensors(values) if tensor.is_floating_point()]
    return functools.reduce(torch.promote_types, types or [torch.float32])


def nested_tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors in `value`: of lists, tuples, mappings and dataclasses in any nesting."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from nested_tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from nested_tensors([getattr(value, one.name, None) for one in fields(value)])

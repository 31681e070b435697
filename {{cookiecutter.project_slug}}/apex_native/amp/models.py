"""Casting models: their weights, what goes in, what comes out, and what is saved of them."""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

HALF_TYPES = (torch.float16, torch.bfloat16)


def half_type(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type that serves as `dtype` on `device`: itself, but for half types on CPUs.

    A CPU without instructions for a 16-bit type emulates it, up to a hundred times slower than
    fp32; and with those for fp16, torch (2.15) still cannot train an LSTM in it. So CPUs compute
    in bfloat16 if they have instructions for it, else in float32.
    """
    if device.type != "cpu" or dtype not in HALF_TYPES:
        return dtype
    mkldnn = torch.backends.mkldnn.is_available()
    has_bfloat16 = mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if has_bfloat16 else torch.float32


def cast_tensors(value: object, dtype: torch.dtype) -> object:
    """`value` with every floating-point tensor in it as `dtype`.

    Goes through tuples (named ones too), lists and mappings; a batch class of the user's is
    handed to its own ``.to(dtype)`` if it has one; everything else is returned as it is.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (str, nn.Module)):  # torch 2.6 cannot compile str | nn.Module
        return value
    if isinstance(value, Mapping):
        items = {key: cast_tensors(item, dtype) for key, item in value.items()}
        if isinstance(value, defaultdict):
            return defaultdict(value.default_factory, items)
        return items if type(value) is dict else type(value)(items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_tensors(item, dtype) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(cast_tensors(item, dtype) for item in value)
    if hasattr(value, "to"):
        return value.to(dtype)
    return value


def check(models: list[nn.Module]) -> None:
    """Raises RuntimeError for a model that is already wrapped, or already half."""
    for model in models:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise RuntimeError(
                f"amp.initialize was given a model inside {type(model).__name__}: call "
                "amp.initialize first and wrap what it returns."
            )
        for kind, named in (
            ("parameter", model.named_parameters()),
            ("buffer", model.named_buffers()),
        ):
            for name, tensor in named:
                if tensor.dtype == torch.float16:
                    raise RuntimeError(
                        f"amp.initialize was given a model whose {kind} {name} is fp16 already: "
                        "leave the model in fp32, initialize casts it as the opt_level asks."
                    )


def cast_model(
    model: nn.Module,
    dtype: torch.dtype,
    keep_batchnorm_fp32: bool,
    output_dtype: torch.dtype,
) -> None:
    """Casts `model` to `dtype` in place; its parameters keep their identity.

    keep_batchnorm_fp32 spares affine batch norms. From here on the top-level call casts its
    inputs to `dtype` and its outputs to `output_dtype`. Hooks do this rather than a replaced
    ``forward``, so that the model can still be copied, pickled and compiled.
    """
    for module in model.modules():
        is_batchnorm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine
        if keep_batchnorm_fp32 and is_batchnorm:
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to(dtype)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    model.register_forward_pre_hook(partial(_cast_inputs, dtype=dtype), with_kwargs=True)
    cast_outputs(model, output_dtype)
    for module in model.modules():
        module.register_state_dict_post_hook(_present_as_fp32)
        module.register_load_state_dict_pre_hook(_refresh_masters)


def cast_outputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes the top-level call return its floating-point tensors as `dtype`."""
    model.register_forward_hook(partial(_cast_output, dtype=dtype))


def _cast_inputs(
    module: nn.Module, args: tuple, kwargs: dict, dtype: torch.dtype
) -> tuple[object, object]:
    return cast_tensors(args, dtype), cast_tensors(kwargs, dtype)


def _cast_output(module: nn.Module, args: tuple, output: object, dtype: torch.dtype) -> object:
    return cast_tensors(output, dtype)


# A master belongs to its parameter, and the model's state must reach it without the optimizer:
# it is an attribute of the parameter, as is the version of the parameter that it goes with.
_MASTER, _VERSION = "_amp_master", "_amp_version"


def make_master(parameter: nn.Parameter) -> Tensor:
    """The fp32 master of a half parameter: made from it at the first call, the same one later."""
    master = getattr(parameter, _MASTER, None)
    if master is None:
        master = parameter.detach().clone().float().requires_grad_()
        setattr(parameter, _MASTER, master)
        mark_up_to_date(parameter)
    return master


def mark_up_to_date(parameter: Tensor) -> None:
    """Says that the master of `parameter` goes with the values that it has now."""
    setattr(parameter, _VERSION, parameter._version)


@torch.no_grad()
def current_master(parameter: Tensor) -> Tensor | None:
    """The master of `parameter`, if it has one, with what others have written to it since.

    DistributedDataParallel does: its broadcast comes after ``initialize``. Apex sees that, because
    it makes masters as late as the first backward pass.
    """
    master = getattr(parameter, _MASTER, None)
    if master is not None and parameter._version != getattr(parameter, _VERSION):
        changed = parameter != master.to(parameter.device, parameter.dtype)
        values = torch.where(changed, parameter.float(), master.to(parameter.device))
        master.copy_(values)
        mark_up_to_date(parameter)
    return master


def _own_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    tensors = {**module._parameters, **module._buffers}
    return {prefix + name: tensor for name, tensor in tensors.items() if tensor is not None}


def _present_as_fp32(
    module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict
) -> None:
    """A saved model is fp32 at every level, and its values are the masters' where there are any.

    Apex saves the rounded half weights, so that a resumed run goes on from other weights than
    the ones it had (apex#180, apex#480).
    """
    for key, tensor in _own_tensors(module, prefix).items():
        if key in state_dict and tensor.dtype in HALF_TYPES:
            master = current_master(tensor)
            values = (tensor if master is None else master).detach()
            state_dict[key] = values.to(tensor.device, torch.float32)  # the model may have moved


def _refresh_masters(
    module: nn.Module,
    state_dict: dict,
    prefix: str,
    local_metadata: dict,
    strict: bool,
    missing_keys: list,
    unexpected_keys: list,
    error_msgs: list,
) -> None:
    """Loading a model loads its masters too, at the precision of what is loaded."""
    for key, tensor in _own_tensors(module, prefix).items():
        master = getattr(tensor, _MASTER, None)
        loaded = state_dict.get(key)
        if master is not None and loaded is not None and loaded.shape == master.shape:
            with torch.no_grad():
                master.copy_(loaded)

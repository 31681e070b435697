"""Contents of ``apex.fp16_utils`` and ``apex.multi_tensor_apply`` that old scripts still import.

``python -m apex_native`` makes it available as both; the installable package has the rest of them.
"""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm  # noqa: F401, Apex's name

from .amp.casting import cast_weights


class tofp16(nn.Module):  # Apex's name
    """Layer that casts its input to fp16."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `input`, of any shape, in fp16."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:  # Apex's name
    """Cast the affine batch norms in `module` to fp32, in place."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.affine:
            layer.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """Cast `network` to fp16 except for its batch norms; wrap it so that inputs are cast too."""
    return nn.Sequential(tofp16(), BN_convert_float(convert_network(network, torch.float16)))


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast `network` to `dtype` in place, except for its affine batch norms."""
    cast_weights(network, dtype, keep_batchnorm_fp32=True)
    return network


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained parameters of `model` and fp32 masters: one each, or one flat for all."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [parameter.detach().clone().float() for parameter in parameters]
    if flat_master:
        masters = [torch.cat([master.reshape(-1) for master in masters])]
    return parameters, [nn.Parameter(master) for master in masters]


def model_grads_to_master_grads(
    model_params: list[Tensor], master_params: list[Tensor], flat_master: bool = False
) -> None:
    """Copy the gradients of `model_params` to their masters, as fp32."""
    grads = [parameter.grad for parameter in model_params]
    if flat_master:
        grads = [torch.cat([grad.reshape(-1) for grad in grads])]  # type: ignore[union-attr]
    for master, grad in zip(master_params, grads, strict=True):
        master.grad = None if grad is None else grad.detach().to(torch.float32, copy=True)


@torch.no_grad()
def master_params_to_model_params(
    model_params: list[Tensor], master_params: list[Tensor], flat_master: bool = False
) -> None:
    """Copy the masters' values to `model_params`."""
    if flat_master:
        master_params = list(master_params[0].split([p.numel() for p in model_params]))
    for parameter, master in zip(model_params, master_params, strict=True):
        parameter.copy_(master.view(parameter.shape))


def to_python_float(tensor: Tensor) -> float:
    """Return the value of a tensor of one element. Waits for the device."""
    return tensor.item()


multi_tensor_applier = SimpleNamespace(available=False)  # Apex's kernels are not here

"""Stand-in for NVIDIA's Apex 25.05, with its private structures, on the CPU."""

from functools import partial
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from torch import nn
from torch.optim import Optimizer


class LossScaler:
    def __init__(self, loss_scale: float | str) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._loss_scale = 2.0**16 if self.dynamic else loss_scale
        self._unskipped = 0

    def loss_scale(self) -> float:
        return self._loss_scale


def create(opt_level: str, loss_scale: float | str | None = None) -> ModuleType:
    """Return a package whose ``amp.initialize(model, optimizer)`` applies `opt_level`."""
    is_cast = opt_level in ("O2", "O3")
    weights = {"O0": torch.float32, "O1": None, "O2": torch.float16, "O3": torch.float16}
    if loss_scale is None:
        loss_scale = "dynamic" if opt_level in ("O1", "O2") else 1.0
    properties = SimpleNamespace(
        opt_level=opt_level,
        cast_model_type=weights[opt_level],
        keep_batchnorm_fp32=opt_level == "O2" if is_cast else None,
        master_weights=opt_level == "O2" if opt_level != "O1" else None,
    )
    state = SimpleNamespace(opt_properties=properties, loss_scalers=[LossScaler(loss_scale)])

    def initialize(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        for module in model.modules():
            is_spared = properties.keep_batchnorm_fp32 and isinstance(module, nn.BatchNorm1d)
            for parameter in module.parameters(recurse=False) if is_cast and not is_spared else ():
                parameter.data = parameter.data.half()
        _process_optimizer(optimizer, bool(properties.master_weights))
        return model, optimizer

    def state_dict() -> dict:
        return {
            f"loss_scaler{index}": {
                "loss_scale": scaler._loss_scale,
                "unskipped": scaler._unskipped,
            }
            for index, scaler in enumerate(state.loss_scalers)
        }

    def load_state_dict(saved: dict) -> None:
        for scaler, entry in zip(state.loss_scalers, saved.values(), strict=True):
            scaler._loss_scale, scaler._unskipped = entry["loss_scale"], entry["unskipped"]

    apex = ModuleType("apex")
    apex.amp = SimpleNamespace(
        _amp_state=state,
        initialize=initialize,
        state_dict=state_dict,
        load_state_dict=load_state_dict,
    )
    if opt_level == "O1":  # at the other levels Apex's fails
        apex.amp.disable_casts = mock.MagicMock()
    return apex


def _process_optimizer(optimizer: Optimizer, has_masters: bool) -> None:
    """Prepare `optimizer` for masters, which the first backward pass would create."""
    optimizer._amp_stash = SimpleNamespace(lazy_init_called=False)
    optimizer._amp_lazy_init = partial(_lazy_init, optimizer, has_masters)


def _lazy_init(optimizer: Optimizer, has_masters: bool) -> None:
    stash = optimizer._amp_stash
    if stash.lazy_init_called:
        return
    stash.lazy_init_called = True
    stash.all_fp16_params = []
    masters = []
    for group in optimizer.param_groups:
        parameters = group["params"]
        halves = [i for i, value in enumerate(parameters) if value.dtype == torch.float16]
        stash.all_fp16_params += [parameters[i] for i in halves]
        for i in halves if has_masters else ():
            parameter = parameters[i]
            parameters[i] = parameter.detach().clone().float().requires_grad_()
            masters.append(parameters[i])
            if parameter in optimizer.state:
                optimizer.state[parameters[i]] = optimizer.state.pop(parameter)
    if has_masters:
        stash.all_fp32_from_fp16_params = masters
        optimizer.load_state_dict(optimizer.state_dict())  # casts the moments

"""What one call of ``initialize`` leaves behind for the calls that follow it."""

import contextlib
import os
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .._say import say

if TYPE_CHECKING:
    from .properties import Properties
    from .scaler import LossScaler


class AmpState:
    """The process-wide state, as in Apex: one set of properties, one scaler for each loss."""

    def __init__(self) -> None:
        self.opt_properties: Properties | None = None
        self.loss_scalers: list[LossScaler] = []
        self.models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.verbosity = 1
        self.device_type = "cpu"
        self.unsynced: list[torch.nn.Module] = []  # in DistributedDataParallel.no_sync


_amp_state = AmpState()


def say_if_verbose(message: str) -> None:
    """Prints `message` on rank 0 unless ``initialize`` was given ``verbosity=0``."""
    if _amp_state.verbosity > 0:
        say(message)


def set_function_casts(device_type: str, dtype: torch.dtype | None) -> None:
    """Switches the O1 and O4 casts on (to `dtype`) or off (None) for this whole thread.

    The casts are torch's autocast, entered and never left, so that they cover the loss and
    whatever else stands outside the model, as Apex's patched functions do. Autocast's cache of
    cast weights is off: it is emptied when the outermost context is left, which never happens
    here, so it would hand out stale weights after a step and gradient-less ones after an
    evaluation. A weight is cast once for each use instead, which is once a step in most models.
    """
    torch.set_autocast_enabled(_amp_state.device_type, False)
    _amp_state.device_type = device_type
    torch.set_autocast_cache_enabled(dtype is None)
    if dtype is not None:
        torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_enabled(device_type, True)


def casts_are_on() -> bool:
    """Whether functions are cast here and now."""
    properties = _amp_state.opt_properties
    is_cast = properties is not None and properties.patch_torch_functions
    return is_cast and torch.is_autocast_enabled(_amp_state.device_type)


# A data loader's worker is forked with the casts on, which are meant for the training alone.
os.register_at_fork(
    after_in_child=lambda: torch.set_autocast_enabled(_amp_state.device_type, False)
)


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Runs its body without the casts of O1 and O4. The backward pass needs no such block."""
    device_type = _amp_state.device_type
    enabled = torch.is_autocast_enabled(device_type)
    torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, enabled)


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yields the parameters that `optimizer` steps: the fp32 masters where there are any."""
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict() -> dict[str, dict[str, float | int]]:
    """The loss scalers' state: ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, …}``.

    Empty before ``initialize`` and after ``initialize(enabled=False)``, where Apex raises.
    """
    return {
        f"loss_scaler{index}": scaler.state_dict()
        for index, scaler in enumerate(_amp_state.loss_scalers)
    }


def load_state_dict(state_dict: dict[str, dict[str, float | int]]) -> None:
    """Restores the loss scalers, in the order in which the entries stand.

    A static scale is left as this run was told to have it, where Apex overwrites it with the
    saved one. Raises RuntimeError for an entry that is not a loss scaler's.
    """
    unexpected = [key for key in state_dict if "loss_scaler" not in key]
    if unexpected:
        raise RuntimeError(f"amp.load_state_dict: unexpected entries {', '.join(unexpected)}.")
    scalers = _amp_state.loss_scalers
    if len(state_dict) != len(scalers):
        say_if_verbose(
            f"Warning: the amp state holds {len(state_dict)} loss scalers, this run uses "
            f"{len(scalers)}; the first {min(len(state_dict), len(scalers))} are restored."
        )
    for scaler, entry in zip(scalers, state_dict.values(), strict=False):
        scaler.load_state_dict(entry)

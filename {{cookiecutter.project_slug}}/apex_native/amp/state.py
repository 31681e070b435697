"""Process-wide state of amp: the properties, and a loss scaler for each loss."""

import weakref
from collections.abc import Callable, Iterator
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import log_rank_zero

if TYPE_CHECKING:
    from .frontend import Properties


class LossScaler:
    """Scale of one loss.

    A dynamic scale starts at 2^16 (or its upper limit, if lower), halves when a gradient
    overflows and doubles after 2,000 clean backward passes in a row, within the two limits. It is
    kept on the device, so that no step waits. A static one never changes, and nothing is checked.

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018; the constants are Apex's.
    """

    LOWEST = 2.0**-64  # far below it, 1 / scale is more than fp32 holds
    PATIENCE = 32  # overflows in a row that a scale can cause; from 2^16, it is then 2^-16

    def __init__(  # noqa: PLR0913, Apex's signature, and two arguments of ``initialize``
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        device: torch.device | None = None,
        index: int = 0,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self.index = index
        self.growth = scale_factor
        self._scale_seq_len = scale_window  # scripts for Apex set this and the next two
        self._min_loss_scale, self._max_loss_scale = min_loss_scale, max_loss_scale
        start = min(init_scale, max_loss_scale) if self.dynamic else float(loss_scale)
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # Of the loss; on the device if dynamic. Blocks of ``scale_loss`` and their graphs keep this
        # tensor, so a change of the scale replaces it.
        self.factor: Tensor | float = start
        if self.dynamic:
            self.factor = torch.full((), start, dtype=torch.float32, device=device)
        self.overflows_in_a_row = 0
        self.counter = torch.zeros((), dtype=torch.int32, device=device)  # of steps in a row
        self._found_inf = self.counter.float()  # of the last update
        self._overflow_buf = self.counter.new_zeros(1)  # for `update_scale`; scripts set it
        self._pending: list[tuple[torch.cuda.Event | None, Tensor]] = []

    @property
    def limits(self) -> tuple[float, float]:
        return max(self._min_loss_scale or 0.0, self.LOWEST), self._max_loss_scale

    @property
    def _unskipped(self) -> Tensor:
        return self.counter.clone()

    @_unskipped.setter
    def _unskipped(self, value: Tensor | int) -> None:
        self.counter.fill_(value)

    def loss_scale(self) -> float:
        """Return the scale as a number. Waits for the device if the scale is dynamic."""
        return float(self.factor)

    def set_loss_scale(self, value: float) -> None:
        """Set the scale, dynamic or static."""
        if isinstance(self.factor, Tensor):
            self.factor = torch.full_like(self.factor, value)
        else:
            self.factor = float(value)

    _loss_scale = property(loss_scale, set_loss_scale)  # scripts for Apex read and set it

    @staticmethod
    def unscale_(grads: list[Tensor], factor: Tensor | float) -> Tensor | None:
        """Divide `grads` in place by `factor`, which the loss was multiplied by.

        Returns 1.0 if any was inf or nan, else 0.0, as a tensor (); None for a static scale.
        """
        grads = [grad._values() if grad.is_sparse else grad for grad in grads]  # uncoalesced, too
        if not isinstance(factor, Tensor):
            if factor != 1.0 and grads:
                torch._foreach_mul_(grads, 1.0 / factor)
            return None
        by_kind: dict[tuple, list[Tensor]] = {}
        for grad in grads:
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        inverse = factor.double().reciprocal().float()
        found = []
        for same in by_kind.values():
            scale = inverse.to(same[0].device)
            if same[0].dtype == torch.bfloat16:  # which torch's fused kernel does not take
                norms = torch.stack(torch._foreach_norm(same, float("inf")))
                found_inf = (~norms.isfinite()).any().float()
                torch._foreach_mul_(same, scale)
            else:  # the kernel of GradScaler, which has no public name; so has the update below
                found_inf = torch.zeros_like(scale)
                torch._amp_foreach_non_finite_check_and_unscale_(same, found_inf, scale)
            found.append(found_inf.to(inverse.device))
        return reduce(torch.maximum, found) if found else torch.zeros_like(inverse)

    def update_(self, found_inf: Tensor) -> None:
        """Update a dynamic scale after a backward pass, with the result of `unscale_`."""
        assert isinstance(self.factor, Tensor)
        self._found_inf = found_inf
        self.factor = self.factor.clone()
        rates = self.growth, 1.0 / self.growth, self._scale_seq_len
        torch._amp_update_scale_(self.factor, self.counter, found_inf, *rates)
        self.factor.clamp_(*self.limits)
        event: torch.cuda.Event | None = None
        outcome = torch.stack([found_inf, self.factor]).to("cpu", non_blocking=True)
        if found_inf.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(found_inf.device))
        self._pending.append((event, outcome))
        self.report()

    def update_scale(self) -> bool:
        """Update a dynamic scale after a delayed check; return whether to skip the step."""
        if isinstance(self.factor, Tensor):
            self.update_(self._overflow_buf.to(self.factor).amax())
        return bool(self._found_inf)

    @property
    def is_patched(self) -> bool:
        """True if a script has replaced `update_scale`, as to skip the same steps on all ranks."""
        return getattr(self.update_scale, "__func__", None) is not UPDATE_SCALE

    _has_overflow = property(lambda self: bool(self._found_inf))  # scripts for Apex read it

    def report(self) -> None:
        """Log the overflows whose record has arrived from the device; wait for nothing."""
        while self._pending:
            event, outcome = self._pending[0]
            if event is not None and not event.query():
                return
            del self._pending[0]
            overflowed, scale = outcome.tolist()
            self.overflows_in_a_row = self.overflows_in_a_row + 1 if overflowed else 0
            if overflowed:
                log_if_verbose(
                    f"Gradient overflow.  Skipping step, loss scaler {self.index} "
                    f"reducing loss scale to {scale}"
                )

    def state_dict(self) -> dict[str, float | int]:
        """Return ``{"loss_scale": float, "unskipped": int}``. Waits for the device."""
        return {"loss_scale": self.loss_scale(), "unskipped": int(self.counter.item())}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restore a dynamic scale; a static one keeps the value given to ``initialize``."""
        unskipped = state["unskipped"]
        if isinstance(self.factor, Tensor):
            restored = torch.full_like(self.factor, state["loss_scale"])
            self.factor = restored.clamp_(*self.limits)
            unskipped %= self._scale_seq_len  # a static scale's passes where others double
        self.counter.fill_(unskipped)


UPDATE_SCALE = LossScaler.update_scale


class AmpState:
    """State that ``initialize`` sets, process-wide as in Apex."""

    def __init__(self) -> None:
        self.level: Properties | None = None
        self.scalers: list[LossScaler] = []
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.verbosity = 1
        self.allow_incoming_model_not_fp32 = False  # scripts set it
        self.device_type = "cpu"
        self.registered: list[Callable[[], None]] = []  # what ``initialize`` is to cast
        self.parallel_models: weakref.WeakSet[Any] = weakref.WeakSet()  # DistributedDataParallels

    @property
    def opt_properties(self) -> "Properties":  # libraries ask whether it is there
        if self.level is None:
            raise AttributeError("opt_properties: amp.initialize was not called")
        return self.level

    @opt_properties.setter
    def opt_properties(self, value: "Properties") -> None:
        self.level = value

    @property
    def loss_scalers(self) -> list[LossScaler]:
        if not self.scalers:
            raise AttributeError("loss_scalers: amp.initialize has made none")
        return self.scalers

    @loss_scalers.setter
    def loss_scalers(self, value: list[LossScaler]) -> None:
        self.scalers = value


_amp_state = AmpState()


def properties() -> "Properties":
    """Return the properties of the last ``initialize``. Raises RuntimeError before the first."""
    if _amp_state.level is None:
        raise RuntimeError("amp.initialize was not called: call it before other functions of amp.")
    return _amp_state.level


def current_loss_scale() -> Tensor | float:
    """Return the scale of loss 0, as a tensor on its device if dynamic; 1 if amp is not in use."""
    return _amp_state.scalers[0].factor if _amp_state.scalers else 1.0


def has_dynamic_loss_scale() -> bool:
    """Return whether the scale of any loss is dynamic."""
    return any(scaler.dynamic for scaler in _amp_state.scalers)


def log_if_verbose(message: str) -> None:
    """Print `message` on rank 0 unless ``initialize`` was given ``verbosity=0``."""
    if _amp_state.verbosity > 0:
        log_rank_zero(message)


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters that `optimizer` steps: the fp32 masters where there are any."""
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict() -> dict[str, dict[str, float | int]]:
    """Return ``{"loss_scaler0": {"loss_scale": float, "unskipped": int}, …}``.

    Empty before ``initialize`` and after ``initialize(enabled=False)``, where Apex raises.
    """
    return {
        f"loss_scaler{index}": scaler.state_dict()
        for index, scaler in enumerate(_amp_state.scalers)
    }


def load_state_dict(state_dict: dict[str, dict[str, float | int]]) -> None:
    """Restore the loss scalers, in the order of the entries.

    A static scale keeps the value given to ``initialize``, where Apex overwrites it with the
    saved one. Raises RuntimeError for an entry that is not a loss scaler's.
    """
    if unexpected := [key for key in state_dict if "loss_scaler" not in key]:
        raise RuntimeError(f"amp.load_state_dict: unexpected entries {', '.join(unexpected)}.")
    scalers = _amp_state.scalers
    if len(state_dict) != len(scalers):
        log_if_verbose(
            f"Warning: the amp state holds {len(state_dict)} loss scalers, this run uses "
            f"{len(scalers)}; the first {min(len(state_dict), len(scalers))} are restored."
        )
    for scaler, entry in zip(scalers, state_dict.values(), strict=False):
        scaler.load_state_dict(entry)

"""Loss scales: static, or dynamic and kept on the device so that no step waits for the GPU."""

from functools import reduce

import torch
from torch import Tensor

from ._state import say_if_verbose


class LossScaler:
    """The scale of one loss.

    A dynamic scale starts at 2^16 (or `max_loss_scale`, if lower), halves when a gradient
    overflows and doubles after 2,000 clean backward passes in a row, within the two limits. A
    static one never changes, and nothing is checked for it.

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018; the constants are Apex's.
    """

    INITIAL, FACTOR, WINDOW = 2.0**16, 2.0, 2000
    LOWEST = 2.0**-64  # far below it, 1 / scale is more than fp32 holds
    PATIENCE = 32  # overflows in a row; from 2^16, the scale is then 2^-16

    def __init__(
        self,
        loss_scale: float | str,
        device: torch.device,
        index: int = 0,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self.index = index
        self.limits = (max(min_loss_scale or 0.0, self.LOWEST), max_loss_scale)
        start = min(self.INITIAL, max_loss_scale) if self.dynamic else float(loss_scale)
        self._scale = torch.full((), start, dtype=torch.float32, device=device)
        self._unskipped = torch.zeros((), dtype=torch.int32, device=device)
        self._static = None if self.dynamic else start
        self._pending: list[tuple[torch.cuda.Event | None, Tensor]] = []
        self._overflows = 0

    @property
    def factor(self) -> Tensor | float:
        """What the loss is multiplied by: a tensor on the device if dynamic, else a number."""
        return self._scale if self.dynamic else self._static

    @property
    def _loss_scale(self) -> float:
        """What scripts of Apex's days read and set, by this name."""
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._scale.fill_(value)
        self._static = None if self.dynamic else float(value)

    def loss_scale(self) -> float:
        """The scale as a number. Waits for the device if the scale is dynamic."""
        return self._scale.item() if self.dynamic else self._static

    def unscale_(self, grads: list[Tensor]) -> Tensor | None:
        """Divides `grads` by the scale in place.

        Returns a float tensor without dimensions, as torch's fused optimizers want it: 1 if any
        gradient was inf or nan and else 0. Or None for a static scale.
        """
        grads = [grad._values() if grad.is_sparse else grad for grad in grads]
        if not self.dynamic:
            if self._static != 1.0 and grads:
                torch._foreach_mul_(grads, 1.0 / self._static)
            return None
        inverse = self._scale.double().reciprocal().float()
        found = []
        for same in _by_device_and_dtype(grads):
            scale = inverse.to(same[0].device)
            if same[0].dtype == torch.bfloat16:  # which torch's fused kernel does not take
                norms = torch.stack(torch._foreach_norm(same, float("inf")))
                found_inf = (~norms.isfinite()).any().float()
                torch._foreach_mul_(same, scale)
            else:
                found_inf = torch.zeros_like(scale)
                torch._amp_foreach_non_finite_check_and_unscale_(same, found_inf, scale)
            found.append(found_inf.to(self._scale.device))
        return reduce(torch.maximum, found) if found else torch.zeros_like(self._scale)

    def update_(self, found_inf: Tensor | None) -> None:
        """Moves the scale after a backward pass; `found_inf` is what `unscale_` returned."""
        if not self.dynamic:
            return
        torch._amp_update_scale_(
            self._scale, self._unskipped, found_inf, self.FACTOR, 1.0 / self.FACTOR, self.WINDOW
        )
        self._scale.clamp_(*self.limits)
        event = None
        outcome = torch.stack([found_inf, self._scale]).to("cpu", non_blocking=True)
        if found_inf.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(found_inf.device))
        self._pending.append((event, outcome))
        self.report()

    @property
    def is_exhausted(self) -> bool:
        """Whether gradients have been overflowing for so long that the scale can't be the cause."""
        return self._overflows >= self.PATIENCE

    def report(self) -> None:
        """Prints the overflows that the device has told of by now; waits for nothing."""
        while self._pending and (self._pending[0][0] is None or self._pending[0][0].query()):
            _, outcome = self._pending.pop(0)
            overflowed, scale = outcome.tolist()
            self._overflows = self._overflows + 1 if overflowed else 0
            if overflowed:
                say_if_verbose(
                    f"Gradient overflow.  Skipping step, loss scaler {self.index} "
                    f"reducing loss scale to {scale}"
                )

    def state_dict(self) -> dict[str, float | int]:
        """``{"loss_scale": float, "unskipped": int}``. Waits for the device."""
        return {"loss_scale": self.loss_scale(), "unskipped": int(self._unskipped.item())}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restores a dynamic scale; a static one stays what this run was told to use."""
        if self.dynamic:
            self._scale.fill_(state["loss_scale"]).clamp_(*self.limits)
            # Apex counts for a static scale too, past where a dynamic one would have doubled.
            self._unskipped.fill_(state["unskipped"] % self.WINDOW)


def _by_device_and_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())

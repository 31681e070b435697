"""Optimizers of ``apex.contrib.optimizers`` that average gradients and shard their state."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from apex_native.amp.casting import HALF_TYPES
from apex_native.optimizers import FusedAdam, FusedLAMB
from apex_native.optimizers.layerwise import LayerwiseOptimizer
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

from .mixed_precision_lamb import FusedWithMasters
from .multi_tensor import in_fp32, write_back

# Apex's options of buffers, process groups, overlap and types, which are unused.
UNUSED_BY_ADAM = (
    "dtype grad_sync_dtype param_sync_dtype device overlap_grad_sync overlap_param_sync "
    "bucket_cap_mb pipeline_size contiguous_param_buffer contiguous_grad_buffer store_params "
    "store_param_remainders nccl_ub"
)
UNUSED_BY_LAMB = (
    "overlap_reductions step_supports_amp_scaling dwu_group_size dwu_num_blocks dwu_num_chunks "
    "dwu_num_rs_pg dwu_num_ar_pg dwu_num_ag_pg fused_norm e5m2_allgather verbose clip_after_ar "
    "full_ar set_param_views_to_flat_buffer skip_allgather fuse_scale param_order "
    "nccl_allgather_channels"
)


class _Adam(FusedWithMasters, FusedAdam):
    """FusedAdam of the parameters of one process."""


class _LAMB(FusedWithMasters, FusedLAMB):
    """FusedLAMB of the parameters of one process, without its clipping."""

    def _before_step(self) -> None:
        LayerwiseOptimizer._before_step(self)
        self._clip = torch.ones(())


class _DistributedOptimizer(ZeroRedundancyOptimizer):
    """Optimizer that averages gradients over the processes and shards its state (ZeRO, stage 1).

    The model is not wrapped in DistributedDataParallel. Each gradient is averaged when the backward
    pass has it, so that GradScaler, too, finds averages; under ``no_sync``, before it is used. The
    same parameters must take part in the backward pass of all processes. Apex also shards gradients
    (stage 2). Half parameters have fp32 masters in the state. Their gradients are averaged in fp32,
    but accumulated in half.

    ``step`` and ``zero_grad`` of the optimizer reset the divisor of half gradients, as in Apex. A
    script that skips a step, and sets ``grad`` to None itself, does not reset it.
    """

    _step_supports_amp_scaling = True  # read by GradScaler.step, which leaves gradients scaled
    grad_scale: Tensor | None
    found_inf: Tensor

    def __init__(
        self,
        params: Iterable,
        optimizer_class: type[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None,
        **defaults: Any,
    ) -> None:
        super().__init__(params, optimizer_class, process_group=process_group, **defaults)
        # Of half gradients, which would underflow: the step divides fp32 copies.
        self._divisor = torch.ones((), device=self.parameters()[0].device)
        self._is_syncing = True
        self._unsynced: set[Tensor] = set()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, whose gradients are averaged, too."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            is_trained = parameter.requires_grad
            parameter.requires_grad_()  # for torch; one that is frozen now may not remain so
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            parameter.requires_grad_(is_trained)

    def parameters(self) -> list[Tensor]:
        """Return the parameters of all groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _on_gradient(self, parameter: Tensor) -> None:
        self._unsynced.add(parameter)
        if self._is_syncing:
            self._average(parameter)

    def _average(self, parameter: Tensor) -> None:
        # The part of an accumulated gradient that was averaged before is equal on all processes, so
        # that the mean leaves it as it is.
        assert parameter.grad is not None
        (grad,) = in_fp32([parameter.grad])
        grad.div_(dist.get_world_size(self.process_group))
        dist.all_reduce(grad, group=self.process_group)
        write_back([parameter.grad], [grad])
        self._unsynced.discard(parameter)

    def grad_sync(self) -> None:
        """Average the gradients that were not averaged yet, such as those of ``no_sync``."""
        for parameter in self.parameters():
            if parameter in self._unsynced:
                self._average(parameter)

    @contextlib.contextmanager
    def no_sync(self, greedy_grad_copy: bool = False) -> Iterator[None]:
        """Accumulate gradients in each process; `greedy_grad_copy` is accepted as in Apex."""
        was_syncing, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = was_syncing

    def _gradients(self) -> list[Tensor]:
        self.grad_sync()
        return [parameter.grad for parameter in self.parameters() if parameter.grad is not None]

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """Return the 2-norm of all averaged gradients."""
        grads = self._gradients()
        return torch.nn.utils.get_total_norm(
            [grad.float() / self._divisor if grad.dtype in HALF_TYPES else grad for grad in grads]
        )

    @torch.no_grad()
    def _divide_gradients(self, divisor: Tensor) -> None:
        """Divide gradients: fp32 ones now, half ones in the next step."""
        grads = [grad for grad in self._gradients() if grad.dtype not in HALF_TYPES]
        if grads:
            torch._foreach_div_(grads, divisor.to(self._divisor.device))
        self._divisor.mul_(divisor)

    def _overflowed(self) -> bool:
        """Return whether GradScaler found an overflow, on all processes or on none."""
        overflows = (self.found_inf > 0).float()
        dist.all_reduce(overflows, group=self.process_group)
        fraction = overflows.item() / dist.get_world_size(self.process_group)
        if self._unsynced or fraction not in (0.0, 1.0):  # both on all processes
            raise RuntimeError(
                "GradScaler checked gradients of no_sync() or of an accumulation step before they "
                "were averaged: call optimizer.grad_sync() before scaler.unscale_ or scaler.step."
            )
        return fraction == 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Average and unscale the gradients, and update the parameters.

        Under ``GradScaler.step``, nothing happens if the gradients are not finite. Raises
        RuntimeError if GradScaler checked gradients of ``no_sync`` before they were averaged.
        """
        if closure is not None:
            raise NotImplementedError("a distributed optimizer takes no closure")
        is_scaled = hasattr(self, "found_inf")  # set by GradScaler.step
        if not (is_scaled and self._overflowed()):
            self.grad_sync()
            if is_scaled and self.grad_scale is not None:
                self._divide_gradients(self.grad_scale)
            self._update()
        self._divisor.fill_(1.0)

    def _update(self) -> None:
        self.optim.half_divisor = self._divisor
        super().step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of all processes."""
        super().load_state_dict(state_dict)
        self.state.clear()  # a second copy
        # It moves 0-dimensional tensors to the CPU, where torch's fused kernels do not take them,
        # and states of half parameters from torch's optimizers are half.
        for parameter, state in self.optim.state.items():
            for name, value in state.items():
                state[name] = value.to(parameter.device, torch.float32)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None or zero."""
        super().zero_grad(set_to_none)
        self._unsynced.clear()
        self._divisor.fill_(1.0)

    def state_dict(self, gather_on_root: bool = True) -> dict[str, Any]:
        """Return the state of all processes, in the form of the unsharded optimizer.

        Every process calls it. With `gather_on_root`, the others than rank 0 get an empty dict.
        """
        targets = range(1 if gather_on_root else dist.get_world_size(self.process_group))
        rank = dist.get_rank(self.process_group)
        result: dict[str, Any] = {}
        for target in targets:
            self.consolidate_state_dict(to=target)
            if rank == target:
                result = super().state_dict()
        return result


class DistributedFusedAdam(_DistributedOptimizer):
    """FusedAdam that averages gradients and shards its moments; see ``_DistributedOptimizer``.

    Args:
        average_grad_sync: False raises NotImplementedError.
        kwargs: Apex's options of buffers, buckets, types and overlap, which are accepted and
            unused: state is fp32, and parameters are broadcast in their own type. Each backward
            pass reduces; ``no_sync`` for all but the last one of a step reduces once.
    """

    def __init__(  # noqa: PLR0913, Apex's signature
        self,
        params: Iterable,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        process_group: dist.ProcessGroup | None = None,
        average_grad_sync: bool = True,
        **kwargs: Any,
    ) -> None:
        if not average_grad_sync:
            raise NotImplementedError("DistributedFusedAdam: average_grad_sync must be True")
        unknown = [name for name in kwargs if name not in UNUSED_BY_ADAM.split() and kwargs[name]]
        if unknown:
            raise NotImplementedError(f"DistributedFusedAdam has no {', '.join(unknown)}")
        super().__init__(
            params,
            _Adam,
            process_group,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            adam_w_mode=adam_w_mode,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )

    @torch.no_grad()
    def clip_grad_norm(
        self, max_norm: float, parameters: object = None, norm_type: float = 2.0
    ) -> Tensor:
        """Clip the averaged gradients to a 2-norm of `max_norm`; return their norm before clipping.

        The ``grad`` of half parameters stays as it is: the next step scales an fp32 copy. Raises
        NotImplementedError for some of the parameters or another norm, as Apex does.
        """
        if parameters is not None or norm_type != 2.0:
            raise NotImplementedError("clip_grad_norm has the 2-norm of all parameters only")
        norm = self.grad_norm()
        self._divide_gradients(torch.clamp((norm + 1e-6) / max_norm, min=1.0))
        return norm

    @torch.no_grad()
    def unscale_grads(self, inv_scale: Tensor, *args: Any) -> dict[torch.device, Tensor]:
        """Multiply the averaged gradients; return for each device 1.0 if one is inf or nan.

        The ``grad`` of half parameters stays as it is, as in ``clip_grad_norm``.
        """
        largest = torch.nn.utils.get_total_norm(self._gradients(), torch.inf)
        self._divide_gradients(1 / inv_scale.squeeze())
        return {largest.device: (~largest.isfinite()).float()}


class DistributedFusedLAMB(_DistributedOptimizer):
    """FusedLAMB that averages gradients and shards its moments; see ``_DistributedOptimizer``.

    The norm of an update is that of the whole parameter. Apex's leaves parts out, by its code, if
    the parameter spans several of its buffers' chunks, and takes larger steps then.

    Args:
        kwargs: Apex's options of process groups, buffers, rounding and overlap, which are accepted
            and unused. Each backward pass reduces; ``set_is_accumulation_step(True)`` or
            ``no_sync`` for all but the last one of a step reduces once.
    """

    def __init__(  # noqa: PLR0913, Apex's signature
        self,
        params: Iterable,
        lr: float = 1e-3,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        adam_w_mode: bool = True,
        use_nvlamb: bool = False,
        **kwargs: Any,
    ) -> None:
        unknown = sorted(kwargs.keys() - UNUSED_BY_LAMB.split())
        if unknown:
            raise TypeError(f"DistributedFusedLAMB has no {', '.join(unknown)}")
        super().__init__(
            params,
            _LAMB,
            None,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            adam_w_mode=adam_w_mode,
            grad_averaging=grad_averaging,
            max_grad_norm=torch.inf,
            use_nvlamb=use_nvlamb,
        )
        self.max_grad_norm = max_grad_norm
        self.global_scale: Tensor | float = 1.0

    def set_is_accumulation_step(self, is_accumulation_step: bool) -> None:
        """Set whether the next backward pass only accumulates gradients in each process."""
        self._is_syncing = not is_accumulation_step

    def set_last_step(self, last_step: bool) -> None:
        """Do nothing: parameters are always broadcast after a step."""

    def set_global_scale(self, global_scale: Tensor | float) -> None:
        """Set the loss scale by which ``step`` divides gradients, unless GradScaler calls it."""
        self.global_scale = global_scale

    def complete_reductions(self) -> None:
        """Average the gradients that were not averaged yet."""
        self.grad_sync()

    def _update(self) -> None:
        if not hasattr(self, "found_inf"):
            self._divide_gradients(torch.as_tensor(self.global_scale).squeeze())
        norm = self.grad_norm()
        if not norm.isfinite():  # as in Apex, a step that overflowed is skipped
            return
        if self.max_grad_norm > 0:
            self._divide_gradients(torch.clamp(norm / self.max_grad_norm, min=1.0))
        super()._update()

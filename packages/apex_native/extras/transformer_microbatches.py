"""Micro-batch calculators of ``apex.transformer``, and its global one."""

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger(__name__)


class NumMicroBatchesCalculator:
    """Number of micro-batches of each process, for a global batch size that may grow."""

    num_micro_batches: int
    current_global_batch_size: int
    micro_batch_size: int

    def get(self) -> int:
        """Return the number of micro-batches."""
        return self.num_micro_batches

    def get_current_global_batch_size(self) -> int:
        """Return the number of samples of a step of all processes."""
        return self.current_global_batch_size

    def update(self, consumed_samples: int, consistency_check: bool) -> None:
        """Set both for the step after `consumed_samples` samples."""
        raise NotImplementedError


class ConstantNumMicroBatches(NumMicroBatchesCalculator):
    """The same number of micro-batches for the whole training."""

    def __init__(
        self, global_batch_size: int, micro_batch_size: int, data_parallel_size: int
    ) -> None:
        if global_batch_size % (micro_batch_size * data_parallel_size):
            raise AssertionError(
                f"global batch size ({global_batch_size}) is not divisible by micro batch size "
                f"({micro_batch_size}) times data parallel size ({data_parallel_size})"
            )
        self.num_micro_batches = global_batch_size // (micro_batch_size * data_parallel_size)
        if self.num_micro_batches < 1:
            raise AssertionError(f"global batch size ({global_batch_size}) is less than 1")
        self.current_global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size

    def update(self, consumed_samples: int, consistency_check: bool) -> None:
        """Do nothing."""


class RampupBatchsizeNumMicroBatches(NumMicroBatchesCalculator):
    """A global batch size that grows in equal increments over the first samples.

    Args:
        ramup_samples: number of samples after which `global_batch_size` is reached.
    """

    def __init__(
        self,
        start_batch_size: int,
        batch_size_increment: int,
        ramup_samples: int,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
    ) -> None:
        self.micro_batch_size = micro_batch_size
        self.data_parallel_size = data_parallel_size
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.start_batch_size = start_batch_size
        self.batch_size_increment = batch_size_increment
        self.global_batch_size = global_batch_size
        self.ramup_samples = ramup_samples
        growth = global_batch_size - start_batch_size
        sizes = (self.micro_batch_times_data_parallel_size, start_batch_size, global_batch_size)
        if min(*sizes, batch_size_increment) <= 0 or growth < 0 or ramup_samples < 0:
            raise AssertionError("batch sizes and their increment must be positive, and grow")
        if growth % batch_size_increment:
            raise AssertionError(
                f"expected global batch size interval ({growth}) to be divisible by global batch "
                f"size increment ({batch_size_increment})"
            )
        num_increments = growth // batch_size_increment
        # Apex divides by zero if there is nothing to grow.
        self.rampup_samples_per_increment = ramup_samples / max(num_increments, 1)
        self.update(0, False)

    def update(self, consumed_samples: int, consistency_check: bool) -> None:
        """Set the batch size for the step after `consumed_samples` samples.

        Raises AssertionError, if asked to check, for one that is not divisible by the micro-batch
        size times the number of processes.
        """
        if consumed_samples > self.ramup_samples or not self.rampup_samples_per_increment:
            self.current_global_batch_size = self.global_batch_size
        else:
            steps = int(consumed_samples / self.rampup_samples_per_increment)
            grown = self.start_batch_size + steps * self.batch_size_increment
            self.current_global_batch_size = min(grown, self.global_batch_size)
        unit = self.micro_batch_times_data_parallel_size
        if consistency_check and self.current_global_batch_size % unit:
            raise AssertionError(
                f"current global batch size ({self.current_global_batch_size}) is not divisible by "
                f"micro-batch-size ({self.micro_batch_size}) times data parallel size "
                f"({self.data_parallel_size})"
            )
        self.num_micro_batches = self.current_global_batch_size // unit


def build_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[Any] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
) -> NumMicroBatchesCalculator:
    """Return the calculator, and log its values on rank 0.

    Args:
        rampup_batch_size: start batch size, increment and number of samples; None for a constant
            batch size.
    """
    sizes = (global_batch_size, micro_batch_size, data_parallel_size)
    calculator: NumMicroBatchesCalculator
    if rampup_batch_size is None:
        calculator = ConstantNumMicroBatches(*sizes)
    else:
        start, increment, samples = map(int, rampup_batch_size)
        calculator = RampupBatchsizeNumMicroBatches(start, increment, samples, *sizes)
    if rank == 0:
        logger.info("number of micro-batches: %s", calculator.get())
    return calculator


class _Global:
    """The calculator of the process, as Megatron's scripts have it."""

    calculator: NumMicroBatchesCalculator | None = None


def _calculator() -> NumMicroBatchesCalculator:
    if _Global.calculator is None:
        raise AssertionError("num microbatches calculator is not initialized.")
    return _Global.calculator


def setup_microbatch_calculator(
    rank: int,
    rampup_batch_size: Sequence[Any] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
) -> None:
    """Build the global calculator. Raises AssertionError if there is one."""
    if _Global.calculator is not None:
        raise AssertionError("num microbatches calculator is already initialized.")
    _Global.calculator = build_num_microbatches_calculator(
        rank, rampup_batch_size, global_batch_size, micro_batch_size, data_parallel_size
    )


def get_micro_batch_size() -> int:
    """Return the number of samples of a micro-batch."""
    return _calculator().micro_batch_size


def get_num_microbatches() -> int:
    """Return the number of micro-batches of each process."""
    return _calculator().get()


def get_current_global_batch_size() -> int:
    """Return the number of samples of a step of all processes."""
    return _calculator().get_current_global_batch_size()


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True) -> None:
    """Set the batch size for the step after `consumed_samples` samples."""
    _calculator().update(consumed_samples, consistency_check)


def get_kth_microbatch(batch: Any, k: int) -> Any:
    """Return the `k`-th micro-batch of each tensor of the list `batch`; other values unchanged."""
    if not isinstance(batch, list | tuple):
        return batch
    start = k * get_micro_batch_size()
    end = start + get_micro_batch_size()
    if not batch or any(tensor.size(0) < end for tensor in batch):
        raise AssertionError(f"the batch has no micro-batch {k} of {get_micro_batch_size()}")
    return [tensor[start:end] for tensor in batch]


def listify_model(model: nn.Module | list[nn.Module]) -> list[nn.Module]:
    """Return `model` as a list."""
    return model if isinstance(model, list) else [model]


def unwrap_model(
    model: Any, module_instances: tuple[type[nn.Module], ...] = (DistributedDataParallel,)
) -> Any:
    """Return a model, or a list of models, without wrappers of these classes."""
    if isinstance(model, list):
        return [unwrap_model(one, module_instances) for one in model]
    while isinstance(model, module_instances):
        model = model.module
    return model


def is_last_rank() -> bool:
    """Return whether this is the process of the highest rank."""
    return dist.get_rank() == dist.get_world_size() - 1


def print_rank_0(message: str) -> None:
    """Print on rank 0, or without a process group."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


def print_rank_last(message: str) -> None:
    """Print on the highest rank, or without a process group."""
    if not dist.is_initialized() or is_last_rank():
        print(message, flush=True)


def param_is_not_shared(param: Tensor) -> bool:
    """Return the attribute ``shared`` of `param`: Apex's function, whose name says the opposite."""
    return getattr(param, "shared", False)

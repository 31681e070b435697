"""``apex.transformer.parallel_state`` for data parallelism alone."""

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

ALTERNATIVES = (
    "apex_native has data parallelism only. For tensor parallelism use "
    "torch.distributed.tensor.parallel, for pipelines torch.distributed.pipelining, or Megatron-LM."
)


class _Groups:
    """The groups of this process: all processes, and itself alone."""

    data: Any = None
    model: Any = None


def initialize_model_parallel(  # noqa: PLR0913, Apex's signature
    tensor_model_parallel_size_: int = 1,
    pipeline_model_parallel_size_: int = 1,
    virtual_pipeline_model_parallel_size_: int | None = None,
    pipeline_model_parallel_split_rank_: int | None = None,
    use_fp8_: bool = False,
    init_mpi_proc_group: bool = False,
    *,
    default_backend: str | None = None,
    p2p_backend: str | None = None,
) -> None:
    """Create the groups of data parallelism. Every process calls it.

    Args:
        default_backend: of the groups, "nccl" for example; by default that of the process group.

    Raises:
        NotImplementedError: for sizes other than 1, fp8, and other options of model parallelism.
    """
    if not dist.is_initialized():
        raise AssertionError("call torch.distributed.init_process_group first")
    # As in Apex, sizes are at most the number of processes.
    world_size = dist.get_world_size()
    sizes = (tensor_model_parallel_size_, pipeline_model_parallel_size_)
    is_parallel = any(min(size, world_size) != 1 for size in sizes)
    options = (virtual_pipeline_model_parallel_size_, pipeline_model_parallel_split_rank_)
    if is_parallel or any(option is not None for option in options):
        raise NotImplementedError(f"model-parallel sizes {sizes}, {options}: {ALTERNATIVES}")
    if use_fp8_ or init_mpi_proc_group or p2p_backend:
        raise NotImplementedError(f"use_fp8_, init_mpi_proc_group or p2p_backend: {ALTERNATIVES}")
    _Groups.data = dist.new_group(backend=default_backend)
    # new_group is collective: each process creates the groups of all, and keeps its own.
    groups = [dist.new_group([rank], backend=default_backend) for rank in range(world_size)]
    _Groups.model = groups[dist.get_rank()]


def destroy_model_parallel() -> None:
    """Forget the groups."""
    _Groups.data = _Groups.model = None


def model_parallel_is_initialized() -> bool:
    """Return whether there are groups."""
    return _Groups.data is not None


def is_unitialized() -> bool:
    """Return whether there are no groups."""
    return _Groups.data is None


def get_data_parallel_group() -> ProcessGroup:
    """Return the group of all processes."""
    if _Groups.data is None:
        raise AssertionError("data parallel group is not initialized")
    return _Groups.data


def get_model_parallel_group() -> ProcessGroup:
    """Return the group of this process alone."""
    if _Groups.model is None:
        raise AssertionError("model parallel group is not initialized")
    return _Groups.model


get_tensor_model_parallel_group = get_model_parallel_group
get_pipeline_model_parallel_group = get_model_parallel_group


def get_data_parallel_world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size(get_data_parallel_group())


def get_data_parallel_rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank(get_data_parallel_group())


def get_data_parallel_src_rank() -> int:
    """Return the first rank of the group of all processes."""
    return 0


def get_rank_info() -> tuple[int, int, int, int | None]:
    """Return the ranks in the data, tensor, pipeline and virtual pipeline groups."""
    if not model_parallel_is_initialized():
        return (0, 0, 0, 0)
    return (get_data_parallel_rank(), 0, 0, None)


def get_tensor_model_parallel_world_size() -> int:
    """Return 1."""
    return 1


get_pipeline_model_parallel_world_size = get_tensor_model_parallel_world_size


def get_tensor_model_parallel_rank() -> int:
    """Return 0."""
    return 0


get_pipeline_model_parallel_rank = get_tensor_model_parallel_rank


def get_tensor_model_parallel_src_rank() -> int:
    """Return the rank of this process, the only one of its group."""
    return dist.get_rank()


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return None: there is no interleaved pipeline, and encoder and decoder are in one stage."""
    return None


get_virtual_pipeline_model_parallel_world_size = get_virtual_pipeline_model_parallel_rank
get_pipeline_model_parallel_split_rank = get_virtual_pipeline_model_parallel_rank


def is_pipeline_first_stage(ignore_virtual: bool = False) -> bool:
    """Return True: there is one stage."""
    return True


is_pipeline_last_stage = is_pipeline_first_stage


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Return True: encoder and decoder are in one stage."""
    return True


is_pipeline_stage_after_split = is_pipeline_stage_before_split

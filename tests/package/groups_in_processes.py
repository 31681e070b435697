"""Functions of test_transformer.py that run in processes, which import them by their module."""

import pytest
import torch
import torch.distributed as dist


def use_groups() -> tuple:
    """Create the groups, check refusals, and return what this process finds in them."""
    from apex_native.extras import transformer_parallel_state as parallel_state

    assert parallel_state.is_unitialized()
    with pytest.raises(AssertionError, match="not initialized"):
        parallel_state.get_data_parallel_group()
    with pytest.raises(NotImplementedError, match=r"\(2, 1\).*Megatron-LM"):
        parallel_state.initialize_model_parallel(2)
    with pytest.raises(NotImplementedError, match="use_fp8_"):
        parallel_state.initialize_model_parallel(use_fp8_=True)
    parallel_state.initialize_model_parallel(1, 1)
    rank = dist.get_rank()
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    own = torch.tensor([rank + 1.0])
    for name in ("tensor_model", "pipeline_model", "model"):
        dist.all_reduce(own, group=getattr(parallel_state, f"get_{name}_parallel_group")())
    ranks = parallel_state.get_rank_info()
    size = parallel_state.get_data_parallel_world_size()
    source = parallel_state.get_tensor_model_parallel_src_rank()
    parallel_state.destroy_model_parallel()
    assert not parallel_state.model_parallel_is_initialized()
    return total.item(), own.item(), ranks, size, source

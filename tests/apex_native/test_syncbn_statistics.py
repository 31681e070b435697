"""SyncBatchNorm: statistics over processes, by collectives, Triton kernels and symmetric memory.

Functions named `on_each_rank_…` run in each of the processes.
"""

import copy
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from amp_helpers import BF16, FP16, FP32
from apex_native.parallel import (
    SyncBatchNorm,
    create_syncbn_process_group,
)
from torch import nn
from torch.nn import functional as F


def on_each_rank_see_what_is_kept():
    from torch._dynamo.backends.common import aot_autograd  # takes a moment, in every process
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    kept = []

    def forward_graph(graph, inputs):
        kept.extend(node.meta["val"] for node in graph.graph.output_node().args[0])
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=forward_graph,
        bw_compiler=lambda graph, inputs: make_boxed_func(graph),
        partition_fn=min_cut_rematerialization_partition,
    )
    norm, x = SyncBatchNorm(3), torch.randn(8, 3, 4, 4, dtype=BF16, requires_grad=True)
    torch.compile(norm.forward_synced, backend=backend, fullgraph=True)(x).sum().backward()
    return [(tensor.dtype, tensor.numel()) for tensor in kept if tensor.dim() == 4]


@pytest.mark.slow
def test_compiled_norm_saves_its_half_input_only(two_processes):
    output_and_input = [(BF16, 8 * 3 * 4 * 4)] * 2
    assert two_processes(on_each_rank_see_what_is_kept) == [output_and_input] * 2


def on_each_rank_share_statistics(whole, sizes, options, group_size=0, compiled=False):
    """A batch norm over this rank's part of a batch, as the group sees it, and one over it all.

    Returns for both, by rank: output, gradients of the input and of the parameters, and buffers.
    """
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    group = create_syncbn_process_group(group_size)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    parts = [whole.split(sizes)[rank] for rank in ranks]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    memory_format = formats.get(whole.dim(), torch.contiguous_format)
    if not whole.is_contiguous(memory_format=memory_format):
        memory_format = torch.contiguous_format
    whole = torch.cat(parts).contiguous(memory_format=memory_format)  # lost if one is empty
    here = ranks.index(dist.get_rank())
    start = sum(map(len, parts[:here]))
    mine = slice(start, start + len(parts[here]))
    torch.manual_seed(0)
    weights = torch.randint(-3, 4, whole.shape)  # the same in every type
    alone = SyncBatchNorm(whole.shape[1], **options).double()
    for parameter in alone.parameters():
        nn.init.normal_(parameter)
    together = copy.deepcopy(alone).to(device, torch.promote_types(whole.dtype, FP32))
    together.process_group = group

    results = []
    for norm, x, weight in ((alone, whole, weights), (together, whole[mine], weights[mine])):
        x = x.double() if norm is alone else x.to(device)
        x = x.detach().requires_grad_()
        forward = norm if norm is alone else norm.forward_synced
        if compiled and norm is together:
            torch.compiler.reset()
            backend = "inductor" if device.type == "cuda" else "aot_eager"
            forward = torch.compile(forward, backend=backend, fullgraph=True)
        output = forward(x)
        assert output.dtype == x.dtype
        assert output.stride() == x.stride() or not x.numel()
        (output * weight.to(x)).sum().backward()
        gradients = [parameter.grad for parameter in norm.parameters()]
        if norm is together:
            for gradient in gradients:
                dist.all_reduce(gradient, group=group)
        part = mine if norm is alone else slice(None)
        results.append([output[part], x.grad[part], *gradients, *norm.buffers()])
    return [[tensor.detach().double().cpu() for tensor in tensors] for tensors in results]


def normalise_as_over_one_batch(processes, whole, sizes, options, tolerance, **kwargs):
    arguments = (on_each_rank_share_statistics, whole, sizes, options)
    for expected, found in processes(*arguments, **kwargs):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


SHAPES = [(3,), (3, 5), (3, 4, 4), (3, 2, 4, 4)]


OPTIONS = [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]


TOLERANCES = {FP32: 1e-4, FP16: 5e-3, BF16: 4e-2}


EAGER = [
    pytest.param(sizes, False, id=f"{sizes}-eager") for sizes in [(4, 4), (3, 5), (0, 6), (6, 0)]
]


def compiled(sizes, *marks):
    return pytest.param(sizes, True, id=f"{sizes}-compiled", marks=marks)


@pytest.mark.parametrize(
    ("sizes", "compiled"),
    [*EAGER, compiled((3, 5), pytest.mark.slow), compiled((4, 4), pytest.mark.weekly)],
)
def test_processes_equal_one_large_batch(two_processes, sizes, compiled):
    """The reference formulas, which torch.compile uses; a mean far from 0 costs no digits."""
    for shape in SHAPES:
        whole = torch.randn(sum(sizes), *shape, dtype=torch.float64) * 3 + 1000
        options = OPTIONS[len(shape) - 1]
        normalise_as_over_one_batch(two_processes, whole, sizes, options, 1e-7, compiled=compiled)


def use_kernels_on_the_cpu(folder, epoch=0):
    """Have Triton's interpreter run the CUDA kernels on the CPU; return their buffer.

    Files that both processes map are the memory that GPUs access on each other.
    """
    from apex_native.parallel import syncbn
    from apex_native.parallel.syncbn import symmetric_memory

    mapped = []

    def map_file(rank, size):
        name = os.path.join(folder, str(rank))
        mapped.append(torch.from_file(name, shared=True, size=3 * size))
        return mapped[-1][size:-size]  # nothing may be written before and behind it

    def rendezvous(memory, group):
        dist.barrier()
        own, ranks = dist.get_rank(), range(dist.get_world_size())
        each = [memory if rank == own else map_file(rank, len(memory)) for rank in ranks]
        return SimpleNamespace(buffer_ptrs=[memory.data_ptr() for memory in each])

    symmetric_memory.symmetric_memory = SimpleNamespace(
        empty=lambda size, **kwargs: map_file(dist.get_rank(), size), rendezvous=rendezvous
    )
    buffer = symmetric_memory.SymmetricBuffer(dist.group.WORLD, 2048, torch.device("cpu"))
    _, world, tiles, *_ = buffer.descriptor.tolist()
    # The flags and the finished epochs; the arrivals behind them stay 0.
    buffer.memory.view(torch.int32)[-(world + 2) * tiles : -tiles] = epoch
    dist.barrier()  # or another process sets a flag before that
    buffer.nothing_written_outside = lambda: all(
        not part.any() for memory in mapped for part in memory.chunk(3)[::2]
    )
    syncbn.symmetric_buffer = lambda *of: buffer.descriptor
    syncbn.select_implementation = lambda *of: symmetric_memory.FusedKernels(buffer.descriptor)
    return buffer


def on_each_rank_share_by_kernels(folder, epoch, *arguments):
    buffer = use_kernels_on_the_cpu(folder, epoch)
    results = on_each_rank_share_statistics(*arguments)
    assert buffer.nothing_written_outside()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(3, 5), (6, 0)], ids=str)
def test_kernels_equal_one_large_batch(interpreted_processes, tmp_path, sizes):
    """Half or not, in any memory format; with more rows and channels than a tile has."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    shapes = [(3,), (5, 3), (70, 5, 5), (3, 2, 4, 4)]
    for shape, options, dtype in zip(shapes, OPTIONS, (FP16, FP32, FP32, BF16), strict=True):
        whole = (torch.randn(sum(sizes), *shape) * 3 + 10).to(dtype)
        whole = whole.contiguous(memory_format=formats.get(whole.dim(), torch.contiguous_format))
        folder = tmp_path / str(whole.dim())
        folder.mkdir()
        epoch = 2**31 - 2  # the backward pass comes after the largest of int32
        arguments = (on_each_rank_share_by_kernels, str(folder), epoch, whole, sizes, options)
        for expected, found in interpreted_processes(*arguments):
            half = TOLERANCES[dtype]  # of what is in the type of the input, and of the rest
            torch.testing.assert_close(found[:2], expected[:2], rtol=half, atol=half)
            torch.testing.assert_close(found[2:], expected[2:], rtol=1e-4, atol=1e-4)


def on_each_rank_track_by_kernels(folder, momentum):
    use_kernels_on_the_cpu(folder)
    norm = SyncBatchNorm(70, momentum=momentum)
    x = torch.randn(8, 70) * 1e-4
    norm.forward_synced(x)
    return x, norm.running_mean, norm.running_var, norm.running_var._version


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [1.0, None])
def test_kernels_update_running_statistics_exactly(interpreted_processes, tmp_path, momentum):
    """At a rate of 1, no trace of the initial variance of 1 is left in one of 1e-8."""
    ranks = interpreted_processes(on_each_rank_track_by_kernels, str(tmp_path), momentum)
    expected = torch.var_mean(torch.cat([x for x, *_ in ranks]), 0)[::-1]
    for _, mean, var, version in ranks:
        torch.testing.assert_close((mean, var), expected, rtol=1e-4, atol=1e-11)
        assert version > 0  # or autograd would not object to a change of what it has saved


def on_each_rank_normalise_by_kernels(folder, channels):
    use_kernels_on_the_cpu(folder)
    norms = [SyncBatchNorm(count) for count in channels[dist.get_rank()]]
    x = torch.randn(8, max(norm.num_features for norm in norms))
    return [norm.forward_synced(x[:, : norm.num_features].contiguous()).detach() for norm in norms]


@pytest.mark.slow
def test_processes_at_different_layers_get_nan(interpreted_processes, tmp_path):
    """They must not get each other's sums."""
    channels = [(3, 4, 5), (3, 5, 4)]
    for outputs in interpreted_processes(
        on_each_rank_normalise_by_kernels, str(tmp_path), channels
    ):
        assert [output.isnan().all().item() for output in outputs] == [False, True, True]


def on_each_rank_normalise_constants(values):
    norm = SyncBatchNorm(len(values))
    nn.init.normal_(norm.bias)
    output = norm.forward_synced(values.expand(7, 5, -1).transpose(1, 2))
    return output.detach(), norm.bias.detach()


def test_constant_channel_becomes_its_bias(two_processes):
    """A rounding error would open or close a ReLU."""
    for output, bias in two_processes(on_each_rank_normalise_constants, torch.rand(64) + 10):
        assert torch.equal(output, bias.view(-1, 1).expand_as(output))


def on_each_rank_normalise_outliers(whole):
    x = whole.chunk(2)[dist.get_rank()]
    norm = SyncBatchNorm(whole.shape[1], momentum=1.0)
    norm.forward_synced(x)
    return norm.running_mean, norm.running_var


def test_outlier_as_first_value_costs_few_digits(two_processes):
    whole = torch.randn(8, 3, 32, 32)
    whole[0, :, 0, 0] = 1000
    expected = list(torch.var_mean(whole.double(), (0, 2, 3)))[::-1]
    for found in two_processes(on_each_rank_normalise_outliers, whole):
        torch.testing.assert_close(list(found), expected, check_dtype=False, rtol=1e-4, atol=1e-5)


def on_each_rank_normalise_untracked():
    norm = SyncBatchNorm(3)
    norm.bias, norm.track_running_stats = None, False
    x = torch.randn(4, 3)
    norm.forward_synced(x).sum().backward()
    return x, norm.running_mean, norm.running_var, norm.weight.grad


def test_norm_without_bias_and_tracking(two_processes):
    ranks = two_processes(on_each_rank_normalise_untracked)
    whole = F.batch_norm(torch.cat([x for x, *_ in ranks]), None, None, training=True)
    for part, (_, mean, var, gradient) in zip(whole.chunk(2), ranks, strict=True):
        assert torch.equal(mean, torch.zeros(3)) and torch.equal(var, torch.ones(3))
        torch.testing.assert_close(gradient, part.sum(0))


def test_process_groups_are_separate(four_processes):
    whole = torch.randn(14, 3, 4, dtype=torch.float64) * torch.arange(1, 15).view(14, 1, 1)
    normalise_as_over_one_batch(four_processes, whole, (2, 3, 4, 5), {}, 1e-7, group_size=2)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize(("sizes", "compiled"), [*EAGER, compiled((3, 5)), compiled((4, 4))])
def test_two_gpus_equal_one_large_batch(two_gpus, sizes, dtype, compiled):
    tolerance = TOLERANCES[dtype]
    formats = {3: torch.channels_last, 4: torch.channels_last_3d}
    for shape, options in zip(SHAPES, OPTIONS, strict=True):
        whole = (torch.randn(sum(sizes), *shape) * 3 + 10).to(dtype)
        for memory_format in {torch.contiguous_format, formats.get(len(shape))} - {None}:
            batch = whole.contiguous(memory_format=memory_format)
            arguments = (two_gpus, batch, sizes, options, tolerance)
            normalise_as_over_one_batch(*arguments, compiled=compiled)


@pytest.mark.gpu(2)
def test_sums_of_many_programs_are_complete_before_the_exchange(two_gpus):
    """Repeated, because a wrong order shows only by chance."""
    whole = torch.randn(64, 256, 28, 28) * 3 + 10
    whole = whole.contiguous(memory_format=torch.channels_last)
    for _ in range(4):
        normalise_as_over_one_batch(two_gpus, whole, (33, 31), {}, 2e-3)


def on_each_rank_count_in_half():
    norm = SyncBatchNorm(1).cuda().half()
    norm(torch.randn(1, 1, 300, 300, device="cuda").half() + 5)
    return norm.running_mean.item(), norm.running_var.item()


@pytest.mark.gpu(2)
def test_half_statistics_of_more_values_than_half_can_count(two_gpus):
    """At O3. torch's SyncBatchNorm counts in the type of the running statistics."""
    for mean, var in two_gpus(on_each_rank_count_in_half):
        assert mean == pytest.approx(0.5, rel=0.02)
        assert var == pytest.approx(1.0, rel=0.02)


def on_each_rank_normalise_one_value():
    norm = SyncBatchNorm(3)
    norm.forward_synced(torch.ones(1 - dist.get_rank(), 3))
    return [norm.running_mean, norm.running_var]


def test_one_value_in_the_group_leaves_no_nan(two_processes):
    for statistics in two_processes(on_each_rank_normalise_one_value):
        assert all(values.isfinite().all() for values in statistics)

"""SyncBatchNorm: conversion, arguments, and batch norm in one process.

Functions named `on_each_rank_…` run in each of the processes.
"""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from amp_helpers import BF16, FP16, FP32, same
from apex_native.parallel import (
    DistributedDataParallel,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
    revert_syncbn_model,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune


def on_each_rank_make_groups(sizes):
    groups = [create_syncbn_process_group(size) for size in sizes]
    return [group and dist.get_process_group_ranks(group) for group in groups]


def test_create_syncbn_process_group(two_processes):
    results = two_processes(on_each_rank_make_groups, [0, 1, 2])
    assert results == [[None, [0], [0, 1]], [None, [1], [0, 1]]]
    with pytest.raises(Exception, match="group_size 3 does not divide 2 processes"):
        two_processes(on_each_rank_make_groups, [3])


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Sequential(nn.BatchNorm2d(4))
    )


def test_conversion_keeps_parameters_buffers_and_modes():
    model = conv_net()
    model[1].weight.requires_grad_(False)
    model[1].eval()
    model[3][0] = nn.BatchNorm2d(4, eps=0.1, momentum=None, affine=False)
    model.append(nn.BatchNorm1d(4, track_running_stats=False))
    tensors = model.state_dict(keep_vars=True)
    converted = convert_syncbn_model(model)

    assert converted is model
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(tensors)
    assert all(after[name] is tensor for name, tensor in tensors.items())
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["1.weight"]
    norms = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
    assert [norm.training for norm in norms] == [False, True, True]
    assert [(norm.eps, norm.momentum, norm.affine) for norm in norms] == [
        (1e-5, 0.1, True),
        (0.1, None, False),
        (1e-5, 0.1, True),
    ]
    assert [norm.track_running_stats for norm in norms] == [True, True, False]
    assert not any(type(module).__name__.startswith("BatchNorm") for module in model.modules())


class NormAndReLU(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


class AlwaysFrozen(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(False)


def test_norms_with_their_own_forward_or_train_are_not_converted(capsys):
    model = nn.Sequential(nn.BatchNorm2d(3), NormAndReLU(3), AlwaysFrozen(3)).eval()
    x = torch.randn(2, 3, 4, 4)
    before = model(x)
    assert list(map(type, convert_syncbn_model(model))) == [
        SyncBatchNorm,
        NormAndReLU,
        AlwaysFrozen,
    ]
    assert torch.equal(model(x), before) and not model.train()[2].training
    names = "AlwaysFrozen, NormAndReLU has a forward pass or train() of its own"
    kept = f"{names} or a pruned or parametrized weight"
    assert f"{kept}, and is not converted" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("kind", ["pruned", "parametrized"])
def test_norms_whose_parameters_are_computed_are_not_converted(capsys, kind, name):
    norm = nn.BatchNorm2d(4).eval()
    if kind == "pruned":
        prune.random_unstructured(norm, name, 2)
    else:
        nn.utils.parametrize.register_parametrization(norm, name, nn.Softplus())
    converted = convert_syncbn_model(nn.Sequential(norm, nn.BatchNorm2d(4)))
    assert converted[0] is norm and isinstance(converted[1], SyncBatchNorm)
    assert "a pruned or parametrized weight, and is not converted" in capsys.readouterr().out


def test_conversion_keeps_hooks_attributes_and_other_references():
    norm = nn.BatchNorm2d(3)
    norm.register_forward_hook(lambda module, inputs, output: output.clamp(max=module.highest))
    norm.highest = 0.5
    model = nn.Sequential(norm)
    model.layers = [(norm, nn.ReLU())]  # a list that the conversion can't see
    convert_syncbn_model(model)
    assert type(model[0]) is SyncBatchNorm and model.layers[0][0] is model[0]
    assert model(torch.randn(4, 3, 5, 5)).max() == 0.5
    model.eval()
    assert not model.layers[0][0].training
    revert_syncbn_model(model)
    assert type(norm) is nn.BatchNorm2d and norm.highest == 0.5
    assert vars(norm).keys() - vars(nn.BatchNorm2d(3)).keys() == {"highest"}


def test_conversion_of_a_batch_norm_itself():
    norm = nn.BatchNorm1d(3)
    converted = convert_syncbn_model(norm, channel_last=True)
    assert isinstance(converted, SyncBatchNorm) and converted.weight is norm.weight
    assert converted.channel_last


def on_each_rank_convert(model):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        convert_syncbn_model(model)
    return text.getvalue()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says it where there is no GPU")
def test_rank_zero_logs_local_statistics_on_the_cpu(two_processes):
    first, second = two_processes(on_each_rank_convert, conv_net())
    assert first == "SyncBatchNorm: on the CPU each process normalizes over its own batch\n"
    assert second == ""


@pytest.mark.parametrize("norm", [nn.LayerNorm(3), NormAndReLU(3)])
def test_model_without_converted_norms_logs_no_local_statistics(two_processes, norm):
    model = nn.Sequential(nn.Linear(3, 3), norm)
    assert not any("normalizes" in text for text in two_processes(on_each_rank_convert, model))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.BatchNorm1d, (5, 3)),
        (nn.BatchNorm1d, (5, 3, 4)),
        (nn.BatchNorm2d, (5, 3, 4, 4)),
        (nn.BatchNorm3d, (5, 3, 2, 2, 2)),
    ],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1}],
    ids=str,
)
def test_equals_batch_norm_in_one_process(kind, shape, options):
    plain = kind(3, **options)
    synced = SyncBatchNorm(3, **options)
    x, y = torch.randn(2, *shape) * 2 + 1
    x_too = x.clone().requires_grad_()
    x.requires_grad_()
    outputs = [norm(first) for norm, first in ((plain, x), (synced, x_too))]
    for output in outputs:
        (output.cumsum(0) ** 2).sum().backward()
    assert same(*[[output] for output in outputs])
    assert torch.equal(x.grad, x_too.grad)
    assert same(plain.state_dict().values(), synced.state_dict().values())
    assert torch.equal(plain(y), synced(y))
    assert torch.equal(plain.eval()(y), synced.eval()(y))
    assert same(plain.state_dict().values(), synced.state_dict().values())


def test_fuse_relu_and_addition():
    norm, x, z = SyncBatchNorm(3, fuse_relu=True), torch.randn(4, 3), torch.randn(4, 3)
    plain = F.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(norm(x), plain.relu())
    torch.testing.assert_close(norm(x, z), (plain + z).relu())
    norm.fuse_relu = False
    torch.testing.assert_close(norm(x, z), plain + z)


def test_invalid_dimensions_raise():
    for shape in ((3,), (2, 3, 1, 1, 1, 1)):
        with pytest.raises(ValueError, match=f"not {len(shape)}-D"):
            SyncBatchNorm(3)(torch.ones(shape))


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_half_input_gives_half_output_from_fp32_statistics(device, dtype):
    norm = SyncBatchNorm(3).to(device)
    x = torch.randn(64, 3, device=device) + 3
    output = norm(x.to(dtype))
    assert output.dtype == dtype
    assert norm.weight.dtype == norm.running_mean.dtype == FP32
    expected = nn.BatchNorm1d(3).to(device)(x)
    torch.testing.assert_close(output.float(), expected, rtol=0.02, atol=0.02)


def on_each_rank_train_synced(data):
    torch.manual_seed(0)
    model = DistributedDataParallel(convert_syncbn_model(conv_net()))
    x = data[dist.get_rank()]
    model(x).square().mean().backward()
    return model(x).detach(), [buffer.clone() for buffer in model.module.buffers()]


def test_cpu_processes_normalize_their_own_batches(two_processes):
    """DistributedDataParallel refuses torch's own SyncBatchNorm there."""
    data = torch.randn(2, 4, 3, 6, 6)
    for x, (output, buffers) in zip(
        data, two_processes(on_each_rank_train_synced, data), strict=True
    ):
        torch.manual_seed(0)
        model = conv_net()
        model(x)
        torch.testing.assert_close(output, model(x))
        torch.testing.assert_close(buffers, list(model.buffers()))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_revert_restores_the_batch_norms(kind):
    model = nn.Sequential(nn.Sequential(kind(4, eps=0.1, momentum=None)), nn.ReLU())
    model[0][0].weight.requires_grad_(False)
    model[0][0].eval()
    tensors = model.state_dict(keep_vars=True)
    assert revert_syncbn_model(convert_syncbn_model(model)) is model
    norm = model[0][0]
    assert type(norm) is kind
    assert (norm.eps, norm.momentum, norm.training) == (0.1, None, False)
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in tensors.items())
    assert not norm.weight.requires_grad


def test_conversion_is_idempotent():
    once = convert_syncbn_model(nn.BatchNorm1d(3))
    twice = convert_syncbn_model(once)
    assert type(revert_syncbn_model(twice)) is nn.BatchNorm1d
    assert convert_syncbn_model(SyncBatchNorm(3, fuse_relu=True)).fuse_relu


@pytest.mark.parametrize("input", [torch.ones(2, 5), torch.ones(2, 3, dtype=torch.int64)])
def test_other_channels_and_integers_raise(input):
    with pytest.raises(ValueError, match="takes 3 channels of a floating-point type"):
        SyncBatchNorm(3).forward_synced(input)


def test_revert_with_fuse_relu_raises():
    with pytest.raises(ValueError, match="fuse_relu=True"):
        revert_syncbn_model(nn.Sequential(SyncBatchNorm(3, fuse_relu=True)))


def test_shared_batch_norm_is_converted_under_both_names():
    norm = nn.BatchNorm1d(2)
    parts = nn.Sequential(norm), nn.Sequential(nn.ReLU(), norm)
    model = convert_syncbn_model(nn.Sequential(*parts))
    assert isinstance(model[0][0], SyncBatchNorm)
    assert model[0][0] is model[1][1]  # two modules would part where buffers are moved or cast
    assert model[0][0].weight is norm.weight
    assert type(revert_syncbn_model(model)[0][0]) is nn.BatchNorm1d
    assert model[0][0] is model[1][1]


def norm_without_some_tensors():
    norm = nn.BatchNorm1d(2)
    norm.bias = norm.running_mean = norm.running_var = None
    return norm


def norm_without_a_count(momentum):
    norm = nn.BatchNorm1d(2, momentum=momentum)
    norm.num_batches_tracked = None
    return norm


def on_each_rank_normalize_without_a_count(momentum, x):
    norm = convert_syncbn_model(norm_without_a_count(momentum))
    norm.forward_synced(x[dist.get_rank()])
    return norm.state_dict()


@pytest.mark.parametrize("momentum", [0.1, None])  # None: torch's running statistics stay
def test_norm_without_a_count_of_batches_is_converted(two_processes, momentum):
    x = torch.randn(2, 4, 2)
    norm = norm_without_a_count(momentum)
    norm(x.flatten(0, 1))
    for state in two_processes(on_each_rank_normalize_without_a_count, momentum, x):
        torch.testing.assert_close(state, norm.state_dict())


def on_each_rank_normalize_without_some_tensors(x):
    norm = convert_syncbn_model(norm_without_some_tensors())
    return norm.forward_synced(x[dist.get_rank()]).detach(), list(norm.state_dict())


def test_conversion_adds_no_tensors(two_processes):
    x = torch.randn(2, 4, 2)
    expected = norm_without_some_tensors()(x.flatten(0, 1)).detach().chunk(2)
    results = two_processes(on_each_rank_normalize_without_some_tensors, x)
    for (output, names), wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(output, wanted)
        assert names == ["weight", "num_batches_tracked"]
    plain = revert_syncbn_model(convert_syncbn_model(norm_without_some_tensors()))
    assert list(plain.state_dict()) == ["weight", "num_batches_tracked"]


def test_conversion_passes_the_process_group():
    group = object()
    model = convert_syncbn_model(conv_net(), group)
    assert model[1].process_group is model[3][0].process_group is group


def test_channel_last_does_not_move_the_channels(device):
    """Apex takes the last dimension for the channels with channel_last=True."""
    x = torch.randn(4, 3, 5, 5, device=device).to(memory_format=torch.channels_last)
    output = SyncBatchNorm(3, channel_last=True).to(device)(x)
    torch.testing.assert_close(output, nn.BatchNorm2d(3).to(device)(x))
    assert output.is_contiguous(memory_format=torch.channels_last)

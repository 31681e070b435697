"""apex_native.parallel: gradients over two processes, and batch norms that share statistics.

What begins with `on_each_rank_` runs in every one of the processes.
"""

import contextlib
import copy
import io
import os
import pickle
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import Processes
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn import functional as F

from apex_native import amp
from apex_native.optimizers import FusedAdam
from apex_native.parallel import (
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
    revert_syncbn_model,
)

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def same(ones, others):
    """Whether two sequences of tensors are the same to the last bit."""
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


# Gradients


def wrap(model, at_once, **options):
    wrapped = DistributedDataParallel(model, **options)
    if at_once:
        wrapped.average_at_once()
    return wrapped


class Weighted(nn.Module):
    """The gradient of its weight is its input."""

    def __init__(self, like):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros_like(like))

    def forward(self, x):
        return (self.weight * x).sum()


def on_each_rank_reduce(rows, options, at_once=False):
    x = rows[dist.get_rank()]
    model = wrap(Weighted(x), at_once, **options)
    for _ in range(2):  # torch lays its buckets out anew after the first pass
        model.zero_grad()
        model(x).backward()
    return model.module.weight.grad


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 0.5),
        ({"delay_allreduce": True}, 0.5),
        ({"message_size": 1}, 0.5),
        ({"gradient_predivide_factor": 4.0}, 0.5),
        ({"gradient_average": False}, 1.0),
        ({"gradient_average": False, "gradient_predivide_factor": 4.0}, 0.25),
        ({"allreduce_always_fp32": True}, 0.5),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_gradients_are_reduced(two_processes, options, factor, at_once):
    rows = torch.tensor([[1.0, 2.0, 3.0], [3.0, 8.0, -5.0]])
    for gradient in two_processes(on_each_rank_reduce, rows, options, at_once):
        assert torch.equal(gradient, rows.sum(0) * factor)


class Mixed(nn.Module):
    """Weights of two types, one of them channels last; outputs of which one is enough."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.factor = nn.Parameter(torch.ones(2).to(BF16))

    def forward(self, x):
        y = self.conv(x) * self.factor.float().sum()
        return {"out": [y], "more": (y.mean(), x)}


def loss_of(results):
    return results["out"][0].square().mean() + results["more"][0]


def on_each_rank_reduce_at_once(inputs, hook):
    torch.manual_seed(0)
    model = wrap(Mixed(), at_once=True)
    if hook:
        model.register_comm_hook(None, hook)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        for _ in range(2):
            model.zero_grad()
            loss_of(model(inputs[dist.get_rank()])).backward()
    for parameter in model.parameters():
        assert parameter.grad.stride() == parameter.stride()
    return [p.grad for p in model.parameters()], all_reduce.call_count


@pytest.mark.parametrize("hook", [None, bf16_compress_hook])
def test_all_of_a_type_is_averaged_at_once(two_processes, hook):
    inputs = torch.randn(2, 4, 2, 5, 5)
    torch.manual_seed(0)
    model = Mixed()
    for x in inputs:
        (loss_of(model(x)) / 2).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    precision = {"rtol": 0.02, "atol": 0.02} if hook else {"rtol": 1e-2, "atol": 1e-5}
    for found, calls in two_processes(on_each_rank_reduce_at_once, inputs, hook):
        assert calls == 2 * 2
        torch.testing.assert_close(found, expected, **precision)


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


def grads_of(model):
    return [parameter.grad.tolist() for parameter in model.parameters()]


def on_each_rank_fail_in_backward():
    model = wrap(nn.Linear(2, 1), at_once=True)
    x = torch.full((1, 2), 1.0 + dist.get_rank(), requires_grad=True)
    with pytest.raises(ZeroDivisionError):
        (model(Refusing.apply(x)) + Refusing.apply(x).sum()).sum().backward()
    model.zero_grad()
    model(x).sum().backward()
    return grads_of(model)


def on_each_rank_differentiate_first():
    """As gradient penalties, adaptive weights and saliency maps do, the last on one rank alone."""
    model = wrap(nn.Linear(2, 1), at_once=True)
    x = torch.full((1, 2), 1.0 + dist.get_rank(), requires_grad=True)
    output = model(x)
    torch.autograd.grad(output.sum(), x, create_graph=True)
    torch.autograd.grad(output.sum(), model.module.weight, retain_graph=True)
    output.backward(inputs=[x], retain_graph=True)
    if dist.get_rank() == 0:
        torch.autograd.grad(output.sum(), x, retain_graph=True)
    output.sum().backward()
    return grads_of(model)


class Silent(nn.Linear):
    def forward(self, x):
        self.loss = super().forward(x).sum()
        return SimpleNamespace(loss=self.loss)


def on_each_rank_return_no_tensor():
    model = wrap(Silent(2, 1), at_once=True)
    model(torch.full((1, 2), 1.0 + dist.get_rank())).loss.backward()
    return grads_of(model)


def on_each_rank_validate_before_backward():
    model = wrap(nn.Linear(2, 1), at_once=True)
    output = model(torch.full((1, 2), 1.0 + dist.get_rank()))
    with torch.no_grad():
        model(torch.ones(1, 2))
    output.sum().backward()
    return grads_of(model)


def on_each_rank_copy(copied=copy.deepcopy):
    original = wrap(nn.Linear(2, 1), at_once=True)
    original(torch.ones(1, 2)).sum().backward()
    model = copied(original)
    model.zero_grad()
    model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
    return grads_of(model)


def on_each_rank_pickle():
    return on_each_rank_copy(lambda model: pickle.loads(pickle.dumps(model)))


def on_each_rank_move_the_gradients():
    model = wrap(nn.Linear(2, 1), at_once=True)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
        model.double().float()
    return grads_of(model)


@pytest.mark.parametrize(
    "on_each_rank",
    [
        on_each_rank_move_the_gradients,
        on_each_rank_fail_in_backward,
        on_each_rank_differentiate_first,
        on_each_rank_return_no_tensor,
        on_each_rank_validate_before_backward,
        on_each_rank_copy,
        on_each_rank_pickle,
    ],
)
def test_averaging_at_once_depends_on_gradients_alone(two_processes, on_each_rank):
    assert two_processes(on_each_rank) == [[[[1.5, 1.5]], [1.0]]] * 2


def on_each_rank_average_what_can_not_be(kind):
    if kind == "unused":
        model, x = Branches(), torch.ones(1, 2)
    else:
        model, x = nn.Embedding(3, 2, sparse=True), torch.tensor([1])
    try:
        wrap(model, at_once=True)(x).sum().backward()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "words"), [("unused", "sometimes.weight, sometimes.bias,"), ("sparse", "no sparse")]
)
def test_averaging_at_once_refuses(two_processes, kind, words):
    for error in two_processes(on_each_rank_average_what_can_not_be, kind):
        assert words in error


def on_each_rank_switch_the_reduction(rows, at_once):
    x = rows[dist.get_rank()]
    model = wrap(Weighted(x), at_once)
    model.disable_allreduce()
    model(x).backward()
    alone = model.module.weight.grad.clone()
    model.enable_allreduce()
    model(x).backward()  # the sum of both passes is averaged
    return alone, model.module.weight.grad


@pytest.mark.parametrize("at_once", [False, True])
def test_the_reduction_can_be_switched_off_and_on(two_processes, at_once):
    rows = torch.tensor([[1.0, 2.0], [3.0, -6.0]])
    for rank, (alone, together) in enumerate(
        two_processes(on_each_rank_switch_the_reduction, rows, at_once)
    ):
        assert torch.equal(alone, rows[rank])
        assert torch.equal(together, rows.sum(0))


def on_each_rank_reduce_by_hand(rows):
    x = rows[dist.get_rank()]
    model = Weighted(x + dist.get_rank())
    nn.init.constant_(model.weight, dist.get_rank())
    reducer = Reducer(model)
    started_as = model.weight.detach().clone()
    model(x).backward()
    reducer.reduce()
    loose = [x.clone(), [x.double() * 2]]
    Reducer(loose).reduce()
    return started_as, model.weight.grad, loose[0], loose[1][0]


def test_a_reducer_averages_when_told_to(two_processes):
    rows = torch.tensor([[1.0, 2.0], [3.0, -6.0]])
    mean = rows.mean(0)
    for results in two_processes(on_each_rank_reduce_by_hand, rows):
        assert same(results, (torch.zeros(2), mean, mean, mean.double() * 2))


def on_each_rank_make_groups(sizes):
    groups = [create_syncbn_process_group(size) for size in sizes]
    return [group and dist.get_process_group_ranks(group) for group in groups]


def test_groups_of_neighbours_normalise_together(two_processes):
    results = two_processes(on_each_rank_make_groups, [0, 1, 2])
    assert results == [[None, [0], [0, 1]], [None, [1], [0, 1]]]
    with pytest.raises(Exception, match="3, which does not divide 2 processes"):
        two_processes(on_each_rank_make_groups, [3])


def test_half_gradients_are_reduced_in_fp32_if_asked(two_processes):
    rows = torch.randn(2, 100).to(BF16)
    expected = rows.float().mean(0).to(BF16)
    options = {"gradient_predivide_factor": 3.0}  # which rounds in bf16
    gradients = two_processes(on_each_rank_reduce, rows, options)
    assert same(*[[gradient] for gradient in gradients])
    assert gradients[0].dtype == BF16
    assert not torch.equal(gradients[0], expected)
    options["allreduce_always_fp32"] = True
    for gradient in two_processes(on_each_rank_reduce, rows, options):
        assert torch.equal(gradient, expected)


def on_each_rank_wrap():
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for tensor in (*model.parameters(), model[1].running_mean):
        nn.init.constant_(tensor, rank + 1.0)
    wrapped = DistributedDataParallel(model)
    after_wrapping = copy.deepcopy(model.state_dict())
    wrapped(torch.randn(4, 2) + 100 * rank)
    return after_wrapping, model.state_dict(), list(wrapped.state_dict())


def test_parameters_are_broadcast_and_buffers_are_not(two_processes):
    results = two_processes(on_each_rank_wrap)
    for rank, (wrapped, _, keys) in enumerate(results):
        assert same([wrapped["0.weight"], wrapped["1.bias"]], [torch.ones(2, 2), torch.ones(2)])
        assert wrapped["1.running_mean"].tolist() == [rank + 1.0] * 2
        assert keys == [f"module.{key}" for key in wrapped]
    first, second = (called["1.running_mean"] for _, called, _ in results)
    assert not torch.allclose(first, second), "nor before a forward pass"


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.sometimes, self.never = (nn.Linear(2, 1) for _ in range(3))

    def forward(self, x, all_branches=False):
        return self.used(x) + (self.sometimes(x) if all_branches else 0.0)


def on_each_rank_leave_parameters_out(only_first_rank_uses, delay_allreduce):
    torch.manual_seed(0)
    model = DistributedDataParallel(Branches(), delay_allreduce=delay_allreduce)
    rank = dist.get_rank()
    x = torch.full((1, 2), rank + 1.0)
    try:
        for _ in range(2):
            model.zero_grad()
            model(x, only_first_rank_uses and rank == 0).sum().backward()
    except RuntimeError as error:
        return str(error)
    return {name: p.grad for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("only_first_rank_uses", [False, True])
def test_delay_allreduce_copes_with_unused_parameters(two_processes, only_first_rank_uses):
    results = two_processes(on_each_rank_leave_parameters_out, only_first_rank_uses, True)
    for gradients in results:
        assert gradients["used.weight"].tolist() == [[1.5, 1.5]]
        assert gradients["never.weight"] is None
        if only_first_rank_uses:
            assert gradients["sometimes.weight"].tolist() == [[0.5, 0.5]]


def on_each_rank_freeze_late():
    model = DistributedDataParallel(Branches())
    model.module.used.weight.requires_grad_(False)
    try:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        return str(error)


def test_a_parameter_that_is_frozen_after_wrapping_is_named(two_processes):
    for error in two_processes(on_each_rank_freeze_late):
        assert "last backward pass: used.weight, sometimes.weight, " in error


def test_unused_parameters_are_named(two_processes):
    for error in two_processes(on_each_rank_leave_parameters_out, False, False):
        assert "sometimes.weight, sometimes.bias, never.weight, never.bias." in error
        assert "used.bias, " not in error
        assert "delay_allreduce=True" in error


def on_each_rank_fail_in_forward():
    model = DistributedDataParallel(nn.Linear(2, 1))
    try:
        model(torch.ones(1, 3))
    except RuntimeError as error:
        return str(error)


def test_errors_of_the_module_come_through(two_processes):
    for error in two_processes(on_each_rank_fail_in_forward):
        assert "shapes cannot be multiplied" in error


def test_arguments_that_cannot_be():
    module = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="device_ids"):
        DistributedDataParallel(module, device_ids=[0])
    with pytest.raises(ValueError, match="shared_param.*delay_allreduce"):
        DistributedDataParallel(module, shared_param=True)
    delayed = {"delay_allreduce": True}
    with pytest.raises(ValueError, match="allreduce_trigger_params needs delay_allreduce=False"):
        DistributedDataParallel(module, **delayed, allreduce_trigger_params=[module.weight])
    with pytest.raises(ValueError, match="num_allreduce_streams.*needs delay_allreduce=False"):
        DistributedDataParallel(module, **delayed, num_allreduce_streams=2)


# With amp


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def initialize(level, **options):
    """A model and an optimizer, in real fp16 at O2 and O3 on any CPU."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    model = net().cuda() if on_gpu else net()
    if level in ("O2", "O3") and not on_gpu:
        options["cast_model_type"] = FP16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def step(model, optimizer, x, factor=1.0):
    x = x.to(next(model.parameters()).device)
    optimizer.zero_grad()
    with amp.scale_loss(model(x).float().square().mean() * factor, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


def on_each_rank_train(level, at_once, data):
    model, optimizer = initialize(level)
    wrapped = wrap(model, at_once)
    for batch in data.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]:
        step(wrapped, optimizer, batch)
    amp.initialize(nn.Identity(), enabled=False)
    return [tensor.cpu() for tensor in model.state_dict().values()]


def trains_as_one_process(processes, level, at_once):
    data = torch.randn(3, 8, 4)
    first, second = processes(on_each_rank_train, level, at_once, data)
    assert same(first, second)

    model, optimizer = initialize(level)
    for batch in data:
        step(model, optimizer, batch)
    assert not same(first, [parameter.float() for parameter in net().parameters()])
    torch.testing.assert_close(first, list(model.state_dict().values()), rtol=0.02, atol=0.002)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_two_processes_train_as_one(two_processes, level, at_once):
    trains_as_one_process(two_processes, level, at_once)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_two_gpus_train_as_one_process(two_gpus, level, at_once):
    trains_as_one_process(two_gpus, level, at_once)


def on_each_rank_step_without_waiting(at_once):
    model = net().cuda()
    optimizer = FusedAdam(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    wrapped = wrap(model, at_once)
    for number in range(5):  # in the second one torch lays its buckets out anew
        torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
        try:
            step(wrapped, optimizer, torch.ones(8, 4, device="cuda"))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return True


@pytest.mark.gpu(2)
@pytest.mark.parametrize("at_once", [False, True])
def test_no_step_waits_for_the_gpus(two_gpus, at_once):
    assert two_gpus(on_each_rank_step_without_waiting, at_once) == [True, True]


def on_each_rank_overflow(level):
    model, optimizer = initialize(level, loss_scale="dynamic")
    wrapped = DistributedDataParallel(model)
    states = [copy.deepcopy(model.state_dict())]
    for factor in (1.0 if dist.get_rank() else float("inf"), 1e-3):
        step(wrapped, optimizer, torch.ones(2, 4), factor)
        states.append(copy.deepcopy(model.state_dict()))
    return [list(state.values()) for state in states], amp.state_dict()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_an_overflow_on_one_rank_skips_the_step_of_all(two_processes, level):
    results = two_processes(on_each_rank_overflow, level)
    for (before, skipped, stepped), state in results:
        assert same(before, skipped)
        assert not same(before, stepped)
        assert state == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 1}}
    assert same(results[0][0][2], results[1][0][2])


def on_each_rank_accumulate(level, no_sync, at_once, data):
    model, optimizer = initialize(level)
    wrapped = wrap(model, at_once)
    if level == "O2":
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 256.0, "unskipped": 0}})
    mine = data[dist.get_rank()]
    for index, batch in enumerate(mine):
        alone = no_sync and index < len(mine) - 1
        loss = wrapped(batch).float().square().mean()
        with (
            wrapped.no_sync() if alone else contextlib.nullcontext(),
            amp.scale_loss(loss, optimizer) as scaled_loss,  # knows that it has to wait
        ):
            scaled_loss.backward()
    return [parameter.grad.float() for parameter in amp.master_params(optimizer)]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_accumulate(two_processes, level, no_sync, at_once):
    data = torch.randn(2, 3, 8, 4)
    first, second = two_processes(on_each_rank_accumulate, level, no_sync, at_once, data)
    assert same(first, second)
    model = net()
    for batch in data.flatten(0, 1):
        (model(batch).square().mean() / 2).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(first, expected, rtol=0.02, atol=0.01)


def on_each_rank_overflow_in_the_sum(options):
    model = DistributedDataParallel(Weighted(torch.ones(1)).half(), **options)
    model(torch.full((1,), 40000.0).half()).backward()
    return model.module.weight.grad.item()


@pytest.mark.parametrize(("factor", "mean"), [(1.0, float("inf")), (2.0, 40000.0)])
def test_half_gradients_overflow_where_apexs_do(two_processes, factor, mean):
    """It sums first and divides then, so that scales and skipped steps are the same."""
    options = {"gradient_predivide_factor": factor}
    assert two_processes(on_each_rank_overflow_in_the_sum, options) == [mean, mean]


def on_each_rank_begin_differently(level, torchs_ddp):
    """The weights of a model that each rank made from another seed, after a step."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(3, 2)
    options = {"cast_model_type": FP16} if level == "O2" else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    kind = nn.parallel.DistributedDataParallel if torchs_ddp else DistributedDataParallel
    wrapped = kind(model)
    for _ in range(2):
        step(wrapped, optimizer, torch.ones(2, 3))
    return list(model.state_dict().values())


@pytest.mark.parametrize("torchs_ddp", [False, True])
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_masters_are_those_of_the_broadcast_weights(two_processes, level, torchs_ddp):
    first, second = two_processes(on_each_rank_begin_differently, level, torchs_ddp)
    assert same(first, second)


def on_each_rank_train_beside_an_unsynced_model():
    """A generator's step while the discriminator does not reduce: its own gradients are true."""
    models = [DistributedDataParallel(net()) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model in models:
        model.cpu()
    amp.initialize([model.module for model in models], optimizers, opt_level="O1", verbosity=0)
    with models[0].no_sync():
        loss = models[1](torch.ones(2, 4)).float().sum()
        with amp.scale_loss(loss, optimizers[1]) as scaled_loss:
            scaled_loss.backward()
        grads = [parameter.grad.clone() for parameter in models[1].parameters()]
        optimizers[1].step()
    return grads


def test_no_sync_is_about_the_models_own_optimizers(two_processes):
    net()(torch.ones(2, 4)).sum().backward()
    for grads in two_processes(on_each_rank_train_beside_an_unsynced_model):
        assert all(grad.abs().max() < 100 for grad in grads)  # not times 65,536


# torch.compile


class Convolved(nn.Module):
    """Not a Sequential, which torch.compile passes over where it is the outermost module."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(self.norm(self.conv(x)).mean((2, 3)))


def on_each_rank_compile(level, wrap_first):
    """The reasons of graph breaks, and the number of operations in each graph."""
    torch._dynamo.reset()
    counters.clear()
    sizes = []

    def backend(graph, example_inputs):
        sizes.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph

    model = Convolved()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if wrap_first:
        model = torch.compile(DistributedDataParallel(model), backend=backend)
    else:
        model = DistributedDataParallel(torch.compile(model, backend=backend))
    step(model, optimizer, torch.randn(2, 3, 8, 8))
    return list(counters["graph_break"]), sizes


@pytest.mark.parametrize("wrap_first", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_a_model_compiles_whole_before_and_after_ddp(two_processes, level, wrap_first):
    """torch's own DistributedDataParallel is one break, outside the model."""
    counts_none = torch.__version__.startswith("2.6.")
    for breaks, sizes in two_processes(on_each_rank_compile, level, wrap_first):
        assert len(breaks) == (wrap_first and not counts_none)
        assert all("_inside_ddp_forward" in reason for reason in breaks)
        assert sum(size > 1 for size in sizes) == 1  # casts of input and output may stand apart
        assert max(sizes) >= len(list(Convolved().children()))


# SyncBatchNorm


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Sequential(nn.BatchNorm2d(4))
    )


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


def test_a_compiled_norm_keeps_its_half_input_and_no_fp32(two_processes):
    output_and_input = [(BF16, 8 * 3 * 4 * 4)] * 2
    assert two_processes(on_each_rank_see_what_is_kept) == [output_and_input] * 2


def test_conversion_keeps_everything_but_the_class():
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


def test_a_norm_that_does_more_stays_as_it_is(capsys):
    model = nn.Sequential(nn.BatchNorm2d(3), NormAndReLU(3)).eval()
    x = torch.randn(2, 3, 4, 4)
    before = model(x)
    assert list(map(type, convert_syncbn_model(model))) == [SyncBatchNorm, NormAndReLU]
    assert torch.equal(model(x), before)
    assert "NormAndReLU does more than normalise, and stays" in capsys.readouterr().out


def test_a_batch_norm_itself_can_be_converted():
    norm = nn.BatchNorm1d(3)
    converted = convert_syncbn_model(norm, channel_last=True)
    assert isinstance(converted, SyncBatchNorm) and converted.weight is norm.weight
    assert converted.channel_last


def on_each_rank_convert():
    with contextlib.redirect_stdout(io.StringIO()) as text:
        convert_syncbn_model(conv_net())
    return text.getvalue()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says it where there is no GPU")
def test_rank_zero_alone_says_that_there_is_nothing_to_share(two_processes):
    first, second = two_processes(on_each_rank_convert)
    assert first == "SyncBatchNorm: on the CPU each process normalises over its own batch\n"
    assert second == ""


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
def test_in_one_process_it_is_a_plain_batch_norm(kind, shape, options):
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


def test_relu_and_sum_can_be_fused():
    norm, x, z = SyncBatchNorm(3, fuse_relu=True), torch.randn(4, 3), torch.randn(4, 3)
    plain = F.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(norm(x), plain.relu())
    torch.testing.assert_close(norm(x, z), (plain + z).relu())
    norm.fuse_relu = False
    torch.testing.assert_close(norm(x, z), plain + z)


def test_other_dimensions_are_refused():
    for shape in ((3,), (2, 3, 1, 1, 1, 1)):
        with pytest.raises(ValueError, match=f"not {len(shape)}-D"):
            SyncBatchNorm(3)(torch.ones(shape))


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_half_input_gives_half_output_of_fp32_statistics(device, dtype):
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


def test_on_the_cpu_each_process_normalises_its_own_batch(two_processes):
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
            torch._dynamo.reset()
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
EAGER_OR_COMPILED = [
    *(
        pytest.param(sizes, False, id=f"{sizes}-eager")
        for sizes in [(4, 4), (3, 5), (0, 6), (6, 0)]
    ),
    *(pytest.param(sizes, True, id=f"{sizes}-compiled") for sizes in [(4, 4), (3, 5)]),
]


@pytest.mark.parametrize(("sizes", "compiled"), EAGER_OR_COMPILED)
def test_processes_normalise_as_over_one_large_batch(two_processes, sizes, compiled):
    """By the formula that serves torch.compile; a mean far from 0 costs it no digits."""
    for shape in SHAPES:
        whole = torch.randn(sum(sizes), *shape, dtype=torch.float64) * 3 + 1000
        options = OPTIONS[len(shape) - 1]
        normalise_as_over_one_batch(two_processes, whole, sizes, options, 1e-7, compiled=compiled)


def use_kernels_on_the_cpu(folder, turn=0):
    """The kernels for CUDA, which Triton's interpreter runs on the CPU; the mailbox they use.

    Files that both processes map are the memory that GPUs reach on each other.
    """
    from apex_native.parallel import _exchange, _mailbox, _rows, sync_batchnorm

    mapped = []

    def map_file(rank, size):
        name = os.path.join(folder, str(rank))
        mapped.append(torch.from_file(name, shared=True, size=3 * size))
        return mapped[-1][size:-size]  # before and behind it nobody should write

    def meet(memory, group):
        dist.barrier()
        own, ranks = dist.get_rank(), range(dist.get_world_size())
        each = [memory if rank == own else map_file(rank, len(memory)) for rank in ranks]
        return SimpleNamespace(buffer_ptrs=[memory.data_ptr() for memory in each])

    _mailbox.symmetric_memory = SimpleNamespace(
        empty=lambda size, **kwargs: map_file(dist.get_rank(), size), rendezvous=meet
    )
    mailbox = _mailbox.Mailbox(dist.group.WORLD, 2048, torch.device("cpu"))
    _, world, tiles, *_ = mailbox.address.tolist()
    # The flags, and the turns taken. Behind them it is counted who came.
    mailbox.memory.view(torch.int32)[-(world + 2) * tiles : -tiles] = turn
    dist.barrier()  # or another process raises a flag before that
    mailbox.nothing_written_outside = lambda: all(
        not part.any() for memory in mapped for part in memory.chunk(3)[::2]
    )
    _exchange.mailbox_of = lambda *of: mailbox.address
    sync_batchnorm._arithmetic_for = lambda input: _rows
    return mailbox


def on_each_rank_share_by_kernels(folder, turn, *arguments):
    mailbox = use_kernels_on_the_cpu(folder, turn)
    results = on_each_rank_share_statistics(*arguments)
    assert mailbox.nothing_written_outside()
    return results


@pytest.mark.parametrize("sizes", [(3, 5), (6, 0)], ids=str)
def test_the_kernels_normalise_as_over_one_large_batch(interpreted_processes, tmp_path, sizes):
    """Half or not, in any memory format; with more rows and channels than a tile has."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    shapes = [(3,), (5, 3), (70, 5, 5), (3, 2, 4, 4)]
    for shape, options, dtype in zip(shapes, OPTIONS, (FP16, FP32, FP32, BF16), strict=True):
        whole = (torch.randn(sum(sizes), *shape) * 3 + 10).to(dtype)
        whole = whole.contiguous(memory_format=formats.get(whole.dim(), torch.contiguous_format))
        folder = tmp_path / str(whole.dim())
        folder.mkdir()
        turn = 2**31 - 2  # the backward pass comes after the largest of int32
        arguments = (on_each_rank_share_by_kernels, str(folder), turn, whole, sizes, options)
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


@pytest.mark.parametrize("momentum", [1.0, None])
def test_the_kernels_replace_running_statistics_without_an_error(
    interpreted_processes, tmp_path, momentum
):
    """Where the rate is 1, nothing of a variance of 1 is left in one of 1e-8."""
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


def test_processes_at_different_norms_get_nan(interpreted_processes, tmp_path):
    """And not each other's sums."""
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


def test_a_channel_that_is_the_same_everywhere_becomes_its_bias(two_processes):
    """Not that and an error of rounding, which opens a ReLU or closes it."""
    for output, bias in two_processes(on_each_rank_normalise_constants, torch.rand(64) + 10):
        assert torch.equal(output, bias.view(-1, 1).expand_as(output))


def on_each_rank_normalise_outliers(whole):
    x = whole.chunk(2)[dist.get_rank()]
    norm = SyncBatchNorm(whole.shape[1], momentum=1.0)
    norm.forward_synced(x)
    return norm.running_mean, norm.running_var


def test_an_outlier_in_the_first_place_costs_few_digits(two_processes):
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


def test_a_norm_without_bias_whose_tracking_is_switched_off(two_processes):
    ranks = two_processes(on_each_rank_normalise_untracked)
    whole = F.batch_norm(torch.cat([x for x, *_ in ranks]), None, None, training=True)
    for part, (_, mean, var, gradient) in zip(whole.chunk(2), ranks, strict=True):
        assert torch.equal(mean, torch.zeros(3)) and torch.equal(var, torch.ones(3))
        torch.testing.assert_close(gradient, part.sum(0))


def test_groups_of_processes_normalise_apart(four_processes):
    whole = torch.randn(14, 3, 4, dtype=torch.float64) * torch.arange(1, 15).view(14, 1, 1)
    normalise_as_over_one_batch(four_processes, whole, (2, 3, 4, 5), {}, 1e-7, group_size=2)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize(("sizes", "compiled"), EAGER_OR_COMPILED)
def test_two_gpus_normalise_as_over_one_large_batch(two_gpus, sizes, dtype, compiled):
    tolerance = TOLERANCES[dtype]
    formats = {3: torch.channels_last, 4: torch.channels_last_3d}
    for shape, options in zip(SHAPES, OPTIONS, strict=True):
        whole = (torch.randn(sum(sizes), *shape) * 3 + 10).to(dtype)
        for memory_format in {torch.contiguous_format, formats.get(len(shape))} - {None}:
            batch = whole.contiguous(memory_format=memory_format)
            arguments = (two_gpus, batch, sizes, options, tolerance)
            normalise_as_over_one_batch(*arguments, compiled=compiled)


@pytest.mark.gpu(2)
def test_sums_of_many_programs_are_added_up_before_they_are_exchanged(two_gpus):
    """Several times, since nothing but their order in time would tell."""
    whole = torch.randn(64, 256, 28, 28) * 3 + 10
    whole = whole.contiguous(memory_format=torch.channels_last)
    for _ in range(4):
        normalise_as_over_one_batch(two_gpus, whole, (33, 31), {}, 2e-3)


class TwiceNormalised(Convolved):
    """With more weights than one MiB, torch's first bucket."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Sequential(
            nn.Conv2d(4, 600, 1), nn.Conv2d(600, 600, 1), nn.BatchNorm2d(600), nn.Conv2d(600, 4, 1)
        )

    def forward(self, x):
        x = self.norm(self.conv(x))
        return self.linear((x + self.wide(x)).mean((2, 3)))


def on_each_rank_train_compiled(mode, at_once=False):
    """The losses of some steps; `mode` is torch.compile's."""
    from torch._inductor import cudagraph_trees  # takes seconds, which only GPUs need

    torch.manual_seed(0)
    model = convert_syncbn_model(TwiceNormalised()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.compile(mode=mode)
    # Buckets as small as torch takes them; it compiles a part of the model for each.
    wrapped, losses = wrap(model, at_once, message_size=2**18), []
    for batch in torch.randn(6, 2, 4, 3, 8, 8)[:, dist.get_rank()].cuda():
        loss = wrapped(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    manager = cudagraph_trees.get_manager(dist.get_rank(), create_if_none_exists=False)
    assert (manager is not None) == bool(mode)
    assert counters["inductor"]["cudagraph_skips"] == 0
    return losses


@pytest.mark.gpu(2)
@pytest.mark.parametrize("at_once", [False, True])
def test_cuda_graphs_train_as_the_same_steps_without_them(at_once):
    processes = Processes("nccl")  # which have exchanged nothing before the graphs warm up
    try:
        found = processes(on_each_rank_train_compiled, "reduce-overhead", at_once)
        processes.stop()
        expected = processes(on_each_rank_train_compiled, None)
    finally:
        processes.stop()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert expected[0][-1] < expected[0][0]


def on_each_rank_count_in_half():
    norm = SyncBatchNorm(1).cuda().half()
    norm(torch.randn(1, 1, 300, 300, device="cuda").half() + 5)
    return norm.running_mean.item(), norm.running_var.item()


@pytest.mark.gpu(2)
def test_half_statistics_are_of_more_values_than_half_can_count(two_gpus):
    """At O3. torch's SyncBatchNorm counts in the type of the running statistics."""
    for mean, var in two_gpus(on_each_rank_count_in_half):
        assert mean == pytest.approx(0.5, rel=0.02)
        assert var == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_conversion_can_be_taken_back(kind):
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


def test_converting_twice_changes_nothing_more():
    once = convert_syncbn_model(nn.BatchNorm1d(3))
    twice = convert_syncbn_model(once)
    assert type(revert_syncbn_model(twice)) is nn.BatchNorm1d
    assert convert_syncbn_model(SyncBatchNorm(3, fuse_relu=True)).fuse_relu


@pytest.mark.parametrize("input", [torch.ones(2, 5), torch.ones(2, 3, dtype=torch.int64)])
def test_other_channels_and_integers_are_refused(input):
    with pytest.raises(ValueError, match="takes 3 channels of a floating-point type"):
        SyncBatchNorm(3).forward_synced(input)


def on_each_rank_normalise_one_value():
    norm = SyncBatchNorm(3)
    norm.forward_synced(torch.ones(1 - dist.get_rank(), 3))
    return [norm.running_mean, norm.running_var]


def test_one_value_in_the_whole_group_leaves_no_nan(two_processes):
    for statistics in two_processes(on_each_rank_normalise_one_value):
        assert all(values.isfinite().all() for values in statistics)


def test_a_norm_with_a_relu_in_it_cannot_be_taken_back():
    with pytest.raises(ValueError, match="fuse_relu=True"):
        revert_syncbn_model(nn.Sequential(SyncBatchNorm(3, fuse_relu=True)))


def test_a_batch_norm_under_two_names_is_converted_under_both():
    norm = nn.BatchNorm1d(2)
    model = convert_syncbn_model(nn.Sequential(norm, nn.ReLU(), norm))
    assert isinstance(model[0], SyncBatchNorm) and isinstance(model[2], SyncBatchNorm)
    assert model[0].weight is model[2].weight is norm.weight
    assert model[0].running_mean is model[2].running_mean


# Where Apex's arguments mean something else, or nothing


@pytest.mark.parametrize(
    "options",
    [
        {"allreduce_trigger_params": []},
        {"retain_allreduce_buffers": True},
        {"num_allreduce_streams": 2, "allreduce_communicators": "any"},
        {"gradient_average_split_factor": 2.0},
        {"prof": True},
    ],
    ids=str,
)
def test_arguments_for_apexs_own_communication_change_nothing(two_processes, options):
    rows = torch.tensor([[1.0, 2.0, 3.0], [3.0, 8.0, -5.0]])
    for gradient in two_processes(on_each_rank_reduce, rows, options):
        assert torch.equal(gradient, rows.mean(0))


def on_each_rank_switch_off_too_late(rows):
    x = rows[dist.get_rank()]
    model = DistributedDataParallel(Weighted(x))
    loss = model(x)
    model.disable_allreduce()
    loss.backward()
    return model.module.weight.grad


def test_the_reduction_is_switched_by_the_forward_pass(two_processes):
    """In Apex, by the backward pass."""
    rows = torch.tensor([[1.0, 2.0], [3.0, -6.0]])
    for gradient in two_processes(on_each_rank_switch_off_too_late, rows):
        assert torch.equal(gradient, rows.mean(0))


def test_conversion_hands_the_group_on():
    group = object()
    model = convert_syncbn_model(conv_net(), group)
    assert model[1].process_group is model[3][0].process_group is group


def test_channels_are_the_second_dimension_whatever_channel_last_says(device):
    """In Apex channel_last=True makes them the last dimension, not a memory format."""
    x = torch.randn(4, 3, 5, 5, device=device).to(memory_format=torch.channels_last)
    output = SyncBatchNorm(3, channel_last=True).to(device)(x)
    torch.testing.assert_close(output, nn.BatchNorm2d(3).to(device)(x))
    assert output.is_contiguous(memory_format=torch.channels_last)

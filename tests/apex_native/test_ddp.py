"""DistributedDataParallel and Reducer: gradients over two processes.

Functions named `on_each_rank_…` run in each of the processes.
"""

import copy
import pickle
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from amp_helpers import BF16, same
from apex_native.parallel import (
    DistributedDataParallel,
    Reducer,
)
from parallel_helpers import Weighted, wrap
from parameters import mostly_slow
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook


def on_each_rank_reduce(rows, options, at_once=False):
    x = rows[dist.get_rank()]
    model = wrap(Weighted(x), at_once, **options)
    for _ in range(2):  # torch lays its buckets out anew after the first pass
        model.zero_grad()
        model(x).backward()
    return model.module.weight.grad


@pytest.mark.parametrize(
    ("options", "factor"),
    mostly_slow(
        [
            ({}, 0.5),
            ({"delay_allreduce": True}, 0.5),
            ({"message_size": 1}, 0.5),
            ({"gradient_predivide_factor": 4.0}, 0.5),
            ({"gradient_average": False}, 1.0),
            ({"gradient_average": False, "gradient_predivide_factor": 4.0}, 0.25),
            ({"allreduce_always_fp32": True}, 0.5),
        ],
        fast=4,
    ),
)
@pytest.mark.parametrize("at_once", [False, True])
def test_gradients_are_reduced(two_processes, options, factor, at_once):
    rows = torch.tensor([[1.0, 2.0, 3.0], [3.0, 8.0, -5.0]])
    for gradient in two_processes(on_each_rank_reduce, rows, options, at_once):
        assert torch.equal(gradient, rows.sum(0) * factor)


def on_each_rank_keep_gradients(rows, retain):
    x = rows[dist.get_rank()]
    model = wrap(Weighted(x), at_once=False, retain_allreduce_buffers=retain)
    kept = []
    for factor in (1.0, 2.0, 3.0):
        model.zero_grad()
        model(factor * x).backward()
        kept.append(model.module.weight.grad)
        if not retain:
            kept[-1].detach_()  # an error for views of other memory
    return kept


def test_gradients_have_their_own_memory(two_processes):
    rows = torch.tensor([[1.0, 2.0], [3.0, -6.0]])
    mean = rows.mean(0)
    for kept in two_processes(on_each_rank_keep_gradients, rows, False):
        assert same(kept, [mean, 2 * mean, 3 * mean])


def test_gradients_in_retained_buffers_are_overwritten(two_processes):
    rows = torch.tensor([[1.0, 2.0], [3.0, -6.0]])
    mean = rows.mean(0)
    for _, second, third in two_processes(on_each_rank_keep_gradients, rows, True):
        assert same([second, third], [3 * mean, 3 * mean])


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
def test_average_at_once_uses_one_collective_per_type(two_processes, hook):
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
    """Differentiate as gradient penalties, adaptive weights and (on one rank) saliency maps do."""
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


def on_each_rank_sum_in_a_copy(rows, pickled):
    x = rows[dist.get_rank()]
    model = wrap(Weighted(x), at_once=False, gradient_average=False)
    model = pickle.loads(pickle.dumps(model)) if pickled else copy.deepcopy(model)
    model(x).backward()
    return model.module.weight.grad


@pytest.mark.parametrize("pickled", [False, True])
def test_copies_reduce_as_the_original(two_processes, pickled):
    rows = torch.tensor([[1.0, 2.0, 3.0], [3.0, 8.0, -5.0]])
    for gradient in two_processes(on_each_rank_sum_in_a_copy, rows, pickled):
        assert torch.equal(gradient, rows.sum(0))


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
def test_average_at_once_with_unusual_passes_and_copies(two_processes, on_each_rank):
    assert two_processes(on_each_rank) == [[[[1.5, 1.5]], [1.0]]] * 2


def on_each_rank_average_what_can_not_be(kind):
    if kind == "unused":
        model, x = Branches(), torch.ones(1, 2)
    else:
        model, x = nn.Embedding(3, 2, sparse=True), torch.tensor([1])
    try:
        wrapped = wrap(model, at_once=True)
        assert wrapped.averages_at_once
        wrapped(x).sum().backward()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "words"), [("unused", "sometimes.weight, sometimes.bias,"), ("sparse", "no sparse")]
)
def test_average_at_once_raises(two_processes, kind, words):
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
def test_disable_and_enable_allreduce(two_processes, at_once):
    rows = torch.tensor([[1.0, 2.0], [3.0, -6.0]])
    for rank, (alone, together) in enumerate(
        two_processes(on_each_rank_switch_the_reduction, rows, at_once)
    ):
        assert torch.equal(alone, rows[rank])
        assert torch.equal(together, rows.sum(0))


def test_class_that_extends_apexs_reduction_is_an_error():
    """Its group would be ignored."""
    with pytest.raises(TypeError, match="allreduce_bucket of Grouped would not be called"):
        type("Grouped", (DistributedDataParallel,), {"allreduce_bucket": lambda self, bucket: None})


def on_each_rank_switch_before_the_backward_pass(x):
    model = wrap(Weighted(x), False)
    model.disable_allreduce()
    for is_evaluation in (True, False):
        loss = model.train(not is_evaluation)(x)
        if is_evaluation:  # which may be without no_grad()
            model.enable_allreduce()
    model.eval()(x)
    model.train()
    with pytest.raises(RuntimeError, match="call them before it"):
        model.disable_allreduce()
    model.enable_allreduce()  # as it is
    loss.backward()
    model.disable_allreduce()


def test_reduction_is_not_switched_before_a_backward_pass(two_processes):
    """It would come too late, and the processes' weights would differ."""
    two_processes(on_each_rank_switch_before_the_backward_pass, torch.ones(2))


def on_each_rank_broadcast_a_view():
    model = nn.Module()
    model.weight = nn.Parameter((torch.arange(16.0) + 100 * dist.get_rank()).view(2, 8)[:, ::2])
    Reducer(model)
    return model.weight.tolist()


def test_reducer_broadcasts_a_view_as_it_is_on_rank_0(two_processes):
    assert two_processes(on_each_rank_broadcast_a_view) == [[[0, 2, 4, 6], [8, 10, 12, 14]]] * 2


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


def test_reducer(two_processes):
    rows = torch.tensor([[1.0, 2.0], [3.0, -6.0]])
    mean = rows.mean(0)
    for results in two_processes(on_each_rank_reduce_by_hand, rows):
        assert same(results, (torch.zeros(2), mean, mean, mean.double() * 2))


def test_allreduce_always_fp32(two_processes):
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
def test_delay_allreduce_accepts_unused_parameters(two_processes, only_first_rank_uses):
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


def test_error_names_parameters_frozen_after_wrapping(two_processes):
    for error in two_processes(on_each_rank_freeze_late):
        assert "last backward pass: used.weight, sometimes.weight, " in error


def test_error_names_unused_parameters(two_processes):
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


def test_module_errors_propagate(two_processes):
    for error in two_processes(on_each_rank_fail_in_forward):
        assert "shapes cannot be multiplied" in error


def on_each_rank_pass_twice(at_once, together):
    model = wrap(nn.Linear(2, 1), at_once)
    output = model(torch.full((1, 2), 1.0 + dist.get_rank()))
    for loss in [output + output] if together else [output, output]:
        loss.backward(retain_graph=True)
    return grads_of(model)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_second_backward_pass_is_not_averaged(two_processes, at_once, together):
    first, second = two_processes(on_each_rank_pass_twice, at_once, together)
    assert (first == second) == together


def on_each_rank_unfreeze(at_once):
    layer = nn.Linear(2, 1)
    layer.weight.requires_grad_(False)
    model = wrap(layer, at_once)
    layer.weight.requires_grad_(True)
    x = torch.full((1, 2), 1.0 + dist.get_rank())
    with pytest.raises(RuntimeError, match=r"not be averaged: weight\. Wrap the module anew"):
        model(x)
    with torch.no_grad():
        model(x)
    model = wrap(layer, at_once)
    model(x).sum().backward()
    return grads_of(model)


@pytest.mark.parametrize("at_once", [False, True])
def test_unfrozen_parameters_are_averaged_after_wrapping_again(two_processes, at_once):
    first, second = two_processes(on_each_rank_unfreeze, at_once)
    assert first == second and len(first) == 2


def on_each_rank_wrap_a_frozen_module():
    with pytest.raises(RuntimeError, match="DistributedDataParallel is not needed") as caught:
        DistributedDataParallel(nn.Linear(1, 1).requires_grad_(False))
    return str(caught.value)


def test_frozen_module_is_an_error(two_processes):
    assert all(two_processes(on_each_rank_wrap_a_frozen_module))


def test_invalid_arguments_raise():
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


@pytest.mark.parametrize(
    "options",
    [
        {"allreduce_trigger_params": []},
        {"num_allreduce_streams": 2, "allreduce_communicators": "any"},
        {"gradient_average_split_factor": 2.0},
        {"prof": True},
    ],
    ids=str,
)
def test_arguments_of_apex_communication_are_ignored(two_processes, options):
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


def test_reduction_is_switched_by_the_forward_pass(two_processes):
    """Apex switches it by the backward pass."""
    rows = torch.tensor([[1.0, 2.0], [3.0, -6.0]])
    for gradient in two_processes(on_each_rank_switch_off_too_late, rows):
        assert torch.equal(gradient, rows.mean(0))

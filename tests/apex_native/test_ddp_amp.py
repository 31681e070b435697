"""DistributedDataParallel with amp, torch.compile and CUDA graphs.

Functions named `on_each_rank_…` run in each of the processes.
"""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from amp_helpers import COMPILED_LEVELS, FP16, LEVELS, same
from apex_native import amp
from apex_native.amp.handle import _first_non_finite_gradient
from apex_native.optimizers import FusedAdam
from apex_native.parallel import (
    DistributedDataParallel,
    Reducer,
    convert_syncbn_model,
)
from parallel_helpers import Weighted, wrap
from parameters import mostly_slow
from processes import Processes
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode


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
def test_step_does_not_synchronize(two_gpus, at_once):
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
def test_overflow_on_one_rank_skips_the_step_of_all(two_processes, level):
    results = two_processes(on_each_rank_overflow, level)
    for (before, skipped, stepped), state in results:
        assert same(before, skipped)
        assert not same(before, stepped)
        assert state == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 1}}
    assert same(results[0][0][2], results[1][0][2])


def on_each_rank_accumulate(level, no_sync, at_once, data, *, begins_without_amp=False):
    model, optimizer = initialize(level)
    wrapped = wrap(model, at_once)
    if level == "O2":
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 256.0, "unskipped": 0}})
    mine = data[dist.get_rank()]
    if begins_without_amp:  # with a penalty that happens to be 0
        (wrapped(mine[0]).float().sum() * 0).backward()
    for index, batch in enumerate(mine):
        alone = no_sync if index < len(mine) - 1 else ()
        with wrapped.no_sync() if "forward" in alone else contextlib.nullcontext():
            loss = wrapped(batch).float().square().mean()
        with (
            wrapped.no_sync() if "backward" in alone else contextlib.nullcontext(),
            amp.scale_loss(loss, optimizer) as scaled_loss,  # waits if the forward pass was alone
        ):
            scaled_loss.backward()
    return [parameter.grad.float() for parameter in amp.master_params(optimizer)]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("no_sync", ["", "forward", "backward", "forward and backward"])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_accumulate(two_processes, level, no_sync, at_once):
    data = torch.randn(2, 3, 8, 4)
    first, second = two_processes(on_each_rank_accumulate, level, no_sync, at_once, data)
    assert same(first, second)
    check_accumulated(first, data)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_accumulate_after_a_backward_pass_without_amp(two_processes, level, at_once):
    data = torch.randn(2, 3, 8, 4)
    begin = partial(on_each_rank_accumulate, begins_without_amp=True)
    first, second = two_processes(begin, level, "forward and backward", at_once, data)
    assert same(first, second)
    check_accumulated(first, data)


def check_accumulated(found, data):
    model = net()
    for batch in data.flatten(0, 1):
        (model(batch).square().mean() / 2).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01)


def on_each_rank_accumulate_two_forwards(level, together, at_once, data):
    """Two forward passes, the second in no_sync(), before their backward passes; then a third."""
    model, optimizer = initialize(level)
    wrapped = wrap(model, at_once)
    amp.load_state_dict(dict.fromkeys(amp.state_dict(), {"loss_scale": 256.0, "unskipped": 0}))
    *batches, last = data[dist.get_rank()]
    for _ in range(2):  # a step before it leaves nothing behind
        optimizer.zero_grad()
        losses = []
        for index, batch in enumerate(batches):
            with wrapped.no_sync() if index else contextlib.nullcontext():
                losses.append(wrapped(batch).float().square().mean())
        for loss in [sum(losses)] if together else losses:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        if not together:  # the second pass was not averaged, and waits for this one
            with amp.scale_loss(wrapped(last).float().square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
        grads = [parameter.grad.float() for parameter in amp.master_params(optimizer)]
        with torch.no_grad():
            for parameter in amp.master_params(optimizer):
                parameter.grad = parameter.grad.clone().zero_()
        optimizer.step()
    return grads


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_no_sync_forward_after_a_synced_one(two_processes, level, together, at_once):
    data = torch.randn(2, 3, 8, 4)
    first, second = two_processes(
        on_each_rank_accumulate_two_forwards, level, together, at_once, data
    )
    assert same(first, second)
    check_accumulated(first, data[:, :2] if together else data)


def on_each_rank_overflow_in_the_sum(options):
    model = DistributedDataParallel(Weighted(torch.ones(1)).half(), **options)
    model(torch.full((1,), 40000.0).half()).backward()
    return model.module.weight.grad.item()


@pytest.mark.parametrize(("factor", "mean"), [(1.0, float("inf")), (2.0, 40000.0)])
def test_half_gradients_overflow_as_in_apex(two_processes, factor, mean):
    """The sum precedes the division, so that scales and skipped steps equal Apex's."""
    options = {"gradient_predivide_factor": factor}
    assert two_processes(on_each_rank_overflow_in_the_sum, options) == [mean, mean]


def on_each_rank_begin_differently(level, torchs_ddp):
    """Return the weights of a model that each rank created from its own seed, after two steps."""
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
def test_masters_equal_the_broadcast_weights(two_processes, level, torchs_ddp):
    first, second = two_processes(on_each_rank_begin_differently, level, torchs_ddp)
    assert same(first, second)


def on_each_rank_load_on_rank_0(reduces):
    """Return the weights after a load of fp32 weights on rank 0 alone, and before it."""
    model, optimizer = initialize("O2")
    exact = model.state_dict()
    if dist.get_rank() == 0:
        model.load_state_dict(exact | {"0.bias": exact["0.bias"] + 1e-5})
    loaded = copy.deepcopy(model.state_dict())
    (Reducer if reduces else DistributedDataParallel)(model)
    step(model, optimizer, torch.ones(2, 4), factor=0.0)
    return list(loaded.values()), list(model.state_dict().values())


@pytest.mark.parametrize("reduces", [False, True])
def test_masters_of_rank_0_are_broadcast(two_processes, reduces):
    (loaded, first), (other, second) = two_processes(on_each_rank_load_on_rank_0, reduces)
    assert not same(loaded, other)
    assert same(first, loaded) and same(second, loaded)


def on_each_rank_overflow_on_one_shard():
    """Return the name of the gradient that is not finite, and the number of collectives for it."""
    model = nn.Linear(4, 4, bias=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    shard = torch.full((2, 4), float("inf") if dist.get_rank() else 0.0)
    model.weight.grad = DTensor.from_local(shard, mesh, [Shard(0)])
    amp.initialize(model, opt_level="O1", verbosity=0)
    with CommDebugMode() as communication:
        name = _first_non_finite_gradient()
    return name, communication.get_total_counts()


def test_search_for_the_overflow_is_of_the_rank_alone(two_processes):
    """Ranks notice the 32nd overflow in a row at different times, since they wait for no GPU."""
    found = two_processes(on_each_rank_overflow_on_one_shard)
    assert found == [("a parameter outside the models", 0), ("weight", 0)]


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


def test_no_sync_affects_only_the_models_optimizers(two_processes):
    net()(torch.ones(2, 4)).sum().backward()
    for grads in two_processes(on_each_rank_train_beside_an_unsynced_model):
        assert all(grad.abs().max() < 100 for grad in grads)  # not times 65,536


class Convolved(nn.Module):
    """Module that is no Sequential, which torch.compile skips where it is the outermost module."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(self.norm(self.conv(x)).mean((2, 3)))


def on_each_rank_compile(level, wrap_first):
    """Return the reasons of graph breaks, and the number of operations in each graph."""
    torch.compiler.reset()
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
@pytest.mark.parametrize("level", mostly_slow(COMPILED_LEVELS))
def test_models_compile_without_graph_breaks(two_processes, level, wrap_first):
    """torch's own DistributedDataParallel is one break, outside the model.

    torch 2.6 counts the decorator of a hook instead, which is outside of it, too.
    """
    reason = "setattr" if torch.__version__.startswith("2.6.") else "_inside_ddp_forward"
    for breaks, sizes in two_processes(on_each_rank_compile, level, wrap_first):
        assert len(breaks) == wrap_first
        assert all(reason in each for each in breaks)
        assert sum(size > 1 for size in sizes) == 1  # casts of input and output may stand apart
        assert max(sizes) >= len(list(Convolved().children()))


def on_each_rank_compile_as_one_graph():
    torch.compiler.reset()
    wrapped = wrap(Convolved().eval(), True)
    data = torch.ones(2, 3, 8, 8)
    with torch._dynamo.config.patch(optimize_ddp=False):
        found = torch.compile(wrapped, backend="eager", fullgraph=True)(data)
    return torch.equal(found, wrapped(data))


def test_model_of_average_at_once_is_one_graph(two_processes):
    assert two_processes(on_each_rank_compile_as_one_graph) == [True, True]


class TwiceNormalised(Convolved):
    """Model with more weights than one MiB, torch's first bucket."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Sequential(
            nn.Conv2d(4, 600, 1), nn.Conv2d(600, 600, 1), nn.BatchNorm2d(600), nn.Conv2d(600, 4, 1)
        )

    def forward(self, x):
        x = self.norm(self.conv(x))
        return self.linear((x + self.wide(x)).mean((2, 3)))


def on_each_rank_train_compiled(mode, at_once=False):
    """Return the losses of some steps; `mode` is torch.compile's."""
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
def test_cuda_graphs_train_as_eager_steps(at_once):
    processes = Processes("nccl")  # which have exchanged nothing before the graphs warm up
    try:
        found = processes(on_each_rank_train_compiled, "reduce-overhead", at_once)
        processes.stop()
        expected = processes(on_each_rank_train_compiled, None)
    finally:
        processes.stop()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert expected[0][-1] < expected[0][0]

"""FSDP against DistributedDataParallel on the CPU: losses, gradients, averages, what is sharded."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engine import UserError
from engine.blocks import checkpoint_activations, find_blocks
from engine.distributed.sharding import Sharding
from sharding_helpers import Classifier, batches, build, losses, needs_fsdp_on_cpu, train
from torch import nn
from versioned import Versioned

pytestmark = needs_fsdp_on_cpu
TOLERANCE = {"O0": 1e-5, "O4": 0.02}  # of the first losses, which are 1.6
FEW = 10  # steps
GROWTH = 100, 5  # of the differences in 50 steps, by which the losses fall to 0.1


def assert_equal_within_rounding(found, expected, level, factor=1):
    """Rounding differs with the processor, and its effect on the losses grows with each step."""
    tolerance = factor * TOLERANCE[level]
    assert found[:FEW] == pytest.approx(expected[:FEW], abs=tolerance)
    assert found == pytest.approx(expected, abs=tolerance * GROWTH[level != "O0"])


@pytest.fixture(params=["two_processes", pytest.param("four_processes", marks=pytest.mark.slow)])
def processes(request):
    return request.getfixturevalue(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O0", "O4"])
def test_losses_equal_those_of_ddp(processes, level):
    expected = processes(losses, level, sharded=False)[0]
    found = processes(losses, level, sharded=True)[0]
    assert expected[-1] < 0.6 * expected[0]
    assert_equal_within_rounding(found, expected, level)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "options"),
    [
        pytest.param("O0", {"accumulate": 3}, id="accumulate"),
        pytest.param("O4", {"accumulate": 3}, id="accumulate-O4"),
        pytest.param("O0", {"reshard_after_forward": False}, id="keep-gathered"),
        pytest.param("O0", {"recompute": True}, id="checkpoint-activations"),
        pytest.param("O4", {"compress_gradients": True}, id="compress-gradients"),
    ],
)
def test_losses_with_options_equal_those_of_ddp(two_processes, level, options):
    accumulate = options.get("accumulate", 1)
    expected = two_processes(losses, level, sharded=False, accumulate=accumulate)[0]
    found = two_processes(losses, level, sharded=True, **options)[0]
    # Gradients that are summed in bfloat16 are rounded more.
    factor = 2 if "compress_gradients" in options else 1
    assert_equal_within_rounding(found, expected, level, factor)


@pytest.mark.slow
def test_bfloat16_weights_train_as_at_o4(two_processes):
    expected = two_processes(losses, "O4", sharded=False)[0]
    assert_equal_within_rounding(two_processes(losses, "O5", sharded=True)[0], expected, "O4", 2)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_batch_norms_train_in_fp32(two_processes, level):
    found = two_processes(losses, level, sharded=True, norm=True)[0]
    assert found[-1] < 0.6 * found[0]
    if level == "O0":
        expected = two_processes(losses, level, sharded=False, norm=True)[0]
        assert found[:3] == pytest.approx(expected[:3], abs=0.05)


def describe(level):
    """Return shapes and types of what a rank holds, before and after training."""
    model, optimizer = build(level)
    before = {name: tuple(p.to_local().shape) for name, p in model.named_parameters()}
    scale = float(model.scale)
    train(model, optimizer, steps=2)
    parameters = dict(model.named_parameters())
    types = {p.dtype for p in parameters.values()}
    moments = {tuple(optimizer.state[p]["exp_avg"].to_local().shape) for p in parameters.values()}
    device = {p.to_local().device.type for p in parameters.values()}
    output = model(batches(1, 0)[0][0]).dtype
    return before, types, moments, device, output, scale


@pytest.mark.parametrize(("level", "output"), [("O0", torch.float32), ("O5", torch.float32)])
def test_each_rank_holds_a_shard_of_weights_and_moments(two_processes, level, output):
    whole = {name: tuple(p.shape) for name, p in Classifier().named_parameters()}
    descriptions = two_processes(describe, level)
    for shards, types, moments, device, found_output, scale in descriptions:
        assert types == {torch.float32} and device == {"cpu"} and found_output == output
        assert moments == set(shards.values())
        assert scale == 2.0  # a buffer outside of the state dict
    shards = [one[0] for one in descriptions]
    for name, shape in whole.items():
        assert sum(one[name][0] for one in shards) == shape[0]
        assert {one[name][1:] for one in shards} == {shape[1:]}


def audit():
    """Return the messages of the first step's audit, and its errors for two faults."""
    import apex_native
    from engine.backend import Backend
    from engine.diagnostics.first_step import FirstStepAudit

    model, optimizer = build()
    messages = []
    logger = SimpleNamespace(info=messages.append)
    arguments = (model, optimizer, Backend(apex_native, ""), [], logger)
    first_step = FirstStepAudit(*arguments)
    model(batches(1, 0)[0][0]).sum().backward()
    model.head.bias.grad = None
    with pytest.raises(UserError) as without_gradient:
        first_step.check_gradients()
    model.whole = nn.Parameter(torch.ones(2), requires_grad=False)
    with pytest.raises(UserError) as not_sharded:
        FirstStepAudit(*arguments)
    return messages, str(without_gradient.value), str(not_sharded.value)


def test_first_step_audit_reports_the_shard_of_a_rank_and_its_memory(two_processes):
    total = sum(parameter.numel() for parameter in Classifier().parameters())
    half = sum(-(-len(p) // 2) * (p.numel() // len(p)) for p in Classifier().parameters())
    expected = f"rank 0 holds {half:,} of {total:,} parameters: 0.00 GiB with gradients and opt"
    (messages, without_gradient, not_sharded), (_, *others) = two_processes(audit)
    assert [message.startswith(expected) for message in messages] == [True]
    assert without_gradient.startswith("no gradient reaches head.bias")
    assert not_sharded.startswith("whole are not sharded")
    assert others == [without_gradient, not_sharded]


def apply_with_old_torch():
    with mock.patch.object(torch.cpu, "Stream", object), pytest.raises(UserError) as raised:
        build()
    return str(raised.value)


def train_offloaded():
    # As torch's is without a driver, whatever this host has.
    with mock.patch.object(torch.Tensor, "pin_memory", side_effect=RuntimeError("no driver")):
        model = nn.Linear(4, 4)
        Sharding(torch.device("cpu"), "O0", cpu_offload=True).apply(model)
        model(torch.ones(2, 4)).sum().backward()
    return model.weight.grad is not None


def test_cpu_offload_without_a_gpu(two_processes):
    assert two_processes(train_offloaded) == [True, True]


def test_old_torch_without_a_gpu_is_an_error(two_processes):
    said = two_processes(apply_with_old_torch)
    assert all("cannot shard on the CPU; use a GPU, or a newer torch" in one for one in said)


def initial_weights():
    model, _ = build()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def test_initial_weights_are_those_of_rank_0(four_processes):
    torch.manual_seed(0)
    expected = Classifier().state_dict()
    for found in four_processes(initial_weights):
        assert found.keys() == expected.keys()
        assert all(found[name].equal(expected[name]) for name in expected)


def average(sharded):
    import apex_native
    from engine.backend import Backend, unwrap
    from engine.distributed.sharding import Sharding
    from engine.optim import Ema

    torch.manual_seed(0)
    with torch.device("meta" if sharded and dist.get_rank() else "cpu"):
        ema = Ema(Classifier(), 0.9)
    if sharded:
        Sharding(torch.device("cpu"), "O0").apply(ema.module)
    model, optimizer = build(sharded=sharded)
    backend = Backend(apex_native, "")
    for step in range(5):
        with torch.no_grad():
            for parameter in unwrap(model).parameters():
                parameter.mul_(1.1)
        ema.update(backend.fp32_state_dict(model, optimizer), step)
    state = ema.module.state_dict()
    return {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in state.items()}


def test_average_is_sharded_and_equals_that_of_ddp(two_processes):
    expected, found = two_processes(average, False)[0], two_processes(average, True)[1]
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def share_a_parameter():
    from engine.distributed.sharding import Sharding

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(UserError, match="share a parameter"):
        Sharding(torch.device("cpu"), "O0").apply(model)
    return dist.get_rank()


def test_shared_parameters_are_refused(two_processes):
    assert two_processes(share_a_parameter) == [0, 1]


def apply_to_a_scalar():
    from engine.distributed.sharding import Sharding

    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(UserError, match=r"the parameter scale has no dimensions.* \(1,\)"):
        Sharding(torch.device("cpu"), "O0").apply(model)
    return dist.get_rank()


def test_parameters_without_dimensions_are_refused(two_processes):
    assert two_processes(apply_to_a_scalar) == [0, 1]


def count_of_rank_0():
    from engine.distributed.sharding import Sharding

    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = nn.Sequential(Versioned(2, 2))
    model[0].count = 0 if dist.get_rank() else 3
    Sharding(torch.device("cpu"), "O0").apply(model)
    return model[0].count


def test_extra_state_is_that_of_rank_0(two_processes):
    """With --weights, rank 0 alone reads the file."""
    assert two_processes(count_of_rank_0) == [3, 3]


def log_a_norm():
    from engine.monitoring.meter import Meter

    model, _ = build("O0")
    meter = Meter(torch.device("cpu"), 1)
    norm = nn.utils.get_total_norm(list(model.parameters()))
    meter.log(norm=norm)
    whole = nn.utils.get_total_norm([p.full_tensor() for p in model.parameters()])
    return meter.results()["norm"], whole.item()


def test_meter_logs_norms_of_all_shards(two_processes):
    for found, expected in two_processes(log_a_norm):
        assert found == pytest.approx(expected)


class Masked(nn.Linear):
    """Layer whose mask is a buffer."""

    def __init__(self, mask):
        super().__init__(3, 3)
        self.register_buffer("mask", mask)


def share_a_buffer():
    from engine.distributed.sharding import Sharding

    with torch.device("meta" if dist.get_rank() else "cpu"):
        mask = torch.arange(3.0)
        view = torch.arange(4, dtype=torch.int16)[1::2]  # of a type that no collective takes
        model = nn.Sequential(Masked(mask), Masked(mask), Masked(view))
    Sharding(torch.device("cpu"), "O0").apply(model)
    return model[0].mask is model[1].mask, [layer.mask.tolist() for layer in model]


def test_shared_buffers_stay_shared_and_views_are_those_of_rank_0(two_processes):
    expected = (True, [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [1, 3]])
    assert two_processes(share_a_buffer) == [expected] * 2


# Blocks


def test_repeated_blocks_are_found():
    model = Classifier()
    assert find_blocks(model) == list(model.blocks)
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []  # without submodules
    nested = nn.Sequential(nn.Sequential(*model.blocks[:2]), nn.Sequential(*model.blocks[2:]))
    assert find_blocks(nested) == list(model.blocks)


def test_blocks_are_named_by_their_class():
    model = Classifier()
    assert find_blocks(model, ("Linear",))[0] is model.embed
    with pytest.raises(UserError, match="has no EncoderBlock"):
        find_blocks(model, ("EncoderBlock",))


def test_activation_checkpointing_saves_memory_and_changes_nothing():
    torch.manual_seed(0)
    plain = Classifier()
    checkpointed = Classifier()
    checkpointed.load_state_dict(plain.state_dict())
    assert "4 blocks" in checkpoint_activations(checkpointed)
    assert checkpointed.state_dict().keys() == plain.state_dict().keys()
    saved = {}
    for model in (plain, checkpointed):
        sizes: list[int] = []

        def pack(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return tensor

        tokens, labels = batches(1, 0)[0]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = nn.functional.cross_entropy(model(tokens), labels)
        saved[model] = sum(sizes)
        loss.backward()
    assert saved[checkpointed] < saved[plain] / 3
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(2),
        nn.InstanceNorm1d(2, track_running_stats=True),
        nn.utils.spectral_norm(nn.Linear(2, 2)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
    ],
    ids=["batch", "instance", "old spectral", "spectral"],
)
def test_activation_checkpointing_refuses_running_statistics(norm):
    block = nn.Sequential(nn.Linear(2, 2), norm)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = block

    with pytest.raises(UserError, match="Block holds a batch norm"):
        checkpoint_activations(nn.Sequential(Block(), Block()))
    with pytest.raises(UserError, match="no repeated blocks"):
        checkpoint_activations(nn.Linear(2, 2))


class Block(nn.Module):
    """Residual block (N, 8) -> (N, 8) of its own width."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))

    def forward(self, inputs):
        return inputs + self.layers(inputs)


def compiled_graphs():
    """Return how many graphs are compiled for training and validation of 12 different blocks."""
    from engine.distributed.sharding import Sharding, compile_sharded

    model = nn.Sequential(*(Block(width) for width in range(4, 16)))
    Sharding(torch.device("cpu"), "O0").apply(model, ["Block"])
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_quickly = partial(model.compile, backend=backend, dynamic=False)
    with mock.patch.object(model, "compile", compile_quickly):
        compile_sharded(model)
    model(torch.ones(2, 8)).sum().backward()
    with torch.no_grad():
        model.eval()(torch.ones(2, 8))
    return len(graphs)


def compiled_operations():
    """Return how many operations are compiled of a model whose modules are all torch's own."""
    from engine.distributed.sharding import Sharding, compile_sharded

    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(8, 2))
    Sharding(torch.device("cpu"), "O0").apply(model, [])
    expected = model(torch.ones(2, 8))
    counts = []

    def backend(graph, inputs):
        counts.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    compile_quickly = partial(model.compile, backend=backend, dynamic=False)
    with mock.patch.object(model, "compile", compile_quickly):
        compile_sharded(model)
    assert torch.equal(model(torch.ones(2, 8)), expected)
    return sum(counts)


def test_modules_of_torch_are_compiled(two_processes):
    """FSDP's hooks split a model into calls of forward(), which torch skips in its own modules."""
    assert two_processes(compiled_operations) == [5, 5]


def test_all_blocks_are_compiled(two_processes):
    """torch runs those after the eighth uncompiled by default."""
    assert two_processes(compiled_graphs) == [24, 24]

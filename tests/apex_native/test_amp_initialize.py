"""amp.initialize: the opt_levels, overrides, refused arguments; casts of inputs and outputs."""

import copy
import pickle
import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import NamedTuple

import pytest
import torch
from amp_helpers import (
    BF16,
    COMPILED_LEVELS,
    FP16,
    FP32,
    LEVELS,
    OPTIMIZERS,
    Net,
    backward,
    batches,
    initialize,
    on,
    prepare,
    same,
    scale,
    set_scale,
    sgd,
    train,
    weights,
)
from apex_native import amp
from parameters import mostly_slow
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence


@pytest.mark.parametrize(
    ("level", "weight", "norm", "function", "output", "masters", "loss_scale"),
    [
        ("O0", FP32, FP32, FP32, FP32, False, 1.0),
        ("O1", FP32, FP32, FP16, FP16, False, 65536.0),
        ("O2", FP16, FP32, FP16, FP32, True, 65536.0),
        ("O3", FP16, FP16, FP16, FP32, False, 1.0),
        ("O4", FP32, FP32, BF16, BF16, False, 1.0),
        ("O5", BF16, FP32, BF16, FP32, True, 1.0),
    ],
)
def test_opt_level_properties(device, level, weight, norm, function, output, masters, loss_scale):
    model = Net().to(device)
    model, optimizer = initialize(model, sgd(model), level)
    functions = []
    model.first.register_forward_hook(lambda module, args, result: functions.append(result.dtype))
    result = model(torch.randn(2, 4, device=device))

    assert model.last.weight.dtype == on(device, weight)
    assert {t.dtype for t in (*model.norm.parameters(), model.norm.running_mean)} == {
        on(device, norm)
    }
    assert model.norm.num_batches_tracked.dtype == torch.int64
    assert model.offset.dtype == on(device, weight)
    assert model.seen == on(device, weight)
    assert functions == [on(device, function)]
    assert result.dtype == on(device, output)
    stepped = list(amp.master_params(optimizer))
    own = zip(stepped, model.parameters(), strict=True)
    assert any(p is not q for p, q in own) == (masters and on(device, weight) != FP32)
    assert scale() == loss_scale
    if masters or level == "O0":
        assert {parameter.dtype for parameter in stepped} == {FP32}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_training_at_each_opt_level(device, level, name):
    model = Net().to(device)
    model, optimizer = initialize(model, OPTIMIZERS[name](model), level)
    ((x, target),) = batches(1, device)
    before = F.cross_entropy(model(x), target).item()
    train(model, optimizer, [(x, target)] * 40)
    assert F.cross_entropy(model(x), target).item() < 0.3 * before


@pytest.mark.parametrize(
    ("level", "options", "weight", "norm"),
    [
        ("O0", {"cast_model_type": False}, FP32, FP32),
        ("O2", {"cast_model_type": FP16, "keep_batchnorm_fp32": False}, FP16, FP16),
        ("O2", {"cast_model_type": FP16, "keep_batchnorm_fp32": "False"}, FP16, FP16),
        ("O3", {"cast_model_type": FP16, "keep_batchnorm_fp32": True}, FP16, FP32),
        ("O3", {"cast_model_type": FP16, "keep_batchnorm_fp32": "True"}, FP16, FP32),
        ("O2", {"cast_model_type": BF16}, BF16, FP32),
        ("O2", {"cast_model_type": False}, FP32, FP32),
        ("O1", {"cast_model_type": False}, FP32, FP32),
        ("O1", {"cast_model_type": FP32}, FP32, FP32),
    ],
)
def test_override_of_cast_model_type(level, options, weight, norm):
    model = initialize(Net(), None, level, **options)
    assert (model.first.weight.dtype, model.norm.weight.dtype) == (weight, norm)


@pytest.mark.parametrize("given", [False, FP32])
def test_override_that_states_what_o1_does_keeps_its_half_type(device, given):
    initialize(Net().to(device), None, "O1", cast_model_type=given)
    product = torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device)
    assert product.dtype == amp.properties().function_type == on(device, FP16)


@pytest.mark.parametrize(
    ("level", "given", "loss_scale", "dynamic"),
    [
        ("O2", 128, 128.0, False),
        ("O1", "128.0", 128.0, False),
        ("O2", 1.0, 1.0, False),
        ("O0", "dynamic", 65536.0, True),
        ("O5", "dynamic", 65536.0, True),
    ],
)
def test_override_of_the_loss_scale(level, given, loss_scale, dynamic):
    initialize(Net(), None, level, loss_scale=given)
    assert scale() == loss_scale
    set_scale(32.0)
    assert scale() == (32.0 if dynamic else loss_scale)


@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_override_of_master_weights(level, master_weights):
    model, optimizer = prepare(level, master_weights=master_weights)
    (group,) = optimizer.param_groups
    assert (group["params"][0] is not model.first.weight) == master_weights
    assert group["params"][0].dtype == (FP32 if master_weights else FP16)


def test_override_of_function_casts():
    initialize(Net(), None, "O1", patch_torch_functions=False)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == FP32


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_override_of_cast_model_outputs(level):
    model = initialize(Net(), None, level, cast_model_outputs=torch.float64)
    assert model(torch.randn(2, 4)).dtype == torch.float64


@pytest.mark.parametrize(
    ("level", "options", "message"),
    [
        ("01", {}, "'01'.*O0, O1, O2, O3, O4, O5.*letter O"),
        ("O6", {}, "'O6'"),
        ("O1", {"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32 has no meaning at O1"),
        ("O1", {"master_weights": True}, "master_weights has no meaning at O1"),
        ("O1", {"cast_model_type": FP16}, "cast_model_type has no meaning at O1"),
        ("O4", {"keep_batchnorm_fp32": "False"}, "keep_batchnorm_fp32 has no meaning at O4"),
        ("O2", {"patch_torch_functions": True}, "patch_torch_functions.*O1 or O4"),
        ("O2", {"keep_batchnorm_fp32": "yes"}, "keep_batchnorm_fp32 must be.*'yes'"),
        ("O1", {"loss_scale": "large"}, "loss_scale must be 'dynamic' or a number above 0, not"),
        ("O1", {"loss_scale": 0}, "a number above 0, not 0"),
    ],
)
def test_contradictory_overrides_raise(level, options, message):
    model = Net()
    before = weights(model)
    with pytest.raises(RuntimeError, match=message):
        initialize(model, sgd(model), level, **options)
    assert same(weights(model), before)
    assert initialize(model, None, "O0") is model


class Wrapped(nn.parallel.DistributedDataParallel):
    def __init__(self):  # without a process group
        nn.Module.__init__(self)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.DataParallel(Net()), "inside DataParallel"),
        (Wrapped, "inside Wrapped"),
        (lambda: Net().half(), "first.weight is fp16 already"),
        (lambda: nn.BatchNorm1d(2, affine=False).half(), "running_mean is fp16 already"),
    ],
)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_wrapped_or_half_models_raise(level, model, message):
    with pytest.raises(RuntimeError, match=message):
        initialize(model(), None, level)


def test_optimizer_initialized_twice_raises():
    model = Net()
    optimizer = sgd(model)
    initialize(model, optimizer)
    with pytest.raises(RuntimeError, match="only once"):
        initialize(model, optimizer)
    other = sgd(model)
    with pytest.raises(RuntimeError, match="only once"):
        initialize(model, [other, other])


class Wrapper(torch.optim.Optimizer):
    """Optimizer that keeps its parameters twice, as torch's ZeroRedundancyOptimizer does."""

    def __init__(self, model):
        super().__init__(model.parameters(), {})
        self.optim = sgd(model)

    def step(self, closure=None):
        self.optim.step(closure)


def test_masters_with_an_optimizer_that_steps_by_another_one_raise():
    """It would step the half parameters, and the next copy of the masters undo that."""
    for level in ("O1", "O4"):
        prepare(level, Wrapper)
    with pytest.raises(RuntimeError, match="Wrapper steps its parameters by an optimizer of"):
        prepare("O2", Wrapper)


def test_other_containers_raise():
    model = Net()
    for models in ((model,), {"model": model}, [model, "model"], None):
        with pytest.raises(TypeError, match="models"):
            initialize(models)
    for optimizers in ((sgd(model),), [sgd(model), None], "SGD"):
        with pytest.raises(TypeError, match="optimizers"):
            initialize(model, optimizers)


def test_scale_loss_argument_errors():
    model, optimizer = prepare("O1")
    loss = model(torch.ones(2, 4)).sum()
    for arguments, message in (((loss, optimizer, 1), "loss_id=1.*num_losses=1"),):
        with pytest.raises(RuntimeError, match=message), amp.scale_loss(*arguments):
            pass


@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
def test_models_moved_after_initialize_raise(level):
    model, optimizer = prepare(level)
    loss = model.to("meta")(torch.ones(2, 4, device="meta")).sum()
    with (
        pytest.raises(RuntimeError, match="models on the CPU, and the loss is on meta"),
        amp.scale_loss(loss, optimizer),
    ):
        pass


@pytest.mark.gpu
def test_loss_on_the_cpu_of_a_model_on_a_gpu():
    model, optimizer = prepare("O2", device="cuda")
    backward(model(torch.ones(2, 4, device="cuda")).cpu().sum(), optimizer)
    optimizer.step()


def test_scale_loss_before_initialize_raises(monkeypatch):
    model, loss = Net(), torch.ones(())
    optimizer = sgd(model)
    initialize(model, optimizer)
    with (
        pytest.raises(RuntimeError, match="amp.initialize returned"),
        amp.scale_loss(loss, sgd(model)),
    ):
        pass
    monkeypatch.setattr(amp._amp_state, "level", None)  # as before any call
    with pytest.raises(RuntimeError, match="needs amp.init"), amp.scale_loss(loss, optimizer):
        pass


def test_lists_are_returned_as_lists():
    a, b = Net(), Net()
    assert initialize(a) is a
    assert initialize([a]) == [a]
    assert initialize([a, b]) == [a, b]
    for models in (a, [a], [a, b]):
        one = sgd(a)
        assert initialize(models, one) == (models, one)
        two = [sgd(a), sgd(b)]
        assert initialize(models, two) == (models, two)


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_keep_their_identity(level):
    model = Net()
    before = dict(model.named_parameters())
    initialize(model, sgd(model), level)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())


def test_o0_casts_double_to_fp32():
    model = initialize(Net().double(), None, "O0")
    output = model(torch.randn(2, 4, dtype=torch.float64))
    assert {tensor.dtype for tensor in model.parameters()} == {FP32}
    assert model.seen == model.offset.dtype == output.dtype == FP32


def test_keep_batchnorm_fp32_applies_to_affine_norms():
    norms = {
        nn.BatchNorm1d(2): FP32,
        nn.BatchNorm1d(2, affine=False): FP16,
        nn.InstanceNorm1d(2, affine=True): FP16,
        nn.LayerNorm(2): FP16,
    }
    initialize(nn.Sequential(*norms), None, "O2", cast_model_type=FP16)
    for norm, dtype in norms.items():
        tensors = [*norm.parameters(), *norm.buffers()]
        assert {tensor.dtype for tensor in tensors} - {torch.int64} == {dtype}


Pair = namedtuple("Pair", "left right")


class Batch:
    """A batch class of the user's."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, dtype):
        return Batch(self.tensor.to(dtype))


class Mapping(UserDict):
    """A batch that is a mapping with another constructor."""

    def __init__(self, tensor, length):
        super().__init__(tensor=tensor)
        self.length = length

    def to(self, dtype):
        return Mapping(self["tensor"].to(dtype), self.length)


class Boxes(namedtuple("Boxes", "features corners")):
    """A batch that is a tuple, of which one field keeps its type."""

    def to(self, dtype):
        return self._replace(features=self.features.to(dtype))


class Echo(nn.Module):
    def forward(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        return args, kwargs


def dtypes(value):
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, Batch):
        return value.tensor.dtype
    if isinstance(value, dict):
        return {key: dtypes(item) for key, item in value.items()}
    return [dtypes(item) for item in value]


def test_inputs_and_outputs_are_cast_recursively():
    model = initialize(Echo(), None, "O2", cast_model_type=BF16)
    x, labels, other = torch.ones(2), torch.arange(2), object()
    args = (x, [x, labels], (x,), Pair(x, labels), {"a": [x]}, OrderedDict(a=x), Batch(x))
    args = (*args, defaultdict(list, a=x))
    args_out, kwargs_out = model(*args, x.max(0), mask=x, name="name", other=other, none=None)

    def check(args, kwargs, dtype):
        fixed = torch.int64
        assert dtypes(args) == [
            *(dtype, [dtype, fixed], [dtype], [dtype, fixed], {"a": [dtype]}, {"a": dtype}, dtype),
            {"a": dtype},
            [dtype, fixed],
        ]
        kinds = [torch.Tensor, list, tuple, Pair, dict, OrderedDict, Batch, defaultdict]
        assert [type(value) for value in args] == [*kinds, torch.return_types.max]
        assert kwargs["mask"].dtype == dtype
        assert kwargs["name"] == "name" and kwargs["other"] is other and kwargs["none"] is None

    check(model.args, model.kwargs, BF16)
    check(args_out, kwargs_out, FP32)
    assert x.dtype == FP32


def test_direct_forward_is_not_cast():
    model = initialize(Echo(), None, "O2", cast_model_type=BF16)
    x = torch.ones(2)
    args, _ = model.forward(x, x.to(BF16))
    assert dtypes(model.args) == dtypes(args) == [FP32, BF16]


def test_containers_with_a_method_to_are_cast_by_it():
    model = initialize(Echo(), None, "O2", cast_model_type=BF16)
    x = torch.ones(2)
    outputs, _ = model(Mapping(x, length=2), Boxes(x, x))
    for (mapping, boxes), dtype in ((model.args, BF16), (outputs, FP32)):
        assert type(mapping) is Mapping and mapping.length == 2
        assert type(boxes) is Boxes
        assert [mapping["tensor"].dtype, *dtypes(boxes)] == [dtype, dtype, FP32]


class Message(NamedTuple):
    text: torch.Tensor
    to: torch.Tensor


def test_fields_named_to_are_no_methods_and_packed_ids_stay_integers():
    model = initialize(Echo(), None, "O2", cast_model_type=BF16)
    packed = pack_sequence([torch.arange(3), torch.arange(2)])
    model(Message(torch.ones(2), torch.ones(2)), packed)
    message, ids = model.args
    assert (message.text.dtype, message.to.dtype, ids.data.dtype) == (BF16, BF16, torch.int64)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
    ],
    ids=["LambdaLR", "OneCycleLR"],
)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_schedulers_work_without_a_warning(level, schedule):
    model, optimizer = prepare(level, OPTIMIZERS["SGD"])
    rates = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = schedule(optimizer)
        for factor in (float("inf"), 1.0, 1.0):  # after a skipped step, too
            backward(model(torch.randn(4, 4)).sum() * factor, optimizer)
            optimizer.step()
            scheduler.step()
            rates.add(optimizer.param_groups[0]["lr"])
    assert len(rates) == 3


@pytest.mark.parametrize("level", LEVELS)
def test_models_can_be_copied_and_pickled(level):
    model, optimizer = prepare(level)
    train(model, optimizer, batches(2))
    x = torch.randn(4, 4)
    expected = model.eval()(x)
    _, pickled = copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert same(pickled.state_dict(), model.state_dict())
    train(model.train(), optimizer, batches(2))
    for one in copies:
        assert torch.equal(one(x), expected)
        assert {tensor.dtype for tensor in one.state_dict().values()} == {FP32, torch.int64}
        one.load_state_dict(model.state_dict())
        assert torch.equal(one(x), model.eval()(x))


@pytest.mark.parametrize("level", mostly_slow(COMPILED_LEVELS))
def test_models_compile_without_graph_breaks(level):
    torch.compiler.reset()
    model, optimizer = prepare(level)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(4, 4)
    output = compiled(x)
    backward(output.square().mean(), optimizer)
    optimizer.step()
    model.eval()
    assert torch.equal(compiled(x), model(x))


class Containers(nn.Linear):
    def forward(self, batch):
        x = super().forward(batch["x"])
        found = OrderedDict(x=x, rest=[x, (x, None), Pair(x, 1)])
        if not torch.__version__.startswith("2.6."):  # which can't compile this by itself
            found["default"] = defaultdict(list, x=x)
        return found


def test_casts_of_containers_compile_without_graph_breaks():
    torch.compiler.reset()
    model = initialize(Containers(2, 2), None, "O2", cast_model_type=BF16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    batch = OrderedDict(x=torch.ones(1, 2))
    found, expected = compiled(batch), model(batch)
    assert type(found) is OrderedDict and found["x"].dtype == FP32
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_gradients_that_exist_before_initialize_are_cast():
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    initialize(model, sgd(model), "O2", cast_model_type=FP16)
    assert model.weight.dtype == model.weight.grad.dtype == FP16
    assert torch.equal(model.weight.grad, torch.ones(1, 2, dtype=FP16))


@pytest.mark.parametrize("late", ["before the first step", "after a step"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_parameters_that_are_unfrozen_later_get_masters(level, late):
    """As in Apex, which makes them in the first backward pass; after it, they would stay half."""
    model = Net()
    first, *others = model.parameters()
    first.requires_grad_(False)
    optimizer = sgd(model, lr=1e-4, momentum=0.9)
    initialize(model, optimizer, level, **({"cast_model_type": FP16} if level == "O2" else {}))
    start = first.float()
    if late == "after a step":
        train(model, optimizer, batches(1))
        assert first.grad is None and torch.equal(first.float(), start)
    first.requires_grad_(True)
    train(model, optimizer, batches(3))
    master = optimizer.param_groups[0]["params"][0]
    assert master.dtype == torch.float32 and [*amp.master_params(optimizer)][0] is master
    assert len([*amp.master_params(optimizer)]) == 1 + len(others)
    assert not torch.equal(master, master.to(first.dtype).float())
    assert torch.equal(first, master.to(first.dtype))


@pytest.mark.parametrize(
    "make", [*OPTIMIZERS.values(), lambda model: torch.optim.Adam(model.parameters())]
)
def test_loaded_states_of_parameters_that_are_unfrozen_later_become_fp32(make):
    saved = None
    for is_frozen in (False, True):
        model = Net()
        first = next(model.parameters())
        first.requires_grad_(not is_frozen)
        optimizer = make(model)
        initialize(model, optimizer, "O5")
        if saved:
            optimizer.load_state_dict(saved)
        first.requires_grad_(True)
        train(model, optimizer, batches(2))
        saved = optimizer.state_dict()
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert state and all(
        value.dtype == torch.float32 for value in state.values() if isinstance(value, torch.Tensor)
    )


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_groups_hold_masters_after_initialize(level):
    """A group is found by its index: Apex makes masters in the first backward pass only."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": layer.parameters()} for layer in net]
    net, optimizer = amp.initialize(
        net, torch.optim.SGD(groups, lr=0.1), opt_level=level, verbosity=0
    )
    own = [{id(parameter) for parameter in layer.parameters()} for layer in net]
    held = [{id(parameter) for parameter in group["params"]} for group in optimizer.param_groups]
    assert (held == own) == (level == "O1")
    if level != "O1":
        masters = optimizer._amp_stash.masters
        assert held == [{id(masters[p]) for p in layer.parameters()} for layer in net]

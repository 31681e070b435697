"""apex_native.amp: what each opt_level makes of a model, and the arithmetic of scaled losses."""

import copy
import io
import pickle
import warnings
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from apex_native import amp
from apex_native.amp.models import half_type
from apex_native.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
OPTIMIZERS = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "FusedAdam": lambda model: FusedAdam(model.parameters(), lr=0.01, weight_decay=0.1),
}


class Net(nn.Module):
    """A net with all that the levels tell apart, which notes what it is given."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x):
        self.seen = x.dtype
        return self.last(torch.relu(self.norm(self.first(x + self.offset))))


def on(device, dtype):
    """The type that serves as `dtype`: on the CPU it depends on the processor."""
    return half_type(dtype, torch.device(device))


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1} | options)


def initialize(models, optimizers=None, level="O1", **options):
    return amp.initialize(models, optimizers, opt_level=level, **{"verbosity": 0} | options)


def prepare(level, make=sgd, device="cpu", **options):
    """A model and an optimizer; weights are cast to real fp16 on any CPU, which may emulate it."""
    if level in ("O2", "O3"):
        options = {"cast_model_type": FP16} | options
    model = Net().to(device)
    return initialize(model, make(model), level, **options)


def backward(loss, optimizer, **options):
    with amp.scale_loss(loss, optimizer, **options) as scaled_loss:
        scaled_loss.backward()


def train(model, optimizer, batches):
    for x, target in batches:
        optimizer.zero_grad()
        backward(F.cross_entropy(model(x), target), optimizer)
        optimizer.step()


def batches(count, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(16, 4, generator=generator)
        yield x.to(device), x[:, :3].argmax(1).to(device)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def gradients(optimizer):
    return [parameter.grad.clone() for parameter in amp.master_params(optimizer)]


def same(ones, others):
    """Whether two mappings or sequences of tensors are the same to the last bit."""
    if isinstance(ones, dict):
        assert ones.keys() == others.keys()
        ones, others = ones.values(), others.values()
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def scale(index=0):
    return amp.state_dict()[f"loss_scaler{index}"]["loss_scale"]


def set_scale(loss_scale, unskipped=0):
    amp.load_state_dict({"loss_scaler0": {"loss_scale": loss_scale, "unskipped": unskipped}})


# The levels


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
def test_level(device, level, weight, norm, function, output, masters, loss_scale):
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
def test_level_trains(device, level, name):
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
def test_overrides_of_casts(level, options, weight, norm):
    model = initialize(Net(), None, level, **options)
    assert (model.first.weight.dtype, model.norm.weight.dtype) == (weight, norm)


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
def test_override_of_masters(level, master_weights):
    model, optimizer = prepare(level, master_weights=master_weights)
    (group,) = optimizer.param_groups
    assert (group["params"][0] is not model.first.weight) == master_weights
    assert group["params"][0].dtype == (FP32 if master_weights else FP16)


def test_override_of_function_casts():
    initialize(Net(), None, "O1", patch_torch_functions=False)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == FP32


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_override_of_outputs(level):
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
def test_contradictions_are_refused(level, options, message):
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
        (lambda: Net().half(), "parameter first.weight is fp16 already"),
        (lambda: nn.BatchNorm1d(2, affine=False).half(), "buffer running_mean is fp16 already"),
    ],
)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_models_that_come_too_late_are_refused(level, model, message):
    with pytest.raises(RuntimeError, match=message):
        initialize(model(), None, level)


def test_an_optimizer_can_be_initialized_once():
    model = Net()
    optimizer = sgd(model)
    initialize(model, optimizer)
    with pytest.raises(RuntimeError, match="only once"):
        initialize(model, optimizer)
    other = sgd(model)
    with pytest.raises(RuntimeError, match="only once"):
        initialize(model, [other, other])


def test_other_containers_are_refused():
    model = Net()
    for models in ((model,), {"model": model}, [model, "model"], None):
        with pytest.raises(TypeError, match="models"):
            initialize(models)
    for optimizers in ((sgd(model),), [sgd(model), None], "SGD"):
        with pytest.raises(TypeError, match="optimizers"):
            initialize(model, optimizers)


def test_scale_loss_names_what_is_wrong_with_its_arguments():
    model, optimizer = prepare("O1")
    loss = model(torch.ones(2, 4)).sum()
    for arguments, message in (
        ((loss, []), "no optimizer"),
        ((loss, optimizer, 1), "loss_id=1.*num_losses=1"),
    ):
        with pytest.raises(RuntimeError, match=message), amp.scale_loss(*arguments):
            pass


def test_scale_loss_needs_initialize(monkeypatch):
    model, loss = Net(), torch.ones(())
    optimizer = sgd(model)
    initialize(model, optimizer)
    with pytest.raises(RuntimeError, match="did not return"), amp.scale_loss(loss, sgd(model)):
        pass
    monkeypatch.setattr(amp._amp_state, "opt_properties", None)  # as before any call
    with pytest.raises(RuntimeError, match="needs amp.init"), amp.scale_loss(loss, optimizer):
        pass


def test_a_list_comes_back_as_a_list():
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


def test_o0_makes_fp32_of_what_is_double():
    model = initialize(Net().double(), None, "O0")
    output = model(torch.randn(2, 4, dtype=torch.float64))
    assert {tensor.dtype for tensor in model.parameters()} == {FP32}
    assert model.seen == model.offset.dtype == output.dtype == FP32


def test_only_batch_norms_with_weights_stay_in_fp32():
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


# What goes in and out

Pair = namedtuple("Pair", "left right")


class Batch:
    """A batch class of the user's."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, dtype):
        return Batch(self.tensor.to(dtype))


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


# What is saved and loaded


@pytest.mark.parametrize("level", LEVELS)
def test_state_dict_is_fp32_with_the_values_that_are_stepped(level):
    model, optimizer = prepare(level)
    train(model, optimizer, batches(3))
    state = model.state_dict()
    assert state.keys() == Net().state_dict().keys()
    assert {tensor.dtype for tensor in state.values()} == {FP32, torch.int64}
    stepped = zip(model.named_parameters(), amp.master_params(optimizer), strict=True)
    for (name, parameter), master in stepped:
        assert torch.equal(state[name], master.float())
        assert torch.equal(parameter, master.to(parameter.dtype))


def test_state_dict_is_not_rounded():
    model, optimizer = prepare("O2")
    train(model, optimizer, batches(3))
    assert model.first.weight.dtype == FP16
    assert not torch.equal(model.state_dict()["first.weight"], model.first.weight.float())


@pytest.mark.gpu
def test_state_dict_lies_where_the_model_does():
    model = nn.Linear(2, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert {tensor.device.type for tensor in model.cpu().state_dict().values()} == {"cpu"}


def test_what_is_written_to_a_model_reaches_its_masters():
    """As Apex sees it, which makes masters at the first backward pass."""
    model, optimizer = prepare("O2")
    exact = model.state_dict()["last.weight"]
    nn.init.constant_(model.first.weight, 0.5)
    assert (model.state_dict()["first.weight"] == 0.5).all()
    assert torch.equal(model.state_dict()["last.weight"], exact)
    nn.init.constant_(model.first.weight, 0.25)
    optimizer.zero_grad()
    optimizer.step()
    assert (model.first.weight == 0.25).all()


def test_names_that_old_scripts_reach_for():
    _, optimizer = prepare("O2")
    optimizer._lazy_init_maybe_master_weights()
    scaler = amp._amp_state.loss_scalers[0]
    assert scaler._loss_scale == 2.0**16
    scaler._loss_scale = 8.0
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 8.0


def test_loading_a_model_refreshes_the_masters():
    model, optimizer = prepare("O2")
    other = Net().state_dict()
    model.load_state_dict(other)
    expected = [other[name] for name, _ in model.named_parameters()]
    assert same(list(amp.master_params(optimizer)), expected)

    backward(model.eval()(torch.randn(4, 4)).sum() * 0.0, optimizer)
    optimizer.step()  # copies the masters to the model
    assert same(model.state_dict(), other)
    assert torch.equal(model.first.weight, other["first.weight"].half())


class Run:
    """A model and an optimizer as a process has them after its start."""

    def __init__(self, level, name, seed):
        torch.manual_seed(seed)
        self.model, self.optimizer = prepare(level, OPTIMIZERS[name])

    def state(self):
        parts = {"model": self.model, "optimizer": self.optimizer, "amp": amp}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(self, file):
        state = torch.load(file, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        amp.load_state_dict(state["amp"])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_resumed_run_equals_an_uninterrupted_one(level, name):
    data = list(batches(6))
    run = Run(level, name, seed=0)
    set_scale(1024.0, unskipped=1996)  # doubles where dynamic, after the resumption
    train(run.model, run.optimizer, data[:3])
    file = io.BytesIO()
    torch.save(run.state(), file)
    train(run.model, run.optimizer, data[3:])
    expected, expected_amp = weights(run.model), amp.state_dict()

    run = Run(level, name, seed=1)
    file.seek(0)
    run.load(file)
    train(run.model, run.optimizer, data[3:])
    assert same(weights(run.model), expected)
    assert amp.state_dict() == expected_amp
    assert scale() == (2048.0 if level in ("O1", "O2") else 1.0)


def test_amp_state_is_loaded_in_order():
    initialize(Net(), num_losses=2)
    saved = {"loss_scaler5": {"loss_scale": 8.0, "unskipped": 3}}
    saved["loss_scaler4"] = {"loss_scale": 4.0, "unskipped": 2}
    amp.load_state_dict(saved)
    assert amp.state_dict() == {
        "loss_scaler0": {"loss_scale": 8.0, "unskipped": 3},
        "loss_scaler1": {"loss_scale": 4.0, "unskipped": 2},
    }


def test_amp_state_of_another_run(capsys):
    initialize(Net(), num_losses=2, verbosity=1)
    capsys.readouterr()
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 3}})
    assert "holds 1 loss scalers, this run uses 2" in capsys.readouterr().out
    assert (scale(0), scale(1)) == (8.0, 65536.0)
    with pytest.raises(RuntimeError, match="unexpected entries model"):
        amp.load_state_dict({"model": {}})


# Masters


def test_masters_are_what_the_optimizer_steps():
    model, optimizer = prepare("O2")
    (group,) = optimizer.param_groups
    assert list(amp.master_params(optimizer)) == group["params"]
    for master, parameter in zip(group["params"], model.parameters(), strict=True):
        assert master.dtype == FP32 and master.requires_grad and master.is_leaf
        assert (master is parameter) == (parameter.dtype == FP32)

    before = model.first.weight.clone()
    train(model, optimizer, batches(1))
    assert not torch.equal(model.first.weight, before)
    assert torch.equal(model.first.weight, group["params"][0].half())


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_add_param_group_after_initialize(level):
    model, optimizer = prepare(level, lambda model: sgd(model.first))
    optimizer.add_param_group({"params": model.last.parameters(), "lr": 0.5})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})

    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5, 0.1]
    stepped = optimizer.param_groups[1]["params"]
    assert {p.dtype for p in stepped} == {FP16 if level == "O3" else FP32}
    before = stepped[0].detach().clone()
    ((x, target),) = batches(1)
    backward(F.cross_entropy(model(x), target), optimizer)
    gradient = stepped[0].grad.clone()
    optimizer.step()
    torch.testing.assert_close(stepped[0].detach(), before - 0.5 * gradient)
    assert torch.equal(model.last.weight, stepped[0].to(model.last.weight.dtype))
    assert torch.equal(model.state_dict()["last.weight"], stepped[0].float())


@pytest.mark.parametrize(("level", "dtype"), [("O2", FP32), ("O3", FP16)])
def test_optimizer_state_from_before_is_cast(level, dtype):
    model = Net()
    optimizer = sgd(model, momentum=0.9)
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    momentum = optimizer.state[model.first.weight]["momentum_buffer"].clone()

    initialize(model, optimizer, level, cast_model_type=FP16)
    parameter = optimizer.param_groups[0]["params"][0]
    buffer = optimizer.state[parameter]["momentum_buffer"]
    assert buffer.dtype == dtype
    assert torch.equal(buffer, momentum.to(dtype))
    train(model, optimizer, batches(2))
    assert len(optimizer.state) == len(optimizer.param_groups[0]["params"])


@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_zero_grad_clears_model_and_masters(clear):
    """The model's own zero_grad() cannot reach the masters, whose gradients step() drops."""
    model, optimizer = prepare("O2", lambda model: sgd(model, lr=0.0))
    ((x, target),) = batches(1)
    model.eval()
    seen = []
    for _ in range(2):
        (optimizer if clear == "optimizer" else model).zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        backward(F.cross_entropy(model(x), target), optimizer)
        seen.append(gradients(optimizer))
        optimizer.step()
    assert same(*seen)


def test_zero_grad_drops_what_the_masters_have_gathered():
    model, optimizer = prepare("O2")
    first, _ = two_losses(model)
    (expected,) = alone(optimizer, [first])
    backward(first(), optimizer)
    optimizer.zero_grad()
    backward(first(), optimizer)
    assert same(gradients(optimizer), expected)


# The arithmetic of scale_loss


def two_losses(model):
    """Two functions that give losses of different gradients."""
    (x, target), (y, other) = batches(2)
    model.eval()
    return lambda: F.cross_entropy(model(x), target), lambda: F.cross_entropy(model(y), other)


def alone(optimizer, losses):
    """The gradients of each of the losses."""
    found = []
    for loss in losses:
        optimizer.zero_grad()
        backward(loss(), optimizer)
        found.append(gradients(optimizer))
    optimizer.zero_grad()
    return found


def test_the_scaled_loss_is_fp32():
    _, optimizer = prepare("O1")
    with amp.scale_loss(torch.full((2,), 3.0, dtype=FP16), optimizer) as scaled_loss:
        assert scaled_loss.dtype == FP32
        assert scaled_loss.tolist() == [3 * 65536.0] * 2


@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0, 1.0])
def test_gradients_are_unscaled(loss_scale):
    model = Net()
    first, _ = two_losses(model)
    first().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    _, optimizer = initialize(model, sgd(model), "O0", loss_scale=loss_scale)
    backward(first(), optimizer)
    assert same(gradients(optimizer), expected)


@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0, 1.0])
def test_gradients_of_masters_are_unscaled(loss_scale):
    model = Net()
    first, _ = two_losses(model)
    first().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    options = {"cast_model_type": FP16, "loss_scale": loss_scale}
    _, optimizer = initialize(model, sgd(model), "O2", **options)
    backward(first(), optimizer)
    for gradient, wanted in zip(gradients(optimizer), expected, strict=True):
        assert gradient.dtype == FP32
        torch.testing.assert_close(gradient, wanted, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_gradients_accumulate_across_a_change_of_scale(level):
    model, optimizer = prepare(level, loss_scale="dynamic")
    losses = two_losses(model)
    set_scale(256.0)
    first, second = alone(optimizer, losses)

    backward(losses[0](), optimizer)
    set_scale(4096.0)
    backward(losses[1](), optimizer)
    assert same(gradients(optimizer), [a + b for a, b in zip(first, second, strict=True)])


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])  # torch adds no sparse half
def test_sparse_gradients_are_unscaled_and_added(level, dense):
    """Where the embedding stays as it is they stay sparse; masters are dense."""
    torch.manual_seed(0)
    model = nn.Embedding(5, 3, sparse=not dense)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"cast_model_type": FP16} if level in ("O2", "O3") else {}
    initialize(model, optimizer, level, loss_scale="dynamic", **options)
    set_scale(16.0)
    before = model.weight.detach().clone().float()
    for _ in range(2):
        backward(model(torch.tensor([0, 2, 2])).sum(), optimizer)
    optimizer.step()
    moved = before - model.weight.detach().float()
    expected = torch.tensor([0.2, 0.0, 0.4, 0.0, 0.0]).view(5, 1).expand(5, 3)
    torch.testing.assert_close(moved, expected, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_clipping_after_the_block_bounds_the_step(level):
    model, optimizer = prepare(level, lambda model: sgd(model, lr=1.0), loss_scale="dynamic")
    set_scale(256.0)
    first, _ = two_losses(model)
    before = [parameter.detach().clone() for parameter in amp.master_params(optimizer)]
    backward(first() * 100, optimizer)
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
    optimizer.step()
    after = zip(amp.master_params(optimizer), before, strict=True)
    moved = torch.cat([(parameter - old).flatten() for parameter, old in after])
    assert moved.norm().item() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_delay_unscale(level):
    model, optimizer = prepare(level, loss_scale="dynamic")
    losses = two_losses(model)
    set_scale(256.0)
    first, second = alone(optimizer, losses)

    backward(losses[0](), optimizer, delay_unscale=True)
    scaled = [parameter.grad.float() for parameter in model.parameters()]
    assert same(scaled, [256.0 * gradient for gradient in first])
    backward(losses[1](), optimizer)
    backward(losses[0](), optimizer)
    for gradient, a, b in zip(gradients(optimizer), first, second, strict=True):
        torch.testing.assert_close(gradient, 2 * a + b, rtol=2e-3, atol=1e-5)
    before = weights(model)
    optimizer.step()
    assert not same(weights(model), before)
    assert scale() == 256.0


def test_delay_overflow_check(capsys):
    model, optimizer = prepare("O1", verbosity=1)
    capsys.readouterr()
    backward(model(torch.randn(4, 4)).sum() * float("inf"), optimizer, delay_overflow_check=True)
    optimizer.step()
    assert not model.last.weight.isfinite().all()
    assert scale() == 65536.0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_failed_backward_pass_keeps_what_earlier_ones_brought(level):
    model, optimizer = prepare(level, loss_scale="dynamic")
    set_scale(256.0)
    losses = two_losses(model)
    first, second = alone(optimizer, losses)
    backward(losses[0](), optimizer)
    with (
        pytest.raises(ZeroDivisionError),
        amp.scale_loss(losses[0](), optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
        raise ZeroDivisionError
    assert same(gradients(optimizer), first)
    backward(losses[1](), optimizer)
    assert same(gradients(optimizer), [a + b for a, b in zip(first, second, strict=True)])


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_what_is_still_scaled_is_not_stepped(level):
    model, optimizer = prepare(level, loss_scale="dynamic")
    backward(two_losses(model)[0](), optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match="gradients are still scaled"):
        optimizer.step()


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_zero_grad_forgets_delayed_gradients_and_what_was_set_aside_for_them(level):
    model, optimizer = prepare(level, loss_scale="dynamic")
    losses = two_losses(model)
    _, second = alone(optimizer, losses)
    backward(losses[0](), optimizer)
    backward(losses[0](), optimizer, delay_unscale=True)
    optimizer.zero_grad()
    backward(losses[1](), optimizer)
    assert same(gradients(optimizer), second)
    optimizer.step()


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_delayed_gradients_keep_their_scale_and_what_was_there(level):
    """A plain block, one that delays at another scale, one of another loss that unscales."""
    model, optimizer = prepare(level, loss_scale="dynamic", num_losses=2)
    for scaler, scale in zip(amp._amp_state.loss_scalers, (256.0, 16.0), strict=True):
        scaler._loss_scale = scale
    losses = two_losses(model)
    first, second = alone(optimizer, losses)
    backward(losses[0](), optimizer, loss_id=1)
    backward(losses[1](), optimizer, loss_id=0, delay_unscale=True)
    backward(losses[1](), optimizer, loss_id=1)
    expected = [one + 2 * other for one, other in zip(first, second, strict=True)]
    torch.testing.assert_close(gradients(optimizer), expected, rtol=1e-3, atol=1e-4)


def test_a_failed_backward_pass_leaves_nothing_behind():
    model, optimizer = prepare("O0", loss_scale="dynamic")
    losses = two_losses(model)
    _, expected = alone(optimizer, losses)
    backward(losses[0](), optimizer)
    with pytest.raises(ZeroDivisionError), amp.scale_loss(losses[0](), optimizer):
        raise ZeroDivisionError
    optimizer.zero_grad()
    backward(losses[1](), optimizer)
    assert same(gradients(optimizer), expected)


# Overflows and scales

MESSAGE = "Gradient overflow.  Skipping step, loss scaler {} reducing loss scale to {}\n"


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("level", LEVELS)
def test_an_overflow_skips_one_step(device, capsys, level, bad):
    model, optimizer = prepare(level, OPTIMIZERS["SGD"], device, loss_scale="dynamic", verbosity=1)
    capsys.readouterr()
    before = weights(model.eval())
    x = torch.randn(4, 4, device=device)
    backward(model(x).sum() * bad, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert same(weights(model), before)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 0}}
    if device.type == "cuda":  # the device tells of it later, without being waited for
        torch.cuda.synchronize()
        backward(model(x).sum() * 0.0, optimizer)
    assert capsys.readouterr().out == MESSAGE.format(0, 32768.0)

    set_scale(256.0)
    backward(model(x).sum(), optimizer)
    optimizer.step()
    assert not same(weights(model), before)
    assert all(tensor.isfinite().all() for tensor in weights(model).values())
    assert capsys.readouterr().out == ""


def test_bf16_gradients_are_unscaled_and_checked():
    """Of which torch's kernel for it knows nothing."""
    model, optimizer = prepare("O3", cast_model_type=BF16, loss_scale="dynamic")
    x, before = torch.ones(2, 4), weights(model.eval())
    backward(model(x).sum(), optimizer)
    assert model.last.bias.grad.tolist() == [2.0, 2.0, 2.0]
    for factor, skips in ((float("inf"), True), (float("nan"), True), (1.0, False)):
        optimizer.zero_grad()
        backward(model(x).sum() * factor, optimizer)
        optimizer.step()
        assert same(weights(model), before) == skips
    assert scale() == 16384.0


def test_an_overflow_is_silent_if_asked(capsys):
    model, optimizer = prepare("O1", verbosity=0)
    backward(model(torch.randn(4, 4)).sum() * float("inf"), optimizer)
    optimizer.step()
    assert scale() == 32768.0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_skips_every_optimizer_that_was_named(bad):
    models = [nn.Linear(2, 1) for _ in range(3)]
    models, optimizers = initialize(
        models, [sgd(m) for m in models], "O0", loss_scale="dynamic", num_losses=3
    )
    x = torch.ones(1, 2)
    a, b, c = models
    before = [weights(model) for model in models]
    factors = [float("inf") if index == bad else 1.0 for index in range(2)]
    backward(a(x).sum() * factors[0] + b(x).sum() * factors[1], optimizers[:2])
    backward(c(x).sum(), optimizers[2], loss_id=2)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    moved = [not same(weights(m), old) for m, old in zip(models, before, strict=True)]
    assert moved == [False, False, True]

    backward(a(x).sum() + b(x).sum(), optimizers[:2])
    for optimizer in optimizers[:2]:
        optimizer.step()
    assert not same(weights(a), before[0]) and not same(weights(b), before[1])


def test_a_block_updates_its_scaler_once_for_all_optimizers():
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    models, optimizers = initialize(models, [sgd(m) for m in models], "O0", loss_scale="dynamic")
    x = torch.ones(1, 2)
    for factor, state in ((1.0, (65536.0, 1)), (float("inf"), (32768.0, 0))):
        backward(sum(model(x).sum() for model in models) * factor, optimizers)
        assert tuple(amp.state_dict()["loss_scaler0"].values()) == state


def test_each_loss_has_its_scale(capsys):
    model = nn.Linear(2, 1)
    model, optimizer = initialize(
        model, sgd(model), "O0", loss_scale="dynamic", num_losses=2, verbosity=1
    )
    capsys.readouterr()
    x = torch.ones(1, 2)
    before = weights(model)
    backward(model(x).sum() * float("inf"), optimizer, loss_id=1)
    backward(model(x).sum(), optimizer, loss_id=0)
    optimizer.step()  # is skipped: its gradients are of both losses
    assert same(weights(model), before)
    assert amp.state_dict() == {
        "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 1},
        "loss_scaler1": {"loss_scale": 32768.0, "unskipped": 0},
    }
    assert capsys.readouterr().out == MESSAGE.format(1, 32768.0)


def clean_blocks(count, model, optimizer):
    for _ in range(count):
        optimizer.zero_grad()
        backward(model(torch.ones(1, 2)).sum() * 1e-6, optimizer)


def overflow(model, optimizer):
    backward(model(torch.ones(1, 2)).sum() * float("inf"), optimizer)


def test_the_scale_doubles_after_2000_clean_blocks():
    model = nn.Linear(2, 1)
    model, optimizer = initialize(model, sgd(model), "O0", loss_scale="dynamic")
    set_scale(1024.0, unskipped=1998)
    clean_blocks(1, model, optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 1024.0, "unskipped": 1999}
    clean_blocks(1, model, optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2048.0, "unskipped": 0}
    clean_blocks(3, model, optimizer)
    overflow(model, optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 1024.0, "unskipped": 0}

    set_scale(1024.0, unskipped=5999)  # of a static scale, for which Apex counts on
    clean_blocks(1, model, optimizer)
    assert scale() == 2048.0


def test_the_scale_has_a_ceiling_and_a_floor():
    model = nn.Linear(2, 1)
    model, optimizer = initialize(model, sgd(model), "O0", loss_scale="dynamic")
    set_scale(2.0**24, unskipped=1999)
    clean_blocks(1, model, optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**24, "unskipped": 0}

    limits = {"min_loss_scale": 512.0, "max_loss_scale": 1024.0}
    model, optimizer = initialize(model, sgd(model), "O0", loss_scale="dynamic", **limits)
    assert scale() == 1024.0
    for expected in (512.0, 512.0):
        overflow(model, optimizer)
        assert scale() == expected
    set_scale(1024.0, unskipped=1999)
    clean_blocks(1, model, optimizer)
    assert scale() == 1024.0


def test_the_scale_stays_where_its_inverse_is_a_number():
    model = nn.Linear(2, 1)
    model, optimizer = initialize(model, sgd(model), "O0", loss_scale="dynamic")
    set_scale(2.0**-64)
    overflow(model, optimizer)
    assert scale() == 2.0**-64
    assert torch.tensor(1.0 / scale(), dtype=FP32).isfinite()


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_static_scale_never_skips(capsys, level):
    model, optimizer = prepare(level, loss_scale=128.0, verbosity=1)
    capsys.readouterr()
    backward(model(torch.randn(4, 4)).sum() * float("inf"), optimizer)
    optimizer.step()
    assert not model.last.weight.isfinite().all()
    assert scale() == 128.0
    assert capsys.readouterr().out == ""


ALL_OPTIMIZERS = OPTIMIZERS | {
    "fused SGD": lambda model: sgd(model, momentum=0.9, fused=True),
    "FusedSGD": lambda model: FusedSGD(model.parameters(), lr=0.1, momentum=0.9),
    "FusedLAMB": lambda model: FusedLAMB(model.parameters(), lr=0.1),
    "FusedNovoGrad": lambda model: FusedNovoGrad(model.parameters(), lr=0.1),
    "FusedAdagrad": lambda model: FusedAdagrad(model.parameters(), lr=0.1),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "fused AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
}


@pytest.mark.parametrize("name", ALL_OPTIMIZERS)
def test_a_skipped_step_leaves_no_trace(device, poisoned_memory, name):
    """Not even the first one, in which optimizers make their state."""
    results = []
    for factors in ((1.0, 2.0), (float("inf"), 1.0, float("nan"), 2.0)):
        torch.manual_seed(0)
        model, optimizer = prepare("O0", ALL_OPTIMIZERS[name], device, loss_scale="dynamic")
        for factor in factors:
            optimizer.zero_grad()
            backward(model.eval()(torch.ones(1, 4, device=device)).sum() * factor, optimizer)
            optimizer.step()
        results.append(weights(model))
    assert same(*results)
    if "Adam" in name:
        assert {int(state["step"]) for state in optimizer.state.values()} == {2}


def test_fused_sgd_steps_masters_whatever_materialize_master_grads_is():
    results = []
    for given in (True, False):
        torch.manual_seed(0)
        model, optimizer = prepare(
            "O2",
            lambda model, given=given: FusedSGD(
                model.parameters(), lr=0.1, materialize_master_grads=given
            ),
            loss_scale=128.0,
        )
        train(model, optimizer, batches(2))
        results.append(weights(model))
    assert same(*results)


class NoWait(TorchDispatchMode):
    """Refuses to hand a tensor's value to Python, for which the CPU would wait for the GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the CPU waits"
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("factor", [1.0, float("inf")])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("name", ["FusedAdam", "fused SGD"])
def test_fused_kernels_skip_without_waiting_for_the_gpu(name, level, factor):
    model, optimizer = prepare(level, ALL_OPTIMIZERS[name], loss_scale="dynamic")
    set_scale(256.0)
    model.eval()
    if name == "fused SGD":  # has to make its momentum first
        train(model, optimizer, batches(1))
    before = weights(model)
    with NoWait():
        optimizer.zero_grad()
        backward(model(torch.ones(2, 4)).sum() * factor, optimizer)
        optimizer.step()
    assert same(weights(model), before) == (factor != 1.0)


def test_sgd_takes_parameters_that_join_late(device):
    """torch's own fused step fails there."""
    results = []
    for fused in (False, True):
        first, late = (nn.Parameter(torch.ones(2, device=device)) for _ in range(2))
        optimizer = torch.optim.SGD([first, late], 0.1, 0.9, fused=fused)
        model = nn.ParameterList([first, late])
        amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)
        for factor in (0.0, 1.0, 2.0):
            optimizer.zero_grad()
            backward((first + factor * late if factor else first).square().sum(), optimizer)
            optimizer.step()
        results.append([first.detach(), late.detach()])
    torch.testing.assert_close(*results)


def test_sgd_that_is_fused_in_a_part_skips_too():
    a, b = (nn.Parameter(torch.ones(2)) for _ in range(2))
    groups = [{"params": [a]}, {"params": [b], "fused": False}]
    optimizer = torch.optim.SGD(groups, 0.1, 0.9, fused=True)
    amp.initialize(nn.ParameterList([a, b]), optimizer, opt_level="O1", verbosity=0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        backward((a + b).sum() * factor, optimizer)
        optimizer.step()
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(a.detach(), torch.full((2,), 1 - 0.1 - 0.19))


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["FusedAdam", "fused SGD"])
def test_no_step_waits_for_the_gpu(name, level):
    model, optimizer = prepare(level, ALL_OPTIMIZERS[name], "cuda")
    x = torch.randn(16, 4, device="cuda")
    for step in range(4):
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            optimizer.zero_grad()
            backward(model(x).square().mean(), optimizer)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_closures_are_refused(level):
    model, optimizer = prepare(level)
    backward(model(torch.randn(2, 4)).sum(), optimizer)
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: None)


def test_disabled():
    """Everything passes through, and nothing is left of an earlier call."""
    initialize(Net())
    model = Net()
    optimizer = sgd(model)
    before, step = weights(model), optimizer.step
    assert amp.initialize(model, optimizer, enabled=False, opt_level="O2") == (model, optimizer)
    assert amp.initialize([model], enabled=False) == [model]
    assert same(weights(model), before)
    assert optimizer.step == step
    assert amp.state_dict() == {}
    amp.load_state_dict({})
    loss = model(torch.randn(2, 4)).sum()
    assert loss.dtype == FP32
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
        scaled_loss.backward()
    optimizer.step()
    assert not same(weights(model), before)


# Casts of functions (O1, O4)


@pytest.mark.parametrize(("level", "dtype"), [("O1", FP16), ("O4", BF16)])
def test_casts_hold_outside_of_the_model(device, level, dtype):
    model = initialize(Net().to(device), None, level)
    output = model(torch.randn(4, 4, device=device))
    assert output.dtype == on(device, dtype)
    assert F.cross_entropy(output, torch.zeros(4, dtype=int, device=device)).dtype == FP32
    assert F.mse_loss(output, torch.zeros_like(output)).dtype == FP32
    if device.type == "cuda":  # torch's list for the CPU is shorter
        assert output.softmax(1).dtype == output.sum().dtype == FP32
    a = torch.ones(2, 2, device=device)
    assert (a @ a).dtype == on(device, dtype)


def product_type():
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize("level", LEVELS)
def test_only_o1_and_o4_cast_functions(level):
    initialize(Net(), None, level)
    assert product_type() == on("cpu", {"O1": FP16, "O4": BF16}.get(level, FP32))


class Spy(torch.optim.SGD):
    def step(self, closure=None):
        self.seen = product_type()
        return super().step(closure)


def test_casts_are_off_where_they_would_do_harm():
    model = Net()
    model, optimizer = initialize(model, Spy(model.parameters(), lr=0.1), "O4")
    assert product_type() == on("cpu", BF16)
    with amp.scale_loss(model(torch.randn(2, 4)).sum(), optimizer):
        assert product_type() == FP32
    optimizer.step()
    assert optimizer.seen == FP32
    with amp.disable_casts():
        assert product_type() == FP32
        with amp.disable_casts():
            assert product_type() == FP32
        assert product_type() == FP32
    assert product_type() == on("cpu", BF16)
    with pytest.raises(ZeroDivisionError), amp.disable_casts():
        raise ZeroDivisionError
    assert product_type() == on("cpu", BF16)


@pytest.mark.parametrize("options", [{"opt_level": "O0"}, {"enabled": False}])
def test_a_second_initialize_ends_the_casts(options):
    initialize(Net(), None, "O4")
    amp.initialize(Net(), verbosity=0, **options)
    assert product_type() == FP32


@pytest.mark.parametrize("level", LEVELS)
def test_weights_are_never_stale(level):
    model, optimizer = prepare(level)
    x = torch.randn(16, 4)

    def output():
        """Of the model, and of one that was never called before."""
        model.eval()
        with torch.no_grad():
            result = model(x)
            assert torch.equal(result, copy.deepcopy(model)(x))
        model.train()
        return result

    outputs = [output()]
    for batch in batches(2):
        train(model, optimizer, [batch])
        assert all(parameter.grad is not None for parameter in model.norm.parameters())
        outputs.append(output())
    model.load_state_dict(Net().state_dict())
    outputs.append(output())
    assert len({tuple(result.flatten().tolist()) for result in outputs}) == 4


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_arrive_after_an_evaluation(level):
    results = []
    for evaluated in (False, True):
        torch.manual_seed(0)
        model, optimizer = prepare(level, loss_scale=128.0)
        x = torch.ones(2, 4)
        model.eval()
        if evaluated:
            with torch.no_grad():
                model(x)
        backward(model(x).sum(), optimizer)
        results.append(gradients(optimizer))
    assert same(*results)


@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_can_be_used_twice(device, level):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    model, x = Twice().to(device), torch.randn(8, 4, device=device)
    model(x).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model, optimizer = initialize(model, sgd(model), level)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model(x).square().mean(), optimizer)
    for gradient, wanted in zip(gradients(optimizer), expected, strict=True):
        torch.testing.assert_close(gradient.float(), wanted, rtol=0.05, atol=0.01)


# What else is done with models and optimizers


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
    copied, pickled = copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert same(pickled.state_dict(), model.state_dict())
    train(model.train(), optimizer, batches(2))
    for one in copies:
        assert torch.equal(one(x), expected)
        assert {tensor.dtype for tensor in one.state_dict().values()} == {FP32, torch.int64}
        one.load_state_dict(model.state_dict())
        assert torch.equal(one(x), model.eval()(x))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_models_can_be_compiled_whole(level):
    torch._dynamo.reset()
    model, optimizer = prepare(level)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(4, 4)
    output = compiled(x)
    backward(output.square().mean(), optimizer)
    optimizer.step()
    model.eval()
    assert torch.equal(compiled(x), model(x))

"""State under amp: fp32 state dicts, exact resumption, master weights."""

import copy
import io
import warnings

import pytest
import torch
from amp_helpers import (
    FP16,
    FP32,
    LEVELS,
    OPTIMIZERS,
    Net,
    alone,
    backward,
    batches,
    gradients,
    initialize,
    prepare,
    same,
    scale,
    set_scale,
    sgd,
    train,
    two_losses,
    weights,
)
from apex_native import amp
from torch import nn
from torch.nn import functional as F


@pytest.mark.parametrize("level", LEVELS)
def test_state_dict_is_fp32_with_master_values(level):
    model, optimizer = prepare(level)
    train(model, optimizer, batches(3))
    state = model.state_dict()
    assert state.keys() == Net().state_dict().keys()
    assert {tensor.dtype for tensor in state.values()} == {FP32, torch.int64}
    stepped = zip(model.named_parameters(), amp.master_params(optimizer), strict=True)
    for (name, parameter), master in stepped:
        assert torch.equal(state[name], master.float())
        assert torch.equal(parameter, master.to(parameter.dtype))


@pytest.mark.parametrize("level", LEVELS)
def test_weights_written_to_data_before_a_second_initialize_are_trained(level):
    """As by an initialization of all weights for the next fold; Apex makes new masters."""
    model, optimizer = prepare(level)
    train(model, optimizer, batches(2))
    model.float()
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    optimizer = sgd(model)
    model, optimizer = initialize(model, optimizer, level)
    assert all((parameter == 0.5).all() for parameter in amp.master_params(optimizer))


def test_state_dict_is_not_rounded():
    model, optimizer = prepare("O2")
    train(model, optimizer, batches(3))
    assert model.first.weight.dtype == FP16
    assert not torch.equal(model.state_dict()["first.weight"], model.first.weight.float())


@pytest.mark.gpu
def test_state_dict_is_on_the_device_of_the_model():
    model = nn.Linear(2, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert {tensor.device.type for tensor in model.cpu().state_dict().values()} == {"cpu"}


def test_writes_to_a_model_update_its_masters():
    """Apex sees such writes because it creates masters at the first backward pass."""
    model, optimizer = prepare("O2")
    exact = model.state_dict()["last.weight"]
    nn.init.constant_(model.first.weight, 0.5)
    assert (model.state_dict()["first.weight"] == 0.5).all()
    assert torch.equal(model.state_dict()["last.weight"], exact)
    nn.init.constant_(model.first.weight, 0.25)
    optimizer.zero_grad()
    optimizer.step()
    assert (model.first.weight == 0.25).all()


def test_writes_through_data_before_the_first_backward_pass_update_masters():
    model, optimizer = prepare("O2", lambda model: sgd(model, lr=0.0))
    model.first.weight.data.fill_(0.5)  # leaves the parameter's version as it is
    assert (model.state_dict()["first.weight"] == 0.5).all()
    model.first.weight.data.fill_(0.25)
    masters = list(amp.master_params(optimizer))
    masters[-2].data.fill_(0.75)  # the last layer's weight
    for _ in range(2):
        backward(model(torch.randn(4, 4)).sum(), optimizer)
        optimizer.step()
        assert (masters[0] == 0.25).all() and (model.first.weight == 0.25).all()
        assert (masters[-2] == 0.75).all() and (model.last.weight == 0.75).all()


def test_writes_to_masters_stay_after_steps_without_scale_loss():
    model, optimizer = prepare("O2")
    masters = list(amp.master_params(optimizer))
    for value in (0.75, 0.5):
        for master in masters:
            master.grad = torch.ones_like(master)
        optimizer.step()
        masters[0].data.fill_(value)
        optimizer.step()
        assert (model.first.weight == value).all()
    model.first.weight.data.fill_(0.25)
    optimizer.step()
    assert (model.first.weight == 0.25).all()


@torch.no_grad()
def write(parameter, values, how):
    if how == "data":
        parameter.data = values.clone()
    else:
        (parameter.data if how == "data.copy_" else parameter).copy_(values)


@pytest.mark.parametrize("how", ["data", "data.copy_", "no_grad"])
def test_averaged_weights_in_the_model_are_saved_and_leave_the_masters_exact(how):
    model, optimizer = prepare("O2")
    train(model, optimizer, batches(3))
    exact = weights(model)
    backup = model.first.weight.detach().clone()
    write(model.first.weight, backup + 0.5, how)
    saved = model.state_dict()
    assert torch.equal(saved.pop("first.weight"), (backup + 0.5).float())
    assert same(saved, {name: exact[name] for name in saved})  # others keep their precision
    write(model.first.weight, backup, how)
    assert same(model.state_dict(), exact)
    optimizer.zero_grad()
    optimizer.step()
    assert same(model.state_dict(), exact)


def test_private_names_that_old_scripts_use():
    _, optimizer = prepare("O2")
    optimizer._lazy_init_maybe_master_weights()
    scaler = amp._amp_state.loss_scalers[0]
    assert scaler._loss_scale == 2.0**16
    scaler._loss_scale = 8.0
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 8.0


def test_loading_a_model_loads_its_masters():
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
def test_resume_is_bit_identical(level, name):
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


def test_amp_state_is_loaded_by_order():
    initialize(Net(), num_losses=2)
    saved = {"loss_scaler5": {"loss_scale": 8.0, "unskipped": 3}}
    saved["loss_scaler4"] = {"loss_scale": 4.0, "unskipped": 2}
    amp.load_state_dict(saved)
    assert amp.state_dict() == {
        "loss_scaler0": {"loss_scale": 8.0, "unskipped": 3},
        "loss_scaler1": {"loss_scale": 4.0, "unskipped": 2},
    }


def test_amp_state_with_another_number_of_scalers(capsys):
    initialize(Net(), num_losses=2, verbosity=1)
    capsys.readouterr()
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 3}})
    assert "holds 1 loss scalers, this run uses 2" in capsys.readouterr().out
    assert (scale(0), scale(1)) == (8.0, 65536.0)
    with pytest.raises(RuntimeError, match="unexpected entries model"):
        amp.load_state_dict({"model": {}})


def test_optimizer_steps_the_masters():
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
def test_existing_optimizer_state_is_cast(level, dtype):
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
    """model.zero_grad() cannot reach the masters; step() drops their gradients."""
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


def test_zero_grad_drops_accumulated_master_gradients():
    model, optimizer = prepare("O2")
    first, _ = two_losses(model)
    (expected,) = alone(optimizer, [first])
    backward(first(), optimizer)
    optimizer.zero_grad()
    backward(first(), optimizer)
    assert same(gradients(optimizer), expected)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_accessors_of_amp_state(level):
    """The adapter in engine reads amp through these alone."""
    model, optimizer = prepare(level)
    assert amp.properties().opt_level == level
    assert amp.has_dynamic_loss_scale() == (level != "O0")
    scale = amp.current_loss_scale()
    assert isinstance(scale, float) == (level == "O0")  # a tensor that nothing waits for
    assert scale == (1.0 if level == "O0" else 2.0**16)
    pairs = amp.master_pairs(optimizer)
    halves = [p for p in model.parameters() if p.dtype == FP16]
    assert [half for half, _ in pairs] == halves
    assert {master for _, master in pairs} <= set(amp.master_params(optimizer))
    assert amp.master_pairs(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)) == []


def test_accessors_without_initialize(monkeypatch):
    amp.initialize(nn.Linear(1, 1), enabled=False)
    assert amp.current_loss_scale() == 1.0
    assert not amp.has_dynamic_loss_scale()
    monkeypatch.setattr(amp._amp_state, "level", None)
    with pytest.raises(RuntimeError, match="amp.initialize was not called"):
        amp.properties()


def test_state_is_recognized_as_initialized(monkeypatch):
    """By names that libraries ask for before they cast anything."""
    state, names = amp._amp_state, ("opt_properties", "loss_scalers")
    monkeypatch.setattr(state, "level", None)
    monkeypatch.setattr(state, "scalers", [])
    assert [hasattr(state, name) for name in names] == [False, False]
    amp.initialize(nn.Linear(1, 1), enabled=False)
    assert [hasattr(state, name) for name in names] == [True, False]
    prepare("O1")
    assert [hasattr(state, name) for name in names] == [True, True]
    assert state.opt_properties.enabled
    assert state.opt_properties.options["opt_level"] == "O1"
    state.loss_scalers = [*state.loss_scalers]  # may be set, too
    assert state.scalers is state.loss_scalers


def test_state_of_a_copy_is_no_place_to_write_to():
    """As timm's ModelEma does, which is made after initialize in its training script."""
    model, _ = prepare("O2")
    copied = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.state_dict()
        amp.initialize(copy.deepcopy(Net()), opt_level="O1", verbosity=0).state_dict()
    with pytest.warns(UserWarning, match="what is written to them, as by timm's ModelEma, is lost"):
        copied.state_dict()


def test_half_models_are_accepted_if_the_script_says_so(monkeypatch):
    model = nn.Linear(2, 2).half()
    with pytest.raises(RuntimeError, match="is fp16 already"):
        amp.initialize(model, opt_level="O3", verbosity=0)
    monkeypatch.setattr(amp._amp_state, "allow_incoming_model_not_fp32", True)
    amp.initialize(model, opt_level="O3", verbosity=0)

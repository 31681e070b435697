"""Loss scales and overflows: skipped steps, growth, limits, no waiting for the device."""

import functools
import types

import pytest
import torch
from amp_helpers import (
    BF16,
    FP32,
    LEVELS,
    OPTIMIZERS,
    backward,
    batches,
    initialize,
    prepare,
    same,
    scale,
    set_scale,
    sgd,
    train,
    weights,
)
from apex_native import amp
from apex_native.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

MESSAGE = "Gradient overflow.  Skipping step, loss scaler {} reducing loss scale to {}\n"


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("level", LEVELS)
def test_overflow_skips_one_step(device, capsys, level, bad):
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
    """torch's kernel for unscaling does not support bf16."""
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


def test_overflow_is_silent_with_verbosity_0(capsys):
    model, optimizer = prepare("O1", verbosity=0)
    backward(model(torch.randn(4, 4)).sum() * float("inf"), optimizer)
    optimizer.step()
    assert scale() == 32768.0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("bad", [0, 1])
def test_overflow_skips_every_given_optimizer(bad):
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


def test_scaler_is_updated_once_for_all_optimizers():
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    models, optimizers = initialize(models, [sgd(m) for m in models], "O0", loss_scale="dynamic")
    x = torch.ones(1, 2)
    for factor, state in ((1.0, (65536.0, 1)), (float("inf"), (32768.0, 0))):
        backward(sum(model(x).sum() for model in models) * factor, optimizers)
        assert tuple(amp.state_dict()["loss_scaler0"].values()) == state


def test_each_loss_has_its_own_scale(capsys):
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


def test_scale_doubles_after_2000_passes_without_overflow():
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


def test_window_is_that_which_the_script_has_set():
    """As NVIDIA's GNMT does."""
    model = nn.Linear(2, 1)
    model, optimizer = initialize(model, sgd(model), "O0", loss_scale="dynamic")
    assert amp._amp_state.loss_scalers[0]._scale_seq_len == 2000
    amp._amp_state.loss_scalers[0]._scale_seq_len = 2
    set_scale(1024.0)
    clean_blocks(4, model, optimizer)
    assert scale() == 4096.0


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_loss_may_be_scaled_without_optimizers(level):
    """As for the gradient of an input in adversarial training; it stays scaled, as in Apex."""
    model, _ = prepare(level, loss_scale="dynamic")
    before = scale()
    inputs = torch.ones(1, 4, requires_grad=True)
    with amp.scale_loss(model.eval()(inputs).float().sum() / 2**10, []) as scaled:
        scaled.backward()
    assert inputs.grad.abs().max() > 1
    assert (scale(), int(amp._amp_state.loss_scalers[0]._unskipped)) == (before, 1)


def test_limits_of_the_scale_that_a_script_sets():
    model = nn.Linear(2, 1)
    model, optimizer = initialize(model, sgd(model), "O0", loss_scale="dynamic")
    scaler = amp._amp_state.loss_scalers[0]
    assert scaler._max_loss_scale == 2.0**24
    scaler._scale_seq_len, scaler._min_loss_scale, scaler._max_loss_scale = 1, 512.0, 1024.0
    set_scale(1024.0)
    clean_blocks(2, model, optimizer)
    assert scale() == 1024.0
    for _ in range(3):
        overflow(model, optimizer)
    assert scale() == scaler._min_loss_scale == 512.0


class StepOfEpoch(torch.optim.SGD):
    """As LARS of pytorch-lars, whose step takes the epoch."""

    def step(self, epoch, closure=None):
        self.epoch = epoch
        return super().step(closure)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_step_of_an_optimizer_takes_its_own_arguments(level):
    model, optimizer = prepare(level, lambda model: StepOfEpoch(model.parameters(), lr=0.1))
    for arguments, options in (((3,), {}), ((), {"epoch": 3})):
        backward(model(torch.randn(4, 4)).sum() / 2**20, optimizer)
        optimizer.step(*arguments, **options)
        assert optimizer.epoch == 3
    plain_step = optimizer.step
    optimizer.step = lambda *given, **options: plain_step(*given, **options)
    backward(model(torch.randn(4, 4)).sum() * float("inf"), optimizer)
    optimizer.step(epoch=4)
    assert optimizer.epoch == 3 or level in ("O0", "O3")


def test_min_and_max_loss_scale():
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


def test_scale_stays_where_its_inverse_is_finite():
    model = nn.Linear(2, 1)
    model, optimizer = initialize(model, sgd(model), "O0", loss_scale="dynamic")
    set_scale(2.0**-64)
    overflow(model, optimizer)
    assert scale() == 2.0**-64
    assert torch.tensor(1.0 / scale(), dtype=FP32).isfinite()


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_static_scale_never_skips(capsys, level):
    model, optimizer = prepare(level, loss_scale=128.0, verbosity=1)
    capsys.readouterr()
    backward(model(torch.randn(4, 4)).sum() * float("inf"), optimizer)
    optimizer.step()
    assert not model.last.weight.isfinite().all()
    assert scale() == 128.0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("level", "loss_scale", "counted"),
    [("O0", 128.0, 3), ("O2", 128.0, 3), ("O5", 1.0, 3), ("O0", 1.0, 0), ("O3", 1.0, 0)],
)
def test_steps_at_a_static_scale_are_counted(level, loss_scale, counted):
    """Scripts step the learning rate if the scaler's `_unskipped` is not 0.

    At scale 1 without masters, Apex does not count.
    """
    model, optimizer = prepare(level, loss_scale=loss_scale)
    for _ in range(3):
        loss = model(torch.randn(4, 4)).sum()
        with amp.scale_loss(loss / 2, optimizer, delay_unscale=True) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
        backward(loss / 2, optimizer)
        optimizer.step()
    assert amp._amp_state.loss_scalers[0]._unskipped == counted
    saved = amp.state_dict()
    assert saved["loss_scaler0"]["unskipped"] == counted
    prepare(level, loss_scale=loss_scale)
    amp.load_state_dict(saved)
    assert amp.state_dict() == saved


@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
def test_count_of_steps_can_be_read_and_set(loss_scale):
    """As scripts do; what they have read does not change with the next step."""
    model, optimizer = prepare("O5", loss_scale=loss_scale)
    scaler = amp._amp_state.loss_scalers[0]
    before = scaler._unskipped
    for _ in range(2):
        backward(model(torch.randn(4, 4)).mean(), optimizer)
    assert (before, scaler._unskipped) == (0, 2)
    scaler._unskipped = 0
    backward(model(torch.randn(4, 4)).mean(), optimizer)
    assert scaler._unskipped == amp.state_dict()["loss_scaler0"]["unskipped"] == 1


@pytest.mark.parametrize("is_of_class", [False, True])
def test_replaced_update_scale_decides(monkeypatch, is_of_class):
    """As scripts replace it that skip the same steps on all ranks of a model-parallel run."""
    model, optimizer = prepare("O0", loss_scale="dynamic")
    scaler = amp._amp_state.loss_scalers[0]
    found, plain = [], type(scaler).update_scale

    def update_scale(scaler):
        found.append(plain(scaler))
        return len(found) == 2  # an overflow on another rank

    if is_of_class:
        monkeypatch.setattr(type(scaler), "update_scale", update_scale)
    else:
        scaler.update_scale = functools.partial(update_scale, scaler)
    changes = []
    for factor in (1.0, 1.0, 1.0, float("inf")):
        before = weights(model)
        backward(model.eval()(torch.ones(1, 4)).sum() * factor, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        changes.append(not same(before, weights(model)))
    assert found == [False, False, False, True]
    assert changes == [True, False, True, True]  # as its result says, in Apex, too


def test_gradients_of_a_replaced_step_that_was_skipped_are_dropped():
    """``model.zero_grad()`` does not reach those of the masters."""
    model, optimizer = prepare("O2", loss_scale="dynamic")
    plain_step = optimizer.step
    optimizer.step = lambda *arguments: plain_step(*arguments)
    for factor in (1.0, float("inf"), 1.0):
        before = weights(model)
        backward(model.eval()(torch.ones(1, 4)).sum() * factor, optimizer)
        optimizer.step()
        model.zero_grad()
    assert not same(before, weights(model))
    assert all(map(torch.all, map(torch.isfinite, weights(model).values())))


@pytest.mark.parametrize("with_scheduler", [False, True])
def test_step_that_a_script_puts_in_place_is_skipped_once(with_scheduler):
    """Such as a step of its own that a callback sets after ``initialize``."""
    model, optimizer = prepare("O0", loss_scale="dynamic")
    calls = []

    def own_step(self, closure=None):
        calls.append(1)
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad

    optimizer.step = own = types.MethodType(own_step, optimizer)
    if with_scheduler:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for factor in (1.0, float("inf"), float("inf"), 1.0):
        backward(model.eval()(torch.ones(1, 4)).sum() * factor, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert len(calls) == 2 and all(map(torch.all, map(torch.isfinite, weights(model).values())))
    assert with_scheduler or optimizer.step == own


class OwnStep(FusedAdam):
    """Without the kernel that skips on the device, which the class that it extends has."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.grad


class OwnStepOfTorchs(torch.optim.AdamW):
    step = OwnStep.step


ALL_OPTIMIZERS = OPTIMIZERS | {
    "own step": lambda model: OwnStep(model.parameters(), lr=0.1),
    "own step of torch's": lambda model: OwnStepOfTorchs(model.parameters(), fused=True),
    "fused SGD": lambda model: sgd(model, momentum=0.9, fused=True),
    "FusedSGD": lambda model: FusedSGD(model.parameters(), lr=0.1, momentum=0.9),
    "FusedLAMB": lambda model: FusedLAMB(model.parameters(), lr=0.1),
    "FusedNovoGrad": lambda model: FusedNovoGrad(model.parameters(), lr=0.1),
    "FusedAdagrad": lambda model: FusedAdagrad(model.parameters(), lr=0.1),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "fused AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
}


@pytest.mark.parametrize("name", ALL_OPTIMIZERS)
def test_skipped_step_changes_nothing(device, poisoned_memory, name):
    """The first step, in which optimizers create their state, included."""
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


def test_materialize_master_grads_is_ignored():
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
def test_fused_kernels_skip_without_synchronization(name, level, factor):
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


def test_sgd_with_parameters_that_get_gradients_late(device):
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


def test_partly_fused_sgd_skips_too():
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
def test_step_does_not_synchronize(name, level):
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

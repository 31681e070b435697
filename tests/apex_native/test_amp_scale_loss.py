"""amp.scale_loss: unscaled gradients, accumulation, delayed unscaling, failed passes."""

import math

import pytest
import torch
from amp_helpers import (
    FP16,
    FP32,
    Net,
    alone,
    backward,
    gradients,
    initialize,
    prepare,
    same,
    scale,
    set_scale,
    sgd,
    two_losses,
    weights,
)
from apex_native import amp
from apex_native.optimizers import FusedAdam
from torch import nn


def test_scaled_loss_is_fp32():
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
    """Gradients of the embedding stay sparse without masters; those of masters are dense."""
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
def test_clipping_after_scale_loss_bounds_the_step(level):
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
def test_failed_backward_pass_keeps_earlier_gradients(level):
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
def test_step_with_scaled_gradients_raises(level):
    model, optimizer = prepare(level, loss_scale="dynamic")
    backward(two_losses(model)[0](), optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match="gradients are still scaled"):
        optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_step_inside_a_block_raises(level):
    model, optimizer = prepare(level)
    losses = two_losses(model)
    with amp.scale_loss(losses[0](), optimizer) as outer:
        backward(losses[1](), optimizer, delay_unscale=True)  # a nested block
        outer.backward()
        with pytest.raises(RuntimeError, match="inside the block of amp.scale_loss"):
            optimizer.step()
    optimizer.step()
    with (
        pytest.raises(RuntimeError, match="inside the block of amp.scale_loss"),
        amp.scale_loss(losses[0](), optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
        optimizer.step()
    backward(losses[0](), optimizer)
    optimizer.step()


def test_step_inside_a_block_that_scales_nothing():
    """Works as in Apex."""
    model, optimizer = prepare("O4", loss_scale=1.0)
    before = weights(model)
    with amp.scale_loss(two_losses(model)[0](), optimizer) as scaled_loss:
        scaled_loss.backward()
        optimizer.step()
    assert not same(weights(model), before)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_zero_grad_drops_delayed_and_stashed_gradients(level):
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
def test_delayed_gradients_keep_their_scale_and_are_added(level):
    """A plain block, one that delays at another scale, one of another loss that unscales."""
    model, optimizer = prepare(level, loss_scale="dynamic", num_losses=2)
    for scaler, loss_scale in zip(amp._amp_state.loss_scalers, (256.0, 16.0), strict=True):
        scaler._loss_scale = loss_scale
    losses = two_losses(model)
    first, second = alone(optimizer, losses)
    backward(losses[0](), optimizer, loss_id=1)
    backward(losses[1](), optimizer, loss_id=0, delay_unscale=True)
    backward(losses[1](), optimizer, loss_id=1)
    expected = [one + 2 * other for one, other in zip(first, second, strict=True)]
    torch.testing.assert_close(gradients(optimizer), expected, rtol=1e-3, atol=1e-4)


def prepare_several(models, level, **options):
    """Return the models and their optimizers, with a dynamic scale."""
    if level == "O2":
        options["cast_model_type"] = FP16
    optimizers = [sgd(model) for model in models]
    return initialize(models, optimizers, level, loss_scale="dynamic", **options)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_delayed_gradients_survive_a_change_of_scale(level):
    """Another optimizer's block with the same scaler overflows between the delayed blocks."""
    models, (optimizer, others) = prepare_several([Net(), nn.Linear(2, 1)], level)
    model, other = models
    set_scale(256.0)
    losses = two_losses(model)
    first, second = alone(optimizer, losses)
    for loss, is_last in ((losses[0], False), (losses[0], False), (losses[1], True)):
        backward(loss(), optimizer, delay_unscale=not is_last)
        backward(other(torch.ones(1, 2)).sum() * float("inf"), others)
    assert scale() == 32.0
    expected = [2 * one + other for one, other in zip(first, second, strict=True)]
    torch.testing.assert_close(gradients(optimizer), expected, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("is_inner_left_first", [False, True])
def test_nested_blocks_keep_their_scales(level, is_inner_left_first):
    """The inner block overflows, which changes the scale before the outer block unscales."""
    models, (optimizer, others) = prepare_several([Net(), nn.Linear(2, 1)], level)
    model, other = models
    set_scale(256.0)
    losses = two_losses(model)
    expected, _ = alone(optimizer, losses)
    bad = other(torch.ones(1, 2)).sum() * float("inf")
    with amp.scale_loss(losses[0](), optimizer) as scaled:
        with amp.scale_loss(bad, others) as other_scaled:
            other_scaled.backward()
            if not is_inner_left_first:
                scaled.backward()
        if is_inner_left_first:
            scaled.backward()
    assert scale() == 128.0
    assert same(gradients(optimizer), expected)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_optimizers_delayed_at_other_scales_share_a_block(level):
    models, optimizers = prepare_several([Net(), Net()], level, num_losses=2)
    for scaler, loss_scale in zip(amp._amp_state.loss_scalers, (256.0, 16.0), strict=True):
        scaler._loss_scale = loss_scale
    losses = [two_losses(model) for model in models]
    parts = [alone(o, pair) for o, pair in zip(optimizers, losses, strict=True)]
    for index, optimizer in enumerate(optimizers):
        backward(losses[index][0](), optimizer, loss_id=index, delay_unscale=True)
    backward(losses[0][1]() + losses[1][1](), optimizers)
    for optimizer, (first, second) in zip(optimizers, parts, strict=True):
        expected = [one + other for one, other in zip(first, second, strict=True)]
        torch.testing.assert_close(gradients(optimizer), expected, rtol=2e-3, atol=1e-4)


def test_failed_backward_pass_leaves_no_gradients():
    model, optimizer = prepare("O0", loss_scale="dynamic")
    losses = two_losses(model)
    _, expected = alone(optimizer, losses)
    backward(losses[0](), optimizer)
    with pytest.raises(ZeroDivisionError), amp.scale_loss(losses[0](), optimizer):
        raise ZeroDivisionError
    optimizer.zero_grad()
    backward(losses[1](), optimizer)
    assert same(gradients(optimizer), expected)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_closures_raise(level):
    model, optimizer = prepare(level)
    backward(model(torch.randn(2, 4)).sum(), optimizer)
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: None)


def test_initialize_with_enabled_false():
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


@pytest.mark.parametrize("level", ["O0", "O1", "O4", "O5"])
@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
def test_parameters_that_a_script_puts_into_the_groups_are_unscaled(level, loss_scale):
    """As PartialFC, which replaces a parameter by the sampled rows of its weights at each step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    _, optimizer = initialize(model, sgd(model), level, loss_scale=loss_scale)
    for value in (1.0, 2.0, 3.0):
        rows = nn.Parameter(torch.full((3,), value))
        optimizer.param_groups[-1]["params"][-1] = rows
        backward((rows * 0.5).sum() + model.weight.sum(), optimizer)
        assert rows.grad.tolist() == [0.5] * 3
        optimizer.step()
        torch.testing.assert_close(rows.detach(), torch.full((3,), value - 0.05))


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_parameters_that_a_script_takes_out_of_the_groups_are_unscaled(level):
    """As of optimizers that step a flat copy of all weights, into which they put gradients."""
    model = nn.Linear(4, 3)
    _, optimizer = initialize(model, sgd(model), level, loss_scale=128.0)
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    optimizer.param_groups[0]["params"] = [flat]
    for _ in range(2):
        model.zero_grad()
        backward(model.weight.sum() + model.bias.sum(), optimizer)
        assert all(parameter.grad.eq(1).all() for parameter in model.parameters())
        flat.grad = torch.cat([p.grad.flatten() for p in model.parameters()])
        optimizer.step()
    assert len(optimizer._amp_stash.plain) == 3


def test_masters_of_replaced_half_parameters_are_dropped():
    model = nn.Linear(4, 3)
    model, optimizer = initialize(model, sgd(model, momentum=0.9), "O5")
    for _ in range(3):
        rows = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer.param_groups[0]["params"][1] = rows
        backward(rows.float().sum() + model.weight.float().sum(), optimizer)
        optimizer.step()
        assert torch.allclose(rows.float(), torch.full((3,), 0.9), atol=0.01)
    assert len(optimizer._amp_stash.masters) == len(optimizer.state) == 2
    assert [*map(len, optimizer._amp_stash.fp16_groups)] == [2]
    repr(optimizer._amp_stash)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_parameters_that_a_script_puts_back_keep_their_masters_and_state(level):
    """As it unfreezes layers by new lists of parameters."""
    results = []
    for puts_back in (False, True):
        torch.manual_seed(0)
        model, optimizer = prepare(level, lambda model: sgd(model, momentum=0.9), loss_scale=2.0)
        for step in range(4):
            if puts_back and step == 2:
                optimizer.param_groups[0]["params"] = [*model.parameters()]
            optimizer.zero_grad()
            backward(model(torch.ones(4, 4)).float().square().sum(), optimizer)
            optimizer.step()
        results.append([*amp.master_params(optimizer)])
    assert same(*results)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_gradients_of_shared_parameters_are_unscaled_once(level):
    """Apex divides them by the scale for each optimizer."""
    model = Net()
    optimizers = [sgd(model), sgd(model.last)]
    options = {"cast_model_type": FP16} if level == "O2" else {}
    model, optimizers = initialize(model, optimizers, level, loss_scale=128.0, **options)
    backward(model.last.bias.float().sum(), optimizers)
    for optimizer in optimizers:
        assert [*amp.master_params(optimizer)][-1].grad.tolist() == [1.0] * 3


def test_own_step_of_an_instance_is_skipped(device):
    """Such a step does more than the kernel that skips where a gradient overflowed."""
    model = nn.Linear(2, 2).to(device)
    optimizer = FusedAdam(model.parameters(), lr=0.0)
    plain, taken = optimizer.step, []

    def step():
        taken.append(plain())

    optimizer.step = step
    model, optimizer = initialize(model, optimizer, "O0", loss_scale="dynamic")
    for factor, count in ((math.inf, 0), (1.0, 1)):
        optimizer.zero_grad()
        backward(model(torch.ones(1, 2, device=device)).sum() * factor, optimizer)
        optimizer.step()
        assert len(taken) == count


def test_fused_sgd_of_an_installed_apex_reads_the_gradients_of_masters():
    model = nn.Linear(4, 3)
    optimizer = sgd(model)
    optimizer.materialize_master_grads = False
    initialize(model, optimizer, "O5")
    assert optimizer.materialize_master_grads


def test_zero_grad_drops_gradients_at_o2():
    """Apex zeroes those of batch norms; torch's optimizers then move what a step does not use."""
    options = {"momentum": 0.9, "weight_decay": 0.1}
    model, optimizer = prepare("O2", lambda model: sgd(model, **options))
    backward(model(torch.randn(4, 4)).sum() / 2**20, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert {parameter.grad for parameter in amp.master_params(optimizer)} == {None}
    before = model.norm.weight.clone()
    backward(model.last(torch.randn(4, 8).to(model.last.weight.dtype)).sum() / 2**20, optimizer)
    optimizer.step()
    assert torch.equal(model.norm.weight, before)

"""The interface of amp before ``initialize``."""

import math

import pytest
import torch
from apex_native import amp
from apex_native.extras.old_amp import init
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def model():
    return nn.Linear(3, 1, device=DEVICE)


def loss_of(model, factor=1.0):
    return model(torch.ones(2, 3, device=DEVICE)).float().sum() * factor


def test_init_casts_functions_without_a_model(model):
    init()
    expected = amp.half_type(torch.float16, torch.device(DEVICE))
    assert model(torch.ones(2, 3, device=DEVICE)).dtype == expected
    assert model.weight.dtype == torch.float32
    init(enabled=False)
    assert model(torch.ones(2, 3, device=DEVICE)).dtype == torch.float32


def test_handle_scales_and_unscales_one_loss(model):
    handle = init()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.weight.detach().clone()
    with handle.scale_loss(loss_of(model), optimizer) as scaled_loss:
        assert scaled_loss.item() == pytest.approx(loss_of(model).item() * 2**16, rel=1e-2)
        scaled_loss.backward()
    torch.testing.assert_close(model.weight.grad, torch.full_like(model.weight, 2.0))
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 1.0)


def test_handle_skips_one_step_after_an_overflow(model, capsys):
    handle = init(verbose=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.weight.detach().clone()
    for factor, moves in ((math.inf, False), (1.0, True)):
        optimizer.zero_grad()
        with handle.scale_loss(loss_of(model, factor), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert torch.equal(model.weight, before) != moves
    assert capsys.readouterr().out.count("Gradient overflow, skipping update") == 1
    with handle.scale_loss(loss_of(model), optimizer) as scaled_loss:
        assert scaled_loss.item() == pytest.approx(loss_of(model).item() * 2**15, rel=1e-2)


def test_wrapped_optimizer_adds_the_gradients_of_its_losses(model):
    handle = init()
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), num_loss=2)
    optimizer.zero_grad()
    for factor in (1.0, 3.0):
        with optimizer.scale_loss(loss_of(model, factor)) as scaled_loss:
            scaled_loss.backward()
    torch.testing.assert_close(model.weight.grad, torch.full_like(model.weight, 8.0))
    with (
        pytest.raises(RuntimeError, match="num_loss=2"),
        optimizer.scale_loss(loss_of(model)),
    ):
        pass
    before = model.weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 4.0)
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(RuntimeError, match=r"optimizer\.scale_loss"), handle.scale_loss(0, None):
        pass


def test_wrapped_optimizer_keeps_gradients_whose_memory_the_next_loss_overwrites(model):
    # A view, as DDP's with gradient_as_bucket_view.
    bucket = torch.empty(model.weight.numel()).view_as(model.weight)

    def move(parameter):
        parameter.grad = bucket.copy_(parameter.grad)

    model.weight.register_post_accumulate_grad_hook(move)
    handle = init()
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), num_loss=2)
    for factor in (1.0, 3.0):
        with optimizer.scale_loss(loss_of(model, factor)) as scaled_loss:
            scaled_loss.backward()
    torch.testing.assert_close(model.weight.grad, torch.full_like(model.weight, 8.0))


def test_wrapped_optimizer_copies_no_other_gradients(model):
    optimizer = init().wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), num_loss=2)
    with optimizer.scale_loss(loss_of(model)) as scaled_loss:
        scaled_loss.backward()
    grad = model.weight.grad
    with optimizer.scale_loss(torch.ones((), requires_grad=True)) as scaled_loss:
        scaled_loss.backward()  # of other parameters
    assert model.weight.grad is grad


@pytest.mark.parametrize("overflowing", [0, 1])
def test_wrapped_optimizer_skips_if_one_loss_overflows(model, overflowing):
    handle = init()
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), num_loss=2)
    before = model.weight.detach().clone()
    for index in range(2):
        with optimizer.scale_loss(loss_of(model, math.inf if index == overflowing else 1)) as loss:
            loss.backward()
    optimizer.step()
    assert torch.equal(model.weight, before)
    optimizer.zero_grad()
    with optimizer.scale_loss(loss_of(model)) as loss:
        loss.backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_disabled_handle_changes_nothing(model):
    handle = init(enabled=False)
    assert not handle.is_active()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = loss_of(model)
    with handle.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    wrapped = handle.wrap_optimizer(optimizer)
    with wrapped.scale_loss(loss) as scaled_loss:
        scaled_loss.backward()
    before = model.weight.detach().clone()
    wrapped.step()
    torch.testing.assert_close(model.weight.detach(), before - 1.0)


def test_disable_casts_of_the_handle(model):
    handle = init()
    with handle._disable_casts():
        assert not handle.is_active()
        assert model(torch.ones(2, 3, device=DEVICE)).dtype == torch.float32
    assert handle.is_active()


@pytest.mark.gpu
def test_banned_function_raises_unless_allowed():
    half = torch.full((2,), 0.5, device="cuda", dtype=torch.float16)
    init()
    with pytest.raises(NotImplementedError, match="binary_cross_entropy"):
        nn.functional.binary_cross_entropy(half, half)


def test_allow_banned_computes_in_fp32(monkeypatch):
    plain = nn.functional.binary_cross_entropy
    monkeypatch.setattr(nn.functional, "binary_cross_entropy", plain)  # restored afterwards
    init(allow_banned=True)
    dtype = amp.half_type(torch.float16, torch.device(DEVICE))
    half = torch.full((2,), 0.5, device=DEVICE, dtype=dtype)
    loss = nn.BCELoss()(half, half)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(2))

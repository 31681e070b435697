"""FP16_Optimizer of its three places, FP16Model and the loss scalers of fp16_utils."""

import copy
import math

import pytest
import torch
from apex_native import optimizers
from apex_native.extras.fp16_optimizer import FP16_Optimizer, FP16Model, convert_module
from apex_native.extras.fused_fp16_optimizer import FP16_Optimizer as FusedFP16_Optimizer
from apex_native.extras.loss_scaler import DynamicLossScaler, LossScaler, any_non_finite
from torch import nn

KINDS = [FP16_Optimizer, FusedFP16_Optimizer]


def half_model(device="cpu"):
    """Return two half tensors, one of which is a batch norm's neighbour, and an fp32 one."""
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(4, 3).half(), nn.Linear(3, 1)]).to(device)


def outputs(model, x):
    return model[1](model[0](x.half()).float())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}])
def test_steps_equal_sgd_on_fp32_masters(device, kind, options):
    """The gradients are those of the half model; weights and momentum are computed in float64."""
    model = half_model(device)
    optimizer = kind(sgd(model.parameters()), **options)
    parameters = list(model.parameters())
    values = [parameter.detach().double() for parameter in parameters]
    momenta = [torch.zeros_like(value) for value in values]
    for step in range(4):
        x = torch.randn(8, 4, device=device)
        loss = outputs(model, x).square().mean()
        expected = torch.autograd.grad(loss, parameters, retain_graph=True)
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.step()
        for index, grad in enumerate(expected):
            momenta[index] = grad.double() if step == 0 else 0.9 * momenta[index] + grad.double()
            values[index] = values[index] - 0.5 * momenta[index]
            held = optimizer.param_groups[0]["params"][index]
            torch.testing.assert_close(held.double(), values[index], rtol=1e-3, atol=2e-4)
            assert held.dtype == torch.float32
            assert torch.equal(parameters[index], held.to(parameters[index].dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_overflow_skips_the_step_and_lowers_a_dynamic_scale(kind, capsys):
    model = half_model()
    optimizer = kind(sgd(model.parameters()), dynamic_loss_scale=True)
    before = copy.deepcopy(model.state_dict())
    optimizer.backward(outputs(model, torch.ones(2, 4)).sum() * math.inf)
    optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    scale = optimizer.loss_scale if kind is FP16_Optimizer else optimizer.cur_scale
    assert scale == 2.0**15
    assert "overflow" in capsys.readouterr().out


def test_static_scale_of_the_fused_one_skips_overflows_too():
    model = half_model()
    optimizer = FusedFP16_Optimizer(sgd(model.parameters()), static_loss_scale=2.0)
    before = model[0].weight.clone()
    optimizer.backward(outputs(model, torch.ones(2, 4)).sum() * math.inf)
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert optimizer.cur_scale == 2.0


def test_scale_doubles_after_the_window():
    model = half_model()
    arguments = {"init_scale": 4.0, "scale_window": 3}
    optimizer = FP16_Optimizer(
        sgd(model.parameters()), dynamic_loss_scale=True, dynamic_loss_args=arguments
    )
    scales = []
    for _ in range(6):
        optimizer.zero_grad()
        optimizer.backward(outputs(model, torch.ones(2, 4)).mean() * 0)
        optimizer.step()
        scales.append(optimizer.loss_scale)
    assert scales == [4, 4, 8, 8, 8, 16]
    optimizer.loss_scale = 2
    assert optimizer.loss_scale == 2.0


def test_fused_one_doubles_as_apex_counts():
    model = half_model()
    optimizer = FusedFP16_Optimizer(sgd(model.parameters()), dynamic_loss_scale=True)
    optimizer.cur_iter, optimizer.last_overflow_iter = 998, -1
    scales = []
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(outputs(model, torch.ones(2, 4)).mean() * 0)
        optimizer.step()
        scales.append(optimizer.cur_scale)
    assert scales == [2.0**16, 2.0**17, 2.0**17]
    with pytest.raises(SystemError, match="dynamic_loss_args"):
        FusedFP16_Optimizer(sgd(model.parameters()), 1.0, True, {"scale_window": 500})


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_run_is_bit_identical_and_the_file_loads_without_pickled_classes(kind, tmp_path):
    def run(steps, model, optimizer):
        for _ in range(steps):
            optimizer.zero_grad()
            optimizer.backward(outputs(model, torch.ones(2, 4)).square().mean())
            optimizer.step()

    def create():
        model = half_model()
        inner = optimizers.FusedAdam(model.parameters(), lr=0.1)
        return model, kind(inner, dynamic_loss_scale=True)

    straight = create()
    run(4, *straight)
    interrupted = create()
    run(2, *interrupted)
    state = {"model": interrupted[0].state_dict(), "optimizer": interrupted[1].state_dict()}
    torch.save(state, tmp_path / "last.pt")
    state = torch.load(tmp_path / "last.pt", weights_only=True)
    resumed = create()
    resumed[0].load_state_dict(state["model"])
    resumed[1].load_state_dict(state["optimizer"])
    run(2, *resumed)
    for one, two in zip(straight[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(one, two)
    for one, two in zip(straight[1].masters, resumed[1].masters, strict=True):
        assert torch.equal(one, two)


def test_checkpoint_with_a_pickled_scaler_of_apex_loads():
    class Pickled:  # attributes of apex.amp.scaler.LossScaler
        _loss_scale, _unskipped, dynamic = 0.0, 0, True

    saved = Pickled()
    saved._loss_scale, saved._unskipped = 512.0, 7
    optimizer = FP16_Optimizer(sgd(half_model().parameters()), dynamic_loss_scale=True)
    state = optimizer.state_dict() | {"loss_scaler": saved}
    optimizer.load_state_dict(state)
    assert optimizer.loss_scaler.state_dict() == {"loss_scale": 512.0, "unskipped": 7}


def test_flat_checkpoint_of_2019_is_refused_with_the_reason():
    optimizer = FusedFP16_Optimizer(sgd(half_model().parameters()))
    state = optimizer.state_dict()
    state["fp32_groups_flat"] = state.pop("fp32_groups")
    with pytest.raises(RuntimeError, match="fp32_groups_flat"):
        optimizer.load_state_dict(state)


def test_several_losses_are_added_before_one_update():
    model = half_model()
    optimizer = FP16_Optimizer(sgd(model.parameters()), static_loss_scale=8.0)
    x = torch.randn(2, 4)
    for factor in (1.0, 2.0):
        loss = outputs(model, x).sum() * factor
        optimizer.backward(loss, update_master_grads=False)
    assert optimizer.param_groups[0]["params"][0].grad is None
    optimizer.update_master_grads()
    expected = torch.autograd.grad(outputs(model, x).sum() * 3, list(model.parameters()))
    (grads,) = optimizer.inspect_master_grad_data()
    for grad, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, reference.float(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_grad_takes_views_as_in_buckets_of_ddp_and_gradients_with_a_graph(kind):
    model = half_model()
    optimizer = kind(sgd(model.parameters()))
    for index, parameter in enumerate(model.parameters()):
        bucket = torch.ones(2, *parameter.shape, dtype=parameter.dtype)
        parameter.grad = bucket[0] if index else bucket.clone().requires_grad_().sum(0)
    optimizer.zero_grad(set_grads_to_None=False)
    for parameter in model.parameters():
        assert not parameter.grad.any() and parameter.grad.grad_fn is None


def test_clip_master_grads():
    model = half_model()
    optimizer = FP16_Optimizer(sgd(model.parameters()), static_loss_scale=8.0)
    optimizer.backward(outputs(model, torch.ones(2, 4)).sum() * 10)
    before = torch.nn.utils.get_total_norm(optimizer.inspect_master_grad_data()[0])
    assert optimizer.clip_master_grads(1.0) == before > 1
    after = torch.nn.utils.get_total_norm(optimizer.inspect_master_grad_data()[0])
    torch.testing.assert_close(after, torch.tensor(1.0))
    optimizer.overflow = True
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None


def test_closure_is_called_again_after_an_overflow():
    model = half_model()
    optimizer = FP16_Optimizer(
        torch.optim.LBFGS(model.parameters(), max_iter=3), dynamic_loss_scale=True
    )
    factors = [math.inf, *[1.0] * 20]
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = outputs(model, torch.ones(2, 4)).square().mean()
        losses.append(loss.item())
        optimizer.backward(loss * factors.pop(0))
        return loss

    optimizer.step(closure)
    assert losses[-1] < losses[0]
    assert optimizer.loss_scale == 2.0**15


def test_other_types_and_pickles_are_refused():
    with pytest.raises(TypeError, match="float64"):
        FP16_Optimizer(sgd(nn.Linear(2, 2).double().parameters()))
    with pytest.raises(RuntimeError, match="state_dict"):
        copy.copy(FP16_Optimizer(sgd(half_model().parameters())))


def test_fp16_model_casts_its_inputs_and_spares_batch_norms():
    model = FP16Model(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    assert model.network[0].weight.dtype == torch.float32
    assert model(torch.ones(3, 2)).dtype == torch.float16


def test_convert_module_casts_a_module_without_its_children():
    layer = nn.BatchNorm1d(2)
    layer.child = nn.Linear(1, 1)
    layer(torch.randn(3, 2)).square().sum().backward()
    convert_module(layer, torch.float64)
    assert {layer.weight.dtype, layer.weight.grad.dtype, layer.running_mean.dtype} == {torch.double}
    assert layer.child.weight.dtype == torch.float32
    assert layer.num_batches_tracked.dtype == torch.int64


def test_dynamic_loss_scaler_in_a_loop_of_the_users_own():
    scaler = DynamicLossScaler(init_scale=8.0, scale_window=3)
    weight = nn.Parameter(torch.ones(3))
    scaler.backward(weight.sum())
    assert torch.equal(weight.grad, torch.full((3,), 8.0))
    assert not DynamicLossScaler.has_overflow(scaler, [weight])
    weight.grad[1] = math.nan
    assert scaler.has_overflow([weight])
    scales = []
    for overflow in (False, True, False, False, False, True, True, True, True):
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == [8, 4, 4, 4, 8, 4, 2, 1, 1]


def test_finite_elements_of_float64_beyond_float32_are_no_overflow():
    tensors = [torch.ones(2, dtype=torch.float16), torch.tensor([1e300], dtype=torch.float64)]
    assert not any_non_finite([None, *tensors])
    assert any_non_finite([nn.Parameter(torch.tensor([math.inf])), *tensors])
    assert not any_non_finite([None, torch.ones(0)])


def test_static_loss_scaler():
    scaler = LossScaler(4)
    weight = nn.Parameter(torch.ones(1))
    scaler.backward(weight.sum())
    scaler.update_scale(True)
    assert (weight.grad.item(), scaler.loss_scale, scaler.has_overflow([weight])) == (4, 4, False)
    assert scaler.scale_gradient(None, (torch.ones(1),), ())[0].item() == 4

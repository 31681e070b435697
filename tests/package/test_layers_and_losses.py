"""Layers and losses of Apex's smaller modules compared with their definitions in float64."""

import math

import pytest
import torch
from apex_native.extras.group_norm import GroupNorm
from apex_native.extras.layers import MLP, FastLayerNorm, FusedDense, FusedDenseGeluDense
from apex_native.extras.losses import (
    FocalLoss,
    SoftmaxCrossEntropyLoss,
    clip_grad_norm_,
    focal_loss,
)
from torch import nn

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def compare(function, reference, tensors, dtype, device):
    """Compare outputs and gradients of `function` with those of `reference` in float64."""
    own = [tensor.to(device, dtype).requires_grad_() for tensor in tensors]
    wide = [tensor.detach().double().cpu().requires_grad_() for tensor in own]
    output, expected = function(*own), reference(*wide)
    limit = TOLERANCES[dtype]
    options = {"rtol": limit, "atol": 2 * limit}
    torch.testing.assert_close(output.double().cpu(), expected, **options)
    grad = torch.randn_like(expected)
    output.backward(grad.to(output))
    expected.backward(grad)
    for one, two in zip(own, wide, strict=True):
        torch.testing.assert_close(one.grad.double().cpu(), two.grad, **options)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("activation", ["none", "relu", "sigmoid"])
@pytest.mark.parametrize("bias", [True, False])
def test_mlp(device, dtype, activation, bias):
    mlp = MLP([3, 5, 2], bias=bias, activation=activation)
    names = [name for name, _ in mlp.named_parameters()]
    shapes = [parameter.shape for parameter in mlp.parameters()]
    expected_names = {"weight_0", "weight_1"} | ({"bias_0", "bias_1"} if bias else set())
    assert set(names) == expected_names

    def function(x, *parameters):
        named = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(mlp, named, (x,))

    def reference(x, *parameters):
        named = dict(zip(names, parameters, strict=True))
        for index in range(2):
            x = x @ named[f"weight_{index}"].T + named.get(f"bias_{index}", 0)
            if activation == "relu":
                x = x * (x > 0)
            elif activation == "sigmoid":
                x = 1 / (1 + (-x).exp())
        return x

    tensors = [torch.randn(4, 3), *(torch.randn(shape) for shape in shapes)]
    compare(function, reference, tensors, dtype, device)


def test_mlp_keeps_its_parameters_when_moved_and_refuses_other_activations():
    mlp = MLP([2, 3]).double()
    assert mlp.weights[0] is mlp.weight_0
    assert mlp.biases[0].dtype == torch.float64
    with pytest.raises(TypeError, match="'gelu'"):
        MLP([2, 3], activation="gelu")


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_fused_dense_gelu_dense(device, dtype):
    layer = FusedDenseGeluDense(3, 5, 2)
    names = [name for name, _ in layer.named_parameters()]
    assert names == ["weight1", "bias1", "weight2", "bias2"]

    def function(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    def reference(x, weight1, bias1, weight2, bias2):
        h = x @ weight1.T + bias1
        h = h / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return h @ weight2.T + bias2

    tensors = [torch.randn(4, 3), *(torch.randn(p.shape) for p in layer.parameters())]
    compare(function, reference, tensors, dtype, device)
    with pytest.raises(ValueError, match="bias=True"):
        FusedDenseGeluDense(3, 5, 2, bias=False)


def test_fused_dense_is_a_linear_layer_with_finite_parameters():
    layer = FusedDense(3, 2, bias=False)
    assert layer.bias is None
    assert layer.weight.isfinite().all()
    x = torch.randn(4, 3)
    torch.testing.assert_close(layer(x), x @ layer.weight.T)
    assert set(FusedDense(3, 2).state_dict()) == {"weight", "bias"}


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_fast_layer_norm(device, dtype):
    norm = FastLayerNorm(6, eps=1e-3)

    def function(x, weight, bias):
        return torch.func.functional_call(norm, {"weight": weight, "bias": bias}, (x,))

    def reference(x, weight, bias):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight + bias

    tensors = [torch.randn(4, 2, 6), torch.rand(6) + 0.5, torch.randn(6)]
    compare(function, reference, tensors, dtype, device)
    assert norm(torch.randn(2, 6).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("padding_idx", [0, 3, -100])
def test_softmax_cross_entropy(device, dtype, smoothing, padding_idx):
    labels = torch.tensor([0, 1, 3, 4, 0])

    def reference(logits):
        log_p = logits - logits.exp().sum(1, keepdim=True).log()
        own = log_p[torch.arange(5), labels]
        losses = -(1 - smoothing) * own - smoothing * log_p.mean(1)
        return losses * (labels != padding_idx)

    def function(logits):
        own = labels.to(device)
        return SoftmaxCrossEntropyLoss.apply(logits, own, smoothing, padding_idx)

    compare(function, reference, [torch.randn(5, 6) * 2], dtype, device)


def test_softmax_cross_entropy_half_to_float():
    logits = torch.randn(5, 6).bfloat16()
    labels = torch.arange(5)
    losses = [SoftmaxCrossEntropyLoss.apply(logits, labels, 0.0, -1, flag) for flag in (0, 1)]
    assert [loss.dtype for loss in losses] == [torch.bfloat16, torch.float32]
    assert torch.equal(losses[0], losses[1].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softmax_cross_entropy_of_confident_half_logits_has_a_gradient(dtype, smoothing):
    logits = torch.tensor([[9.0, 0.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
    SoftmaxCrossEntropyLoss.apply(logits, torch.tensor([0]), smoothing, -1, True).sum().backward()
    exact = logits.detach().double().requires_grad_()
    nn.functional.cross_entropy(exact, torch.tensor([0]), label_smoothing=smoothing).backward()
    torch.testing.assert_close(logits.grad, exact.grad.to(dtype))
    assert logits.grad[0, 0] != 0


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_focal_loss_of_saturated_logits_has_finite_gradients(gamma):
    logits = torch.tensor([[200.0, -200.0, 20.0, 0.0]], requires_grad=True)
    loss = focal_loss(logits, torch.tensor([0]), torch.ones(1), 4, 0.25, gamma)
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(0.75 * (20.0 + 0.5**gamma * math.log(2))))
    assert logits.grad.isfinite().all() and logits.grad[0, :2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_focal_loss(device, dtype, smoothing):
    """Class 5 is padding, -1 a sample without a class, -2 one that is not counted."""
    labels = torch.tensor([[0, 4, -1], [-2, 2, 2]])
    positives = torch.tensor([3.0])

    def reference(logits):
        total = 0
        for index, label in enumerate(labels.flatten().tolist()):
            for c in range(5 if label != -2 else 0):
                p = 1 / (1 + (-logits.reshape(-1, 6)[index, c]).exp())
                is_own = c == label
                t = 1 - smoothing / 2 if is_own else smoothing / 2
                weight = 0.25 * (1 - p) ** 2 if is_own else 0.75 * p**2
                total = total - weight * (t * p.log() + (1 - t) * (1 - p).log())
        return total / 3

    def function(logits):
        own = labels.to(device)
        loss = focal_loss(logits, own, positives.to(device), 5, 0.25, 2.0, smoothing)
        return loss

    compare(function, reference, [torch.randn(2, 3, 6)], dtype, device)
    arguments = (torch.randn(2, 3, 6), labels, positives, 5, 0.25, 2.0)
    assert torch.equal(FocalLoss.apply(*arguments), focal_loss(*arguments))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clip_grad_norm(device, norm_type):
    parameters = [nn.Parameter(torch.zeros(n, device=device)) for n in (3, 4, 2)]
    grads = [torch.randn(n) * 5 for n in (3, 4)]
    for parameter, grad in zip(parameters, grads, strict=False):
        parameter.grad = grad.to(device)
    wide = torch.cat(grads).double()
    expected = torch.linalg.vector_norm(wide, norm_type)
    norm = clip_grad_norm_(parameters, 1.0, norm_type)
    torch.testing.assert_close(norm.double().cpu(), expected)
    clipped = torch.cat([parameter.grad.double().cpu() for parameter in parameters[:2]])
    torch.testing.assert_close(clipped, wide / expected, rtol=1e-5, atol=1e-6)
    assert clip_grad_norm_(parameters, 100.0, norm_type) < 1.01


def test_clip_grad_norm_of_half_gradients_does_not_overflow():
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    parameter.grad = torch.full((4,), 60000.0, dtype=torch.float16)
    assert clip_grad_norm_(parameter, 1.0).item() == pytest.approx(120000, rel=1e-3)
    torch.testing.assert_close(parameter.grad, torch.full((4,), 0.5).half())


def test_clip_grad_norm_without_gradients_and_with_nan():
    parameter = nn.Parameter(torch.zeros(2))
    assert clip_grad_norm_([parameter], 1.0).item() == 0
    parameter.grad = torch.tensor([1.0, math.nan])
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("act", [None, "", "silu", "Swish"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_group_norm(device, dtype, act, channels_last):
    layer = GroupNorm(3, 6, eps=1e-3, act=act)
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def function(x, weight, bias):
        output = torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))
        assert output.is_contiguous(memory_format=layout)
        return output

    def reference(x, weight, bias):
        grouped = x.reshape(2, 3, -1)
        centred = grouped - grouped.mean(-1, keepdim=True)
        x = (centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()).view_as(x)
        x = x * weight[:, None, None] + bias[:, None, None]
        return x / (1 + (-x).exp()) if act else x

    x = torch.randn(2, 6, 4, 5).to(memory_format=layout)
    compare(function, reference, [x, torch.randn(6), torch.randn(6)], dtype, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_group_norm_of_mixed_types_has_the_type_of_its_input(device, dtype):
    x = torch.randn(2, 6, 4, 5, device=device)
    expected = nn.functional.group_norm(x, 2)
    found = GroupNorm(2, 6, dtype=dtype, device=device)(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    found = GroupNorm(2, 6, device=device)(x.to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    found = GroupNorm(2, 6, affine=False)(x.cpu())
    torch.testing.assert_close(found, expected.cpu())


def test_group_norm_refuses_other_arguments():
    with pytest.raises(ValueError, match="divisible"):
        GroupNorm(4, 6)
    with pytest.raises(ValueError, match="'relu'"):
        GroupNorm(2, 6, act="relu")

"""Functions of apex.normalization.fused_layer_norm compared with their definitions in float64."""

import pytest
import torch
from apex_native.extras import norm_functions

SHAPE = (3, 5)
FUNCTIONS = [
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def call(name, x, weight, bias, **options):
    """Call the function `name` with those of the arguments that it takes."""
    function = getattr(norm_functions, name)
    if name == "manual_rms_norm":
        return function(x, SHAPE, weight, 1e-6)
    if not name.endswith("affine"):
        return function(x, SHAPE, **options)
    parameters = (weight, bias) if "layer_norm" in name else (weight,)
    return function(x, *parameters, SHAPE, **options)


def defined(name, x, weight, bias):
    """Return the norm over the last two dimensions."""
    if "layer_norm" in name:
        x = x - x.mean((-2, -1), keepdim=True)
    x = x / (x.square().mean((-2, -1), keepdim=True) + 1e-6).sqrt()
    if name in ("fused_layer_norm", "fused_rms_norm"):
        return x
    return x * weight + (bias if "layer_norm" in name else 0)


def close(actual, expected, tolerance):
    assert (actual is None) == (expected is None)
    if actual is not None:
        torch.testing.assert_close(
            actual.double().cpu(), expected, rtol=tolerance, atol=4 * tolerance
        )


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        (norm_functions.FusedLayerNormFunction, "fused_layer_norm"),
        (norm_functions.FusedLayerNormAffineFunction, "fused_layer_norm_affine"),
        (
            norm_functions.FusedLayerNormAffineMixedDtypesFunction,
            "mixed_dtype_fused_layer_norm_affine",
        ),
        (norm_functions.FusedRMSNormFunction, "fused_rms_norm"),
        (norm_functions.FusedRMSNormAffineFunction, "fused_rms_norm_affine"),
        (
            norm_functions.FusedRMSNormAffineMixedDtypesFunction,
            "mixed_dtype_fused_rms_norm_affine",
        ),
    ],
)
def test_functions_as_apply_of_a_class(kind, function):
    """As Apex's autograd functions, which copies of its modules call."""
    x, weight, bias = torch.randn(4, *SHAPE), torch.rand(SHAPE), torch.randn(SHAPE)
    parameters = [] if not function.endswith("affine") else [weight, bias]
    if "rms_norm" in function:
        del parameters[1:]
    output = kind.apply(x, *parameters, torch.Size(SHAPE), 1e-6)
    assert torch.equal(output, call(function, x, weight, bias, eps=1e-6))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("input_type", TOLERANCES)
@pytest.mark.parametrize("weight_type", TOLERANCES)
def test_outputs_and_gradients_equal_the_formula(device, name, input_type, weight_type):
    torch.manual_seed(0)
    types = (input_type, weight_type, weight_type)
    values = [torch.randn(4, *SHAPE) * 2 + 1, torch.rand(SHAPE) + 0.5, torch.randn(SHAPE)]
    own = [value.to(device, t).requires_grad_() for value, t in zip(values, types, strict=True)]
    wide = [tensor.detach().double().cpu().requires_grad_() for tensor in own]
    output, expected = call(name, *own), defined(name, *wide)
    tolerance = max(TOLERANCES[input_type], TOLERANCES[weight_type])
    close(output, expected, tolerance)
    grad = torch.randn(4, *SHAPE)
    output.backward(grad.to(output))
    expected.backward(grad.double())
    for one, two in zip(own, wide, strict=True):
        close(one.grad, two.grad, 4 * tolerance)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_type_of_the_output(name):
    x, weight, bias = torch.randn(4, *SHAPE), torch.ones(SHAPE), torch.zeros(SHAPE)
    is_mixed = name.startswith("mixed") or name == "manual_rms_norm"
    for input_type, weight_type in ((torch.bfloat16, torch.float32), (torch.float32, torch.half)):
        output = call(name, x.to(input_type), weight.to(weight_type), bias.to(weight_type))
        assert output.dtype == (weight_type if is_mixed else input_type)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "manual_rms_norm"])
def test_eps_and_memory_efficient(name):
    x, weight, bias = torch.randn(4, *SHAPE) * 1e-3, torch.ones(SHAPE), torch.zeros(SHAPE)
    plain = call(name, x, weight, bias)
    assert torch.equal(call(name, x, weight, bias, eps=1e-6), plain)
    assert torch.equal(call(name, x, weight, bias, memory_efficient=True), plain)
    assert not torch.allclose(call(name, x, weight, bias, eps=1e-2), plain)


def test_manual_rms_norm_without_weight():
    x = torch.randn(4, 8)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt()
    close(norm_functions.manual_rms_norm(x, (8,), None, 1e-3), expected, 1e-5)


def test_normalized_shape_as_a_number():
    x, weight = torch.randn(4, 8), torch.ones(8)
    one = norm_functions.fused_rms_norm_affine(x, weight, 8)
    assert torch.equal(one, norm_functions.fused_rms_norm_affine(x, weight, (8,)))

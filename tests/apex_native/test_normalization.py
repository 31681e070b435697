"""Fused norms compared with their definitions."""

import pytest
import torch
from apex_native import normalization
from torch.nn.utils import prune

PLAIN = [normalization.FusedLayerNorm, normalization.FusedRMSNorm]
MIXED = [normalization.MixedFusedLayerNorm, normalization.MixedFusedRMSNorm]


def defined(kind, x, weight):
    """Return the norm over the last two dimensions, in float64."""
    x = x.double()
    if "RMS" not in kind.__name__:
        x = x - x.mean((-2, -1), keepdim=True)
    return x / (x.square().mean((-2, -1), keepdim=True) + 1e-5).sqrt() * weight.double()


@pytest.mark.parametrize("kind", PLAIN + MIXED)
def test_norm_equals_its_formula(device, kind):
    x, norm = torch.randn(4, 3, 5, device=device), kind((3, 5)).to(device)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    torch.testing.assert_close(
        norm(x).double(), defined(kind, x, norm.weight), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("kind", PLAIN)
def test_norm_without_weight(device, kind):
    x = torch.randn(4, 3, 5, device=device)
    norm = kind((3, 5), elementwise_affine=False)
    torch.testing.assert_close(
        norm(x).double(), defined(kind, x, torch.ones_like(x)), rtol=1e-5, atol=1e-5
    )
    assert not list(norm.parameters())


@pytest.mark.parametrize("kind", PLAIN + MIXED)
def test_memory_efficient_changes_no_result(kind):
    x, results = torch.randn(4, 8), []
    for memory_efficient in (False, True):
        norm, own = kind(8, memory_efficient=memory_efficient), x.clone().requires_grad_()
        output = norm(own)
        (output.cumsum(0) ** 2).sum().backward()
        results.append((output, own.grad, norm.weight.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", PLAIN + MIXED)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_output_type_of_plain_and_mixed_norms(device, kind, weights):
    norm = kind(8).to(device, weights)
    for dtype in (torch.float32, torch.bfloat16):
        output = norm(torch.randn(2, 8, dtype=dtype, device=device, requires_grad=True))
        assert output.dtype == (weights if kind in MIXED else dtype)
        output.sum().backward()


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("affine", [False, True])
def test_output_type_under_autocast(device, kind, affine):
    norm = kind(8, elementwise_affine=affine).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        assert norm(torch.randn(2, 8, device=device).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", PLAIN)
def test_half_input_is_normalized_with_the_pruned_weight(device, kind):
    norm, x = kind(8).to(device), torch.randn(4, 8, device=device).bfloat16()
    prune.random_unstructured(norm, "weight", 4)
    assert torch.equal(norm(x), norm(x.float()).bfloat16()) and (norm(x) == 0).any()


@pytest.mark.parametrize("kind", MIXED)
def test_mixed_norms_without_parameters_raise(kind):
    with pytest.raises(RuntimeError, match="elementwise_affine"):
        kind(8, elementwise_affine=False)

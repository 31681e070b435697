"""Models for small images: their sizes and shapes."""

import pytest
import torch
from engine.small_models import build_small_model


@pytest.mark.parametrize(
    ("arch", "millions"),
    [("resnet18_cifar", 11.17), ("wrn16_4", 2.75), ("wrn28_10", 36.48), ("wrn40_4", 8.95)],
)
def test_number_of_parameters_is_the_published_one(arch: str, millions: float) -> None:
    """With 10 classes: Zagoruyko and Komodakis, table 1 and 4; ResNet-18 as for CIFAR-10."""
    model = build_small_model(arch, 10)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


@pytest.mark.parametrize("arch", ["resnet18_cifar", "wrn10_2"])
@pytest.mark.parametrize("size", [28, 32])
def test_features_keep_a_quarter_or_an_eighth_of_the_size(arch: str, size: int) -> None:
    model = build_small_model(arch, 10).eval()
    shapes = []
    last = model.layer4 if arch.startswith("resnet") else model.layer3
    last.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape[-1]))
    assert model(torch.randn(2, 3, size, size)).shape == (2, 10)
    divisor = 8 if arch.startswith("resnet") else 4
    assert shapes == [-(-size // divisor)]


@pytest.mark.parametrize(
    "arch", ["resnet18", "wrn27_10", "wrn4_1", "wrn600004_1", "wrn28", "resnet19_cifar"]
)
def test_other_names_are_none_of_them(arch: str) -> None:
    assert build_small_model(arch, 10) is None

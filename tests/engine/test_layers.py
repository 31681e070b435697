"""Numbers of layers, and learning rates that decrease from the last layer to the first."""

import pytest
import torch
import torchvision
from engine import optim
from engine.blocks import layer_numbers
from engine.small_models import build_small_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torchvision.models.resnet import BasicBlock


@pytest.mark.parametrize(
    ("arch", "count"),
    [("resnet18", 10), ("vit_b_16", 14), ("convnext_tiny", 23), ("efficientnet_b0", 19)],
)
def test_layers_of_torchvision_models(arch: str, count: int) -> None:
    """Stem, blocks and head: 8, 12, 18 + 3 downsampling layers, and 16 + a convolution."""
    model = torchvision.models.get_model(arch, weights=None, num_classes=4)
    numbers = layer_numbers(model)
    assert list(numbers) == [name for name, _ in model.named_parameters()]
    assert sorted(set(numbers.values())) == [*range(count)]
    assert [*numbers.values()] == sorted(numbers.values())  # in the order of the forward pass


def test_layers_of_a_resnet_are_those_of_timm() -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    ours = layer_numbers(torchvision.models.resnet18())
    model = timm.create_model("resnet18")
    assert model.group_matcher
    assert ours == layer_numbers(model)


def test_layers_that_are_wrapped_have_the_same_numbers() -> None:
    model = torchvision.models.resnet18()
    before = [*layer_numbers(model).values()]
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, BasicBlock))
    assert [*layer_numbers(model).values()] == before


def test_class_token_and_position_embedding_belong_to_the_input() -> None:
    numbers = layer_numbers(torchvision.models.vit_b_16())
    assert numbers["class_token"] == numbers["encoder.pos_embedding"] == 0
    assert numbers["encoder.layers.encoder_layer_0.mlp.0.weight"] == 1


@pytest.mark.parametrize(
    ("arch", "options", "heads"),
    [
        (
            "deeplabv3_mobilenet_v3_large",
            {"aux_loss": True, "weights_backbone": None},
            {"classifier", "aux_classifier"},
        ),
        ("googlenet", {"init_weights": False}, {"fc", "aux1", "aux2"}),
        ("inception_v3", {"init_weights": False}, {"fc", "AuxLogits"}),
    ],
)
def test_auxiliary_heads_are_in_the_layer_of_the_head(arch: str, options: dict, heads: set) -> None:
    """Wherever they are defined."""
    numbers = layer_numbers(torchvision.models.get_model(arch, weights=None, **options))
    last = max(numbers.values())
    assert {name.partition(".")[0] for name, n in numbers.items() if n == last} == heads
    assert {*numbers.values()} == {*range(last + 1)}


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_temperature_belongs_to_the_output(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_parameter("log_scale", nn.Parameter(torch.zeros(shape)))
    assert layer_numbers(model) == {"log_scale": 1} | {
        f"{index}.{name}": index for index in (0, 1) for name in ("weight", "bias")
    }


def test_learning_rates_decay_from_the_last_layer(capsys: pytest.CaptureFixture) -> None:
    model = build_small_model("wrn10_1", 10)
    groups = optim.param_groups(model, 0.4, decay_weights_only=True, layer_decay=0.5)
    rates = {id(tensor): group["lr"] for group in groups for tensor in group["params"]}
    assert len(rates) == len(list(model.parameters()))
    expected = {"fc": 0.4, "layer3": 0.2, "layer2": 0.1, "layer1": 0.05, "conv1": 0.025}
    for name, rate in expected.items():
        assert {rates[id(p)] for p in model.get_submodule(name).parameters()} == {rate}
    assert groups[0]["lr"] == 0.4  # which is logged
    said = "the first (conv1.weight) has 0.0625 times the learning rate of the last (fc.weight, fc"
    assert f"--layer-decay: of 5 layers, {said}" in capsys.readouterr().err
    for group in groups:
        dims = {tensor.dim() > 1 for tensor in group["params"]}
        assert dims == {"weight_decay" not in group}


def test_frozen_layers_count_for_the_decay() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    model[2].requires_grad_(False)
    groups = optim.param_groups(model, 1.0, decay_weights_only=False, layer_decay=0.5)
    assert [group["lr"] for group in groups] == [0.5, 0.25]

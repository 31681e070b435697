"""timm's models: their images, options and errors, and SyncBN for norms with an activation."""

import argparse
import copy
import sys
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from apex_native.parallel import SyncBatchNorm, convert_syncbn_model
from engine import UserError, models, optim
from engine.data.images import MEAN, STD
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

timm = pytest.importorskip("timm", reason="timm is not installed")

HALF = (0.5, 0.5, 0.5)


def built(arch: str, num_classes: int = 4, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return models.build_timm_model(arch, num_classes, **models.model_options(arch, **options))


def test_model_options_are_those_of_the_pretrained_weights(capsys: pytest.CaptureFixture) -> None:
    options = models.model_options("timm:vit_tiny_patch16_224", drop_path=0.1)
    assert options["image"] == {
        "size": 224,
        "interpolation": "bicubic",
        "crop_fraction": 0.9,
        "mean": HALF,
        "std": HALF,
        "eval_size": None,
    }
    assert options["drop_path"] == 0.1 and "drop_rate" not in options
    assert "224 × 224 pixels, bicubic, crop 0.9, mean 0.5, 0.5, 0.5" in capsys.readouterr().err
    options = models.model_options(
        "timm:vit_tiny_patch16_224", {"size": 96, "interpolation": "bilinear"}
    )
    assert options["image"]["size"] == 96 and options["image"]["interpolation"] == "bilinear"
    assert models.model_options("resnet18") == {}
    assert models.model_options("resnet18", {"size": 96})["image"]["size"] == 96


@pytest.mark.parametrize("arch", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_model_with_a_fixed_size_is_built_for_another(arch: str) -> None:
    model = built(f"timm:{arch}", image={"size": 96}).eval()
    assert model(torch.randn(1, 3, 96, 96)).shape == (1, 4)


def test_images_are_normalized_as_the_model_expects() -> None:
    """The weights' names are timm's, a copy converts too, and gradients flow."""
    model = built("timm:vit_tiny_patch16_224", image={"size": 32}).eval()
    torch.manual_seed(0)
    plain = timm.create_model("vit_tiny_patch16_224", num_classes=4, img_size=32).eval()
    plain.load_state_dict(model.state_dict())
    pixels = torch.rand(2, 3, 32, 32)
    mean, std = torch.tensor([MEAN, STD]).view(2, 3, 1, 1)
    expected = plain((pixels - 0.5) / 0.5)
    for one in (model, copy.deepcopy(model)):
        torch.testing.assert_close(one((pixels - mean) / std), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain((pixels - mean) / std), expected, rtol=1e-2)


def test_drop_rates_reach_the_model() -> None:
    model = built("timm:resnet26d", drop_rate=0.3, drop_path=0.2)
    assert model.drop_rate == 0.3
    rates = [part.drop_prob for part in model.modules() if type(part).__name__ == "DropPath"]
    assert max(rates) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("timm:resnt18", r"timm:resnt18 is not one of .*; the nearest are timm:resnet18"),
        ("timm:resnet18.foo", r"no such weights of resnet18; the nearest are timm:resnet18"),
        ("timm:hf-hub:timm/resnet18", r"is not one of the models of timm"),
    ],
)
def test_unknown_model_is_refused_with_the_nearest(arch: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        models.model_options(arch)


def test_missing_timm_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: object) -> None:
        if name == "timm":
            raise ModuleNotFoundError("No module named 'timm'", name="timm")

    monkeypatch.delitem(sys.modules, "timm")
    monkeypatch.setattr(sys, "meta_path", [type("F", (), {"find_spec": refuse}), *sys.meta_path])
    with pytest.raises(UserError, match=r"--arch timm:resnet18: pip install timm"):
        models.model_options("timm:resnet18")


def test_rates_of_other_models_are_refused() -> None:
    with pytest.raises(UserError, match=r"--drop-path 0.1 is for timm:NAME, not .* resnet18"):
        models.model_options("resnet18", drop_path=0.1)
    with pytest.raises(UserError, match=r"timm:vgg11 can't be built with drop_path_rate=0.1"):
        models.build_timm_model("timm:vgg11", 4, drop_path=0.1)


def test_no_weight_decay_of_the_parameters_that_the_model_names() -> None:
    model = built("timm:vit_tiny_patch16_224", image={"size": 32})
    weights, others = optim.param_groups(model, 0.1, decay_weights_only=True)
    others = {id(tensor) for tensor in others["params"]}
    assert model.pos_embed.dim() > 1 and id(model.pos_embed) in others
    assert id(model.cls_token) in others and id(model.norm.weight) in others
    assert id(model.head.weight) not in others
    assert len(weights["params"]) + len(others) == len(list(model.parameters()))


@pytest.mark.parametrize("names", [{"weight"}, lambda: {"weight"}])
def test_no_weight_decay_may_be_a_set(names: object) -> None:
    model = torch.nn.Linear(2, 2)
    model.no_weight_decay = names
    (group,) = optim.param_groups(model, 0.1, decay_weights_only=True)
    assert group["weight_decay"] == 0.0


# SyncBN

FUSED = ("resnet10t", "regnetx_002", "efficientnet_b0", "densenet121", "mobilenetv3_small_050")


@pytest.mark.parametrize("name", FUSED)
def test_converted_model_is_equivalent(name: str) -> None:
    """All norms are converted; outputs, gradients and running statistics are the same."""
    plain = built(f"timm:{name}")
    converted = models.convert_norms(copy.deepcopy(plain), convert_syncbn_model)
    norms = [part for part in converted.modules() if isinstance(part, _BatchNorm)]
    assert norms and all(type(norm) is SyncBatchNorm for norm in norms)
    images = torch.randn(2, 3, 64, 64)
    outputs = []
    for model in (plain, converted):
        torch.manual_seed(1)
        outputs.append(model(images))
        outputs[-1].square().sum().backward()
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    torch.testing.assert_close(converted.state_dict(), plain.state_dict(), rtol=0, atol=0)
    for (_, found), (key, expected) in zip(
        converted.named_parameters(), plain.named_parameters(), strict=True
    ):
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=0, msg=key)


def on_each_rank_normalize(images: torch.Tensor) -> tuple:
    """Return this process's outputs and statistics, and those of the whole batch in one."""
    plain = built("timm:regnetx_002").double()
    synced = models.convert_norms(copy.deepcopy(plain), convert_syncbn_model)
    for norm in synced.modules():
        if isinstance(norm, SyncBatchNorm):
            norm.forward = norm.forward_synced  # which forward calls on GPUs only
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    found, expected = synced(images[mine]), plain(images)[mine]
    buffers = [[*model.buffers()] for model in (synced, plain)]
    return found.detach(), expected.detach(), *buffers


def test_fused_norms_use_the_batches_of_all_processes(two_processes) -> None:
    images = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    for found, expected, buffers, whole in two_processes(on_each_rank_normalize, images):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(buffers, whole)


def test_conversion_keeps_frozen_parts() -> None:
    model = built("timm:regnetx_002")
    optim.freeze(model, ["stem"])
    convert = partial(convert_syncbn_model, process_group=None)
    converted = models.convert_norms(model, convert)
    norm = converted.stem.bn
    assert type(norm) is SyncBatchNorm and not norm.training and not norm.weight.requires_grad


@pytest.mark.parametrize("bare", [False, True])
def test_shared_norm_is_converted_once(bare: bool) -> None:
    """Two norms would part where buffers are moved or cast; missing tensors stay missing."""
    norm = timm.layers.BatchNormAct2d(3)
    if bare:
        norm.bias = norm.running_mean = norm.running_var = None
    plain = nn.Sequential(nn.Sequential(norm), nn.Sequential(nn.Conv2d(3, 3, 1), norm))
    images = torch.randn(2, 3, 4, 4)
    expected = copy.deepcopy(plain)(images)
    converted = models.convert_norms(plain, convert_syncbn_model)
    assert type(converted[0][0]) is SyncBatchNorm
    assert converted[0][0] is converted[1][1]
    torch.testing.assert_close(converted(images), expected)


def test_images_that_no_checkpoint_could_have_are_refused():
    parser = Mock(**{"error.side_effect": UserError})
    flags = dict.fromkeys(("image_size", "eval_size", "data", "interpolation"))
    args = argparse.Namespace(arch="resnet18", drop_rate=0, drop_path=0, decode="cpu", **flags)
    with pytest.raises(UserError):
        models.set_model_options(parser, args, {"size": 4096, "crop_fraction": 0.4})
    assert "use at most 4096 pixels, and at most 8192 when" in parser.error.call_args.args[0]

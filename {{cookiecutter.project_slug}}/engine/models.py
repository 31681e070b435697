"""Models of timm, and batch norms that end in an activation, as many of timm's do."""

import argparse
from collections.abc import Callable
from difflib import get_close_matches
from textwrap import shorten
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from engine import UserError, cli, distributed
from engine.data.image_size import parse_size, size_range
from engine.data.images import INTERPOLATIONS, MAX_SIZE, MEAN, STD, ImageSpec, is_image_spec

PREFIX = "timm:"  # of --arch


def add_timm_arguments(parser: cli.ArgumentParser) -> None:
    """Add the flags of images and timm models."""
    add = parser.group("model").add_argument
    rate: dict[str, Any] = {"type": cli.fraction, "default": 0.0, "metavar": "P"}
    add("--drop-rate", **rate, help="dropout before the last layer of a timm model")
    add("--drop-path", **rate, help="stochastic depth of a timm model")
    add = parser.group("data").add_argument
    add(
        "--image-size",
        type=size_range,
        metavar="N|N:N",
        help="height and width, or their growth during training, such as 128:224 (default: 32 for "
        "the digits, that of IDX files or of a timm model, or 224)",
    )
    help = "height and width in validation and inference (default: --image-size)"
    add("--eval-size", type=cli.positive_int, help=help)
    add(
        "--interpolation",
        choices=INTERPOLATIONS,
        help="how images are resized (default: that of a timm model, or bilinear)",
    )


def set_model_options(
    parser: cli.ArgumentParser, args: argparse.Namespace, default_image: dict[str, Any]
) -> None:
    """Set ``args.model_options`` from the flags; reject those that contradict each other.

    Args:
        default_image: fields of the ImageSpec that follow from the task and the data.
    """
    if args.interpolation and args.data is None:
        parser.error("--interpolation is for the files of --data")
    first_size, size = parse_size(args.image_size) if args.image_size else (None, None)
    if args.data is None and (args.eval_size or first_size != size):
        parser.error("--eval-size, and an --image-size that grows, are for --data")
    if args.eval_size and args.eval_size > MAX_SIZE:
        parser.error(f"--eval-size {args.eval_size}: use at most {MAX_SIZE} pixels")
    args.static_shapes = first_size != size
    given = {"size": size, "interpolation": args.interpolation, "eval_size": args.eval_size}
    image = default_image | {name: value for name, value in given.items() if value is not None}
    args.model_options = model_options(
        args.arch, image, drop_rate=args.drop_rate, drop_path=args.drop_path
    )
    image = args.model_options.get("image", {})
    if not is_image_spec(image):  # no checkpoint could be saved
        parser.error(
            f"the images, {image}, are out of range: use at most {MAX_SIZE} pixels, and at most "
            f"{2 * MAX_SIZE} when divided by crop_fraction"
        )
    interpolation = image.get("interpolation", "bilinear")
    if args.decode == "gpu" and interpolation != "bilinear":
        parser.error(
            f"--decode gpu resizes bilinearly, where --arch {args.arch} has {interpolation}; add "
            "--interpolation bilinear"
        )


def model_options(
    arch: str,
    image: dict[str, Any] | None = None,
    *,
    drop_rate: float = 0.0,
    drop_path: float = 0.0,
) -> dict[str, Any]:
    """Return the arguments of `build_model` beyond `arch`: the images as a dict, and rates.

    A timm model's images are those of its pretrained weights, with the given fields of `image`
    replaced. The result, of plain types, is stored in checkpoints.

    Raises UserError if timm is missing or has no such model, and for rates, a mean or a standard
    deviation of another model.
    """
    changes = image or {}
    rates = {"drop_rate": drop_rate, "drop_path": drop_path}
    if arch.startswith(PREFIX):
        spec = _spec_of(arch)._replace(**changes)
        distributed.print_on_rank_zero(f"--arch {arch}: {spec.describe()}")
        return {"image": spec._asdict()} | {name: rate for name, rate in rates.items() if rate}
    for name, rate in rates.items():
        if rate:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} {rate:g} is for {PREFIX}NAME, not for --arch {arch}")
    if not changes.keys().isdisjoint(("mean", "std")):
        raise UserError(f"mean and std of IMAGES are for {PREFIX}NAME; others have ImageNet's")
    return {"image": ImageSpec(**changes)._asdict()} if changes else {}


def build_timm_model(
    arch: str,
    num_classes: int,
    image: dict[str, Any] | None = None,
    *,
    drop_rate: float = 0.0,
    drop_path: float = 0.0,
) -> nn.Module:
    """Return the untrained timm model for timm:NAME: (N, 3, H, W) -> (N, num_classes).

    Its inputs are normalized with ImageNet's mean and standard deviation, as those of all models
    are; a model with others converts them.

    Args:
        image: fields of the ImageSpec; by default that of the model's pretrained weights.
    """
    timm = _import_timm(arch)
    spec = ImageSpec(**image) if image else _spec_of(arch)
    options: dict[str, Any] = {"drop_rate": drop_rate, "drop_path_rate": drop_path}
    options = {name: rate for name, rate in options.items() if rate}
    name = arch.removeprefix(PREFIX)
    config = timm.models.get_pretrained_cfg(name)
    if config and config.fixed_input_size and max(config.input_size[1:]) != spec.size:
        options["img_size"] = spec.size
    try:
        model = timm.create_model(name, pretrained=False, num_classes=num_classes, **options)
    except Exception as error:  # constructors raise anything for what they don't support
        reason = shorten(str(error) or type(error).__name__, 160)
        given = ", ".join(f"{name}={value:g}" for name, value in options.items())
        raise UserError(
            f"--arch {arch} can't be built with {given or 'these'} ({reason})"
        ) from None
    if (spec.mean, spec.std) != (MEAN, STD):
        model.renormalize = Renormalize(spec.mean, spec.std)
        model.register_forward_pre_hook(_renormalize_input)
    return model


class Renormalize(nn.Module):
    """Conversion of images that are normalized with ImageNet's statistics to others.

    Its buffers are not part of the state dict, so that it stays that of timm.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        old_mean, old_std, new_mean, new_std = torch.tensor([MEAN, STD, mean, std])[..., None, None]
        self.register_buffer("scale", old_std / new_std, persistent=False)
        self.register_buffer("shift", (old_mean - new_mean) / new_std, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return (images * self.scale + self.shift).to(images.dtype)


def _renormalize_input(model: Any, inputs: tuple) -> tuple:
    return model.renormalize(inputs[0]), *inputs[1:]


def convert_norms(model: nn.Module, convert: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return ``convert(model)``, where `convert` replaces batch norms by SyncBN.

    timm's BatchNormAct2d is a batch norm that applies dropout and an activation as well. Its batch
    norm is converted; the others stay its children, with the same names, and follow in a hook.
    """
    fused = {
        name: norm
        for name, norm in model.named_modules(remove_duplicate=False)
        if isinstance(norm, nn.BatchNorm2d) and hasattr(norm, "drop") and hasattr(norm, "act")
    }
    plain = {norm: plain_norm(norm) for norm in fused.values()}  # one may have several names
    for name, norm in fused.items():
        model.set_submodule(name, plain[norm])
    model = convert(model)
    converted = {model.get_submodule(name): norm for name, norm in fused.items()}
    for synced, norm in converted.items():
        synced.add_module("drop", norm.get_submodule("drop"))
        synced.add_module("act", norm.get_submodule("act"))
        synced.register_forward_hook(_activate)
    return model


def plain_norm(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    """Return a BatchNorm2d with the tensors of `norm`, and the mode that it is in."""
    options = norm.eps, norm.momentum, norm.affine, norm.track_running_stats
    plain = nn.BatchNorm2d(norm.num_features, *options, device="meta").train(norm.training)
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(plain, name, getattr(norm, name))
    return plain


def _activate(norm: Any, inputs: tuple, output: Tensor) -> Tensor:
    return norm.act(norm.drop(output))


def _import_timm(arch: str) -> ModuleType:
    """Return the package, if it has the model `arch`; raise UserError if not."""
    try:
        import timm
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise UserError(
            f"--arch {arch}: pip install timm, or choose one of torchvision's, such as resnet50"
        ) from None
    name = arch.removeprefix(PREFIX)
    base, _, tag = name.partition(".")
    if not timm.is_model(base):
        nearest = get_close_matches(base, timm.list_models(), n=3, cutoff=0.0)
        raise UserError(
            f"--arch {arch} is not one of the models of timm {timm.__version__}; the nearest are "
            f"{', '.join(PREFIX + other for other in nearest)}"
        )
    tagged = timm.list_pretrained(f"{base}.*")
    if tag and name not in tagged:
        nearest = get_close_matches(name, [*tagged, base], n=3, cutoff=0.0)
        raise UserError(
            f"--arch {arch}: timm {timm.__version__} has no such weights of {base}; the nearest "
            f"are {', '.join(PREFIX + other for other in nearest)}"
        )
    return timm


def _spec_of(arch: str) -> ImageSpec:
    """Return what the images of a timm model's pretrained weights are."""
    timm = _import_timm(arch)
    config = timm.models.get_pretrained_cfg(arch.removeprefix(PREFIX))
    if config is None:
        return ImageSpec()
    return ImageSpec(
        size=max(config.input_size[1:]),
        interpolation="bilinear" if config.interpolation == "bilinear" else "bicubic",
        crop_fraction=min(1.0, config.crop_pct),
        mean=tuple(config.mean),
        std=tuple(config.std),
    )

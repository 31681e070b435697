"""Image classification: model, data, loss and metrics. Replace this file to train something else.

main.py and predict.py use the constants, functions and classes that the page "The functions of
task.py" of the documentation lists, and the flags `args.arch` and `args.flip_tta`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchvision.transforms import v2

from engine import UserError, cli, distributed, fingerprint, models
from engine.checkpoint.compatibility import is_validation_set
from engine.data import SizedDataset, augmentation, idx, images
from engine.data.class_weights import WeightedDataset
from engine.data.folders import list_classes, list_labels, relabel, warn_if_enlarged
from engine.data.gpu_decoding import choose_decoder
from engine.data.image_size import ProgressiveDataset, SizeSchedule, parse_size
from engine.data.images import (
    MEAN,
    STD,
    Crop,
    Encoded,
    ImageSpec,
    Span,
    crop_and_resize,
    read_image,
)
from engine.distributed.consistency import class_names
from engine.monitoring import image_grid
from engine.monitoring.class_report import ClassReport
from engine.optim import FlipAverage, eval_mode
from engine.small_models import EXAMPLES, build_small_model

METRIC = "val_accuracy"  # a key of Metrics.compute; best.pt has its best value
METRIC_MODE = "max"  # or "min"
LAYOUT = "train/CLASS/IMAGE and val/CLASS/IMAGE, or IDX files such as MNIST's"
BATCH_SIZE = 32
WARMUP_EPOCHS = 1.0
# Modules, by class, that FSDP shards and --checkpoint-activations recomputes one by one; (): those
# that are repeated in a Sequential or ModuleList.
BLOCKS: tuple[str, ...] = ()
DUMMY_CLASSES = 1000
FLIP_TTA_HELP = "average the predictions for an image and its mirror image"

IMAGES = ImageSpec(size=224)
RANDOM_CROP = v2.RandomResizedCrop(IMAGES.size)  # used for its random parameters only


def add_arguments(parser: cli.ArgumentParser) -> None:
    """Add the flags of this task."""
    help = f"a torchvision model, such as resnet50, timm:NAME, {' or '.join(EXAMPLES)}"
    parser.group("model").add_argument("--arch", default="resnet18", help=help)
    models.add_timm_arguments(parser)
    parser.group("data").add_argument(
        "--decode",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="where JPEG files are decoded (default: on the GPU if the CPU cores are too few)",
    )
    parser.group("optimization").add_argument(
        "--class-weights", action="store_true", help="weigh samples so that classes count equally"
    )
    add = parser.group("data").add_argument
    alpha = cli.number_type(float, 0, math.nextafter(1000, 1001), "a number from 0 to 1000")
    help = "blend images, such as 0.2 (default: 0, not at all)"
    add("--mixup", type=alpha, default=0.0, metavar="ALPHA", help=help)
    help = "paste parts of images, such as 1.0 (default: 0, not at all)"
    add("--cutmix", type=alpha, default=0.0, metavar="ALPHA", help=help)
    help = "probability that a part of an image is erased"
    add("--random-erasing", type=cli.probability, default=0.0, metavar="P", help=help)
    help = "probability that an image is mirrored, for --data"
    add("--hflip", type=cli.probability, default=0.5, metavar="P", help=help)
    add("--auto-augment", choices=augmentation.POLICIES, help="torchvision's policy, for --data")
    help = "write precision, recall and F1 of each class, a confusion matrix and the top-5 accuracy"
    parser.group("run").add_argument("--report", action="store_true", help=help)
    parser.group("run").add_argument("--flip-tta", action="store_true", help=FLIP_TTA_HELP)


def check_arguments(parser: cli.ArgumentParser, args: argparse.Namespace) -> None:
    """Stop with an error message if flags contradict each other; set the model's options."""
    models.set_model_options(parser, args, default_image(args))
    if args.decode == "gpu" and (args.dummy or args.data is None or idx.is_idx(args.data)):
        parser.error("--decode gpu is for the JPEG files of --data")
    if args.decode == "gpu" and args.skip_broken:
        parser.error("--skip-broken needs files that the CPU decodes; leave out --decode gpu")
    if args.class_weights and args.dummy:
        parser.error("--class-weights is for the classes of training data, not for --dummy")
    if (args.mixup or args.cutmix or args.random_erasing) and args.dummy:
        parser.error("--mixup, --cutmix and --random-erasing are for data, not for --dummy")
    if args.auto_augment and (args.data is None or args.decode == "gpu"):
        parser.error("--auto-augment is for --data, and images that are decoded on the CPU")
    if idx.is_idx(args.data) and (args.static_shapes or args.interpolation == "bicubic"):
        parser.error(
            "an --image-size that grows, and --interpolation bicubic, are not for IDX files"
        )
    if args.report and args.dummy:
        parser.error("--report is about validation data, which --dummy has none of")


def default_image(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the ImageSpec by IMAGES and --data, which the flags override."""
    changes = IMAGES.changes()
    if idx.is_idx(args.data):
        size = idx.image_size(args.data)
        return changes | {"size": size, "crop_fraction": 1.0, "interpolation": "bilinear"}
    if args.data is not None or args.dummy:
        return changes
    if args.arch.startswith(models.PREFIX):
        return changes | {"size": Digits.SIZE}
    return changes if args.image_size else {}  # the digits' own size, Digits.SIZE


def build_model(arch: str, num_classes: int, **options: Any) -> nn.Module:
    """Return an untrained classification model: (N, 3, H, W) -> (N, num_classes).

    Args:
        arch: a torchvision model, timm:NAME, or one of engine/small_models.py.
        options: of a timm model; see `models.build_timm_model`.
    """
    if not num_classes:
        raise UserError(
            "the data has no classes: give the data sets of build_datasets, in task.py, an "
            "attribute .classes, the list of the classes' names"
        )
    if arch.startswith(models.PREFIX):
        return models.build_timm_model(arch, num_classes, **options)
    if model := build_small_model(arch, num_classes):
        return model
    names = torchvision.models.list_models(module=torchvision.models)
    if arch not in names:
        nearest = get_close_matches(arch, names, n=3, cutoff=0.0)
        raise UserError(
            f"--arch {arch} is not one of torchvision's {len(names)} classification models; "
            f"the nearest are {', '.join(nearest)}"
        )
    return torchvision.models.get_model(arch, weights=None, num_classes=num_classes)


def build_datasets(args: argparse.Namespace) -> tuple[SizedDataset, SizedDataset]:
    """Return the training and the validation set of (image, label), each with ``.classes``.

    Training samples have further elements for --class-weights, --mixup and the like; see `prepare`.
    """
    train_set: Any
    train_set, val_set = read_datasets(args)
    if args.eval_only:  # they are the same, and nothing is trained
        return train_set, val_set
    if args.image_size:
        schedule = SizeSchedule(*parse_size(args.image_size), args.epochs)
        if schedule.first != schedule.last:
            distributed.print_on_rank_zero(f"--image-size {args.image_size}: {schedule.describe()}")
            train_set = ProgressiveDataset(train_set, schedule)
    if args.auto_augment:
        train_set = augmentation.AutoAugmentedDataset(train_set, args.auto_augment)
    if args.class_weights:
        train_set = WeightedDataset(train_set)
    if args.mixup or args.cutmix or args.random_erasing:
        train_set = augmentation.MixedDataset(
            train_set, args.mixup, args.cutmix, args.random_erasing
        )
    return train_set, val_set


def read_datasets(args: argparse.Namespace) -> tuple[SizedDataset, SizedDataset]:
    """Return the training and the validation set of (image, label).

    --data is a folder ``train/CLASS/IMAGE`` and ``val/CLASS/IMAGE``, or one of IDX files, such as
    Fashion-MNIST's; the default is the digits that come with the project. Images are (3, H, W),
    float or uint8, or encoded files, which the data loader decodes (engine/data/images.py).
    With --eval-only, the validation set takes the place of the training set, which is not read.

    Raises UserError if the folder has another structure.
    """
    spec = ImageSpec(**args.model_options.get("image", {}))
    if args.data is None:
        size = spec.size if args.model_options else Digits.SIZE  # see `default_image`
        return Digits(train=True, size=size), Digits(train=False, size=size)
    if idx.is_idx(args.data):
        eval_size = spec.for_eval().size
        if args.eval_only:
            test_set = idx.IdxImages(args.data, False, eval_size)
            return test_set, test_set
        idx_set = idx.IdxImages(args.data, True, spec.size, args.hflip)
        return idx_set, idx.IdxImages(args.data, False, eval_size, classes=idx_set.classes)
    required = ("val",) if args.eval_only else ("train", "val")
    for folder in (args.data, *(args.data / split for split in required)):
        if not folder.is_dir():
            raise UserError(f"--data {args.data}: there is no folder {folder}; it takes {LAYOUT}")
    on_cpu = args.auto_augment or spec.interpolation != "bilinear"  # the GPU's is bilinear
    decode = choose_decoder("cpu" if on_cpu else args.decode, args.skip_broken)
    to_center = partial(center_crop, spec=spec.for_eval())
    to_random = partial(random_crop, spec=spec, hflip=args.hflip)
    classes = None
    if not args.eval_only:
        train_set = Images(args.data / "train", to_random, decode=decode)
        classes = train_set.classes
        if len(classes) == 1:
            raise UserError(f"--data {args.data} has one class, {classes[0]}: it takes {LAYOUT}")
    val_set = Images(args.data / "val", to_center, decode=decode, classes=classes)
    warn_if_enlarged(val_set.samples, round(spec.for_eval().size / spec.crop_fraction))
    if args.eval_only:
        train_set = val_set
    return train_set, val_set


def prepare(batch: list[Tensor]) -> tuple[Tensor, Any]:
    """Return the model's input and the loss's targets for a batch that is on the device.

    Crops of files are uint8 and are normalized here; the digits already are. The targets are
    labels; in training with --class-weights, --mixup or the like, a list of labels and weights.
    """
    pixels, labels, *extra = batch
    return augmentation.mix(images.normalize(pixels), labels, extra)


def criterion(
    output: Tensor, targets: Tensor | augmentation.Targets, label_smoothing: float = 0.0
) -> Tensor:
    """Return the mean cross entropy of the logits (N, num_classes) and the labels (N,).

    It is divided by the number of samples, not by the sum of their weights or the number of those
    with labels, which differ between processes: so the mean over processes is that of the batch.
    """

    def losses(labels: Tensor) -> Tensor:  # of each sample
        return F.cross_entropy(output, labels, reduction="none", label_smoothing=label_smoothing)

    if isinstance(targets, Tensor):
        return losses(targets).mean()
    weighted = [weights * losses(labels) for labels, weights in targets]
    return torch.stack(weighted).sum(dim=0).mean()


class Metrics:
    """Loss and accuracy of the validation set, exact for any number of processes."""

    def __init__(self, num_classes: int, device: torch.device, args: argparse.Namespace) -> None:
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)
        self.report = ClassReport(num_classes, device) if args.report else None

    def reset(self) -> None:
        """Clear the totals."""
        self.totals.zero_()
        if self.report:
            self.report.reset()

    def update(self, output: Tensor, targets: Tensor) -> None:
        """Add a batch: the sum of its losses, its correct predictions, its size."""
        if not isinstance(targets, Tensor) or targets.ndim > 1:
            raise UserError("a sample to validate on is (image, class number), without weight")
        size = targets.new_full((), len(targets), dtype=torch.int64)
        loss = criterion(output.float(), targets) * size  # their sum, without label smoothing
        correct = (output.argmax(dim=1) == targets).sum()
        self.totals += torch.stack([loss.double(), correct.double(), size.double()])
        if self.report:
            self.report.update(output, targets)

    def compute(self) -> dict[str, float]:
        """Return val_loss and val_accuracy (0 to 1) over all processes; every process calls it."""
        dist.all_reduce(self.totals)
        loss, correct, count = self.totals.tolist()
        results = {"val_loss": loss / count, "val_accuracy": correct / count}
        if self.report:
            results |= self.report.compute()
        return results


def random_crop(height: int, width: int, spec: ImageSpec = IMAGES, hflip: float = 0.5) -> Crop:
    """Return a random part of an image, possibly mirrored, resized to the square of `spec.size`."""
    box = RANDOM_CROP.make_params([torch.empty(1, height, width, device="meta")])
    rows = Span(start=box["top"], length=box["height"], resized=spec.size)
    columns = Span(start=box["left"], length=box["width"], resized=spec.size)
    flip = torch.rand(1).item() < hflip
    return Crop(rows, columns, spec.size, flip, spec.interpolation)


def center_crop(height: int, width: int, spec: ImageSpec = IMAGES) -> Crop:
    """Return the central square of `spec.size` pixels, such as 224 of a shorter side of 256."""
    shorter = min(height, width)
    rows, columns = (center_span(side, shorter, spec) for side in (height, width))
    return Crop(rows, columns, spec.size, interpolation=spec.interpolation)


def center_span(side: int, shorter: int, spec: ImageSpec) -> Span:
    """Return the central part of a side of `side` pixels; the shorter side has `shorter`."""
    length = min(side, images.MAX_RATIO * shorter)  # as `images.trim`
    resized = int(spec.size / spec.crop_fraction) * length // shorter
    first = round((resized - spec.size) / 2)
    return Span(start=(side - length) // 2, length=length, resized=resized, first=first)


def read_center_crop(path: Path, spec: ImageSpec = IMAGES) -> Tensor:
    """Return the central crop of an image file, as in validation: uint8 (3, size, size)."""
    encoded = images.read_encoded(str(path), partial(center_crop, spec=spec))
    return crop_and_resize(images.decode(encoded), encoded.crop)


@torch.no_grad()
def show(
    model: nn.Module,
    val_set: Digits | Images,
    metrics: Metrics,
    output: Path,
    epoch: int | None = None,
) -> Path:
    """Write `output`/validation/epoch_NNN.png (eval_only.png without an epoch); return its path.

    It shows eight samples from across the set with the most likely class and the true one.
    --report adds its files to `output`.
    """
    pixels, labels = image_grid.sample_evenly(val_set, 8)
    inputs, _ = prepare([pixels.to(next(model.parameters()).device), labels])
    with eval_mode(model):
        probabilities, predictions = model(inputs).float().softmax(dim=1).max(dim=1)
    captions = []
    for probability, prediction, label in zip(
        probabilities.tolist(), predictions.tolist(), labels.tolist(), strict=True
    ):
        is_correct = prediction == label
        truth = "" if is_correct else f"\nis {val_set.classes[label]}"
        captions.append((f"{val_set.classes[prediction]}: {probability:.2f}{truth}", is_correct))
    if metrics.report:
        metrics.report.write(output, class_names(val_set))
    path = image_grid.image_path(output, epoch)
    image_grid.save_image_grid(path, inputs, captions)
    return path


def add_predict_arguments(parser: cli.ArgumentParser) -> None:
    """Add the flags of predict.py that belong to this task."""
    parser.add_argument(
        "--top", type=cli.positive_int, default=5, metavar="N", help="number of classes to print"
    )
    parser.add_argument("--flip-tta", action="store_true", help=FLIP_TTA_HELP)


class Predictor:
    """Inference on one image file: its most likely classes with their probabilities.

    Args:
        model: in eval mode.
        metadata: that of the checkpoint.
        args: the flags of predict.py.
    """

    def __init__(self, model: nn.Module, metadata: dict, args: argparse.Namespace) -> None:
        self.model = FlipAverage(model) if args.flip_tta else model
        self.classes = metadata["classes"]
        self.top = args.top
        self.device = next(model.parameters()).device
        image = metadata.get("model_options", {}).get("image", {})
        may_be_digits = not metadata["data"] and self.classes == [*Digits.classes]
        if may_be_digits and is_validation_set(Digits(train=False), metadata):
            self.read = partial(Digits.read, size=image.get("size", Digits.SIZE))
        else:
            self.read = partial(read_center_crop, spec=ImageSpec(**image).for_eval())

    def __call__(self, path: Path) -> list[tuple[str, float]]:
        """Return the classes of the image at `path`, most likely first."""
        pixels = self.read(path).unsqueeze(0).to(self.device)
        inputs, _ = prepare([pixels, pixels.new_zeros(1, dtype=torch.long)])
        probabilities = self.model(inputs).softmax(dim=1)[0]
        values, indices = probabilities.sort(descending=True)
        pairs = zip(indices.tolist(), values.tolist(), strict=True)
        return [(self.classes[index], value) for index, value in pairs][: self.top]


def dummy_batch(batch_size: int, device: torch.device, **options: Any) -> list[Tensor]:
    """Return one synthetic batch on the device, of the shape that these options of a model set."""
    size = ImageSpec(**options.get("image", {})).size
    pixels = torch.randn(batch_size, 3, size, size, device=device)
    return [pixels, torch.randint(DUMMY_CLASSES, (batch_size,), device=device)]


def enlarge(digits: Tensor, size: int) -> Tensor:
    """Resize digits (N, 8, 8), from 0 to 1, and normalize them: (N, 3, size, size)."""
    enlarged = F.interpolate(digits.unsqueeze(1), size=(size, size), mode="bilinear")
    return v2.functional.normalize(enlarged.expand(-1, 3, -1, -1), MEAN, STD)


class Digits(Dataset):
    """1,797 handwritten digits of 8 x 8 pixels (README.md), enlarged to 32 x 32, or --image-size.

    Every fifth is for validation; the others are shifted by up to an eighth each time.
    """

    classes = tuple("0123456789")
    SIZE = 32

    def __init__(self, train: bool, size: int = SIZE) -> None:
        file = np.load(Path(__file__).parent / "data" / "digits.npz", allow_pickle=False)
        is_val = np.arange(len(file["labels"])) % 5 == 0
        chosen = ~is_val if train else is_val
        self.images = enlarge(torch.from_numpy(file["images"][chosen]).float().div(16), size)
        self.labels = torch.from_numpy(file["labels"][chosen]).long()
        background = v2.functional.normalize(torch.zeros(3, 1, 1), MEAN, STD).flatten().tolist()
        shift = v2.RandomCrop(size, padding=size // 8, fill=background)
        self.transform = shift if train else v2.Identity()

    @staticmethod
    def read(path: Path, size: int = SIZE) -> Tensor:
        """Return an image file, bright on dark, in the form of these digits: float (3, H, W)."""
        image = v2.functional.rgb_to_grayscale(read_image(path)) / 255
        return enlarge(F.adaptive_avg_pool2d(image, 8), size)[0]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[index]), self.labels[index]


class Images(Dataset):
    """Folder of CLASS/IMAGE, whose samples are encoded files with the crop to make of them.

    Args:
        choose_crop: returns the crop of an image of the given height and width.
        decode: "cpu" or "gpu", for the data loader.
        classes: class names in the order of their labels; by default the folder's own, sorted.
    """

    def __init__(
        self,
        root: Path,
        choose_crop: Callable[[int, int], Crop],
        decode: str = "cpu",
        classes: list[str] | None = None,
    ) -> None:
        self.choose_crop = choose_crop
        self.decode = decode
        self.samples, self.classes = list_classes(root, classes)
        self.shard_sizes = getattr(self.samples, "shard_sizes", ())  # if they are read by URL
        self.fingerprint = fingerprint.of_files(root, self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def labels(self) -> list[int]:
        """The labels of all samples."""
        return list_labels(self.samples)

    def reorder_classes(self, classes: list[str]) -> None:
        """Change the labels to the positions in `classes`, which include all of its own."""
        labels = [classes.index(name) for name in self.classes]
        self.samples = relabel(self.samples, labels)
        self.classes = list(classes)

    def __getitem__(self, index: int) -> tuple[Encoded, int]:
        path, label = self.samples[index]
        return images.read_encoded(path, self.choose_crop), label

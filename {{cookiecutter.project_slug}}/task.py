"""What is trained: classification of images. Replace this file to train something else.

main.py and predict.py ask for the names below, and know nothing else of the task.
"""

from argparse import Namespace
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from engine import images, sheet
from engine.errors import UserError
from engine.images import MEAN, STD, Crop, Encoded, Span, cut, decode, normalise, read, read_image
from engine.training import evaluation

METRIC = "val_accuracy"
LAYOUT = "train/CLASS/IMAGE and val/CLASS/IMAGE"
BATCH_SIZE = 32
DUMMY_CLASSES = 1000

RANDOM_CROP = v2.RandomResizedCrop(224)  # asked for its parameters alone

prepare = normalise
gpu_loader = images.gpu_loader  # for --decode gpu


def build_model(arch: str, num_classes: int) -> nn.Module:
    """torchvision's classification model `arch`, untrained: (N, 3, H, W) → (N, num_classes)."""
    names = torchvision.models.list_models(module=torchvision.models)
    if arch not in names:
        nearest = get_close_matches(arch, names, n=3, cutoff=0.0)
        raise UserError(
            f"--arch {arch} is not one of torchvision's {len(names)} classification models; "
            f"the nearest are {', '.join(nearest)}"
        )
    return torchvision.models.get_model(arch, weights=None, num_classes=num_classes)


def build_datasets(data: Path | None) -> tuple[Dataset, Dataset]:
    """The training and the validation set of (image, label), each with ``.classes``.

    Images are float (3, H, W), or files that are still to be decoded (engine/images.py).

    `data` is a folder ``train/CLASS/IMAGE`` and ``val/CLASS/IMAGE``; without it, the digits that
    come with the project. Raises UserError for a folder of another shape.
    """
    if data is None:
        return Digits(train=True), Digits(train=False)
    for folder in (data, data / "train", data / "val"):
        if not folder.is_dir():
            raise UserError(f"--data {data}: there is no folder {folder}; it takes {LAYOUT}")
    train_set = Images(data / "train", random_crop)
    return train_set, Images(data / "val", central_crop, classes=train_set.classes)


def random_crop(height: int, width: int) -> Crop:
    """A part of random size, shape and place, mirrored or not, as 224 × 224 pixels."""
    box = RANDOM_CROP.make_params([torch.empty(1, height, width, device="meta")])
    rows, columns = Span(box["top"], box["height"], 224), Span(box["left"], box["width"], 224)
    return Crop(rows, columns, 224, flip=torch.rand(1).item() < 0.5)


def central_crop(height: int, width: int) -> Crop:
    """The middle 224 × 224 pixels, once the shorter side has 256."""
    sides = (height, width)
    resized = [256 * side // min(sides) for side in sides]
    rows, columns = (
        Span(0, side, to, round((to - 224) / 2)) for side, to in zip(sides, resized, strict=True)
    )
    return Crop(rows, columns, 224)


def read_central(path: Path) -> Tensor:
    """The central crop of the image at `path`, as in validation: uint8 (3, 224, 224)."""
    encoded = read(str(path), central_crop)
    return cut(decode(encoded), encoded.crop)


def criterion(output: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The mean cross entropy."""
    return F.cross_entropy(output, targets, label_smoothing=label_smoothing)


class Metrics:
    """Loss and accuracy of the validation set, exact however processes share it out."""

    def __init__(self, device: torch.device) -> None:
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)

    def reset(self) -> None:
        """Forgets what it has seen."""
        self.totals.zero_()

    def update(self, output: Tensor, targets: Tensor) -> None:
        """Adds a batch: the sum of its losses, its hits, its size."""
        losses = F.cross_entropy(output.float(), targets, reduction="sum")
        hits = (output.argmax(dim=1) == targets).sum()
        size = hits.new_tensor(len(targets))
        self.totals += torch.stack([losses.double(), hits.double(), size.double()])

    def compute(self) -> dict[str, float]:
        """val_loss and val_accuracy (0 to 1) of what all processes have seen, on each of them."""
        dist.all_reduce(self.totals)
        losses, hits, count = self.totals.tolist()
        return {"val_loss": losses / count, METRIC: hits / count}


@torch.no_grad()
def show(
    model: nn.Module,
    val_set: Dataset,
    metrics: Metrics,
    output: Path,
    epoch: int | None = None,
    count: int = 8,
) -> Path:
    """Writes `output`/validation/epoch_NNN.png; without an epoch, eval_only.png. Returns its path.

    It has `count` samples from all over the set, each with its likeliest class and the true one.
    """
    images, labels = sheet.spread(val_set, count)
    images = prepare(images.to(next(model.parameters()).device))
    with evaluation(model):
        shares, numbers = model(images).float().softmax(dim=1).max(dim=1)
    words = []
    for share, number, label in zip(shares, numbers.tolist(), labels.tolist(), strict=True):
        truth = "" if number == label else f", is {val_set.classes[label]}"
        words.append((f"{val_set.classes[number]}: {share:.2f}{truth}", not truth))
    path = sheet.path_of(output, epoch)
    sheet.write(path, images, words)
    return path


class Predictor:
    """For predict.py: the likeliest classes of an image file, with their probabilities.

    Args:
        model: in eval mode.
        about: what its checkpoint says of it.
        args: predict.py's.
    """

    def __init__(self, model: nn.Module, about: dict, args: Namespace) -> None:
        self.model, self.classes, self.top = model, about["classes"], args.top
        self.device = next(model.parameters()).device
        self.read = read_central if about["data"] else Digits.read

    def __call__(self, path: Path) -> list[tuple[str, float]]:
        images = self.read(path).unsqueeze(0).to(self.device)
        shares, numbers = self.model(prepare(images)).softmax(dim=1)[0].sort(descending=True)
        pairs = zip(numbers.tolist(), shares.tolist(), strict=True)
        return [(self.classes[number], share) for number, share in pairs][: self.top]


def dummy_batch(batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One batch in ImageNet's shape, made on the device."""
    images = torch.randn(batch_size, 3, 224, 224, device=device)
    return images, torch.randint(DUMMY_CLASSES, (batch_size,), device=device)


def enlarge(images: Tensor) -> Tensor:
    """Digits (N, 8, 8), from 0 to 1, as models take them: (N, 3, 32, 32), normalised."""
    images = F.interpolate(images.unsqueeze(1), size=(32, 32), mode="bilinear")
    return v2.functional.normalize(images.expand(-1, 3, -1, -1), MEAN, STD)


class Digits(Dataset):
    """1,797 handwritten digits of 8 × 8 pixels (data/README.md), enlarged to 32 × 32.

    Every fifth is for validation; the others are shifted by up to 4 pixels each time they are read.
    """

    classes = tuple("0123456789")

    def __init__(self, train: bool) -> None:
        file = np.load(Path(__file__).parent / "data" / "digits.npz", allow_pickle=False)
        chosen = (np.arange(len(file["labels"])) % 5 != 0) == train
        images = torch.from_numpy(file["images"][chosen]).float().div(16)
        self.images = enlarge(images)
        self.labels = torch.from_numpy(file["labels"][chosen]).long()
        background = v2.functional.normalize(torch.zeros(3, 1, 1), MEAN, STD).flatten().tolist()
        self.transform = v2.RandomCrop(32, padding=4, fill=background) if train else v2.Identity()

    @staticmethod
    def read(path: Path) -> Tensor:
        """The image at `path`, light on dark, in the form of these: float (3, 32, 32)."""
        image = v2.functional.rgb_to_grayscale(read_image(path)) / 255
        return enlarge(F.adaptive_avg_pool2d(image, 8))[0]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[index]), self.labels[index]


class Images(ImageFolder):
    """A folder of CLASS/IMAGE; a file that is no readable image ends the run with its path.

    Args:
        choose: what is cropped out of an image of that height and width.
        classes: those to number by, in order; by default the folder's own, sorted.
    """

    def __init__(
        self, root: Path, choose: Callable[[int, int], Crop], classes: list[str] | None = None
    ) -> None:
        self.choose, self.known = choose, classes
        try:
            super().__init__(root, allow_empty=True)
        except FileNotFoundError:
            raise UserError(f"{root} holds no folder: make one for each class") from None
        if not self.samples:
            raise UserError(f"{root} holds no images (CLASS/IMAGE.jpg or .png)")

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        """The classes and their numbers; those of the training set where it was given."""
        found, numbers = super().find_classes(directory)
        if self.known is None:
            return found, numbers
        unknown = sorted(set(found) - set(self.known))
        if unknown:
            raise UserError(
                f"{directory} has classes that train/ does not have: {', '.join(unknown)}; "
                "remove them, or add them to train/"
            )
        return self.known, {name: number for number, name in enumerate(self.known)}

    def __getitem__(self, index: int) -> tuple[Encoded, int]:
        path, label = self.samples[index]
        return read(path, self.choose), label

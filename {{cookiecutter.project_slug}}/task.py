"""What is trained: classification of images. Replace this file to train something else.

main.py asks for the names below and knows nothing else of the task.
"""

import io
from difflib import get_close_matches
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from engine.errors import UserError

METRIC = "val_accuracy"
NO_TOTALS = torch.zeros(3, dtype=torch.float64)
DUMMY_CLASSES = 1000

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RGB = ImageReadMode.RGB

criterion = nn.CrossEntropyLoss()


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
    """The training and the validation set of (image (3, H, W), label), each with ``.classes``.

    Images from files are uint8: loading processes send a quarter of what floats would be.

    `data` is a folder ``train/CLASS/IMAGE`` and ``val/CLASS/IMAGE``; without it, the digits that
    come with the project. Raises UserError for a folder of another shape.
    """
    if data is None:
        return Digits(train=True), Digits(train=False)
    for folder in (data, data / "train", data / "val"):
        if not folder.is_dir():
            raise UserError(
                f"--data {data}: there is no folder {folder}; it takes train/CLASS/IMAGE and "
                "val/CLASS/IMAGE"
            )
    train = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
    val = [v2.Resize(256, antialias=True), v2.CenterCrop(224)]
    train_set = Images(data / "train", v2.Compose(train))
    return train_set, Images(data / "val", v2.Compose(val), classes=train_set.classes)


def prepare(images: Tensor) -> Tensor:
    """What the model takes of a batch on its device: uint8 (N, 3, H, W) normalised, floats kept."""
    if images.is_floating_point():
        return images
    mean, std = _statistics(images.device)
    return torch.sub(images, mean).div_(std)


@cache  # or each batch would wait for a copy to the device
def _statistics(device: torch.device) -> Tensor:
    return 255 * torch.tensor([MEAN, STD], device=device).view(2, 3, 1, 1)


def totals(output: Tensor, target: Tensor) -> Tensor:
    """What one batch adds to the validation: its summed loss, its hits, its size; float64 (3,)."""
    loss = F.cross_entropy(output.float(), target, reduction="sum")
    hits = (output.argmax(dim=1) == target).sum()
    return torch.stack([loss.double(), hits.double(), hits.new_tensor(len(target)).double()])


def results(totals: Tensor) -> dict[str, float]:
    """val_loss and val_accuracy (0 to 1) from the totals of the whole validation set."""
    loss, hits, count = totals.tolist()
    return {"val_loss": loss / count, METRIC: hits / count}


def dummy_batch(batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One batch in ImageNet's shape, made on the device."""
    images = torch.randn(batch_size, 3, 224, 224, device=device)
    return images, torch.randint(DUMMY_CLASSES, (batch_size,), device=device)


class Digits(Dataset):
    """1,797 handwritten digits of 8 × 8 pixels (data/README.md), enlarged to 32 × 32.

    Every fifth is for validation; the others are shifted by up to 4 pixels each time they are read.
    """

    classes = tuple("0123456789")

    def __init__(self, train: bool) -> None:
        file = np.load(Path(__file__).parent / "data" / "digits.npz", allow_pickle=False)
        chosen = (np.arange(len(file["labels"])) % 5 != 0) == train
        images = torch.from_numpy(file["images"][chosen]).float().div(16).unsqueeze(1)
        images = F.interpolate(images, size=(32, 32), mode="bilinear").expand(-1, 3, -1, -1)
        self.images = v2.functional.normalize(images, MEAN, STD)
        self.labels = torch.from_numpy(file["labels"][chosen]).long()
        background = v2.functional.normalize(torch.zeros(3, 1, 1), MEAN, STD).flatten().tolist()
        self.transform = v2.RandomCrop(32, padding=4, fill=background) if train else v2.Identity()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[index]), self.labels[index]


class Images(ImageFolder):
    """A folder of CLASS/IMAGE; a file that is no readable image ends the run with its path.

    Args:
        classes: those to number by, in order; by default the folder's own, sorted.
    """

    def __init__(
        self, root: Path, transform: v2.Transform, classes: list[str] | None = None
    ) -> None:
        self.known = classes
        try:
            super().__init__(root, transform, loader=read_image, allow_empty=True)
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


def read_image(path: str) -> Tensor:
    """The image at `path`, as RGB: uint8 (3, H, W)."""
    try:
        data = Path(path).read_bytes()
        with Image.open(io.BytesIO(data)) as image:  # reads no more than the header
            if image.format == "JPEG" and image.mode in ("L", "RGB"):  # half of PIL's time
                return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), RGB)
            # PIL warns of transparent palettes unless they go through RGBA.
            mode = "RGBA" if "transparency" in image.info else "RGB"
            return v2.functional.pil_to_tensor(image.convert(mode).convert("RGB"))
    except (OSError, RuntimeError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = str(error).splitlines()[0].split(", ")[-1]  # torchvision's begins with its source
        raise UserError(f"{path} can't be read as an image ({reason}); mend or remove it") from None

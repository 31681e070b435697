"""What is trained: segmentation of images. Replace this file to train something else.

main.py and predict.py ask for the names below, and know nothing else of the task.
"""

import colorsys
import csv
import os
import sys
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten

import numpy as np
import torch
import torch.distributed as dist
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from engine import distributed, sheet
from engine.check import sample
from engine.errors import UserError, first_few
from engine.images import MEAN, UNREADABLE, normalise, read_image
from engine.training import evaluation

METRIC = "val_miou"
LAYOUT = "images/ and annotations/ with training/ and validation/ in each, and classes.txt"
BATCH_SIZE = 16
DUMMY_CLASSES = 150

SUFFIXES = (".jpg", ".jpeg", ".png")
IGNORED = 255  # in masks: a pixel that counts neither in the loss nor in the metric
SIZE = 512  # pixels, of the crops to train on and of the longer side in validation
AUX_WEIGHT = 0.5  # of the loss of a model's auxiliary head
GREY = tuple(round(255 * value) for value in MEAN)  # 0 once it is normalised

prepare = normalise


def build_model(arch: str, num_classes: int) -> nn.Module:
    """The segmentation model `arch`, untrained: (N, 3, H, W) → scores (N, num_classes, H, W).

    Those of torchvision return a dict, with the scores as "out" and, from those with an auxiliary
    head, "aux".

    Args:
        arch: one of torchvision's, "unet" (the small one below), or "smp:DECODER:ENCODER", such as
            smp:deeplabv3plus:tu-xception65, one of segmentation-models-pytorch.
    """
    if arch == "unet":
        return UNet(num_classes)
    if arch.startswith("smp:"):
        return build_smp_model(arch, num_classes)
    names = torchvision.models.list_models(module=torchvision.models.segmentation)
    if arch not in names:
        nearest = get_close_matches(arch, [*names, "unet"], n=3, cutoff=0.0)
        raise UserError(
            f"--arch {arch} is not unet, smp:DECODER:ENCODER or one of torchvision's {len(names)} "
            f"segmentation models; the nearest are {', '.join(nearest)}"
        )
    auxiliary = {} if arch.startswith("lraspp") else {"aux_loss": True}
    return torchvision.models.get_model(
        arch, weights=None, weights_backbone=None, num_classes=num_classes, **auxiliary
    )


def build_smp_model(arch: str, num_classes: int) -> nn.Module:
    """The model that segmentation-models-pytorch makes of smp:DECODER:ENCODER, untrained."""
    try:
        import segmentation_models_pytorch as smp
    except ModuleNotFoundError as error:
        if error.name != "segmentation_models_pytorch":
            raise
        raise UserError(
            f"--arch {arch}: pip install segmentation-models-pytorch, or choose one of "
            "torchvision's, such as deeplabv3_resnet50"
        ) from None
    decoder, _, encoder = arch.removeprefix("smp:").partition(":")
    if encoder == "xception" and decoder.lower().startswith("deeplabv3"):
        encoder = "tu-xception65"  # that of the paper (Chen and others, 2018)
        if distributed.is_speaker():
            said = f"--arch {arch}: with {encoder}, as smp's own xception can't be dilated"
            print(said, file=sys.stderr, flush=True)
    try:
        model = smp.create_model(decoder, encoder, encoder_weights=None, classes=num_classes)
    except Exception as error:  # encoders that don't suit a decoder raise anything
        reason = shorten(str(error).strip('"') or "the encoder does not suit the decoder", 160)
        raise UserError(f"--arch {arch} can't be made ({reason}); name another") from None
    return split_norms(model)


def split_norms(model: nn.Module) -> nn.Module:
    """Puts a plain batch norm and what followed in the place of each of timm's BatchNormAct2d.

    Apex's SyncBN would replace those, too, and lose the activation in which they end.
    """
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if isinstance(norm, _BatchNorm) and hasattr(norm, "act"):
                options = norm.eps, norm.momentum, norm.affine, norm.track_running_stats
                plain = nn.BatchNorm2d(norm.num_features, *options)
                plain.load_state_dict(norm.state_dict(), strict=False)  # which may have act's
                parts = {"norm": plain, "drop": norm.drop, "act": norm.act}
                setattr(parent, name, nn.Sequential(OrderedDict(parts)))
    return model


def build_datasets(data: Path | None, ignore_index: int | None = None) -> tuple[Dataset, Dataset]:
    """The training and the validation set of (image, mask), each with ``.classes``.

    Images are uint8 (3, H, W). Masks are uint8 (H, W) and hold the class of each pixel, or IGNORED.

    Args:
        data: a folder as read_classes and Pairs describe it; without it, digits on a canvas, from
            the set that comes with the project.
        ignore_index: the label in the files that stands for no class, whether or not it has a
            name (255 always does); by default, 0 of ADE20K.

    Raises UserError for a folder of another shape.
    """
    if data is None:
        if ignore_index is not None:
            raise UserError("--ignore-index is for the labels of --data, the digits' all count")
        return Digits(train=True), Digits(train=False)
    folders = [
        [data / kind / split for kind in ("images", "annotations")]
        for split in ("training", "validation")
    ]
    for folder in (data, *folders[0], *folders[1]):
        if not folder.is_dir():
            raise UserError(f"--data {data}: there is no folder {folder}; it takes {LAYOUT}")
    labels = read_classes(data, ignore_index)
    train, val = folders
    return Pairs(*train, *labels, augment), Pairs(*val, *labels, letterbox)


def read_classes(data: Path, ignore_index: int | None) -> tuple[list[str], Tensor]:
    """The names of the classes, and the class of each label (256,): IGNORED, or -1 for none.

    `data`/classes.txt has a name in each line, those of the labels 0, 1, 2 and so on. ADE20K's
    objectInfo150.txt will do as well: there 0 stands for whatever has no name.
    """
    own, ade20k = data / "classes.txt", data / "objectInfo150.txt"
    if own.is_file():
        try:
            names = own.read_text(encoding="utf-8-sig").rstrip().splitlines()
        except UnicodeDecodeError:
            raise UserError(f"{own} is not UTF-8; save it as that") from None
    elif ade20k.is_file():
        lines = ade20k.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[1:]
        names = ["other", *(line.strip().split("\t")[-1] for line in lines)]
        ignore_index = 0 if ignore_index is None else ignore_index
    else:
        raise UserError(f"{own} is missing: it has the name of a class in each line, from label 0")
    if not 0 < len(names) <= IGNORED or not all(map(str.strip, names)):
        raise UserError(f"{own} must hold 1 to {IGNORED} names, one in each line")
    ignored = {IGNORED, IGNORED if ignore_index is None else ignore_index}
    if max(ignored) > 255:
        raise UserError(f"--ignore-index {ignore_index}: labels are of 8 bits, from 0 to 255")
    counted = [label for label in range(len(names)) if label not in ignored]
    if not counted:
        raise UserError(
            f"--data {data}: its only label with a name, {ignore_index}, is ignored "
            "(--ignore-index): name the others, or ignore another"
        )
    numbers = torch.full((256,), -1)
    numbers[counted] = torch.arange(len(counted))
    numbers[list(ignored)] = IGNORED
    return [names[label] for label in counted], numbers


def criterion(
    output: Tensor | Mapping[str, Tensor], masks: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """The mean cross entropy of the pixels that count, with that of an auxiliary head if any."""
    outputs = output if isinstance(output, Mapping) else {"out": output}
    counted = (masks != IGNORED).sum().clamp(min=1)  # a crop may lie in nothing but ignored pixels
    # Their sum is taken here: torch's own has no deterministic kernel for pixels on a GPU.
    options = {"ignore_index": IGNORED, "label_smoothing": label_smoothing, "reduction": "none"}
    losses = {
        name: F.cross_entropy(scores, masks.long(), **options).sum() / counted
        for name, scores in outputs.items()
    }
    return losses["out"] + AUX_WEIGHT * losses.get("aux", 0.0)


class Metrics:
    """Loss and mean IoU of the validation set, exact however processes share it out.

    There is one confusion matrix, (true class, predicted class), of all pixels of the whole set.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)
        self.losses = torch.zeros((), dtype=torch.float64, device=device)

    def reset(self) -> None:
        """Forgets what it has seen."""
        self.confusion.zero_()
        self.losses.zero_()

    def update(self, output: Tensor | Mapping[str, Tensor], masks: Tensor) -> None:
        """Adds the pixels of a batch."""
        scores = scores_of(output).float()
        masks = masks.long()
        losses = F.cross_entropy(scores, masks, ignore_index=IGNORED, reduction="none")
        self.losses += losses.sum(dtype=torch.float64)
        counted = masks != IGNORED
        cells = len(self.confusion) * masks[counted] + scores.argmax(dim=1)[counted]
        counts = torch.bincount(cells, minlength=self.confusion.numel())
        self.confusion += counts.view_as(self.confusion)

    def compute(self) -> dict[str, float]:
        """val_loss and val_miou (0 to 1) of what all processes have seen, on each of them.

        Classes that are neither there nor predicted have no IoU, and are not in the mean.
        """
        dist.all_reduce(self.confusion)
        dist.all_reduce(self.losses)
        loss = self.losses / self.confusion.sum()
        return {"val_loss": loss.item(), METRIC: self.iou().nanmean().item()}

    def iou(self) -> Tensor:
        """Intersection over union of each class, float64; nan for one that is nowhere."""
        both = self.confusion.diag()
        return both.double() / (self.confusion.sum(0) + self.confusion.sum(1) - both)


def scores_of(output: Tensor | Mapping[str, Tensor]) -> Tensor:
    """The scores (N, num_classes, H, W) in what a model returns."""
    return output["out"] if isinstance(output, Mapping) else output


@torch.no_grad()
def show(
    model: nn.Module,
    val_set: Dataset,
    metrics: Metrics,
    output: Path,
    epoch: int | None = None,
    count: int = 4,
) -> Path:
    """Writes what an epoch has come to, into `output`/validation; returns the picture's path.

    epoch_NNN.csv has the IoU of each class, and its colour in epoch_NNN.png, which shows the first
    `count` samples in a row each: the image, the truth (white where it is ignored), the prediction.
    Without an epoch the files are called eval_only.
    """
    path = sheet.path_of(output, epoch)
    path.parent.mkdir(parents=True, exist_ok=True)
    palette = colours(len(val_set.classes))
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["class", "iou", "colour"])
        for number, (name, iou) in enumerate(zip(val_set.classes, metrics.iou(), strict=True)):
            colour = bytes(palette[number].tolist()).hex()
            writer.writerow([name, "" if iou.isnan() else iou.item(), f"#{colour}"])

    images, masks = sample(val_set, min(count, len(val_set)))
    device = next(model.parameters()).device
    with evaluation(model):
        predictions = scores_of(model(prepare(images.to(device)))).argmax(dim=1).cpu()
    rows = []
    for image, *labels in zip(images, masks, predictions, strict=True):
        rows += [image, *(overlay(image, kind, palette) for kind in labels)]
    enlarge = max(1, 192 // images.shape[-1])
    grid = torchvision.utils.make_grid(rows, nrow=3).permute(1, 2, 0).numpy()
    Image.fromarray(grid.repeat(enlarge, 0).repeat(enlarge, 1)).save(path)
    return path


def overlay(image: Tensor, labels: Tensor, palette: Tensor) -> Tensor:
    """The image, uint8 (3, H, W), behind the colours of its labels (H, W)."""
    return palette[labels.long()].permute(2, 0, 1).mul(0.7).add(image, alpha=0.3).byte()


def colours(count: int) -> Tensor:
    """`count` colours, of which the first is grey, and white for IGNORED: uint8 (256, 3)."""
    palette = torch.ones(256, 3)
    palette[0] = 0.3
    for index in range(1, count):  # hues by the golden ratio, so that they lie far apart
        hue, value = 0.618034 * index % 1, 0.9 - 0.3 * (index % 2)
        palette[index] = torch.tensor(colorsys.hsv_to_rgb(hue, 0.8, value))
    return (255 * palette).byte()


class Predictor:
    """For predict.py: the classes in an image file, with their shares of its pixels.

    For each it writes masks/NAME.png, whose pixels are the numbers of the classes, with their
    colours as its palette, and overlays/NAME.png; both are of the image's size.

    Args:
        model: in eval mode.
        about: what its checkpoint says of it.
        args: predict.py's, with the files as ``images``.
    """

    def __init__(self, model: nn.Module, about: dict, args: Namespace) -> None:
        self.model, self.classes, self.output = model, about["classes"], args.output
        self.device = next(model.parameters()).device
        self.side = SIZE if about["data"] else Digits.side
        self.palette = colours(len(self.classes))
        self.root = os.path.commonpath([os.path.abspath(path.parent) for path in args.images])
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            is_empty = not any(self.output.iterdir())
        except OSError as error:
            raise UserError(
                f"--output {self.output} can't be written ({error.strerror}): name another folder"
            ) from None
        if not is_empty:
            raise UserError(f"--output {self.output} holds something already: name a new folder")

    def __call__(self, path: Path) -> list[tuple[str, float]]:
        image = read_image(path)
        labels = self.predict(image)
        mask = Image.fromarray(labels.numpy())
        mask.putpalette(bytes(self.palette.flatten().tolist()))
        panel = overlay(image, labels, self.palette).permute(1, 2, 0).numpy()
        name = Path(os.path.relpath(path, self.root)).with_suffix(".png")
        for kind, picture in (("masks", mask), ("overlays", Image.fromarray(panel))):
            file = self.output / kind / name
            if file.exists():
                raise UserError(f"{path}: {file} is of another image of that name; rename one")
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                picture.save(file)
            except OSError as error:
                raise UserError(f"{file} can't be written ({error.strerror or error})") from None
        shares = labels.flatten().bincount() / labels.numel()
        present = shares.nonzero().flatten().tolist()
        found = [(self.classes[number], shares[number].item()) for number in present]
        return sorted(found, key=lambda pair: -pair[1])

    def predict(self, image: Tensor) -> Tensor:
        """The class of each pixel of an image, uint8 (3, H, W), seen as validation sees it."""
        height, width = image.shape[1:]
        mask = tv_tensors.Mask(torch.zeros(height, width, dtype=torch.uint8))
        square, mask = letterbox(tv_tensors.Image(image), mask, self.side)
        batch = square.as_subclass(Tensor).unsqueeze(0).to(self.device)
        labels = scores_of(self.model(prepare(batch))).argmax(dim=1, keepdim=True).byte().cpu()
        rows, columns = ((mask != IGNORED).sum(dim=dim).max() for dim in (0, 1))
        labels = labels[:, :, :rows, :columns]  # without the padding
        return F.interpolate(labels, size=(height, width), mode="nearest-exact")[0, 0]


def dummy_batch(batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One batch in the shape of ADE20K's crops, made on the device."""
    images = torch.randn(batch_size, 3, SIZE, SIZE, device=device)
    return images, torch.randint(DUMMY_CLASSES, (batch_size, SIZE, SIZE), device=device)


class Digits(Dataset):
    """Handwritten digits (data/README.md) on a canvas of 48 × 48 pixels, one in each quarter.

    The classes are the background and the ten digits. Every fifth digit is for validation, where
    each stands on one canvas only. A canvas for training is another one each time that it is read:
    it has the digit of its number, three others, and all in other places and sizes.
    """

    classes = ("background", *"0123456789")
    side = 48

    def __init__(self, train: bool) -> None:
        file = np.load(Path(__file__).parent / "data" / "digits.npz", allow_pickle=False)
        chosen = (np.arange(len(file["labels"])) % 5 != 0) == train
        self.digits = torch.from_numpy(file["images"][chosen]).float().div(16)
        self.labels = torch.from_numpy(file["labels"][chosen])
        self.train = train

    def __len__(self) -> int:
        return len(self.labels) if self.train else len(self.labels) // 4

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.train:
            others = torch.randint(len(self.labels), (3,)).tolist()
            return self.draw([index, *others], None)
        # In validation a canvas is always the same.
        return self.draw(range(4 * index, 4 * index + 4), torch.Generator().manual_seed(index))

    def draw(self, chosen: list[int], generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """The image and the mask of four digits."""
        image = torch.zeros(self.side, self.side)
        mask = torch.zeros(self.side, self.side, dtype=torch.uint8)
        quarter = self.side // 2
        for number, digit in enumerate(chosen):
            size = random(16, quarter + 1, generator)
            top = number // 2 * quarter + random(0, quarter - size + 1, generator)
            left = number % 2 * quarter + random(0, quarter - size + 1, generator)
            place = slice(top, top + size), slice(left, left + size)
            digits = self.digits[digit].expand(1, 1, -1, -1)
            image[place] = F.interpolate(digits, size=(size, size), mode="bilinear")[0, 0]
            mask[place] = (image[place] > 0.4) * (self.labels[digit] + 1)
        return (255 * image).byte().expand(3, -1, -1), mask


def random(low: int, high: int, generator: torch.Generator | None) -> int:
    """A number from `low` to `high` - 1."""
    return int(torch.randint(low, high, (), generator=generator))


class Pairs(Dataset):
    """Images and the PNG files of the same names that hold the label of each of their pixels.

    What is wrong with them ends the run with the file's path: names and sizes at once, the rest
    when a file is read.

    Args:
        classes, numbers: as read_classes gives them.
        transform: of an Image and a Mask, together.
    """

    def __init__(
        self,
        images: Path,
        annotations: Path,
        classes: list[str],
        numbers: Tensor,
        transform: v2.Transform,
    ) -> None:
        self.classes, self.numbers, self.transform = classes, numbers, transform
        paths = sorted(path for path in images.iterdir() if path.suffix.lower() in SUFFIXES)
        found = {path.stem: path for path in paths}
        masks = {path.stem: path for path in annotations.iterdir() if path.suffix == ".png"}
        if not found:
            raise UserError(f"{images} holds no images (NAME.jpg or .png)")
        twice = [path.name for path in paths if found[path.stem] != path]
        if twice:
            others = first_few([found[Path(name).stem].name for name in twice])
            raise UserError(f"{images} has {first_few(twice)} beside {others}; keep one of a name")
        for alone, folder in (
            (found.keys() - masks.keys(), f"{annotations} has no NAME.png"),
            (masks.keys() - found.keys(), f"{images} has no image"),
        ):
            if alone:
                names = ", ".join(sorted(alone)[:5]) + (", …" if len(alone) > 5 else "")
                raise UserError(f"{folder} for {len(alone)} of NAME: {names}; add or remove them")
        self.files = [(found[name], masks[name]) for name in sorted(found)]
        # A second for thousands. One process of each machine will do: it has files of its own.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            with ThreadPoolExecutor() as pool:
                odd = first_few(list(filter(None, pool.map(odd_sizes, self.files))))
            if odd:
                raise UserError(f"in {images}, {odd}; make them alike")
            ignored = numbers == IGNORED
            if all(ignored[read_labels(mask)].all() for _, mask in self.files):  # most end at one
                labels = " or ".join(map(str, ignored.nonzero().flatten().tolist()))
                raise UserError(
                    f"every pixel of the masks in {annotations} is ignored (label {labels}), so "
                    "that nothing counts; look at the masks, and at --ignore-index"
                )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        path, mask_path = self.files[index]
        image = read_image(path)
        labels = read_labels(mask_path)
        if image.shape[-2:] != labels.shape[-2:]:  # and another process is still listing them
            odd = odd_sizes((path, mask_path))
            raise UserError(f"in {path.parent}, {odd}; make them alike")
        mask = self.numbers[labels]
        if mask.min() < 0:
            label = labels[mask < 0][0].item()
            raise UserError(
                f"{mask_path} holds the label {label}, which is neither one of the "
                f"{len(self.classes)} classes nor ignored; mend it, or the list of classes"
            )
        image, mask = tv_tensors.Image(image), tv_tensors.Mask(mask.byte())
        image, mask = self.transform(image, mask)
        return image.as_subclass(Tensor), mask.as_subclass(Tensor)


def odd_sizes(pair: tuple[Path, Path]) -> str:
    """What there is to say of an image and a mask that are not of the same size; else nothing."""
    sizes = []
    for path in pair:
        try:
            with Image.open(path) as image:  # reads no more than the header
                sizes.append(" × ".join(map(str, image.size)))
        except UNREADABLE:
            return ""  # the error is that of reading it
    has_others = sizes[0] != sizes[1]
    return f"{pair[0].name} has {sizes[0]} pixels and its mask {sizes[1]}" if has_others else ""


def read_labels(path: Path) -> Tensor:
    """The values of a PNG's pixels, as they are: int64 (H, W)."""
    try:
        with Image.open(path) as image:
            if image.mode not in ("L", "P"):
                raise UserError(
                    f"{path} is no mask: it must hold one value of 8 bits for each pixel, not "
                    f"{image.mode}"
                )
            return torch.from_numpy(np.array(image)).long()
    except UNREADABLE as error:
        raise UserError(f"{path} can't be read as a mask ({error}); mend or remove it") from None


FILL = {tv_tensors.Image: GREY, tv_tensors.Mask: IGNORED}

augment = v2.Compose(
    [
        v2.RandomResize(SIZE // 2, 2 * SIZE, antialias=True),  # of the shorter side
        v2.RandomCrop(SIZE, pad_if_needed=True, fill=FILL),
        v2.RandomHorizontalFlip(),
    ]
)


def letterbox(image: Tensor, mask: Tensor, side: int = SIZE) -> tuple[Tensor, Tensor]:
    """All of an image, made a square by resizing its longer side and padding the other."""
    longest = max(mask.shape)
    height, width = (max(1, side * length // longest) for length in mask.shape)
    image, mask = v2.Resize([height, width], antialias=True)(image, mask)
    return v2.Pad([0, 0, side - width, side - height], fill=FILL)(image, mask)


class UNet(nn.Module):
    """A small U-Net (Ronneberger and others, 2015) for small images.

    Four scales of `width`, 2 · `width`, … channels, with batch norm. (N, 3, H, W), where H and W
    are at least 8, → (N, num_classes, H, W).
    """

    def __init__(self, num_classes: int, width: int = 16) -> None:
        super().__init__()
        widths = [width * 2**scale for scale in range(4)]
        self.down = nn.ModuleList(map(block, [3, *widths[:-1]], widths))
        self.up = nn.ModuleList(block(3 * narrow, narrow) for narrow in widths[-2::-1])
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """The scores of each class at each pixel."""
        features = self.down[0](images)
        skipped = []
        for layer in self.down[1:]:
            skipped.append(features)
            features = layer(F.max_pool2d(features, 2))
        for layer in self.up:
            fine = skipped.pop()
            coarse = F.interpolate(features, fine.shape[2:], mode="bilinear")
            features = layer(torch.cat([coarse.to(fine.dtype), fine], dim=1))
        return self.head(features)


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions of 3 × 3, with batch norm."""
    layers = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)

"""Semantic segmentation: model, data, loss and metrics. Replace this file for something else.

main.py and predict.py use the constants, functions and classes that the page "The functions of
task.py" of the documentation lists, and the flag `args.arch`.
"""

from __future__ import annotations

import argparse
import colorsys
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
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
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from engine import UserError, cli, distributed, fingerprint, summarize
from engine.checkpoint.compatibility import is_validation_set
from engine.data import SizedDataset, select_batch
from engine.data.files import FileError
from engine.data.images import MAX_SIZE, MEAN, normalize, read_image, read_labels, trim
from engine.data.masks import (
    IGNORED,
    PackedMasks,
    list_masks,
    mask_folders,
    odd_sizes,
    read_classes,
    read_mask,
    renumber,
    warn_of_absent_classes,
)
from engine.data.shards import MASK_SPLITS
from engine.distributed.consistency import class_names
from engine.models import plain_norm
from engine.monitoring import image_grid
from engine.monitoring.run_files import write_csv
from engine.optim import eval_mode
from engine.text import csv_cell

METRIC = "val_miou"  # a key of Metrics.compute; best.pt has its best value
METRIC_MODE = "max"  # or "min"
LAYOUT = "images/ and annotations/ with training/ and validation/ in each, and classes.txt"
BATCH_SIZE = 16
WARMUP_EPOCHS = 3.0
# Modules, by class, that FSDP shards and --checkpoint-activations recomputes one by one; (): those
# that are repeated in a Sequential or ModuleList.
BLOCKS: tuple[str, ...] = ()
DUMMY_CLASSES = 150

SIZE = 512  # pixels: side of the training crops, longer side in validation
AUX_WEIGHT = 0.5  # of the auxiliary head's loss
GREY = tuple(round(255 * value) for value in MEAN)  # 0 after normalization


def add_arguments(parser: cli.ArgumentParser) -> None:
    """Add the flags of this task."""
    parser.group("model").add_argument(
        "--arch",
        help="a torchvision model, smp:DECODER:ENCODER, or unet"
        " (default: deeplabv3_resnet50; unet for the digits)",
    )
    parser.group("data").add_argument(
        "--ignore-index",
        type=cli.non_negative_int,
        help="label of pixels without a class (default: 0 for ADE20K)",
    )


def check_arguments(parser: cli.ArgumentParser, args: argparse.Namespace) -> None:
    """Stop with an error message if flags contradict each other; set dependent defaults."""
    if args.arch is None:
        args.arch = "deeplabv3_resnet50" if args.data or args.dummy else "unet"


def build_model(arch: str, num_classes: int) -> nn.Module:
    """Return an untrained segmentation model: (N, 3, H, W) -> logits (N, num_classes, H, W).

    torchvision's models return a dict with the logits as "out" and, from an auxiliary head, "aux".

    Args:
        arch: a torchvision model, "unet" (the small one below), or "smp:DECODER:ENCODER" for a
            model of segmentation-models-pytorch, such as smp:deeplabv3plus:tu-xception65.
    """
    if not num_classes:
        raise UserError(
            "the data has no classes: give the data sets of build_datasets, in task.py, an "
            "attribute .classes, the list of the classes' names"
        )
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
    """Return the untrained model of segmentation-models-pytorch for smp:DECODER:ENCODER."""
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
    if ":" in encoder:  # timm would read a file, or the network, and a checkpoint can name any
        raise UserError(f"--arch {arch}: {encoder} is not the name of an encoder")
    if encoder == "xception" and decoder.lower().startswith("deeplabv3"):
        encoder = "tu-xception65"  # that of the paper (Chen and others, 2018)
        distributed.print_on_rank_zero(
            f"--arch {arch}: with {encoder}, as smp's own xception can't be dilated"
        )
    try:
        model = smp.create_model(decoder, encoder, encoder_weights=None, classes=num_classes)
    except Exception as error:  # encoders that don't suit a decoder raise anything
        reason = shorten(str(error).strip('"') or "the encoder does not suit the decoder", 160)
        raise UserError(f"--arch {arch} can't be made ({reason}); name another") from None
    return split_norms(model)


def split_norms(model: nn.Module) -> nn.Module:
    """Replace each of timm's BatchNormAct2d by a plain batch norm, dropout and activation.

    Apex's convert_syncbn_model would replace the whole and lose the activation.
    """
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if isinstance(norm, nn.BatchNorm2d) and hasattr(norm, "act"):
                drop, act = norm.get_submodule("drop"), norm.get_submodule("act")
                parts = OrderedDict(norm=plain_norm(norm), drop=drop, act=act)
                setattr(parent, name, nn.Sequential(parts))
    return model


def build_datasets(args: argparse.Namespace) -> tuple[SizedDataset, SizedDataset]:
    """Return the training and the validation set of (image, mask), each with ``.classes``.

    Images are uint8 (3, H, W). Masks are uint8 (H, W): the class of each pixel, or IGNORED. --data
    is a folder as `read_classes` and `Pairs` describe it; the default is digits on a canvas, from
    the set that comes with the project. --ignore-index is the label in the files that stands for
    no class (255 always does; by default 0 of ADE20K). With --eval-only, the validation set takes
    the place of the training set, which is not read.

    Raises UserError if the folder has another structure.
    """
    data = args.data
    if data is None:
        if args.ignore_index is not None:
            raise UserError("--ignore-index is for the labels of --data, the digits' all count")
        return Digits(train=True), Digits(train=False)
    splits = ("validation",) if args.eval_only else MASK_SPLITS
    folders = [folder for split in splits for folder in mask_folders(data, split)]
    for folder in (data, *folders):
        if not folder.is_dir():
            raise UserError(f"--data {data}: there is no folder {folder}; it takes {LAYOUT}")
    classes, numbers = read_classes(data, args.ignore_index)
    val_set = Pairs(list_masks(data, "validation"), classes, numbers, letterbox)
    val_set.fingerprint |= {"image size": str(SIZE)}  # on which its scores depend
    train_set = val_set
    if not args.eval_only:
        train_set = Pairs(list_masks(data, "training"), classes, numbers, augment)
        if not train_set.shard_sizes:  # reading a sample by URL would load many shards
            warn_of_absent_classes(train_set.files, classes, numbers)
    return train_set, val_set


def prepare(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the model's input and the loss's targets for a batch that is on the device."""
    pixels, masks = batch
    if masks.is_floating_point():  # perhaps divided by 255
        raise UserError("the masks of a data set must be integers, the class of each pixel")
    return normalize(pixels), masks


def criterion(
    output: Tensor | Mapping[str, Tensor], targets: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Return the mean cross entropy of logits (N, num_classes, H, W) and labels (N, H, W)."""
    outputs = output if isinstance(output, Mapping) else {"out": output}
    num_pixels = (targets != IGNORED).sum().clamp(min=1)  # a crop may have none
    # Summed here, because torch's reduction over pixels has no deterministic CUDA kernel.
    pixel_losses = nn.CrossEntropyLoss(
        ignore_index=IGNORED, label_smoothing=label_smoothing, reduction="none"
    )
    losses = {
        name: pixel_losses(logits, targets.long()).sum() / num_pixels
        for name, logits in outputs.items()
    }
    return losses["out"] + AUX_WEIGHT * losses.get("aux", 0.0)


class Metrics:
    """Loss and mean IoU of the validation set, exact for any number of processes.

    From one confusion matrix, (true class, predicted class), of all pixels of the whole set.
    """

    def __init__(self, num_classes: int, device: torch.device, args: argparse.Namespace) -> None:
        make_palette(num_classes)  # refuses too many now, not when the first epoch is drawn
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)
        self.losses = torch.zeros((), dtype=torch.float64, device=device)

    def reset(self) -> None:
        """Clear the confusion matrix and the loss."""
        self.confusion.zero_()
        self.losses.zero_()

    def update(self, output: Tensor | Mapping[str, Tensor], targets: Tensor) -> None:
        """Add the pixels of a batch."""
        logits = logits_of(output).float()
        targets = targets.long()
        losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        self.losses += losses.sum(dtype=torch.float64)
        counted = targets != IGNORED
        cells = len(self.confusion) * targets[counted] + logits.argmax(dim=1)[counted]
        counts = torch.bincount(cells, minlength=self.confusion.numel())
        self.confusion += counts.view_as(self.confusion)

    def compute(self) -> dict[str, float]:
        """Return val_loss and val_miou (0 to 1) over all processes; every process calls it.

        Classes that neither occur nor are predicted have no IoU and are not in the mean.
        """
        dist.all_reduce(self.confusion)
        dist.all_reduce(self.losses)
        loss = self.losses / self.confusion.sum()
        return {"val_loss": loss.item(), "val_miou": self.iou().nanmean().item()}

    def iou(self) -> Tensor:
        """Return each class's intersection over union, float64 (num_classes,); NaN if absent."""
        intersection = self.confusion.diag()
        union = self.confusion.sum(0) + self.confusion.sum(1) - intersection
        return intersection.double() / union


def logits_of(output: Tensor | Mapping[str, Tensor]) -> Tensor:
    """Return the logits (N, num_classes, H, W) in a model's output."""
    return output["out"] if isinstance(output, Mapping) else output


@torch.no_grad()
def show(
    model: nn.Module,
    val_set: Digits | Pairs,
    metrics: Metrics,
    output: Path,
    epoch: int | None = None,
) -> Path:
    """Write per-class IoU and a picture into `output`/validation; return the picture's path.

    epoch_NNN.csv has the IoU and the colour of each class. epoch_NNN.png shows the first four
    samples, one per row: image, ground truth, prediction, with a legend of the classes in them.
    Without an epoch the files are called eval_only.
    """
    # First: with FSDP, all processes run the model together, and files may fail in one of them.
    images, masks = select_batch(val_set, range(min(4, len(val_set))))
    device = next(model.parameters()).device
    inputs, _ = prepare([images.to(device), masks])
    with eval_mode(model):
        predictions = logits_of(model(inputs)).argmax(dim=1).cpu()
    path = image_grid.image_path(output, epoch)
    path.parent.mkdir(parents=True, exist_ok=True)
    classes = class_names(val_set)
    palette = make_palette(len(classes))
    table: list[list] = [["class", "iou", "colour"]]
    for index, (name, iou) in enumerate(zip(classes, metrics.iou(), strict=True)):
        colour = bytes(palette[index].tolist()).hex()
        table.append([csv_cell(name), None if iou.isnan() else iou.item(), f"#{colour}"])
    write_csv(path.with_suffix(".csv"), table)
    pixels = image_grid.to_pixels(inputs)  # the data set's images may be floats
    rows = [
        [image, overlay(image, mask, palette), overlay(image, prediction, palette)]
        for image, mask, prediction in zip(pixels, masks, predictions, strict=True)
    ]
    names = dict(enumerate(classes)) | {IGNORED: "ignored"}
    shown = torch.cat([masks, predictions]).unique().tolist()
    legend = [(names[label], palette[label].tolist()) for label in shown]
    image_grid.save_panels(path, rows, ["image", "truth", "prediction"], legend)
    return path


def overlay(image: Tensor, labels: Tensor, palette: Tensor) -> Tensor:
    """Return the image, uint8 (3, H, W), blended with the colours of its labels (H, W)."""
    return palette[labels.long()].permute(2, 0, 1).mul(0.7).add(image, alpha=0.3).byte()


def make_palette(num_classes: int) -> Tensor:
    """Return a colour for each class, grey for the first, white for IGNORED: uint8 (256, 3).

    Raises UserError for more classes than a mask can show.
    """
    if num_classes > IGNORED:
        raise UserError(f"a mask has 8 bits: it can't show {num_classes} classes")
    palette = torch.ones(256, 3)
    palette[0] = 0.3
    for index in range(1, num_classes):
        hue = 0.618034 * index % 1  # multiples of the golden ratio lie far apart
        value = 0.9 - 0.3 * (index % 2)
        palette[index] = torch.tensor(colorsys.hsv_to_rgb(hue, 0.8, value))
    return (255 * palette).byte()


def add_predict_arguments(parser: cli.ArgumentParser) -> None:
    """Add the flags of predict.py that belong to this task."""
    parser.add_argument(
        "--output",
        type=cli.local_path,
        default=Path("predictions"),
        help="empty folder for masks (default: predictions)",
    )


class Predictor:
    """Inference on one image file: the classes in it, with their fractions of its pixels.

    Writes masks/NAME.png, whose pixels are class numbers with the classes' colours as palette,
    and overlays/NAME.png, both of the image's size.

    Args:
        model: in eval mode.
        metadata: that of the checkpoint.
        args: the flags of predict.py, with the files as ``images``.
    """

    def __init__(self, model: nn.Module, metadata: dict, args: argparse.Namespace) -> None:
        self.model = model
        self.classes = metadata["classes"]
        self.output = args.output
        self.device = next(model.parameters()).device
        is_alike = not metadata["data"] and self.classes == [*Digits.classes]
        is_digits = is_alike and is_validation_set(Digits(train=False), metadata)
        # SIZE of the training; the present SIZE if the checkpoint has none, or an invalid one.
        trained = metadata.get("fingerprints", {}).get("val", {}).get("image size", "")
        size = int(trained) if trained in map(str, range(1, MAX_SIZE + 1)) else SIZE
        self.side = Digits.side if is_digits else size
        self.palette = make_palette(len(self.classes))
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
        """Write the files for the image at `path`; return its classes, largest first."""
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
        fractions = labels.flatten().bincount() / labels.numel()
        present = fractions.nonzero().flatten().tolist()
        found = [(self.classes[index], fractions[index].item()) for index in present]
        return sorted(found, key=lambda pair: -pair[1])

    def predict(self, image: Tensor) -> Tensor:
        """Return the class of each pixel of an image, uint8 (3, H, W), resized as in validation."""
        height, width = image.shape[1:]
        mask = tv_tensors.Mask(torch.zeros(height, width, dtype=torch.uint8))
        square, mask = letterbox(tv_tensors.Image(image), mask, self.side)
        batch = square.as_subclass(Tensor).unsqueeze(0).to(self.device)
        inputs, _ = prepare([batch, mask.unsqueeze(0).to(self.device)])
        logits = logits_of(self.model(inputs))
        labels = logits.argmax(dim=1, keepdim=True).byte().cpu()
        rows = (mask != IGNORED).any(dim=1).sum()  # of the image; the others are padding
        columns = (mask != IGNORED).any(dim=0).sum()
        labels = labels[:, :, :rows, :columns]
        return F.interpolate(labels, size=(height, width), mode="nearest-exact")[0, 0]


def dummy_batch(batch_size: int, device: torch.device) -> list[Tensor]:
    """Return one batch in the shape of ADE20K's crops, made on the device."""
    images = torch.randn(batch_size, 3, SIZE, SIZE, device=device)
    return [images, torch.randint(DUMMY_CLASSES, (batch_size, SIZE, SIZE), device=device)]


class Digits(Dataset):
    """Handwritten digits (README.md) on a canvas of 48 x 48 pixels, one in each quarter.

    The classes are the background and the ten digits. Every fifth digit is for validation, where
    each appears on one canvas only. A training canvas changes each time it is read: it has the
    digit of its index and three random others, at random places and sizes.
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

    def draw(
        self, chosen: Sequence[int], generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Return the image and the mask of four digits."""
        image = torch.zeros(self.side, self.side)
        mask = torch.zeros(self.side, self.side, dtype=torch.uint8)
        quarter = self.side // 2
        for number, digit in enumerate(chosen):
            size = random_integer(16, quarter + 1, generator)
            top = number // 2 * quarter + random_integer(0, quarter - size + 1, generator)
            left = number % 2 * quarter + random_integer(0, quarter - size + 1, generator)
            place = slice(top, top + size), slice(left, left + size)
            digits = self.digits[digit].expand(1, 1, -1, -1)
            image[place] = F.interpolate(digits, size=(size, size), mode="bilinear")[0, 0]
            mask[place] = (image[place] > 0.4) * (self.labels[digit] + 1)
        return (255 * image).byte().expand(3, -1, -1), mask


def random_integer(low: int, high: int, generator: torch.Generator | None) -> int:
    """Return a random integer from `low` to `high` - 1."""
    return int(torch.randint(low, high, (), generator=generator))


class Pairs(Dataset):
    """Images and masks, which have the label of each of their pixels.

    A defect raises a UserError with the file's path: in sizes at once, others when the file is
    read.

    Args:
        files: the paths of each image and its mask.
        classes, numbers: as `read_classes` returns them.
        transform: applied to an Image and its Mask together.
    """

    def __init__(
        self,
        files: Sequence[tuple[Path, Path]],
        classes: list[str],
        numbers: Tensor,
        transform: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> None:
        self.files = files
        self.shard_sizes = getattr(files, "shard_sizes", ())  # if they are read by URL
        self.fingerprint = fingerprint.of_files(files[0][0].parent, files)
        self.classes, self.numbers, self.transform = classes, numbers, transform
        # Takes a second for thousands of files, so only one process per host checks them.
        if distributed.is_local_leader():
            if not isinstance(files, PackedMasks):  # whose sizes were compared before
                require_same_sizes(files)
            ignored = numbers == IGNORED
            if all(all_ignored(mask, ignored) for _, mask in files):  # mostly the first is not
                labels = " or ".join(map(str, ignored.nonzero().flatten().tolist()))
                raise UserError(
                    f"every pixel of the masks in {files[0][1].parent} is ignored (label {labels}),"
                    " so that nothing counts; look at the masks, and at --ignore-index"
                )

    def __len__(self) -> int:
        return len(self.files)

    def reorder_classes(self, classes: list[str]) -> None:
        """Change the labels to the positions in `classes`, which include all of its own."""
        self.numbers = renumber(self.numbers, self.classes, classes)
        self.classes = list(classes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        path, mask_path = self.files[index]
        image = read_image(path)
        mask = read_mask(mask_path, self.numbers)
        if image.shape[-2:] != mask.shape[-2:]:  # the check of all files may not be finished
            odd = odd_sizes((path, mask_path))
            raise UserError(f"in {path.parent}, {odd}; make them alike")
        image, mask = tv_tensors.Image(image), tv_tensors.Mask(mask.byte())
        image, mask = self.transform(image, mask)
        return image.as_subclass(Tensor), mask.as_subclass(Tensor)


def require_same_sizes(files: Sequence[tuple[Path, Path]]) -> None:
    """Raise UserError if an image and its mask differ in size."""
    with ThreadPoolExecutor() as pool:
        odd = summarize(list(filter(None, pool.map(odd_sizes, files))))
    if odd:
        raise UserError(f"in {files[0][0].parent}, {odd}; make them alike")


def all_ignored(mask: Path, ignored: Tensor) -> bool:
    """Return whether all labels of a mask are `ignored`, bool (256,); False for a broken file."""
    try:
        return bool(ignored[read_labels(mask)].all())
    except FileError:
        return False  # reading it raises the error


FILL = {tv_tensors.Image: GREY, tv_tensors.Mask: IGNORED}


def resize(image: Tensor, mask: Tensor, size: list[int]) -> tuple[Tensor, Tensor]:
    """Resize an image and its mask, which v2.Resize would shift by up to half a pixel."""
    nearest = v2.InterpolationMode.NEAREST_EXACT
    labels = v2.functional.resize(mask.as_subclass(Tensor)[None], size, nearest)[0]
    return v2.functional.resize(image, size, antialias=True), tv_tensors.Mask(labels)


def random_resize(image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Resize the shorter side of an image and its mask to SIZE / 2 to 2 * SIZE - 1 pixels."""
    return resize(image, mask, [random_integer(SIZE // 2, 2 * SIZE, None)])


augment = v2.Compose(
    [
        v2.Lambda(trim),
        random_resize,
        v2.RandomCrop(SIZE, pad_if_needed=True, fill=FILL),
        v2.RandomHorizontalFlip(),
    ]
)


def letterbox(image: Tensor, mask: Tensor, side: int = SIZE) -> tuple[Tensor, Tensor]:
    """Resize the longer side of an image and its mask to `side`, and pad them to a square."""
    longest = max(mask.shape)
    height, width = (max(1, side * length // longest) for length in mask.shape)
    image, mask = resize(image, mask, [height, width])
    return v2.Pad([0, 0, side - width, side - height], fill=FILL)(image, mask)


class UNet(nn.Module):
    """Small U-Net (Ronneberger and others, 2015) for small images, with batch norm.

    Four scales of `width`, 2 * `width`, ... channels. (N, 3, H, W) -> (N, num_classes, H, W);
    H and W are at least 8.
    """

    def __init__(self, num_classes: int, width: int = 16) -> None:
        super().__init__()
        w1, w2, w3, w4 = width, 2 * width, 4 * width, 8 * width
        self.down = nn.ModuleList([block(3, w1), block(w1, w2), block(w2, w3), block(w3, w4)])
        self.up = nn.ModuleList([block(w4 + w3, w3), block(w3 + w2, w2), block(w2 + w1, w1)])
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each class at each pixel."""
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


def block(in_channels: int, out_channels: int) -> nn.Sequential:
    """Return two 3 x 3 convolutions, each with batch norm and ReLU."""
    layers: list[nn.Module] = []
    for channels in (in_channels, out_channels):
        layers += [nn.Conv2d(channels, out_channels, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)

"""Contrastive image-text training, as CLIP does. Replace this file to train something else.

main.py and predict.py use the constants, functions and classes that the page "The functions of
task.py" of the documentation lists, and the flag `args.arch`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache, reduce
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

from engine import UserError, cli
from engine.checkpoint.compatibility import is_validation_set
from engine.data import SizedDataset
from engine.data.captions import (
    PackedCaptions,
    identify,
    list_captions,
    read_lines,
    require_short,
)
from engine.data.images import MEAN, STD, normalize, read_image, trim
from engine.monitoring import image_grid
from engine.optim import eval_mode

METRIC = "val_recall_at_1"  # a key of Metrics.compute; best.pt has its best value
METRIC_MODE = "max"  # or "min"
LAYOUT = "train/ and val/ with images and a captions.tsv (FILE, tab, TEXT) in each"
BATCH_SIZE = 32
WARMUP_EPOCHS = 1.0
# Modules, by class, that FSDP shards and --checkpoint-activations recomputes one by one; (): those
# that are repeated in a Sequential or ModuleList.
BLOCKS: tuple[str, ...] = ()
DUMMY_CLASSES = 0  # captions are not classes

SIZE = 224  # pixels: sides of the crops of files
EMBEDDING = 256  # dimensions of an embedding
LENGTH = 256  # bytes of the longest caption
WIDTH, DEPTH, HEADS = 256, 4, 4  # of the text encoder
MAX_SCALE = 100.0  # of the similarities, 1 / temperature, as in CLIP


def add_arguments(parser: cli.ArgumentParser) -> None:
    """Add the flags of this task."""
    parser.group("model").add_argument(
        "--arch", default="resnet18", help="image encoder: a torchvision model, such as resnet50"
    )
    parser.group("optimization").add_argument(
        "--text-lr",
        type=cli.non_negative_float,
        help="peak learning rate of the text encoder (default: that of --lr)",
    )


def check_arguments(parser: cli.ArgumentParser, args: argparse.Namespace) -> None:
    """Stop with an error message if flags contradict each other; set dependent defaults."""
    if args.accumulate > 1:
        parser.error(
            f"--accumulate {args.accumulate}: negatives come from one batch only, so that "
            "accumulated batches are not one large batch; use a larger --batch-size"
        )
    if args.text_lr is None:
        args.text_lr = args.lr


def build_model(arch: str, num_classes: int = 0) -> nn.Module:
    """Return an untrained TwoEncoders, whose image encoder is the torchvision model `arch`.

    `num_classes` is not used: captions are not classes.
    """
    names = torchvision.models.list_models(module=torchvision.models)
    if arch not in names:
        nearest = get_close_matches(arch, names, n=3, cutoff=0.0)
        raise UserError(
            f"--arch {arch} is not one of torchvision's {len(names)} classification models; "
            f"the nearest are {', '.join(nearest)}"
        )
    image_encoder = torchvision.models.get_model(arch, weights=None, num_classes=EMBEDDING)
    return TwoEncoders(image_encoder, TextEncoder())


def prepare(batch: list[Tensor]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the model's input and the loss's targets for a batch that is on the device."""
    pixels, captions = batch
    return (normalize(pixels), captions), captions


class TwoEncoders(nn.Module):
    """Image encoder and text encoder, trained together and saved as one model.

    Takes a pair of images (N, 3, H, W) and captions uint8 (N, L); returns their embeddings,
    (N, EMBEDDING) each. Image embeddings are not normalized.
    """

    def __init__(self, image_encoder: nn.Module, text_encoder: nn.Module) -> None:
        super().__init__()
        self.image_encoder = image_encoder
        self.text_encoder = text_encoder

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        pixels, captions = inputs
        return self.image_encoder(pixels), self.text_encoder(captions)


class Block(nn.Module):
    """Transformer layer: (N, L, WIDTH) and the mask of text positions (N, L) -> (N, L, WIDTH).

    Not nn.TransformerEncoderLayer, which converts its mask to floating point: under real Apex's
    O1 that is fp32 with half-precision queries, which cuDNN's attention turns into NaN
    (pytorch#191612).
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix_heads = nn.Linear(WIDTH, WIDTH)
        self.of_each = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, features: Tensor, is_text: Tensor) -> Tensor:
        heads = self.queries_keys_values(self.norm(features)).unflatten(2, (3, HEADS, -1))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_text[:, None, None])
        features = features + self.mix_heads(mixed.transpose(1, 2).flatten(2))
        return features + self.of_each(features)


class TextEncoder(nn.Module):
    """Transformer over the bytes of captions.

    uint8 (N, L), zero-padded -> (N, EMBEDDING), each of norm 1 / temperature. The learned
    temperature starts at 0.07, as in CLIP, where `log_scale` is 0: weight decay pulls it there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, EMBEDDING, bias=False)
        self.log_scale = nn.Parameter(torch.zeros(1))

    def forward(self, captions: Tensor) -> Tensor:
        is_text = captions != 0
        features = self.embed(captions.long()) + self.position[: captions.shape[1]]
        for layer in self.layers:
            features = layer(features, is_text)
        features = self.norm(features)
        weights = (is_text / is_text.sum(dim=1, keepdim=True)).to(features.dtype)
        mean = (features * weights.unsqueeze(2)).sum(dim=1)
        log_scale = LimitedAbove.apply(self.log_scale.float(), math.log(0.07 * MAX_SCALE))
        return F.normalize(self.head(mean).float(), dim=1) * log_scale.exp() / 0.07


class LimitedAbove(torch.autograd.Function):
    """Clamp to a limit from which the gradient can lower the value again, unlike torch.clamp's.

    A gradient that would raise it further is 0. The parameter is not written to: FSDP, DataParallel
    and O2 have another copy of it.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, limit: float) -> Tensor:  # type: ignore[override]
        """Return `value`, at most `limit`."""
        ctx.save_for_backward(value)
        ctx.limit = limit
        return value.clamp(max=limit)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the gradient of `value`."""
        (value,) = ctx.saved_tensors
        return gradient.where((value < ctx.limit) | (gradient > 0), 0), None


def similarities(image_embeddings: Tensor, text_embeddings: Tensor) -> Tensor:
    """Return cosine similarity / temperature of (N, EMBEDDING) and (M, EMBEDDING): (N, M)."""
    return F.normalize(image_embeddings, dim=1) @ text_embeddings.T


def exact_similarities(image_embeddings: Tensor, text_embeddings: Tensor) -> Tensor:
    """Return the `similarities` in fp32: in half precision, similar captions would tie.

    Neither autocast nor real Apex's O1, which does not patch ``torch.inner``, casts them.
    """
    with torch.autocast(text_embeddings.device.type, enabled=False):
        images = F.normalize(image_embeddings.float(), dim=1)
        return torch.inner(images, text_embeddings.float())


def criterion(
    output: tuple[Tensor, Tensor], targets: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Return this process's share of CLIP's loss of the batch of all processes.

    Each image is to find its caption among those of the whole batch, and each caption its image.
    The mean over processes, which DDP takes of the gradients, is the loss of one process with
    all pairs.

    Args:
        output: embeddings of images and captions, (N, EMBEDDING) each, N alike on all processes.
        targets: the captions, uint8 (N, L); pairs with the very same caption are no negatives of
            each other.

    Raises ValueError if the whole batch is one pair.
    """
    image_embeddings, text_embeddings = output
    keys = hash_captions(targets)
    all_images, all_texts, all_keys, rank = image_embeddings, text_embeddings, keys, 0
    if dist.is_initialized() and dist.get_world_size() > 1:
        rank, all_images, all_texts, all_keys = gather(image_embeddings, text_embeddings, keys)
    elif len(targets) == 1:
        raise ValueError("one pair has no negatives to learn from, so use a larger batch")
    own = torch.arange(len(targets), device=targets.device) + rank * len(targets)
    is_same = (keys.unsqueeze(1) == all_keys).scatter(1, own.unsqueeze(1), False)
    losses = []
    for logits in (
        similarities(image_embeddings, all_texts),
        similarities(all_images, text_embeddings).T,
    ):
        logits = logits.masked_fill(is_same, -torch.inf)
        losses.append((1 - label_smoothing) * F.cross_entropy(logits, own))
        if label_smoothing:  # torch's would give the masked pairs a share
            others = -F.log_softmax(logits, dim=1).masked_fill(is_same, 0).sum(dim=1)
            losses.append(label_smoothing * (others / (~is_same).sum(dim=1)).mean())
    return reduce(torch.add, losses) / 2


def gather(
    image_embeddings: Tensor, text_embeddings: Tensor, keys: Tensor
) -> tuple[int, Tensor, Tensor, Tensor]:
    """Return this process's rank among those gathered, and the tensors of all of them.

    A CPU tensor is not gathered where the process group is NCCL's: that is the check of the model
    before training, which every process makes on its own.
    """
    if dist.get_backend() == "nccl" and not keys.is_cuda:
        return 0, image_embeddings, text_embeddings, keys
    both = torch.cat([image_embeddings, text_embeddings], dim=1)  # fp32, as the texts are
    all_images, all_texts = Gather.apply(both).chunk(2, dim=1)
    return dist.get_rank(), all_images, all_texts, Gather.apply(keys)


class Gather(torch.autograd.Function):
    """Differentiable all_gather: (N, ...) of each process -> (processes * N, ...) in rank order.

    The backward pass sums the gradients of all processes' losses, which DDP's average turns into
    the gradient of their mean.
    """

    @staticmethod
    def forward(ctx: object, values: Tensor) -> Tensor:
        values = values.contiguous()
        gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, values)
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def hash_captions(captions: Tensor) -> Tensor:
    """Return 64-bit hashes (N,) of captions (N, L), which are cheaper to gather and compare.

    Two different captions share a hash with a probability of about 2^-60.
    """
    factors = _hash_factors(captions.device)[: captions.shape[1]]
    return (captions.long() * factors).sum(dim=1)


@cache  # or each batch would wait for a copy to the device
def _hash_factors(device: torch.device) -> Tensor:
    limits = torch.iinfo(torch.int64)
    generator = torch.Generator().manual_seed(0)  # the same in every process
    return torch.randint(limits.min, limits.max, (LENGTH,), generator=generator).to(device)


class Metrics:
    """Retrieval of captions by images over the whole validation set, exact for any sharding.

    The candidates are the distinct captions of all processes. An image is correct if its most
    similar caption is its own; the loss is the cross entropy of that choice.
    """

    def __init__(self, num_classes: int, device: torch.device, args: argparse.Namespace) -> None:
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Clear the embeddings and captions."""
        self.images: list[Tensor] = []
        self.captions: list[list[bytes]] = []
        self.texts: dict[bytes, Tensor] = {}

    def update(self, output: tuple[Tensor, Tensor], targets: Tensor) -> None:
        """Add a batch: embeddings of images and captions (N, EMBEDDING), and the captions."""
        images, texts = (embeddings.clone() for embeddings in output)  # CUDA graphs reuse them
        captions = [bytes(row).rstrip(b"\0") for row in targets.cpu().numpy()]
        self.images.append(images)
        self.captions.append(captions)
        for caption, text in zip(captions, texts, strict=True):
            self.texts.setdefault(caption, text)

    def compute(self) -> dict[str, float]:
        """Return val_loss and val_recall_at_1 (0 to 1) over all processes; every one calls it."""
        candidates, texts = self._gather_texts()
        index = {caption: number for number, caption in enumerate(candidates)}
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        for images, captions in zip(self.images, self.captions, strict=True):
            logits = exact_similarities(images, texts)
            own = torch.tensor([index[caption] for caption in captions], device=self.device)
            losses = F.cross_entropy(logits, own, reduction="sum")
            correct = (logits.argmax(dim=1) == own).sum()
            size = correct.new_tensor(len(own))
            totals += torch.stack([losses.double(), correct.double(), size.double()])
        dist.all_reduce(totals)
        loss, correct_count, count = totals.tolist()
        return {"val_loss": loss / count, "val_recall_at_1": correct_count / count}

    def _gather_texts(self) -> tuple[list[bytes], Tensor]:
        """Return the distinct captions of all processes and their embeddings (M, EMBEDDING)."""
        found: list[list[bytes]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, [*self.texts])
        first_rank: dict[bytes, int] = {}
        for rank, captions in enumerate(found):
            for caption in captions:
                first_rank.setdefault(caption, rank)
        candidates = sorted(first_rank)
        texts = torch.zeros(len(candidates), EMBEDDING, device=self.device)
        for number, caption in enumerate(candidates):
            if first_rank[caption] == dist.get_rank():
                texts[number] = self.texts[caption].float()
        dist.all_reduce(texts)  # each row is zero on all processes but one
        return candidates, texts


def embed(text_encoder: nn.Module, captions: list[bytes], batch_size: int = 256) -> Tensor:
    """Return the embeddings of captions, (N, EMBEDDING)."""
    device = next(text_encoder.parameters()).device
    longest = max(map(len, captions))
    padded = torch.stack([as_tensor(caption, longest) for caption in captions])
    return torch.cat([text_encoder(batch.to(device)).float() for batch in padded.split(batch_size)])


@torch.no_grad()
def show(
    model: nn.Module,
    val_set: Digits | Pairs,
    metrics: Metrics,
    output: Path,
    epoch: int | None = None,
) -> Path:
    """Write `output`/validation/epoch_NNN.png (eval_only.png without an epoch); return its path.

    It shows eight samples from across the set, each with the most similar of their captions, and
    with its own if that is another.
    """
    pixels, captions = image_grid.sample_evenly(val_set, 8)
    device = next(model.parameters()).device
    inputs, _ = prepare([pixels.to(device), captions.to(device)])
    own = [bytes(row).rstrip(b"\0").decode() for row in captions.numpy()]
    with eval_mode(model):
        embeddings, texts = model(inputs)
    chosen = exact_similarities(embeddings, texts).argmax(dim=1).tolist()
    words = []
    for number, caption in zip(chosen, own, strict=True):
        is_correct = own[number] == caption
        words.append((own[number] if is_correct else f"{own[number]}\nis {caption}", is_correct))
    path = image_grid.image_path(output, epoch)
    image_grid.save_image_grid(path, inputs[0], words)
    return path


def add_predict_arguments(parser: cli.ArgumentParser) -> None:
    """Add the flags of predict.py that belong to this task."""
    parser.add_argument(
        "--top", type=cli.positive_int, default=5, metavar="N", help="number of captions to print"
    )
    parser.add_argument(
        "--captions", type=cli.path, help="candidates, one per line (default: validation's)"
    )


class Predictor:
    """Inference on one image file: the most similar captions with their probabilities.

    Args:
        model: in eval mode.
        metadata: that of the checkpoint.
        args: the flags of predict.py.
    """

    def __init__(self, model: nn.Module, metadata: dict, args: argparse.Namespace) -> None:
        self.image_encoder = model.get_submodule("image_encoder")
        self.top = args.top
        self.device = next(model.parameters()).device
        may_be_digits = not metadata["data"] and Digits.file.exists()
        is_digits = may_be_digits and is_validation_set(Digits(train=False), metadata)
        is_default = is_digits and args.captions is None
        self.captions = (
            [*Digits.names] if is_default else candidates(args.captions, metadata["data"])
        )
        self.texts = embed(
            model.get_submodule("text_encoder"), [caption.encode() for caption in self.captions]
        )
        self.read = Digits.read if is_digits else read_center_crop

    def __call__(self, path: Path) -> list[tuple[str, float]]:
        """Return the captions for the image at `path`, most similar first."""
        pixels = self.read(path).unsqueeze(0).to(self.device)
        caption = as_tensor(b"", LENGTH).unsqueeze(0).to(self.device)
        inputs, _ = prepare([pixels, caption])
        embedding = self.image_encoder(inputs[0])
        probabilities = similarities(embedding, self.texts).softmax(dim=1)[0]
        values, indices = probabilities.sort(descending=True)
        pairs = zip(indices.tolist(), values.tolist(), strict=True)
        return [(self.captions[index], value) for index, value in pairs][: self.top]


def candidates(file: Path | None, data: str) -> list[str]:
    """Return the distinct lines of `file`; by default the captions of the validation set."""
    if file is None and (not data or "://" in data):
        whose = data or "a data set of your own"
        raise UserError(f"name a file with --captions: predict.py can't read those of {whose}")
    if file is None:
        try:
            captions = [caption.decode() for _, caption in first_captions(Path(data, "val"))]
        except UserError as error:
            raise UserError(f"{error}; or name a file of captions with --captions") from None
    else:
        captions = [line.strip() for line in read_lines(file) if line.strip()]
        for caption in captions:
            require_short(len(caption.encode()), LENGTH, str(file))
            if "\t" in caption:
                raise UserError(
                    f"{file} has a tab in {caption!r}: give captions without file names"
                )
    if not captions:
        raise UserError(f"{file} holds no captions: write one in each line")
    return [*dict.fromkeys(captions)]


def as_tensor(caption: bytes, length: int) -> Tensor:
    """Return the bytes of a caption, zero-padded: uint8 (length,)."""
    return torch.tensor(list(caption.ljust(length, b"\0")), dtype=torch.uint8)


def build_datasets(args: argparse.Namespace) -> tuple[SizedDataset, SizedDataset]:
    """Return the training and the validation set of (image (3, H, W), caption uint8 (L,)).

    --data is a folder as LAYOUT describes it; the default is the digits that come with the
    project, and their names. Images from files are uint8, a quarter of the size of floats for the
    loading workers to send. In validation an image with several captions appears once, with the
    first of them. With --eval-only, the validation set takes the place of the training set, which
    is not read.

    Raises UserError if the folder has another structure.
    """
    if args.data is None:
        return Digits(train=True), Digits(train=False)
    required = ("val",) if args.eval_only else ("train", "val")
    for folder in (args.data, *(args.data / split for split in required)):
        if not folder.is_dir():
            raise UserError(f"--data {args.data}: there is no folder {folder}; it takes {LAYOUT}")
    val = args.data / "val"
    val_set = Pairs(val, first_captions(val), center_crop)
    val_set.fingerprint |= {"image size": str(SIZE)}  # on which its scores depend
    train_set = val_set
    if not args.eval_only:
        # Images are not mirrored: a caption may say what is on the left.
        train_crop = v2.RandomResizedCrop(SIZE, scale=(0.5, 1.0), antialias=True)
        train = args.data / "train"
        train_set = Pairs(train, list_captions(train, LENGTH), train_crop)
    return train_set, val_set


resize = v2.Resize(SIZE * 8 // 7, antialias=True)
center_crop = v2.Compose([v2.Lambda(trim), resize, v2.CenterCrop(SIZE)])


def read_center_crop(path: Path) -> Tensor:
    """Return the central crop of an image file, as in validation: uint8 (3, SIZE, SIZE)."""
    return center_crop(read_image(path))


def first_captions(folder: Path) -> list[tuple[Path, bytes]]:
    """Return the images and captions as list_captions does, but each image only once."""
    captions: dict[Path, bytes] = {}
    for path, caption in list_captions(folder, LENGTH):
        captions.setdefault(path, caption)
    return [*captions.items()]


class Pairs(Dataset):
    """Images and their captions; an unreadable image file raises a UserError with its path."""

    def __init__(
        self, folder: Path, pairs: Sequence[tuple[Path, bytes]], transform: v2.Transform
    ) -> None:
        self.pairs, self.transform = pairs, transform
        self.fingerprint = identify(folder, pairs)
        self.shard_sizes = getattr(pairs, "shard_sizes", ())  # if they are read by URL
        if isinstance(pairs, PackedCaptions):
            self.longest = pairs.pack.manifest.longest
        else:
            self.longest = max(len(caption) for _, caption in pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        path, caption = self.pairs[index]
        return self.transform(read_image(path)), as_tensor(caption, self.longest)


def enlarge(digits: Tensor) -> Tensor:
    """Resize digits (N, 8, 8), from 0 to 1, and normalize them: (N, 3, 32, 32)."""
    enlarged = F.interpolate(digits.unsqueeze(1), size=(32, 32), mode="bilinear")
    return v2.functional.normalize(enlarged.expand(-1, 3, -1, -1), MEAN, STD)


class Digits(Dataset):
    """1,797 handwritten digits (README.md), enlarged to 32 x 32, and their names.

    Every fifth is for validation; the others are shifted by up to 4 pixels each time.
    """

    file = Path(__file__).parent / "data" / "digits.npz"
    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

    def __init__(self, train: bool) -> None:
        file = np.load(self.file, allow_pickle=False)
        chosen = (np.arange(len(file["labels"])) % 5 != 0) == train
        self.images = enlarge(torch.from_numpy(file["images"][chosen]).float().div(16))
        self.labels = file["labels"][chosen]
        self.captions = torch.stack([as_tensor(name.encode(), 5) for name in self.names])
        background = v2.functional.normalize(torch.zeros(3, 1, 1), MEAN, STD).flatten().tolist()
        self.transform = v2.RandomCrop(32, padding=4, fill=background) if train else v2.Identity()

    @staticmethod
    def read(path: Path) -> Tensor:
        """Return an image file, bright on dark, in the form of these digits: float (3, 32, 32)."""
        image = v2.functional.rgb_to_grayscale(read_image(path)) / 255
        return enlarge(F.adaptive_avg_pool2d(image, 8))[0]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[index]), self.captions[self.labels[index]]


def dummy_batch(batch_size: int, device: torch.device) -> list[Tensor]:
    """Return one batch of noise with captions of random letters, on the device."""
    pixels = torch.randn(batch_size, 3, SIZE, SIZE, device=device)
    captions = torch.randint(ord("a"), ord("z") + 1, (batch_size, min(64, LENGTH)), device=device)
    return [pixels, captions.to(torch.uint8)]

"""What is trained: which caption belongs to which image. Replace this file to train something else.

main.py and predict.py ask for the names below, and know nothing else of the task.
"""

from argparse import Namespace
from difflib import get_close_matches
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchvision.transforms import v2

from engine import sheet
from engine.errors import UserError
from engine.images import MEAN, STD, normalise, read_image
from engine.training import evaluation

METRIC = "val_recall_at_1"
LAYOUT = "train/ and val/ with images and a captions.tsv (FILE, tab, TEXT) in each"
BATCH_SIZE = 32

EMBEDDING = 256  # numbers, of an image or a caption
LENGTH = 256  # bytes, of the longest caption
WIDTH, DEPTH, HEADS = 256, 4, 4  # of the text encoder
COLDEST = 100.0  # the limit of 1 / temperature, as in CLIP

prepare = normalise


def build_model(arch: str) -> nn.Module:
    """An image encoder, which is torchvision's classification model `arch`, and a text encoder."""
    names = torchvision.models.list_models(module=torchvision.models)
    if arch not in names:
        nearest = get_close_matches(arch, names, n=3, cutoff=0.0)
        raise UserError(
            f"--arch {arch} is not one of torchvision's {len(names)} classification models; "
            f"the nearest are {', '.join(nearest)}"
        )
    image_encoder = torchvision.models.get_model(arch, weights=None, num_classes=EMBEDDING)
    return TwoEncoders(image_encoder, TextEncoder())


class TwoEncoders(nn.Module):
    """The two encoders that are trained together, and saved as one.

    Called with images, (N, 3, H, W), it gives their embeddings, (N, EMBEDDING), of any length.
    """

    def __init__(self, image_encoder: nn.Module, text_encoder: nn.Module) -> None:
        super().__init__()
        self.image_encoder, self.text_encoder = image_encoder, text_encoder

    def forward(self, images: Tensor) -> Tensor:
        return self.image_encoder(images)


class Block(nn.Module):
    """A layer of a transformer: (N, L, WIDTH) and which of the L are text, (N, L) → (N, L, WIDTH).

    nn.TransformerEncoderLayer makes numbers of its mask. Under real Apex's O1 those are fp32 beside
    half queries, and torch's attention by cuDNN misreads them (pytorch#191612): all becomes nan.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.queries_keys_values = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.mix_heads = nn.Linear(WIDTH, WIDTH)
        wide = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.of_each = nn.Sequential(nn.LayerNorm(WIDTH), *wide)

    def forward(self, features: Tensor, is_text: Tensor) -> Tensor:
        heads = self.queries_keys_values(self.norm(features)).unflatten(2, (3, HEADS, -1))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_text[:, None, None])
        features = features + self.mix_heads(mixed.transpose(1, 2).flatten(2))
        return features + self.of_each(features)


class TextEncoder(nn.Module):
    """A transformer over the bytes of captions.

    uint8 (N, L), with zeros after the end → (N, EMBEDDING), each of the length 1 / temperature.
    The learned temperature is in here, so that this encoder's DDP averages its gradient. It starts
    at 0.07 as in CLIP, where `log_scale` is 0, so that weight decay pulls it there too.
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
        scale = (self.log_scale.float().exp() / 0.07).clamp(max=COLDEST)
        return F.normalize(self.head(mean).float(), dim=1) * scale


def similarities(images: Tensor, texts: Tensor) -> Tensor:
    """Cosine / temperature of images (N, EMBEDDING) with texts (M, EMBEDDING): (N, M)."""
    return F.normalize(images, dim=1) @ texts.T


def criterion(
    images: Tensor,
    texts: Tensor,
    captions: Tensor | None = None,
    rank: int = 0,
    world_size: int = 1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """CLIP's loss of a batch that is spread over all processes; this one's share of it.

    Each image is to find its text among all those of the batch, and each text its image. The mean
    over processes, which DDP takes of the gradients, is the loss of one process with all pairs.

    Args:
        images, texts: the embeddings of this process's pairs, (N, EMBEDDING), as many on each.
        captions: (N, L); another pair with the very same caption is no wrong answer and left out.
    """
    all_images, all_texts = images, texts
    keys = all_keys = fingerprints(captions) if captions is not None else None
    if world_size > 1:
        both = Gather.apply(torch.cat([images, texts], dim=1))  # fp32, as the texts are
        all_images, all_texts = both.chunk(2, dim=1)
        all_keys = Gather.apply(keys)
    own = torch.arange(len(images), device=images.device) + rank * len(images)
    by_image = similarities(images, all_texts)
    by_text = similarities(all_images, texts).T
    same = torch.zeros_like(by_image, dtype=torch.bool)
    if keys is not None:
        same = (keys.unsqueeze(1) == all_keys).scatter(1, own.unsqueeze(1), False)
    losses = []
    for logits in (by_image, by_text):
        logits = logits.masked_fill(same, -torch.inf)
        losses.append((1 - label_smoothing) * F.cross_entropy(logits, own))
        if label_smoothing:  # torch's would give those a share that are left out
            others = -F.log_softmax(logits, dim=1).masked_fill(same, 0).sum(dim=1)
            losses.append(label_smoothing * (others / (~same).sum(dim=1)).mean())
    return sum(losses) / 2


class Gather(torch.autograd.Function):
    """(N, …) of each process → (processes · N, …) on all of them, in the order of ranks.

    What comes back is the gradient of the sum of all processes' losses, of which DDP's average
    over processes makes that of their mean.
    """

    @staticmethod
    def forward(ctx: object, values: Tensor) -> Tensor:
        values = values.contiguous()
        everywhere = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, values)
        return torch.cat(everywhere)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def fingerprints(captions: Tensor) -> Tensor:
    """Numbers (N,) of 64 bits that are the same for the same caption, and only for that.

    Cheaper to send and to compare than captions are; two share one by a chance of about 2^-60.
    """
    return (captions.long() * _factors(captions.device)[: captions.shape[1]]).sum(dim=1)


@cache  # or each batch would wait for a copy to the device
def _factors(device: torch.device) -> Tensor:
    whole = torch.iinfo(torch.int64)
    generator = torch.Generator().manual_seed(0)  # the same in every process
    return torch.randint(whole.min, whole.max, (LENGTH,), generator=generator).to(device)


class Metrics:
    """How well images find their captions among all of the validation set, exactly.

    The candidates are the distinct captions of all processes; a hit is an image whose most similar
    caption is its own, and the loss is the cross entropy of that choice.
    """

    def __init__(self, text_encoder: nn.Module) -> None:
        self.text_encoder = text_encoder
        self.reset()

    def reset(self) -> None:
        """Forgets what it has seen."""
        self.images: list[Tensor] = []
        self.captions: list[list[bytes]] = []

    def update(self, images: Tensor, captions: Tensor) -> None:
        """Adds a batch: embeddings (N, EMBEDDING) and the captions (N, L) that belong to them."""
        self.images.append(images.clone())  # CUDA graphs write the next batch over these
        self.captions.append([bytes(row).rstrip(b"\0") for row in captions.cpu().numpy()])

    def compute(self) -> dict[str, float]:
        """val_loss and val_recall_at_1 (0 to 1) of what all processes have seen, on each of them.

        Puts the captions through the text encoder, each in one of the processes.
        """
        found: list = [None] * dist.get_world_size()
        dist.all_gather_object(found, set(chain(*self.captions)))
        candidates = sorted(set().union(*found))
        texts = self._embed(candidates)
        number = {caption: index for index, caption in enumerate(candidates)}
        totals = torch.zeros(3, dtype=torch.float64, device=texts.device)
        for images, captions in zip(self.images, self.captions, strict=True):
            logits = similarities(images, texts).float()
            own = torch.tensor([number[caption] for caption in captions], device=texts.device)
            losses = F.cross_entropy(logits, own, reduction="sum")
            hits = (logits.argmax(dim=1) == own).sum()
            size = hits.new_tensor(len(own))
            totals += torch.stack([losses.double(), hits.double(), size.double()])
        dist.all_reduce(totals)
        losses, hits, count = totals.tolist()
        return {"val_loss": losses / count, METRIC: hits / count}

    def _embed(self, captions: list[bytes]) -> Tensor:
        """The embeddings of the captions, (N, EMBEDDING): each process makes its share."""
        share = range(dist.get_rank(), len(captions), dist.get_world_size())
        embeddings = embed(self.text_encoder, captions, share)
        dist.all_reduce(embeddings)  # the rows of the other processes are zeros
        return embeddings


def embed(
    text_encoder: nn.Module, captions: list[bytes], share: range, batch_size: int = 256
) -> Tensor:
    """The embeddings of those captions that `share` counts, and zeros: (N, EMBEDDING)."""
    device = next(text_encoder.parameters()).device
    longest = max(map(len, captions))
    embeddings = torch.zeros(len(captions), EMBEDDING, device=device)
    for first in range(0, len(share), batch_size):
        indices = share[first : first + batch_size]
        batch = torch.stack([as_tensor(captions[index], longest) for index in indices])
        embeddings[list(indices)] = text_encoder(batch.to(device)).float()
    return embeddings


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

    It has `count` samples from all over the set, each with the best one of their captions.
    """
    images, captions = sheet.spread(val_set, count)
    images = prepare(images.to(next(model.parameters()).device))
    own = [bytes(row).rstrip(b"\0") for row in captions.numpy()]
    candidates = sorted({*own})
    with evaluation(model):
        texts = embed(model.text_encoder, candidates, range(len(candidates)))
        chosen = similarities(model(images), texts).argmax(dim=1).tolist()
    words = [
        (candidates[number].decode(), candidates[number] == caption)
        for number, caption in zip(chosen, own, strict=True)
    ]
    path = sheet.path_of(output, epoch)
    sheet.write(path, images, words)
    return path


class Predictor:
    """For predict.py: the captions that go best with an image file, with their probabilities.

    Args:
        model: in eval mode.
        about: what its checkpoint says of it.
        args: predict.py's.
    """

    def __init__(self, model: nn.Module, about: dict, args: Namespace) -> None:
        self.model, self.top = model, args.top
        self.device = next(model.parameters()).device
        self.captions = candidates(args.captions, about["data"])
        encoded = [caption.encode() for caption in self.captions]
        self.texts = embed(model.text_encoder, encoded, range(len(encoded)))
        self.read = read_central if about["data"] else Digits.read

    def __call__(self, path: Path) -> list[tuple[str, float]]:
        images = self.read(path).unsqueeze(0).to(self.device)
        logits = similarities(self.model(prepare(images)), self.texts)
        shares, numbers = logits.softmax(dim=1)[0].sort(descending=True)
        pairs = zip(numbers.tolist(), shares.tolist(), strict=True)
        return [(self.captions[number], share) for number, share in pairs][: self.top]


def candidates(file: Path | None, data: str) -> list[str]:
    """The different lines of `file`; by default the captions that validation chose from."""
    if file is None and not data:
        return [*Digits.names]
    if file is None:
        try:
            captions = [caption.decode() for _, caption in first_captions(Path(data, "val"))]
        except UserError as error:
            raise UserError(f"{error}; or name a file of captions with --captions") from None
    else:
        captions = [line.strip() for line in read_lines(file) if line.strip()]
        for caption in captions:
            encode(caption, str(file))
    if not captions:
        raise UserError(f"{file} holds no captions: write one in each line")
    return [*dict.fromkeys(captions)]


def as_tensor(caption: bytes, length: int) -> Tensor:
    """The bytes of a caption, with zeros behind: uint8 (length,)."""
    return torch.tensor(list(caption.ljust(length, b"\0")), dtype=torch.uint8)


def build_datasets(data: Path | None) -> tuple[Dataset, Dataset]:
    """The training and the validation set of (image (3, H, W), caption uint8 (L,)).

    Images from files are uint8: loading processes send a quarter of what floats would be. In
    validation an image that has several captions is there once, with the first of them.

    `data` is a folder of the LAYOUT above; without it, the digits that come with the project, and
    their names. Raises UserError for a folder of another shape.
    """
    if data is None:
        return Digits(train=True), Digits(train=False)
    for folder in (data, data / "train", data / "val"):
        if not folder.is_dir():
            raise UserError(f"--data {data}: there is no folder {folder}; it takes {LAYOUT}")
    # Images are not mirrored: a caption may say what is on the left.
    train_crop = v2.RandomResizedCrop(224, scale=(0.5, 1.0), antialias=True)
    train_set = Pairs(read_captions(data / "train"), train_crop)
    return train_set, Pairs(first_captions(data / "val"), central_crop)


central_crop = v2.Compose([v2.Resize(256, antialias=True), v2.CenterCrop(224)])


def read_central(path: Path) -> Tensor:
    """The central crop of the image at `path`, as in validation: uint8 (3, 224, 224)."""
    return central_crop(read_image(path))


def first_captions(folder: Path) -> list[tuple[Path, bytes]]:
    """As read_captions, but with each image only once."""
    captions: dict[Path, bytes] = {}
    for path, caption in read_captions(folder):
        captions.setdefault(path, caption)
    return [*captions.items()]


def read_captions(folder: Path) -> list[tuple[Path, bytes]]:
    """The images and captions in `folder`/captions.tsv, whose first line may be its head.

    Raises UserError for a line that isn't FILE, tab, TEXT, for an empty or a long caption, and for
    files that are not there.
    """
    path = folder / "captions.tsv"
    if not path.exists():
        raise UserError(f"{path} is missing; --data takes {LAYOUT}")
    pairs = []
    for number, line in enumerate(read_lines(path), 1):
        name, tab, text = (part.strip(" ") for part in line.partition("\t"))
        if (number, name, text) == (1, "file", "text") or not line.strip():
            continue
        caption = encode(text, f"{path}, line {number}")
        if not (tab and name and caption) or b"\0" in caption:
            raise UserError(f"{path}, line {number}: it must be FILE, a tab, and a text")
        pairs.append((folder / name, caption))
    there = {file for parent in {file.parent for file, _ in pairs} for file in parent.glob("*")}
    missing = sorted({str(file) for file, _ in pairs if file not in there})
    if missing:
        names = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        raise UserError(f"{path} names {len(missing)} files that are not there: {names}")
    if not pairs:
        raise UserError(f"{path} holds no captions (FILE, tab, TEXT in each line)")
    return pairs


def read_lines(path: Path) -> list[str]:
    """The lines of a text file; U+0085 and its like, which may be in a text, end none."""
    try:
        return path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); name another file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8; save it as that") from None


def encode(text: str, place: str) -> bytes:
    """The bytes of a caption, which stands in `place`; raises UserError for a long one."""
    caption = text.strip().encode()
    if len(caption) > LENGTH:
        raise UserError(
            f"{place}: the text has {len(caption)} bytes, more than {LENGTH}; shorten it, or raise "
            "LENGTH in task.py"
        )
    return caption


class Pairs(Dataset):
    """Images and their captions; a file that is no readable image ends the run with its path."""

    def __init__(self, pairs: list[tuple[Path, bytes]], transform: v2.Transform) -> None:
        self.pairs, self.transform = pairs, transform
        self.longest = max(len(caption) for _, caption in pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        path, caption = self.pairs[index]
        return self.transform(read_image(path)), as_tensor(caption, self.longest)


def enlarge(images: Tensor) -> Tensor:
    """Digits (N, 8, 8), from 0 to 1, as models take them: (N, 3, 32, 32), normalised."""
    images = F.interpolate(images.unsqueeze(1), size=(32, 32), mode="bilinear")
    return v2.functional.normalize(images.expand(-1, 3, -1, -1), MEAN, STD)


class Digits(Dataset):
    """1,797 handwritten digits (data/README.md), enlarged to 32 × 32, and their names.

    Every fifth is for validation; the others are shifted by up to 4 pixels each time they are read.
    """

    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

    def __init__(self, train: bool) -> None:
        file = np.load(Path(__file__).parent / "data" / "digits.npz", allow_pickle=False)
        chosen = (np.arange(len(file["labels"])) % 5 != 0) == train
        images = torch.from_numpy(file["images"][chosen]).float().div(16)
        self.images = enlarge(images)
        self.labels = file["labels"][chosen]
        self.captions = torch.stack([as_tensor(name.encode(), 5) for name in self.names])
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
        return self.transform(self.images[index]), self.captions[self.labels[index]]


def dummy_batch(batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One batch in ImageNet's shape with captions of 64 random letters, made on the device."""
    images = torch.randn(batch_size, 3, 224, 224, device=device)
    captions = torch.randint(ord("a"), ord("z") + 1, (batch_size, 64), device=device)
    return images, captions.to(torch.uint8)

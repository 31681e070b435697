"""JPEG files that the GPU decodes, crops and resizes, a batch at once."""

import io
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import util
from typing import Any, NamedTuple

import torch
import torchvision
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from engine import UserError, distributed
from engine.data.files import naming_errors
from engine.data.images import (
    JPEG_DECODER,
    RGB,
    Crop,
    Encoded,
    Span,
    crop_and_resize,
    decode,
    decode_jpeg,
    whole,
)

MAX_PIXELS = 2**26  # that the GPU decodes at once: 200 MB
# CPU cores of a process that decode as many images per second as a GPU; see docs/data.md.
ENOUGH_CORES = 14
PREFETCH = 2  # batches that are decoded before they are needed
MANY_WORKERS = 6  # have cores to spare: they decode some files, see `is_for_workers`
SMALL_IMAGE = 2**17  # pixels
# Errors of the GPU, which files do not cause. torch before 2.8 has the first one only.
DEVICE_ERRORS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", MemoryError))


class Packed(NamedTuple):
    """A batch of files in one tensor: each tensor of a list would need a file descriptor."""

    paths: list[str]
    data: Tensor  # uint8: the concatenated files
    files: Tensor  # int64 (N, 4): bytes, pixels, 1 if encoded (0: a crop), 1 if to be flipped
    spans: Tensor  # int64 (N, 2, 4): rows and columns
    size: int


def pack(batch: list[tuple]) -> list:
    """Collate a batch of (Encoded, …) to [Packed, …]; the CPU decodes what the GPU should not.

    Raises UserError if the dataset returns something else, or a file is damaged.
    """
    if not isinstance(batch[0][0], Encoded):
        raise UserError("--decode gpu: this data set's images are not files; add --decode cpu")
    images, *others = zip(*batch, strict=True)
    (size,) = {image.crop.size for image in images}
    workers = get_worker_info()
    helps = workers is not None and workers.num_workers >= MANY_WORKERS
    pieces: list[bytearray | memoryview] = []
    files: list[tuple[int, int, bool, bool]] = []
    spans: list[tuple[Span, Span]] = []
    for place, image in enumerate(images):
        piece: bytearray | memoryview = image.data
        pixels = image.pixels
        crop = image.crop
        suits_gpu = image.suits_gpu and not (helps and is_for_workers(place, pixels))
        if not suits_gpu:
            piece = crop_and_resize(decode(image), crop).contiguous().flatten().numpy().data
            pixels = size**2
            crop = whole(size, size)
        pieces.append(piece)
        files.append((len(piece), pixels, suits_gpu, crop.flip))
        spans.append((crop.rows, crop.columns))
    data = torch.frombuffer(bytearray().join(pieces), dtype=torch.uint8)
    paths = [image.path for image in images]
    packed = Packed(paths, data, torch.tensor(files), torch.tensor(spans), size)
    return [packed, *(default_collate(list(values)) for values in others)]


def is_for_workers(place: int, pixels: int) -> bool:
    """Return whether workers decode the image at `place` in a batch, and not the GPU.

    The GPU's decoder waits for kernels that are queued behind those of the training step. Each run
    chooses alike, since the two decoders differ by rounding.
    """
    return place % 4 < (2 if pixels <= SMALL_IMAGE else 1)


def unpack(packed: Packed, device: torch.device) -> Tensor:
    """Decode, crop and resize a batch on `device`: uint8 (N, 3, size, size).

    Raises UserError if a file is damaged.
    """
    size = packed.size
    lengths, pixels, are_encoded, flips = packed.files.T.tolist()
    files = packed.data.split(lengths)
    # Crops that the CPU made are few, or the whole batch: they are transferred in one piece.
    ready = files if all(are_encoded) else packed.data.to(device).split(lengths)
    crops = []
    for group in _groups(pixels):
        encoded = [index for index in group if are_encoded[index]]
        paths = [packed.paths[index] for index in encoded]
        decoded = iter(_decode_on(device, [files[index] for index in encoded], paths))
        images = []
        for index in group:
            is_crop = not are_encoded[index]
            images.append(ready[index].view(3, size, size) if is_crop else next(decoded))
        part = slice(group.start, group.stop)
        crops.append(_crop_batch(images, packed.spans[part], flips[part], size))
        if device.type == "cuda":
            # torchvision's decoder has its own stream, which does not wait for this one: it would
            # overwrite these images with the next ones once they are freed.
            torch.cuda.current_stream(device).synchronize()
        del images, decoded
    batch = crops[0] if len(crops) == 1 else torch.cat(crops)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # as above
    return batch


def _groups(pixels: list[int]) -> Iterator[range]:
    """Yield the images in order, in groups of up to MAX_PIXELS pixels."""
    start = total = 0
    for index, count in enumerate(pixels):
        if total and total + count > MAX_PIXELS:
            yield range(start, index)
            start, total = index, 0
        total += count
    yield range(start, len(pixels))


def _decode_on(device: torch.device, files: list[Tensor], paths: list[str]) -> list[Tensor]:
    """Return the images of JPEG files: uint8 (3, H, W), each of its own size."""
    if not files:
        return []
    try:
        return decode_jpeg(files, mode=RGB, device=device)
    except RuntimeError:  # by one of the files, which is not named, or by all of them together
        return [_decode_alone(device, *file) for file in zip(files, paths, strict=True)]


def _decode_alone(device: torch.device, file: Tensor, path: str) -> Tensor:
    try:
        return decode_jpeg(file, mode=RGB, device=device)
    except DEVICE_ERRORS:
        raise
    except RuntimeError:  # damaged, or of a kind that only the CPU's decoder supports
        with naming_errors(path, "an image"):
            image = decode_jpeg(file, mode=RGB)
    return image.to(device)


def _crop_batch(images: list[Tensor], spans: Tensor, flips: list[int], size: int) -> Tensor:
    if images[0].is_cuda:
        from engine.data.resize import resize  # needs Triton, which comes with torch for GPUs

        return resize(images, spans, torch.tensor(flips, dtype=torch.bool), size)
    crops = [
        Crop(Span(*rows), Span(*columns), size, bool(flip))
        for (rows, columns), flip in zip(spans.tolist(), flips, strict=True)
    ]
    return torch.stack(list(map(crop_and_resize, images, crops)))


class DecodingLoader(DataLoader):
    """DataLoader of `Encoded` images that decodes and crops them on `device`, ahead of their use.

    A thread with its own stream waits for the decoder, so that the training steps do not.
    """

    def __init__(self, device: torch.device, dataset: Dataset, **options: Any) -> None:
        super().__init__(dataset, collate_fn=pack, **options)
        # With deterministic algorithms, torch fills new memory with 255. nvJPEG does not wait for
        # that: images turned white where several processes shared a GPU.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def __iter__(self) -> Iterator[list[Tensor]]:  # type: ignore[override]  # torch's is narrower
        return self._decode_ahead(super().__iter__())  # draws the workers' seed now

    def _decode_ahead(self, batches: Iterator[list]) -> Iterator[list[Tensor]]:
        with ThreadPoolExecutor(1) as thread:
            pending: deque[Future[list[Tensor]]] = deque()
            for batch in batches:
                pending.append(thread.submit(self._decode, batch))
                if len(pending) > PREFETCH:
                    yield self._collect(pending.popleft())
            while pending:
                yield self._collect(pending.popleft())

    def _decode(self, batch: list) -> list[Tensor]:
        if self.stream:  # a thread starts with GPU 0, where the stream would create a context
            torch.cuda.set_device(self.stream.device)
        with torch.cuda.stream(self.stream):
            return [unpack(batch[0], self.device), *batch[1:]]

    def _collect(self, decoding: Future[list[Tensor]]) -> list[Tensor]:
        batch = decoding.result()
        if self.stream:  # keeps the memory of the images until the training has read them
            batch[0].record_stream(torch.cuda.current_stream(self.device))
        return batch


def choose_decoder(wanted: str, skip_broken: int) -> str:
    """Return where JPEG files are decoded, "cpu" or "gpu"; choose, and log it, for "auto"."""
    if wanted != "auto" or not torch.cuda.is_available():
        return "cpu" if wanted == "auto" else wanted
    cores = distributed.cpu_cores()
    decoder, reason = "cpu", f"on {cores} CPU cores for each process"
    if skip_broken:  # files that the GPU can't decode are found too late to skip them
        reason = "which --skip-broken requires"
    elif cores < ENOUGH_CORES:
        reason += f", fewer than {ENOUGH_CORES}"
        try:
            require_gpu_decoder(torch.device("cuda", torch.cuda.current_device()))
            decoder = "gpu"
        except UserError as error:
            reason += f"; {error}"
    distributed.print_on_rank_zero(f"--decode auto: {decoder}, {reason}")
    return decoder


def require_gpu_decoder(device: torch.device) -> None:
    """Raise UserError if images can't be decoded on `device`."""
    if device.type != "cuda":
        raise UserError("--decode gpu: this run is on the CPU; leave it out")
    if util.find_spec("triton") is None:
        raise UserError("--decode gpu needs Triton, which is not installed here; leave it out")
    if decode_jpeg is None:
        raise UserError(
            f"--decode gpu: torchvision {torchvision.__version__} has no decode_jpeg; "
            "install torchcodec, or leave it out"
        )
    probe = io.BytesIO()
    Image.new("RGB", (8, 8)).save(probe, "JPEG")
    try:
        decode_jpeg(torch.frombuffer(probe.getbuffer(), dtype=torch.uint8), mode=RGB, device=device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--decode gpu: {JPEG_DECODER} can't decode on this GPU ({reason}); leave it out"
        ) from None

"""Data loading: sample order and random numbers as a function of the position in training."""

import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import repeat
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from engine import UserError
from engine.data import images
from engine.data.remote import WINDOW

# O1 and O4 on the CPU would change what the training process reads, and not what its workers do.
no_casts = partial(torch.autocast, "cpu", enabled=False)


class SizedDataset(Protocol):
    """Data set of known length, such as every map-style ``torch.utils.data.Dataset``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class DatasetWrapper(Dataset):
    """Base class of a data set that changes the samples of `dataset`, and has its attributes."""

    def __init__(self, dataset: SizedDataset) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # such as its own way of pickling
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)


class SeededDataset(DatasetWrapper):
    """`dataset` with random numbers that depend only on the seed, the epoch and the batch.

    So a batch's augmentations are the same whichever process loads it, and whatever was loaded
    before it. The random numbers of the training itself are left as they are.

    Attributes:
        collate_fn: makes a batch of samples; copied, default torch's default_collate.
        decode: where its images are decoded, "cpu" or "gpu"; copied from `dataset`, default "cpu".
        shard_sizes: samples of each shard of data that is read by URL; copied, default none.

    Raises UserError if torch's Subset or ConcatDataset hides a method that this class calls.
    """

    def __init__(self, dataset: SizedDataset, seed: int) -> None:
        super().__init__(dataset)
        _require_visible_methods(dataset)
        self.seed = seed
        self.epoch = 0
        self._length = len(dataset)
        self.collate_fn: Callable[[list], Any] = default_collate
        if hasattr(dataset, "collate_fn"):
            self.collate_fn = partial(self._collate, dataset.collate_fn)
        self._first: Sequence[int] = ()  # index of the latest batch's first sample
        self.decode: str = getattr(dataset, "decode", "cpu")
        self.shard_sizes: Sequence[int] = getattr(dataset, "shard_sizes", ())

    def __getitem__(self, index: int) -> object:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list:
        """Return the samples of a batch; a DataLoader prefers this to single samples."""
        with no_casts(), nullcontext() if get_worker_info() else rng_preserved():
            self._first = indices[:1]
            seed_cpu(mix_seeds(self.seed, self.epoch, *self._first))
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(self.epoch)
                if len(self.dataset) != self._length:
                    raise UserError(
                        f"set_epoch changed the length of a data set from {self._length} to "
                        f"{len(self.dataset)}: the schedule and resumption need the same in all "
                        "epochs"
                    )
            return self.read(indices)

    def read(self, indices: Sequence[int]) -> list:
        """Return the samples of a batch, after their random numbers are seeded."""
        return [self.dataset[index] for index in indices]

    def _collate(self, collate_fn: Callable[[list], Any], samples: list) -> Any:
        """Return the batch that was read last, with random numbers of its own, too."""
        with no_casts(), nullcontext() if get_worker_info() else rng_preserved():
            seed_cpu(mix_seeds(self.seed, self.epoch, *self._first, 1))
            return collate_fn(samples)


def _require_visible_methods(dataset: SizedDataset) -> None:
    sets: list[Any] = [dataset]
    for each in sets:
        if isinstance(each, ConcatDataset):
            sets += each.datasets
        elif isinstance(each, Subset | DatasetWrapper):
            sets.append(each.dataset)
    for name in ("collate_fn", "set_epoch"):
        if not hasattr(dataset, name) and any(hasattr(each, name) for each in sets):
            kind = next(type(each) for each in sets if not isinstance(each, DatasetWrapper))
            raise UserError(
                f"a {kind.__name__} hides the {name} of the data set in it: set {name} on it, too"
            )


class ResumableDistributedSampler(DistributedSampler):
    """DistributedSampler with ``drop_last=True`` that can start within an epoch.

    Each epoch has a new order, of which each process takes every `num_replicas`-th sample. All
    processes together consume the order from its start, so one count of samples states the
    position, whatever the number of processes was. The order is that of `shard_order` if the
    data set's shards are read by URL.
    """

    dataset: SeededDataset

    def __init__(
        self,
        dataset: SeededDataset,
        seed: int,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, seed=seed, drop_last=True)
        self.start_sample = 0

    def set_epoch(self, epoch: int, start_sample: int = 0) -> None:
        """Set the epoch, on which the order depends, and the position to start at.

        Args:
            start_sample: how many samples of the epoch all processes together have consumed.
        """
        super().set_epoch(epoch)  # or every epoch has the order of the first
        self.dataset.epoch = epoch
        self.start_sample = start_sample

    def __len__(self) -> int:
        return max(0, len(self.dataset) - self.start_sample) // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        sizes = self.dataset.shard_sizes
        if sizes and sum(sizes) != len(self.dataset):
            raise ValueError(f"{sum(sizes)} samples in shards, but {len(self.dataset)} in all")
        if sizes:
            order = shard_order(sizes, generator)
        else:
            order = torch.randperm(len(self.dataset), generator=generator)
        remaining = order[self.start_sample :]
        num_samples = len(remaining) // self.num_replicas  # equally many in each process
        return iter(remaining[self.rank :: self.num_replicas][:num_samples].tolist())


def shard_order(sizes: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a random order of samples in which those of a shard are near one another.

    The shards are in random order, and each sample takes a random place within the WINDOW shards
    that follow the start of its own, around the end of the epoch to its start. So there are
    samples of as many shards at each position, also at the first.

    Args:
        sizes: number of samples of each shard; their indices are consecutive.
    """
    counts = torch.tensor(sizes)
    shuffled = torch.randperm(len(sizes), generator=generator)
    starts = torch.empty_like(counts)
    starts[shuffled] = counts[shuffled].cumsum(0) - counts[shuffled]
    total = sum(sizes)
    window = total * min(1, WINDOW / len(sizes))
    offsets = window * torch.rand(total, generator=generator, dtype=torch.float64)
    return (starts.repeat_interleave(counts) + offsets).remainder(total).argsort(stable=True)


class RepeatedBatch:
    """The same batch `num_batches` times per epoch: loader and sampler of --dummy."""

    def __init__(self, batch: Sequence[Tensor], num_batches: int, world_size: int) -> None:
        self.batch = batch
        self.num_batches = num_batches
        self.remaining = num_batches
        self.samples_per_step = len(batch[0]) * world_size

    def set_epoch(self, epoch: int, start_sample: int = 0) -> None:
        """Set the position to start at, as for ResumableDistributedSampler."""
        self.remaining = max(0, self.num_batches - start_sample // self.samples_per_step)

    def __iter__(self) -> Iterator[Sequence[Tensor]]:
        return repeat(self.batch, self.remaining)

    def __len__(self) -> int:
        return self.remaining


def collate(samples: list, collate_fn: Callable[[list], Any] = default_collate) -> Any:
    """Return a batch of samples, whose `Encoded` images become uint8 (3, size, size) first.

    Returns None for no samples.

    Args:
        collate_fn: of a data set, as DataLoader's: it may pad samples of different lengths.
    """
    return collate_fn([decode_crops(sample) for sample in samples]) if samples else None


def require_default_collate(dataset: SizedDataset, flag: str) -> None:
    """Raise UserError if a data set has a `collate_fn`, which expects no element more."""
    if hasattr(dataset, "collate_fn"):
        raise UserError(
            f"{flag} adds an element to each sample, which the data set's collate_fn does not "
            "expect: leave one of them out"
        )


def decode_crops(sample: Any) -> Any:
    """Return `sample` with crops in place of its `Encoded` images, decoded on the CPU."""
    if isinstance(sample, images.Encoded):
        return images.crop_and_resize(images.decode(sample), sample.crop)
    if isinstance(sample, Mapping):
        return {key: decode_crops(value) for key, value in sample.items()}
    if type(sample) in (tuple, list):
        return type(sample)(map(decode_crops, sample))
    return sample


def select_batch(dataset: SizedDataset, indices: Sequence[int]) -> list[Tensor]:
    """Return the samples at `indices` as one batch, on the CPU, in the state of epoch 0."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(0)
    collate_fn = getattr(dataset, "collate_fn", default_collate)
    return collate([dataset[index] for index in indices], collate_fn)


def to_device(
    batch: Sequence[Tensor], device: torch.device, memory_format: torch.memory_format
) -> list[Tensor]:
    """Return the tensors of `batch` on `device`; images, (N, C, H, W), in `memory_format`.

    Raises UserError if anything else is in it.
    """
    moved = []
    for index, tensor in enumerate(batch):
        if not isinstance(tensor, Tensor):
            raise UserError(
                f"element {index} of each batch is a {type(tensor).__name__} and not a tensor: "
                "samples of a data set must be tuples of tensors and numbers, without names"
            )
        layout = memory_format if tensor.dim() == 4 else torch.preserve_format
        moved.append(tensor.to(device, memory_format=layout, non_blocking=True))
    return moved


def mix_seeds(*numbers: int) -> int:
    """Return a seed of 32 bits that differs, most likely, for any other `numbers`."""
    return zlib.crc32(" ".join(map(str, numbers)).encode())


def seed_everything(seed: int) -> None:
    """Seed Python, torch on every device, and NumPy if it is imported; `seed` < 2^32."""
    torch.manual_seed(seed)
    seed_cpu(seed)


@contextmanager
def rng_preserved() -> Iterator[None]:
    """Restore this process's random numbers after the body."""
    state = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def seed_cpu(seed: int) -> None:
    """Seed as `seed_everything` does, except the GPUs, in a tenth of the time."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        # Not the same seed: integers would be torch's, as both have the same generator.
        sys.modules["numpy"].random.seed(mix_seeds(seed, 1))


def get_rng_state() -> dict[str, Any]:
    """Return the states of this process's generators, as plain types and tensors only."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, key, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, key.tolist(), *rest)
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
        state["each_cuda"] = torch.cuda.get_rng_state_all()  # DataParallel draws on all of them
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore `state`, except for generators that this process does not have, such as a GPU's."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_initialized():
        each = state.get("each_cuda", [])
        if len(each) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(each)
        torch.cuda.set_rng_state(state["cuda"])

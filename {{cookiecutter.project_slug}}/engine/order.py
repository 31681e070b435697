"""In which order samples are read, and with which random numbers: a function of the position."""

from collections.abc import Iterator, Sequence
from itertools import repeat

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from engine import rng
from engine.watch import leave_signals_to_the_training


class Order(DistributedSampler):
    """A new order in each epoch, of which each process takes every `num_replicas`-th sample.

    As DistributedSampler's with ``drop_last=True``, but it can begin within an epoch. All processes
    together take the order from its front, so a count of samples says what is left of it, whatever
    the number of processes that took them.
    """

    def __init__(self, dataset: "Seeded", seed: int, **replicas: int) -> None:
        super().__init__(dataset, seed=seed, drop_last=True, **replicas)
        self.taken = 0

    def begin(self, epoch: int, taken: int) -> None:
        """The next iteration is of `epoch`, without the first `taken` samples of its order."""
        self.set_epoch(epoch)  # or every epoch has the order of the first
        self.dataset.epoch, self.taken = epoch, taken

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
        return iter(order[self.taken + self.rank :: self.num_replicas][: len(self)])

    def __len__(self) -> int:
        return max(0, len(self.dataset) - self.taken) // self.num_replicas


class Repeated:
    """The same batch, `count` times in an epoch: a loader, and its sampler, for --dummy."""

    def __init__(self, batch: Sequence[Tensor], count: int, world_size: int) -> None:
        self.batch, self.count, self.left = batch, count, count
        self.samples = len(batch[0]) * world_size

    def begin(self, epoch: int, taken: int) -> None:
        """The next iteration is without the batches of the first `taken` samples."""
        self.left = self.count - taken // self.samples

    def __iter__(self) -> Iterator[Sequence[Tensor]]:
        return repeat(self.batch, self.left)

    def __len__(self) -> int:
        return self.left


class Seeded(Dataset):
    """`dataset`, with random numbers that depend on the seed, the epoch and the batch alone.

    So a batch's augmentations are the same whichever process loads it, and whatever was loaded
    before it. The training's own random numbers stay as they are.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> object:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list:
        """The samples of a batch; this is how a DataLoader asks for them."""
        before = rng.state() if get_worker_info() is None else None
        rng.seed_cpu(rng.mixed(self.seed, self.epoch, *indices[:1]))
        try:
            return [self.dataset[index] for index in indices]
        finally:
            if before:
                rng.restore(before)


def loading(batch_size: int, workers: int, pinned: bool) -> dict[str, object]:
    """What a DataLoader of the training is made with, beside its samples and their order."""
    return {
        "batch_size": batch_size,
        "num_workers": workers,
        "pin_memory": pinned,
        "generator": torch.Generator(),  # or it takes numbers from the training's
        "worker_init_fn": leave_signals_to_the_training,
    }

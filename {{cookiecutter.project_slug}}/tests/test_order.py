"""engine.order: which samples are read from any position on, and with which random numbers."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from engine.order import Order, Repeated, Seeded


class Numbers(Dataset):
    """Each sample: its index, and what three sources of random numbers give for it."""

    def __len__(self) -> int:
        return 103

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = (random.random(), np.random.random(), torch.rand(()).item())
        return torch.tensor([index, *draws], dtype=torch.float64)


def batches(world_size: int, epoch: int, taken: int, workers: int = 0) -> list[list]:
    """What each rank reads from there on, in batches of 4."""
    data = Seeded(Numbers(), seed=5)
    read = []
    for rank in range(world_size):
        order = Order(data, 5, num_replicas=world_size, rank=rank)
        order.begin(epoch, taken)
        loader = DataLoader(data, 4, sampler=order, drop_last=True, num_workers=workers)
        read.append(list(loader))
        assert len(read[-1]) == len(loader)
    return read


def test_an_epoch_goes_on_where_it_stopped() -> None:
    """With the same samples, and the same augmentations however they are loaded."""
    whole = batches(2, epoch=3, taken=0)
    for workers in (0, 2):
        for own, left in zip(whole, batches(2, 3, 3 * 8, workers), strict=True):
            assert all(torch.equal(*pair) for pair in zip(own[3:], left, strict=True))
    assert not torch.equal(batches(2, 4, 0)[0][0], whole[0][0])
    assert whole[0][0][:, 1:].unique().numel() == 12


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (1, 4)])
def test_on_another_number_of_processes_no_sample_is_lost_or_doubled(
    before: int, after: int
) -> None:
    steps = 5
    first = [batch for own in batches(before, 0, 0) for batch in own[:steps]]
    rest = [batch for own in batches(after, 0, steps * before * 4) for batch in own]
    read = torch.cat(first + rest)[:, 0].tolist()
    assert len(read) == len(set(read))
    assert 103 - len(read) < after * 4  # the last short step


def test_loading_leaves_the_trainings_random_numbers_alone() -> None:
    def draw() -> tuple:
        return random.random(), np.random.random(), torch.rand(()).item()

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    undisturbed = draw(), draw()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    data = Seeded(Numbers(), seed=5)
    assert draw() == undisturbed[0]
    assert torch.equal(data[7], data[7])
    assert draw() == undisturbed[1]


def test_a_repeated_batch_goes_on_within_an_epoch() -> None:
    batch = [torch.zeros(4, 3), torch.zeros(4)]
    repeated = Repeated(batch, 10, world_size=2)
    assert [len(repeated), len(list(repeated))] == [10, 10]
    repeated.begin(1, 3 * 8)
    assert [len(repeated), len(list(repeated))] == [7, 7]
    assert next(iter(repeated)) is batch

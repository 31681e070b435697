"""Image sizes that grow during the training."""

import argparse
from collections.abc import Iterator
from functools import partial

import pytest
import task
import torch
from engine import UserError
from engine.data import SeededDataset, collate
from engine.data.image_size import (
    ProgressiveDataset,
    SizeSchedule,
    parse_size,
    resized,
    size_range,
)
from engine.data.images import Crop, Encoded, Span, crop_and_resize
from engine.data.loading import TrainLoader
from torchvision.transforms.v2 import functional


def test_size_grows_in_steps_of_32_to_the_full_size() -> None:
    schedule = SizeSchedule(128, 224, epochs=10)
    assert [schedule.at(epoch) for epoch in range(10)] == [128] * 3 + [160] * 3 + [192] * 2 + [
        224
    ] * 2
    assert schedule.describe() == (
        "image size 128 from epoch 1, 160 from epoch 4, 192 from epoch 7, 224 from epoch 9"
    )


@pytest.mark.parametrize("epochs", [1, 2, 3, 16, 90])
@pytest.mark.parametrize(("first", "last"), [(128, 176), (100, 224), (224, 224)])
def test_last_epoch_has_the_full_size(first: int, last: int, epochs: int) -> None:
    sizes = [SizeSchedule(first, last, epochs).at(epoch) for epoch in range(epochs)]
    assert sizes == sorted(sizes) and sizes[-1] == last and sizes[0] >= first
    assert len(set(sizes)) <= 5


@pytest.mark.parametrize("text", ["0", "224:128", "128:", "a:b", "1:2:3", "-1", "99999"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as 128:224"):
        size_range(text)


def test_size_range() -> None:
    assert parse_size(size_range("128:224")) == (128, 224)
    assert parse_size(size_range("176")) == (176, 176)


def test_resized_crop_shows_the_same_part() -> None:
    image = torch.arange(64, dtype=torch.uint8).expand(3, 64, 64).contiguous()
    crop = Crop(Span(8, 32, 64), Span(16, 32, 64), 64, flip=True)
    smaller = crop_and_resize(image, resized(crop, 32))
    assert smaller.shape == (3, 32, 32)
    assert torch.equal(smaller, image[:, 8:40, 16:48].flip(2))


@pytest.mark.parametrize(("height", "width"), [(512, 640), (640, 512), (500, 333), (7, 5)])
def test_resized_centre_crop_shows_the_centre(height: int, width: int) -> None:
    """A task may train on center_crop, whose resized sides are longer than the crop."""
    crop = task.center_crop(height, width)
    rows, columns = torch.linspace(0, 160, height), torch.linspace(0, 90, width)
    image = (rows[:, None] + columns).byte().expand(3, -1, -1)
    found, full = (crop_and_resize(image, each) for each in (resized(crop, 112), crop))
    assert found.shape == (3, 112, 112)
    expected = functional.resize(full, [112, 112], antialias=True)
    assert (found.int() - expected.int()).abs().float().mean() < 1


class Files(torch.utils.data.Dataset):
    """Encoded images without pixels, whose crops have 224 pixels."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Encoded, int]:
        crop = Crop(Span(0, 300, 224), Span(0, 300, 224), 224)
        return Encoded("", bytearray(), 90_000, crop, False), index


class Sampler:
    """Sampler of all samples in their order, from a position on."""

    epoch, start_sample = 0, 0

    def set_epoch(self, epoch: int, start_sample: int) -> None:
        self.epoch, self.start_sample = epoch, start_sample

    def __len__(self) -> int:
        return 8 - self.start_sample

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start_sample, 8))


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_yields_the_size_of_each_epoch(monkeypatch, workers: int) -> None:
    """The loading processes prepare batches of the next epoch before this one ends."""
    zeros = torch.zeros(3, 300, 300, dtype=torch.uint8)
    monkeypatch.setattr("engine.data.images.decode", lambda encoded: zeros)
    schedule = SizeSchedule(64, 128, epochs=4)
    dataset = SeededDataset(ProgressiveDataset(Files(), schedule), 0)
    assert collate([dataset[0]])[0].shape == (1, 3, 64, 64)
    sampler = Sampler()
    loader = TrainLoader(
        dataset, sampler, batch_size=4, epochs=4, workers=workers, device=torch.device("cpu")
    )
    for epoch, start in ((0, 0), (1, 0), (2, 4), (3, 0)):
        sampler.epoch, sampler.start_sample = epoch, start
        shapes = {tuple(images.shape[1:]) for images, _ in loader}
        size = (64, 64, 96, 128)[epoch]
        assert shapes == {(3, size, size)}


def test_data_set_learns_the_epoch() -> None:
    files = Files()
    files.set_epoch = partial(setattr, files, "epoch")
    SeededDataset(ProgressiveDataset(files, SizeSchedule(64, 128, epochs=4)), 0)[0]
    assert files.epoch == 0


def test_data_set_of_tensors_is_an_error() -> None:
    dataset = ProgressiveDataset([(torch.zeros(3, 4, 4), 0)], SizeSchedule(64, 128, epochs=4))
    with pytest.raises(UserError, match="this data set's images are not files; give one size"):
        dataset[0]

"""Tests of engine.data: order of the samples and their random numbers after any position."""

import copy
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from itertools import chain, islice
from multiprocessing import resource_sharer
from pathlib import Path

import numpy as np
import pytest
import torch
from engine import UserError
from engine.data import (
    DatasetWrapper,
    RepeatedBatch,
    ResumableDistributedSampler,
    SeededDataset,
    collate,
    select_batch,
    to_device,
)
from engine.data.images import Crop, Span, crop_and_resize, decode, read_encoded
from engine.data.loading import EpochBatches, SeededBatchSampler, TrainLoader, build_loader
from engine.data.skipping import SkippingDataset, skip_broken
from engine.monitoring.image_grid import sample_evenly
from fresh import TEMPLATE
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import ConcatDataset, Dataset, RandomSampler, Subset

CPU = torch.device("cpu")


class Numbers(Dataset):
    """Samples of an index and numbers from three random-number generators."""

    def __len__(self) -> int:
        return 103

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = (random.random(), np.random.random(), torch.rand(()).item())
        return torch.tensor([index, *draws], dtype=torch.float64)


def test_copy_of_a_seeded_data_set_is_one_if_the_data_set_has_its_own_way() -> None:
    class Own(Numbers):
        def __deepcopy__(self, memo: dict) -> "Own":
            return Own()

    assert copy.deepcopy(SeededDataset(Own(), seed=5)).seed == 5


def read_epoch(world_size: int, epoch: int, start_sample: int, workers: int = 0) -> list[list]:
    """Return the batches of 4 that each rank reads from that position on."""
    data = SeededDataset(Numbers(), seed=5)
    batches = []
    for rank in range(world_size):
        sampler = ResumableDistributedSampler(data, 5, num_replicas=world_size, rank=rank)
        sampler.set_epoch(epoch, start_sample)
        loader = TrainLoader(data, sampler, batch_size=4, epochs=9, workers=workers, device=CPU)
        batches.append(list(loader))
        assert len(batches[-1]) == len(loader)
    return batches


def test_resume_within_an_epoch_reads_the_same_samples_and_augmentations() -> None:
    whole = read_epoch(2, epoch=3, start_sample=0)
    for workers in (0, 2):
        for own, rest in zip(whole, read_epoch(2, 3, 3 * 8, workers), strict=True):
            assert all(torch.equal(*pair) for pair in zip(own[3:], rest, strict=True))
    assert not torch.equal(read_epoch(2, 4, 0)[0][0], whole[0][0])
    assert whole[0][0][:, 1:].unique().numel() == 12


def test_order_is_that_of_version_0_9() -> None:
    """So that checkpoints written by it resume with the samples that are left."""
    data = SeededDataset(Numbers(), seed=5)
    sampler = ResumableDistributedSampler(data, 5, num_replicas=2, rank=1)
    sampler.set_epoch(3, 8)
    generator = torch.Generator().manual_seed(5 + 3)
    order = torch.randperm(103, generator=generator).tolist()
    assert list(sampler) == order[8:][1::2][: (103 - 8) // 2]


def test_epochs_without_a_position_start_at_the_first_sample() -> None:
    data = SeededDataset(Numbers(), seed=5)
    sampler = ResumableDistributedSampler(data, 5, num_replicas=1, rank=0)
    sampler.set_epoch(0, 50)
    assert len(sampler) == 53
    sampler.set_epoch(1)
    assert sorted(sampler) == list(range(103))
    assert data.epoch == 1


class WorkerIds(Numbers):
    """The same, with the process that reads each sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([super().__getitem__(index), torch.tensor([os.getpid()])])


@pytest.mark.parametrize("steps", [None, 5])
def test_workers_live_for_all_epochs_and_read_the_same_batches(steps: int | None) -> None:
    """Also if an epoch is left after `steps` and read again from there."""
    data = SeededDataset(WorkerIds(), seed=5)
    sampler = ResumableDistributedSampler(data, 5, num_replicas=2, rank=1)
    loader = TrainLoader(data, sampler, batch_size=4, epochs=3, workers=2, device=CPU)
    processes = set()
    for epoch in range(3):
        (_, alone) = read_epoch(2, epoch, 0)
        sampler.set_epoch(epoch)
        batches = list(islice(loader, steps))
        if steps:
            sampler.set_epoch(epoch, steps * 8)
            batches += list(islice(loader, len(loader)))  # not the end of the iteration
        assert [batch[:, :4].tolist() for batch in batches] == [b.tolist() for b in alone]
        processes |= {int(process) for batch in batches for process in batch[:, 4]}
    assert len(processes) == 2 and os.getpid() not in processes


class Augmented(Numbers):
    """Numbers with settings."""

    def __init__(self) -> None:
        self.augments, self.shifts, self.transform = True, [0], torch.abs

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + (0 if self.augments else self.shifts[0])


@pytest.mark.parametrize("workers", [0, 1])
def test_change_of_the_data_without_effect_is_a_warning(tmp_path, workers: int, capsys) -> None:
    """As in loops that end an augmentation before the last epoch."""
    data = Augmented()
    seeded = SeededDataset(skip_broken(data, 1, tmp_path, None), seed=5)
    sampler = ResumableDistributedSampler(seeded, 5, num_replicas=1, rank=0)
    loader = TrainLoader(seeded, sampler, batch_size=4, epochs=4, workers=workers, device=CPU)
    for epoch in range(4):
        if epoch == 2:
            data.augments, data.shifts = False, [1000]  # as labels that are corrected
            data.transform = torch.neg
        sampler.set_epoch(epoch)
        has_effect = {bool(batch[0, 0] >= 1000) for batch in loader}
        assert has_effect == {epoch >= 2 and not workers}
    warning = "warning: augments, shifts, transform of the training data changed after the loading "
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith(warning) for line in lines] == [True] * workers


class Epochs(Numbers):
    def set_epoch(self, epoch: int) -> None: ...


@pytest.mark.parametrize(
    "part_of",
    [
        lambda dataset: Subset(dataset, [0]),
        lambda dataset: Subset(DatasetWrapper(Subset(dataset, [0])), [0]),
        lambda dataset: ConcatDataset([Numbers(), dataset]),
    ],
    ids=["subset", "nested", "concatenated"],
)
def test_hidden_method_of_a_data_set_is_an_error(part_of: Callable) -> None:
    """After torch's random_split, an augmentation or a collate_fn would silently be missing."""
    dataset = Epochs()
    part = part_of(dataset)
    message = f"a {type(part).__name__} hides the set_epoch of the data set in it: set set_epoch on"
    for hidden in (part, DatasetWrapper(part)):
        with pytest.raises(UserError, match=message):
            SeededDataset(hidden, 0)
    part.set_epoch = dataset.set_epoch
    SeededDataset(DatasetWrapper(part), 0)


class Products(Dataset):
    """The type of a matrix product."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return torch.eye(2).mm(torch.eye(2)).element_size()

    def collate_fn(self, samples: list) -> tuple:
        return torch.tensor(samples), torch.tensor(self[0])


@pytest.mark.parametrize("workers", [0, 1])
def test_casts_of_the_training_do_not_change_the_data(workers: int) -> None:
    """O1 and O4 cast in the training process, which reads the samples without workers."""
    data = SeededDataset(Products(), seed=5)
    sampler = ResumableDistributedSampler(data, 5, num_replicas=1, rank=0)
    loader = TrainLoader(data, sampler, batch_size=4, epochs=1, workers=workers, device=CPU)
    with torch.autocast("cpu", torch.bfloat16):
        for sizes, collated in loader:
            assert sizes.tolist() == [4] * 4 and collated == 4


class Chosen(ResumableDistributedSampler):
    """Samples that the training chooses for each epoch."""

    wanted: torch.Tensor

    def __iter__(self):
        return iter([int(self.wanted)] * len(self))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("workers", "batch_size"), [(0, 4), (1, 4), (1, 100)])
def test_change_of_the_sampler_between_epochs_has_its_effect_at_once(
    workers: int, batch_size: int, in_place: bool
) -> None:
    """Although workers read two batches ahead, which may be of the next epochs."""
    data = SeededDataset(Numbers(), seed=5)
    sampler = Chosen(data, 5, num_replicas=1, rank=0)
    sampler.wanted = torch.zeros((), dtype=torch.int)
    options = {"batch_size": batch_size, "workers": workers, "device": CPU}
    loader = TrainLoader(data, sampler, epochs=5, **options)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        wanted = torch.tensor(7 * epoch, dtype=torch.int)
        sampler.wanted = sampler.wanted.copy_(wanted) if in_place else wanted
        assert {int(index) for batch in loader for index in batch[:, 0]} == {7 * epoch}


class Opened(Numbers):
    """The process that has opened the data set at its first sample."""

    opened = None

    def __getitem__(self, index: int) -> torch.Tensor:
        self.opened = self.opened or os.getpid()
        return torch.tensor([self.opened])


def test_workers_that_are_started_share_nothing_that_is_opened_later() -> None:
    """As for the picture of a validation with which a run resumes."""
    data = SeededDataset(Opened(), seed=5)
    sampler = ResumableDistributedSampler(data, 5, num_replicas=1, rank=0)
    loader = TrainLoader(data, sampler, batch_size=4, epochs=1, workers=1, device=CPU)
    loader.start()
    select_batch(data, [0])
    assert os.getpid() not in {int(process) for batch in loader for process in batch[:, 0]}


def set_threads(worker: int) -> None:
    torch.set_num_threads(3 + worker)


class Threads(Dataset):
    """The number of threads of the process that reads a sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(torch.get_num_threads())


def test_options_of_the_owner_replace_those_of_the_loader() -> None:
    data = SeededDataset(Threads(), seed=5)
    options = {"workers": 1, "device": CPU, "batch_size": 2, "worker_init_fn": set_threads}
    loader = build_loader(data, persistent_workers=False, **options)
    assert {int(number) for batch in loader for number in batch} == {3}
    assert not loader.persistent_workers
    with pytest.raises(UserError, match="make it a method of the data set"):
        build_loader(data, collate_fn=list, **options)


class Texts(Dataset):
    """Samples of different lengths."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 + index % 4,), index)

    @staticmethod
    def collate_fn(samples: list[torch.Tensor]) -> list[torch.Tensor]:
        return [pad_sequence(samples, batch_first=True, padding_value=-1)]


@pytest.mark.parametrize(("size", "last"), [(1, 0), (5, 4), (8, 7), (15, 13), (54, 47), (64, 56)])
def test_samples_for_a_picture_are_from_all_over_the_data(size: int, last: int) -> None:
    (chosen,) = sample_evenly([(torch.tensor(index),) for index in range(size)], 8)
    assert chosen[0] == 0 and chosen[-1] == last
    assert len(set(chosen.tolist())) == len(chosen) == min(size, 8)


@pytest.mark.parametrize("workers", [0, 1])
def test_collate_fn_of_a_data_set_makes_all_batches(workers: int, tmp_path: Path) -> None:
    data = SeededDataset(skip_broken(Texts(), 1, tmp_path), seed=5)
    options = {"workers": workers, "device": CPU}
    expected = [[0, -1, -1, -1], [1, 1, -1, -1], [2, 2, 2, -1], [3, 3, 3, 3]]
    batches = [batch.tolist() for (batch,) in build_loader(data, batch_size=4, **options)]
    assert batches[0] == expected
    assert select_batch(data, range(4))[0].tolist() == expected
    assert sample_evenly(data, 2)[0].tolist() == [[0], [4]]
    sampler = ResumableDistributedSampler(data, 5, num_replicas=1, rank=0)
    loader = TrainLoader(data, sampler, batch_size=8, epochs=1, **options)
    ((batch,),) = loader
    assert batch.shape == (8, 4) and sorted(batch[:, 0].tolist()) == list(range(8))
    data.decode = "gpu"
    with pytest.raises(UserError, match="the data set has a collate_fn"):
        build_loader(data, **options)


class Growing(Numbers):
    length = 8

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.length = 8 * (epoch + 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_length_that_changes_between_epochs_is_an_error(workers: int) -> None:
    """The order of an epoch is made before, in another process."""
    data = SeededDataset(Growing(), seed=5)
    sampler = ResumableDistributedSampler(data, 5, num_replicas=1, rank=0)
    loader = TrainLoader(data, sampler, batch_size=4, epochs=2, workers=workers, device=CPU)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        if epoch:
            with pytest.raises(UserError, match="changed the length of a data set from 8 to 16"):
                list(loader)
        else:
            next(iter(loader))


class PseudoLabels(Numbers):
    """Numbers with labels that the training computes before each epoch."""

    def __init__(self, file: Path) -> None:
        self.file, self.epoch, self.label = file, -1, -1

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.label = epoch, int(self.file.read_text())

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.label)


class WrappingPseudoLabels(PseudoLabels, DatasetWrapper):
    dataset = Numbers()


@pytest.mark.parametrize("kind", [PseudoLabels, WrappingPseudoLabels])
@pytest.mark.parametrize("workers", [0, 2])
def test_set_epoch_is_called_in_its_epoch(
    workers: int, kind: type[PseudoLabels], tmp_path: Path
) -> None:
    """Also if the workers were started before, as by a run that resumes with a validation."""
    (tmp_path / "labels").write_text("-1")
    files = SkippingDataset(kind(tmp_path / "labels"), 1, tmp_path / "broken")
    data = SeededDataset(files, seed=5)
    sampler = ResumableDistributedSampler(data, 5, num_replicas=1, rank=0)
    loader = TrainLoader(data, sampler, batch_size=4, epochs=3, workers=workers, device=CPU)
    loader.start()
    for epoch in range(3):
        (tmp_path / "labels").write_text(str(epoch))
        sampler.set_epoch(epoch)
        batches = torch.stack(list(loader))
        assert len(batches) == len(loader) and batches.eq(epoch).all()
    assert len(loader._indices._made) == 1  # not those of all epochs


class StateOfEpoch(Numbers):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.epoch)


def test_samples_of_a_picture_have_the_state_of_the_first_epoch() -> None:
    """The training process, which reads them, may have called set_epoch for no batch."""
    assert not torch.as_tensor(sample_evenly(StateOfEpoch(), 8)).any()


class Sparse(Numbers):
    """Numbers whose batches are left out without those that are broken, as in many programs."""

    @staticmethod
    def collate_fn(samples: list) -> torch.Tensor | None:
        kept = [sample for sample in samples if sample[0] != 3]
        return torch.stack(kept) if kept else None


@pytest.mark.parametrize("workers", [0, 1])
def test_training_without_one_of_its_batches_is_an_error(workers: int) -> None:
    """Batches of the next epoch would take its place, and the last epoch would be too short."""
    data = SeededDataset(Sparse(), seed=5)
    sampler = ResumableDistributedSampler(data, 5, num_replicas=1, rank=0)
    loader = TrainLoader(data, sampler, batch_size=1, epochs=2, workers=workers, device=CPU)
    with pytest.raises(UserError, match="the collate_fn of the training data returned None: all"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_iteration_within_an_iteration_is_an_error(workers: int) -> None:
    """The outer one would go on with the first batches of the epoch."""
    data = SeededDataset(Numbers(), seed=5)
    sampler = ResumableDistributedSampler(data, 5, num_replicas=1, rank=0)
    loader = TrainLoader(data, sampler, batch_size=4, epochs=2, workers=workers, device=CPU)
    batches = iter(loader)
    first = next(batches)
    assert torch.equal(next(iter(loader)), first)
    with pytest.raises(UserError, match="taken from the loader of the training while it is iterat"):
        next(batches)


class Noise(Dataset):
    """Samples of the random numbers of their collate_fn, after their own."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1)

    @staticmethod
    def collate_fn(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([*samples, torch.rand(2), torch.tensor([random.random()])])


def test_random_numbers_of_a_collate_fn_depend_on_the_batch_alone() -> None:
    data = SeededDataset(Noise(), seed=5)
    before = torch.get_rng_state()
    first, second = (
        torch.stack(list(build_loader(data, workers=workers, device=CPU, batch_size=2)))
        for workers in (0, 2)
    )
    assert torch.equal(first, second)
    assert len(first.unique()) == first.numel()
    assert torch.equal(torch.get_rng_state(), before)


class SameSample(ResumableDistributedSampler):
    """Sampler of one's own, as PyTorch documents them: with `__iter__`."""

    def __iter__(self):
        return iter([10 * self.epoch + self.start_sample] * len(self))


@pytest.mark.parametrize("workers", [0, 2])
def test_iteration_of_a_derived_sampler_is_what_is_read(workers) -> None:
    data = SeededDataset(Numbers(), seed=5)
    sampler = SameSample(data, 5, num_replicas=2, rank=0)
    loader = TrainLoader(data, sampler, batch_size=4, epochs=3, workers=workers, device=CPU)
    for epoch, start_sample in ((0, 0), (1, 0), (2, 8)):
        sampler.set_epoch(epoch, start_sample)
        read = {int(index) for batch in loader for index in batch[:, 0]}
        assert read == {10 * epoch + start_sample}


class Drawn(ResumableDistributedSampler):
    """Sampler of one's own that draws from torch's random numbers, as torch's RandomSampler."""

    def __iter__(self):
        order = torch.randperm(len(self.dataset))[self.start_sample :]
        return iter(order[self.rank :: self.num_replicas][: len(self)].tolist())


@pytest.mark.parametrize("workers", [0, 1])
def test_random_order_of_a_derived_sampler_is_resumed_and_shared_by_all_processes(workers) -> None:
    data = SeededDataset(Numbers(), seed=5)

    def read(rank: int, world_size: int, start_sample: int) -> list[list[int]]:
        """Read two epochs in a process with other random numbers."""
        torch.seed()
        before = torch.get_rng_state()
        sampler = Drawn(data, 5, num_replicas=world_size, rank=rank)
        loader = TrainLoader(data, sampler, batch_size=4, epochs=2, workers=workers, device=CPU)
        epochs = []
        for epoch, start in ((0, start_sample), (1, 0)):
            sampler.set_epoch(epoch, start)
            epochs.append([int(index) for batch in loader for index in batch[:, 0]])
        assert torch.equal(torch.get_rng_state(), before)
        return epochs

    first, second = read(0, 1, 0)
    assert first != second and len({*first}) == len(first) == 100
    assert read(0, 1, 40) == [first[40:], second]
    shards = [read(rank, 2, 40)[0] for rank in range(2)]
    assert sorted(shards[0] + shards[1]) == sorted(first[40:96])


def test_samplers_that_no_run_could_resume_are_errors(monkeypatch) -> None:
    data = SeededDataset(Numbers(), seed=5)
    options = {"batch_size": 4, "epochs": 3, "workers": 0, "device": CPU}
    with pytest.raises(UserError, match="RandomSampler has no position to resume from"):
        TrainLoader(data, RandomSampler(data), **options)
    sampler = SameSample(data, 5, num_replicas=2, rank=0)
    monkeypatch.setattr(SameSample, "__iter__", lambda self: iter([0] * 11))
    with pytest.raises(
        UserError, match="SameSample yields 12 batches .* but 2 from start_sample 0"
    ):
        next(iter(TrainLoader(data, sampler, **options)))


def test_nothing_is_loaded_beyond_the_last_epoch() -> None:
    sampler = ResumableDistributedSampler(SeededDataset(Numbers(), 0), 5, num_replicas=2, rank=0)
    sampler.set_epoch(1, 32)
    made = EpochBatches(SeededBatchSampler(sampler, 4, seed=0), epochs=3)
    epochs, batches = zip(*made, strict=True)
    assert epochs == (*8 * [1], *12 * [2])
    assert list(chain(*batches[:8])) == list(sampler)[:32]


@pytest.mark.parametrize(
    "starts", [[(2, 5), (3, None)], [(1, 5), (4, None)], [(2, 3), (1, 4), (2, 2), (3, None)]]
)
def test_another_number_of_processes_neither_skips_nor_repeats_samples(
    starts: list[tuple[int, int | None]],
) -> None:
    """`starts` has the processes of each start of a run, and the steps up to its checkpoint."""
    read, start_sample = [], 0
    for world_size, steps in starts:
        for own in read_epoch(world_size, 0, start_sample):  # beyond `steps`, too
            read += torch.cat(own[:steps])[:, 0].tolist()
        start_sample += (steps or 0) * world_size * 4
    order = torch.randperm(103, generator=torch.Generator().manual_seed(5)).tolist()
    assert sorted(read) == sorted(order[: len(read)])
    assert 103 - len(read) < world_size * 4  # the last short step


def test_loading_leaves_global_random_state_unchanged() -> None:
    def draw() -> tuple:
        return random.random(), np.random.random(), torch.rand(()).item()

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    undisturbed = draw(), draw()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    data = SeededDataset(Numbers(), seed=5)
    assert draw() == undisturbed[0]
    assert torch.equal(data[7], data[7])
    assert draw() == undisturbed[1]


def test_repeated_batch_resumes_within_an_epoch() -> None:
    batch = [torch.zeros(4, 3), torch.zeros(4)]
    repeated = RepeatedBatch(batch, 10, world_size=2)
    assert [len(repeated), len(list(repeated))] == [10, 10]
    repeated.set_epoch(1, 3 * 8)
    assert [len(repeated), len(list(repeated))] == [7, 7]
    repeated.set_epoch(1, 11 * 8)  # of a longer epoch
    assert [len(repeated), len(list(repeated))] == [0, 0]
    repeated.set_epoch(1)
    assert next(iter(repeated)) is batch


def choose_crop(height: int, width: int) -> Crop:
    return Crop(Span(0, height, 6), Span(1, width - 1, 6), 6)


@pytest.fixture
def encoded(tmp_path):
    """An image file of which 6 × 6 pixels are to be cropped, and these pixels."""
    pixels = np.arange(8 * 9 * 3, dtype=np.uint8).reshape(8, 9, 3)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    encoded = read_encoded(str(tmp_path / "image.png"), choose_crop)
    return encoded, crop_and_resize(decode(encoded), encoded.crop)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda image: (image, 3),
        lambda image: [image, torch.tensor(3)],
        lambda image: {"image": image, "label": 3},
        lambda image: image,
    ],
    ids=["tuple", "list", "dict", "alone"],
)
def test_collate_decodes_image_files(encoded, wrap) -> None:
    image, crop = encoded
    expected = torch.utils.data.default_collate([wrap(crop), wrap(crop)])
    torch.testing.assert_close(collate([wrap(image), wrap(image)]), expected, rtol=0, atol=0)


def test_sample_batch_is_the_first_samples_as_one_batch(encoded) -> None:
    image, crop = encoded
    images, labels = select_batch([(image, 0), (image, 1), (image, 2)], range(2))
    assert torch.equal(images, torch.stack([crop, crop]))
    assert labels.tolist() == [0, 1]


def test_images_on_the_device_have_the_memory_format() -> None:
    images, labels = to_device(
        [torch.zeros(2, 3, 4, 5), torch.ones(2, 3)], CPU, torch.channels_last
    )
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.is_contiguous()
    assert torch.equal(labels, torch.ones(2, 3))


def test_samples_with_names_are_an_error() -> None:
    batch = collate([(torch.zeros(3), "1.png"), (torch.ones(3), "2.png")])
    with pytest.raises(UserError, match="element 1 of each batch is a .* and not a tensor"):
        to_device(batch, CPU, torch.channels_last)


def test_decoding_on_the_gpu_is_refused_on_the_cpu() -> None:
    data = Numbers()
    data.decode = "gpu"
    with pytest.raises(UserError, match="--decode gpu: this run is on the CPU; leave it out"):
        build_loader(SeededDataset(data, 0), sampler=range(4), batch_size=2, workers=0, device=CPU)


class LostReceiver(Numbers):
    """Samples whose receiver is lost, as a training process that exits at once is."""

    def __getitem__(self, index: int) -> torch.Tensor:
        handle = resource_sharer.DupFd(0)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(handle._id[0])
        connection.close()
        handle.detach()  # the thread serves one receiver after the other
        return super().__getitem__(index)


def test_worker_of_a_lost_training_process_prints_nothing(capfd) -> None:
    data = SeededDataset(LostReceiver(), seed=5)
    loader = build_loader(data, sampler=range(2), batch_size=2, workers=1, device=CPU)
    assert len(list(loader)) == 1
    assert capfd.readouterr().err == ""


KEEPS_ITS_LOADER = """
import torch
from engine.data import ResumableDistributedSampler, SeededDataset
from engine.data.loading import TrainLoader
data = SeededDataset(list(range(100)), 0)
sampler = ResumableDistributedSampler(data, 0, num_replicas=1, rank=0)
loader = TrainLoader(
    data, sampler, batch_size=4, epochs=9, workers=2, device=torch.device("cpu")
)
print(len(list(loader)))
"""


@pytest.mark.slow
def test_process_that_keeps_its_loader_exits() -> None:
    done = subprocess.run(
        [sys.executable, "-c", KEEPS_ITS_LOADER],
        env=os.environ | {"PYTHONPATH": str(TEMPLATE)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "25\n", "")

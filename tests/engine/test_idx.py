"""IDX files: their images, shifts and flips, and errors."""

import gzip
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import task
import torch
from engine import UserError
from engine.data import SeededDataset, collate, idx
from fresh import UNCHANGED
from idx_files import COUNTS, write_dataset, write_idx


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "idx")


def test_validation_images_are_those_of_the_file(folder: Path) -> None:
    assert idx.is_idx(folder) and idx.image_size(folder) == 28
    dataset = idx.IdxImages(folder, train=False, size=28)
    assert len(dataset) == COUNTS["t10k"] and dataset.classes == [*"0123456789"]
    data = gzip.decompress((folder / "t10k-images-idx3-ubyte.gz").read_bytes())[16:]
    expected = torch.from_numpy(np.frombuffer(data, np.uint8).reshape(-1, 28, 28).copy())
    images, labels = collate([dataset[index] for index in range(20)])
    assert torch.equal(images, expected[:, None].expand(-1, 3, -1, -1))
    assert labels.tolist() == dataset.labels == [*range(10)] * 2


def test_uncompressed_files_are_read(folder: Path) -> None:
    expected = idx.read_file(folder, True, idx.IMAGES)
    for path in folder.iterdir():
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert np.array_equal(idx.read_file(folder, True, idx.IMAGES), expected)


def test_training_images_are_shifted_and_flipped(tmp_path: Path) -> None:
    """A white pixel in a corner moves by up to a seventh, 4 pixels, and to the other side."""
    folder = write_dataset(tmp_path / "idx")
    images = np.zeros((96, 28, 28))
    images[:, 14, 9] = 255
    write_idx(folder / "train-images-idx3-ubyte.gz", images)
    for hflip, columns in ((0.0, {*range(5, 14)}), (0.5, {*range(5, 14), *range(14, 23)})):
        dataset = SeededDataset(idx.IdxImages(folder, True, 28, hflip), seed=0)
        batch = torch.stack([dataset[index % 96][0] for index in range(96)])
        assert batch.shape == (96, 3, 28, 28) and batch.dtype == torch.uint8
        places = (batch[:, 0] == 255).nonzero()
        assert len(places) == 96
        assert set(places[:, 1].tolist()) == {*range(10, 19)}
        assert set(places[:, 2].tolist()) <= columns and len(set(places[:, 2].tolist())) > 6
        again = torch.stack([dataset[index % 96][0] for index in range(96)])
        assert torch.equal(batch, again)


def test_images_are_resized(folder: Path) -> None:
    dataset = idx.IdxImages(folder, train=False, size=32)
    image, label = dataset[7]
    assert image.shape == (3, 32, 32) and image.dtype == torch.uint8
    assert abs(image.float().mean() - (23 * label + 12)) < 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-50]), "can't be read"),
        (lambda path: path.write_bytes(gzip.compress(b"\0\0\x08\x03" + bytes(9))), "is damaged"),
        (
            lambda path: path.write_bytes(gzip.compress(b"\0\0\x08\x03" + 12 * b"\xff")),
            "no IDX file of up to 1073741824 bytes",
        ),
        (lambda path: write_idx(path, np.zeros((2**24 + 1, 1, 1), np.uint8)), "16777216 samples"),
        (lambda path: write_idx(path, np.zeros((3, 28, 28))), "3 images, but 96 labels"),
        (Path.unlink, "there is no file train-images-idx3-ubyte.gz"),
    ],
)
def test_damaged_files_are_named(folder: Path, damage, message: str) -> None:
    damage(folder / "train-images-idx3-ubyte.gz")
    with pytest.raises(UserError, match=message):
        idx.IdxImages(folder, train=True, size=28)


def test_labels_above_those_of_the_training_images_are_an_error(folder: Path) -> None:
    args = Namespace(data=folder, eval_only=False, **UNCHANGED)
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", np.arange(COUNTS["t10k"]) % 8)
    assert [data_set.classes for data_set in task.read_datasets(args)] == [[*"0123456789"]] * 2
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", np.arange(COUNTS["t10k"]))
    with pytest.raises(UserError, match="the t10k labels go up to 19, those of the training .* 9;"):
        task.read_datasets(args)


def test_labels_follow_the_classes_of_a_checkpoint(folder: Path) -> None:
    dataset = idx.IdxImages(folder, train=False, size=28)
    dataset.reorder_classes([*"9876543210", "10"])
    assert dataset.labels[:10] == [*range(9, -1, -1)] and len(dataset.classes) == 11


def test_images_that_are_no_squares_are_an_error(folder: Path) -> None:
    write_idx(folder / "t10k-images-idx3-ubyte.gz", np.zeros((20, 28, 20)))
    with pytest.raises(UserError, match="28 × 20 pixels"):
        idx.image_size(folder)
    with pytest.raises(UserError, match="28 × 20 pixels"):  # as of the training set
        idx.IdxImages(folder, train=False, size=28)

"""engine.fingerprint: what two data sets of the same size and classes differ in."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engine import UserError, fingerprint
from engine.data import DatasetWrapper, idx
from idx_files import COUNTS, write_dataset, write_idx


class Samples(list):
    """Data set of as many samples as labels, with the attributes that are given."""

    def __init__(self, labels: object, **attributes: object) -> None:
        super().__init__(labels)
        self.labels = labels
        vars(self).update(attributes)


def test_labels_in_another_order_differ() -> None:
    one, two = (fingerprint.of_data_set(Samples(labels)) for labels in ([0, 1, 1], [1, 0, 1]))
    assert one.keys() == two.keys() == {"labels"} and one != two
    assert len(one["labels"]) == 16


def test_labels_are_the_same_in_any_container() -> None:
    found = [
        fingerprint.of_data_set(Samples(labels))
        for labels in ([0, 2], (0, 2), np.array([0, 2]), torch.tensor([0, 2]))
    ]
    assert found == found[:1] * 4


@pytest.mark.parametrize("kind", [int, np.int64, torch.tensor])
def test_labels_count_by_the_names_of_their_classes(kind: Callable) -> None:
    """So that a checkpoint's order of the classes, and its further classes, change nothing."""
    one = fingerprint.of_data_set(Samples([0, 1], classes=["cat", "dog"]))
    other = Samples([kind(2), kind(0)], classes=["dog", "owl", "cat"])
    assert one == fingerprint.of_data_set(other)
    assert one != fingerprint.of_data_set(Samples([0, 1], classes=["dog", "cat"]))


def test_labels_that_are_not_one_for_each_sample_are_left_out() -> None:
    masks = Samples(np.zeros((2, 4, 4)))
    names_of_labels = Samples([0, 1, 2])
    names_of_labels.labels = ["cat", "dog"]
    for data_set in (masks, names_of_labels, [1, 2]):
        assert fingerprint.of_data_set(data_set) == {}


def test_lists_of_labels_for_each_sample_are_allowed() -> None:
    one, two = Samples([[0, 1], []]), Samples([[0], [1]])
    assert fingerprint.of_data_set(one) != fingerprint.of_data_set(two)


def test_attribute_of_an_owners_data_set_is_used() -> None:
    data_set = Samples([0], fingerprint={"version": 3})
    found = fingerprint.of_data_set(DatasetWrapper(data_set))
    assert found == {"version": "3", "labels": fingerprint.digest([0])}
    with pytest.raises(UserError, match="fingerprint of Samples is a str; it must be a dict of"):
        fingerprint.of_data_set(Samples([0], fingerprint="3"))


def test_files_have_the_same_names_in_any_folder() -> None:
    def of(folder: str, *names: str) -> dict[str, str]:
        return fingerprint.of_files(folder, [(Path(folder, name), 0) for name in names])

    assert of("/here", "a/1.jpg", "b/1.jpg") == of("/there", "a/1.jpg", "b/1.jpg")
    assert of("/here", "a/1.jpg", "b/1.jpg") != of("/here", "a/1.jpg", "b/2.jpg")
    assert of("/here", "a/1.jpg", "b/1.jpg") != of("/here", "b/1.jpg", "a/1.jpg")
    assert of("/here", "\udcff.jpg") != of("/here", "\udcfe.jpg")  # names that are not UTF-8


def test_idx_files_of_permuted_labels_differ(tmp_path: Path) -> None:
    def read() -> dict[str, str]:
        return fingerprint.of_data_set(idx.IdxImages(folder, train=False, size=28))

    folder = write_dataset(tmp_path / "idx")
    before = read()
    labels = np.arange(COUNTS["t10k"])[::-1] % 10
    write_idx(folder / "t10k-labels-idx1-ubyte.gz", labels)
    assert read() != before

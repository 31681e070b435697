"""Comparison of a checkpoint with the data and the settings of the run that loads it."""

from pathlib import Path

import pytest
import torch
from engine import UserError
from engine.checkpoint import validation
from engine.checkpoint.compatibility import (
    adapt_classes,
    compare_data,
    compare_images,
    compare_metadata,
    compare_validation,
    describe_data,
    describe_difference,
    is_same_val_data,
    warn_of_changed_data,
)

PATH = Path("best.pt")


class Labels(list):
    """Data set of labels that can change the order of its classes."""

    classes = ("cat", "dog", "owl")

    def reorder_classes(self, classes: list[str]) -> None:
        self[:] = [classes.index(self.classes[label]) for label in self]
        self.classes = tuple(classes)


class FixedLabels(list):
    """Data set of labels that cannot."""


def test_same_classes_need_no_change() -> None:
    for saved in (["cat", "dog"], []):  # an old checkpoint does not name them
        assert adapt_classes(PATH, saved, ["cat", "dog"], {"train": FixedLabels([0])}) == ""


def test_labels_follow_the_order_of_the_checkpoint() -> None:
    saved = ["owl", "cat", "dog"]
    data_sets = {"train": Labels([0, 1, 2, 0]), "val": Labels([2, 1])}
    note = adapt_classes(PATH, saved, list(Labels.classes), data_sets)
    assert note == ", with the labels of the data in its order of the classes"
    assert data_sets == {"train": [1, 2, 0, 1], "val": [0, 2]}
    assert adapt_classes(PATH, saved, list(data_sets["val"].classes), data_sets) == ""


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    [
        ("ab", "ac", r"\(only in the checkpoint: b; only in the data: c\).* --weights best.pt"),
        ("ab", "abc", r"\(only in the data: c\)"),
        ("abc", "ab", r"\(only in the checkpoint: c\)"),
        ("ab", "", r"\(only in the checkpoint: a, b\)"),
        ("aab", "abb", r"\(only in the checkpoint: a; only in the data: b\)"),
        ("abcdef", "a", r"checkpoint: b, c, d and 2 more\)"),
        ("cab", "cba", "class 1 is a there and b here; .* a method reorder_classes"),
        (["a", "\x1b[2J"], "ab", r"only in the checkpoint: .x1b\[2J"),
    ],
)
def test_other_classes_are_an_error(saved: str, own: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^--resume best.pt: .*{message}"):
        adapt_classes(PATH, list(saved), list(own), {"train": FixedLabels()})


def test_equal_names_have_no_order_to_restore() -> None:
    with pytest.raises(UserError, match="class 1 is a there and b here"):
        adapt_classes(PATH, list("aab"), list("aba"), {"train": Labels()})
    assert describe_difference(list("aab"), list("aba")) == ""


def test_data_of_an_evaluation_may_lack_classes() -> None:
    saved = ["owl", "cat", "ant", "dog"]
    val_set = Labels([0, 1, 2, 0])
    data_sets = {"train": val_set, "val": val_set}  # one object under both names
    assert adapt_classes(PATH, saved, list(Labels.classes), data_sets, is_evaluation=True)
    assert val_set == [1, 3, 0, 1] and val_set.classes == tuple(saved)
    with pytest.raises(UserError, match="only in the data: elk"):
        adapt_classes(PATH, saved, ["cat", "elk"], data_sets, is_evaluation=True)
    with pytest.raises(UserError, match="class 2 is ant there and none here; .* reorder_classes"):
        adapt_classes(PATH, saved, saved[:2], {"val": FixedLabels()}, is_evaluation=True)


def metadata(train: int, val: int, **digests: str) -> dict:
    """Return the metadata of data sets of these sizes; the digests are those of "val"."""
    return {
        "samples": {"train": train, "val": val},
        "fingerprints": {"train": {}, "val": digests},
    }


def test_another_number_of_samples_is_described() -> None:
    own = metadata(40, 9)
    for saved in ({}, own, {"samples": {"train": 40}}):
        assert compare_data(saved, own) == {}
    assert compare_data(metadata(41, 9), own) == {"train": "41 samples there, 40 here"}
    assert compare_data(own, describe_data({})) == {}  # of synthetic data


def test_another_fingerprint_is_described() -> None:
    own = metadata(40, 9, labels="0a", pack="1b")
    assert compare_data(metadata(40, 9, labels="0a", files="2c"), own) == {}  # of a folder
    assert compare_data(metadata(40, 9, labels="ff"), own) == {"val": "other labels"}
    both = metadata(40, 9, labels="ff", pack="ff")
    assert compare_data(both, own) == {"val": "other labels and pack"}
    assert compare_data(metadata(40, 8, labels="ff"), own) == {"val": "8 samples there, 9 here"}


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (metadata(1, 9, labels="0a"), True),
        (metadata(40, 9, labels="ff"), False),
        (metadata(40, 8), False),
        (metadata(40, 9), None),
        (metadata(40, 9, pack="1b"), None),
        ({}, None),
    ],
)
def test_validation_data_is_compared(saved: dict, expected: bool | None) -> None:
    assert is_same_val_data(saved, metadata(40, 9, labels="0a")) is expected


def test_labels_of_a_folder_and_of_a_pack_do_not_tell_whether_the_images_are_the_same() -> None:
    folder = metadata(40, 9, labels="0a", files="2c")
    pack = metadata(40, 9, labels="0a", pack="1b")
    assert is_same_val_data(folder, pack) is None
    assert is_same_val_data(folder, folder) is True


def test_other_images_are_described():
    small = {"model_options": {"image": {"size": 32, "eval_size": 40}}}
    assert compare_images(small, {"model_options": {"image": {"size": 32, "eval_size": 40}}}) == ""
    assert (
        compare_images(small, {}) == "size 32 there and 224 here, eval_size 40 there and None here"
    )
    chosen = {"model_options": {"image": {"eval_size": 64}}}
    assert compare_images(small, chosen) == "size 32 there and 224 here"
    assert compare_images({}, small) == ""  # a checkpoint of another script


@pytest.mark.parametrize(("data", "is_known"), [("photos", True), ("", False)])
def test_older_checkpoints_of_the_default_size_are_compared(data: str, is_known: bool) -> None:
    """They have no size, which is 224 with --data; that of the digits is unknown."""
    old = {"model_options": {}, "data": data}
    own = {"model_options": {"image": {"size": 64, "eval_size": 96}}}
    expected = "size 224 there and 64 here" if is_known else ""
    assert compare_images(old, own) == expected
    expected = "the validation has size 96 and not 224 now" if is_known else ""
    assert compare_validation(old, own) == expected
    assert compare_images(old, {"model_options": {"image": {"size": 224}}}) == ""
    expected = "the validation has size 224 and not 96 now" if is_known else ""
    assert compare_validation(own, old) == expected


@pytest.mark.parametrize(
    ("samples", "is_evaluation", "count"), [(4, False, 1), (0, False, 0), (4, True, 0)]
)
def test_data_of_another_kind_in_mid_epoch_is_a_warning(
    samples: int, is_evaluation: bool, count: int
) -> None:
    """A folder of masks, and a pack of it, have no digest in common."""

    def metadata(kind: str) -> dict:
        return {"samples": {"train": 9}, "fingerprints": {"train": {kind: "0123"}}}

    entries = {"metadata": metadata("file names"), "samples": samples}
    said: list[str] = []
    warn_of_changed_data(PATH, entries, metadata("pack"), is_evaluation, said.append)
    assert len(said) == count
    assert all("may repeat or leave out samples" in text for text in said)


@pytest.mark.parametrize(
    ("there", "samples", "count"), [(False, 4, 1), (True, 4, 0), (None, 4, 0), (False, 0, 0)]
)
def test_pack_read_by_url_after_a_local_one_in_mid_epoch_is_a_warning(
    there: bool | None, samples: int, count: int
) -> None:
    """The same data in another order. Older checkpoints do not have the entry."""
    own = metadata(9, 9) | describe_data({"train": [*range(9)]}) | {"by_shard": True}
    saved = metadata(9, 9) if there is None else own | {"by_shard": there}
    said: list[str] = []
    entries = {"metadata": saved, "samples": samples}
    warn_of_changed_data(PATH, entries, own, is_evaluation=False, warn=said.append)
    assert len(said) == count
    assert all("read by URL" in one and "repeat or leave out samples" in one for one in said)


def test_model_of_another_name_is_a_warning() -> None:
    said: list[str] = []
    for arch in ("resnet18", "resnet34", None):
        saved = {} if arch is None else {"arch": arch}
        compare_metadata(PATH, saved, {"arch": "resnet18"}, {}, said.append)
    (message,) = said
    assert message.endswith("it is of --arch resnet34, and this run of resnet18")


def test_other_options_of_the_model_are_a_warning() -> None:
    """They may change no shape. Options of images and dropout rates are not compared here."""
    said: list[str] = []
    saved = {"model_options": {"scale": 2, "w": torch.ones(3), "drop_path": 0.1, "image": {}}}
    for options in ({"scale": 2, "w": torch.ones(3), "added": 1}, {"scale": 1}):
        compare_metadata(PATH, saved, {"model_options": options}, {}, said.append)
    compare_metadata(PATH, {}, {"model_options": {"scale": 1}}, {}, said.append)
    (message,) = said
    assert message.endswith("its model has other options (scale 2 there and 1 here)")


def test_options_of_the_model_may_have_tuples_as_keys() -> None:
    options = {"model_options": {"windows": {(1, 2): 3}}}
    compare_metadata(PATH, options, options, {}, pytest.fail)


def test_metadata_says_whether_predictions_are_averaged() -> None:
    assert validation.is_metadata({"flip_tta": True})
    assert not validation.is_metadata({"flip_tta": torch.zeros(2)})

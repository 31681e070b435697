"""The digits that every generated project starts with."""

import subprocess
import sys
from argparse import Namespace

import numpy as np
import pytest
import task
import torch
from fresh import ROOT
from PIL import Image

PROJECT = ROOT / "{{cookiecutter.project_slug}}"
DATA = PROJECT / "data"
FILE = DATA / "digits.npz"
COUNTS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # of the digits 0 to 9


@pytest.fixture(scope="module")
def digits():
    with np.load(FILE, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def test_digits_file_holds_images_and_labels(digits):
    assert set(digits) == {"images", "labels"}
    assert digits["images"].shape == (1797, 8, 8) and digits["images"].dtype == np.uint8
    assert digits["labels"].shape == (1797,) and digits["labels"].dtype == np.uint8


def test_digits_values_are_the_original_ones(digits):
    assert digits["images"].min() == 0 and digits["images"].max() == 16
    assert np.bincount(digits["labels"]).tolist() == COUNTS


def test_each_digit_is_in_training_and_in_validation(digits):
    validation = np.arange(len(digits["labels"])) % 5 == 0
    assert validation.sum() == 360
    for part in (validation, ~validation):
        assert np.bincount(digits["labels"][part], minlength=10).min() >= 20


@pytest.mark.slow
def test_make_digits_reproduces_the_files(tmp_path):
    pytest.importorskip("sklearn")
    subprocess.run([sys.executable, ROOT / "tools" / "make_digits.py", tmp_path], check=True)
    assert (tmp_path / "digits.npz").read_bytes() == FILE.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in DATA.iterdir()}
    for path in DATA.glob("*example.png*"):  # compressed by any version of zlib
        with Image.open(path) as ours, Image.open(tmp_path / path.name) as theirs:
            assert ours.size[0] % 64 == 0 and np.array_equal(ours, theirs)


def test_data_readme_names_source_and_license():
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    for part in ("E. Alpaydin and C. Kaynak", "1998", "10.24432/C50P49", "CC BY 4.0", "1,797"):
        assert part in text


@pytest.mark.parametrize(
    ("data", "classes", "is_digit"),
    [("", "0123456789", True), ("", "abcdefghij", False), ("folder", "0123456789", False)],
)
@pytest.mark.parametrize("samples", [{}, {"val": 20}, {"val": 360}])
@pytest.mark.parametrize("digest", [None, "0" * 16])
def test_only_the_digits_are_predicted_at_their_own_size(
    tmp_path, data, classes, is_digit, samples, digest
):
    # An owner's data set, built without --data, has no folder either.
    path = tmp_path / "image.png"
    Image.new("L", (300, 200)).save(path)
    metadata = {"data": data, "classes": [*classes], "samples": samples}
    if digest:
        metadata["fingerprints"] = {"val": {"labels": digest}}
    is_digit = is_digit and samples.get("val") != 20 and not digest  # an own data set of digits
    predict = task.Predictor(torch.nn.Linear(1, 1), metadata, Namespace(top=5, flip_tta=False))
    assert predict.read(path).shape == (3, *([32, 32] if is_digit else [224, 224]))

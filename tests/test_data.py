"""The digits that every generated project starts with."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent.parent / "{{cookiecutter.project_slug}}" / "data"
COUNTS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # of the digits 0 to 9


@pytest.fixture(scope="module")
def digits():
    with np.load(FOLDER / "digits.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def test_the_file_holds_images_and_labels(digits):
    assert set(digits) == {"images", "labels"}
    assert digits["images"].shape == (1797, 8, 8) and digits["images"].dtype == np.uint8
    assert digits["labels"].shape == (1797,) and digits["labels"].dtype == np.uint8


def test_the_values_are_the_original_ones(digits):
    assert digits["images"].min() == 0 and digits["images"].max() == 16
    assert np.bincount(digits["labels"]).tolist() == COUNTS


def test_each_digit_is_in_training_and_in_validation(digits):
    validation = np.arange(len(digits["labels"])) % 5 == 0
    assert validation.sum() == 360
    for part in (validation, ~validation):
        assert np.bincount(digits["labels"][part], minlength=10).min() >= 20


def test_the_script_writes_the_same_bytes(tmp_path):
    pytest.importorskip("sklearn")
    copy = tmp_path / "copy.npz"
    subprocess.run([sys.executable, FOLDER / "make_digits.py", copy], check=True)
    assert copy.read_bytes() == (FOLDER / "digits.npz").read_bytes()


def test_the_readme_names_source_and_licence():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    for part in ("E. Alpaydin and C. Kaynak", "1998", "10.24432/C50P49", "CC BY 4.0", "1,797"):
        assert part in text

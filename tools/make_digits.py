"""Write the template's data/digits.npz, and example.png next to it, from scikit-learn's digits.

    pip install scikit-learn pillow
    python tools/make_digits.py             # overwrites the template's files
    python tools/make_digits.py FOLDER

example.png is for predict.py: one digit of the validation set, or four for segmentation.

The bytes of digits.npz are the same on every machine: the members are stored uncompressed
(compressors differ), with a fixed date and fixed permissions. Their SHA-256 is
0c2aff3ad3efa4c983d74435f40847c3f2dea3c33f362c61616f7b067d84c8fe. The README of the generated
project names the source and the licence of the data.
"""

import argparse
import io
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "{{cookiecutter.project_slug}}" / "data"
ONE, FOUR = 65, (40, 45, 50, 65)  # every fifth digit is in the validation set
# Names in the template, of which a project gets the one of its task.
EXAMPLES = {
    "{% if cookiecutter.task != 'segmentation' %}example.png{% endif %}": lambda x: x[ONE],
    "{% if cookiecutter.task == 'segmentation' %}example.png{% endif %}": lambda x: np.block(
        [[x[FOUR[0]], x[FOUR[1]]], [x[FOUR[2]], x[FOUR[3]]]]
    ),
}
SCALE = 8  # pixels of a side of each value


def write_npz(path, arrays):
    """Write what np.savez writes, with the same bytes in every run."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, array, version=(1, 0), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.create_system = 3  # Unix, on Windows too
            info.external_attr = 0o644 << 16
            archive.writestr(info, member.getvalue())


def main():
    parser = argparse.ArgumentParser(description="Write the digits and the example images.")
    parser.add_argument("folder", nargs="?", type=Path, default=DATA)
    folder = parser.parse_args().folder
    output = folder / "digits.npz"

    digits = load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
    assert (images == digits.images).all(), "the values are whole numbers from 0 to 16"
    write_npz(output, {"images": images, "labels": labels})
    for name, choose in EXAMPLES.items():
        pixels = np.kron(choose(images) * 15, np.ones((SCALE, SCALE), np.uint8))
        Image.fromarray(pixels).save(folder / name, "PNG", optimize=True)
    print(f"{output}: {len(images)} images, {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()

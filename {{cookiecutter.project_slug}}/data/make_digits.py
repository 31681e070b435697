"""Writes digits.npz from the copy of the digits that scikit-learn carries.

    pip install scikit-learn
    python data/make_digits.py              # writes data/digits.npz
    python data/make_digits.py other.npz

The same bytes come out on every machine: the members are stored uncompressed (compressors differ),
with a fixed date and fixed permissions. README.md beside this file says what the digits are.
"""

import argparse
import io
import zipfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def write_npz(path, arrays):
    """np.savez, with everything fixed that could differ from run to run."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, array, version=(1, 0), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.create_system = 3  # Unix, on Windows too
            info.external_attr = 0o644 << 16
            archive.writestr(info, member.getvalue())


def main():
    parser = argparse.ArgumentParser(description="Write the digits to an .npz file.")
    beside_this = Path(__file__).with_name("digits.npz")
    parser.add_argument("output", nargs="?", type=Path, default=beside_this)
    output = parser.parse_args().output

    digits = load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
    assert (images == digits.images).all(), "the values are whole numbers from 0 to 16"
    write_npz(output, {"images": images, "labels": labels})
    print(f"{output}: {len(images)} images, {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()

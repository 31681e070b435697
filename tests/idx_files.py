"""IDX files as those of Fashion-MNIST, with few random images."""

import gzip
from pathlib import Path

import numpy as np

COUNTS = {"train": 96, "t10k": 20}


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write an IDX file of bytes, compressed if the name ends in .gz."""
    data = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    data += values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_dataset(folder: Path, size: int = 28) -> Path:
    """Write images whose brightness depends on their class, one of ten; return the folder."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for split, count in COUNTS.items():
        labels = np.arange(count) % 10
        noise = generator.integers(0, 25, (count, size, size))
        write_idx(folder / f"{split}-images-idx3-ubyte.gz", noise + 23 * labels[:, None, None])
        write_idx(folder / f"{split}-labels-idx1-ubyte.gz", labels)
    return folder

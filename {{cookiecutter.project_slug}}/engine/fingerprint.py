"""Fingerprints of data sets: digests that differ for data of the same size and classes.

They are made from what is in memory once a data set is indexed; no image is read.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from engine import UserError

Fingerprint = dict[str, str]  # digests by what they are of, such as "labels"


def of_data_set(data_set: Any) -> Fingerprint:
    """Return what identifies the samples of a data set; {} if nothing is known.

    It has the digests in the attribute ``fingerprint`` of the data set, if any, and that of its
    labels, if it has ``labels`` of all samples. Labels count by the names in ``classes``, so that
    the order of the classes does not matter.

    Raises UserError if the attribute is not a dict.
    """
    found = getattr(data_set, "fingerprint", {})
    if not isinstance(found, Mapping):
        raise UserError(
            f"the attribute fingerprint of {type(data_set).__name__} is a {type(found).__name__}; "
            'it must be a dict of texts, such as {"captions": "0a1b"}'
        )
    digests = {str(part): str(value) for part, value in found.items()}
    if (labels := labels_of(data_set)) is not None:
        names = dict(enumerate(getattr(data_set, "classes", ())))
        digests["labels"] = digest(
            names.get(label, label) if isinstance(label, int) else label for label in labels
        )
    return digests


def labels_of(data_set: Any) -> Sequence[Any] | None:
    """Return the labels of all samples of a data set, numbers of Python's; None if it has none."""
    labels: Any = getattr(data_set, "labels", None)
    if hasattr(labels, "tolist"):  # an array or a tensor
        labels = labels.tolist() if labels.ndim == 1 else None
    if not isinstance(labels, Sequence) or len(labels) != len(data_set):
        return None
    # Scalars of NumPy and torch, too; not vectors, such as of several labels.
    return [label.item() if getattr(label, "ndim", None) == 0 else label for label in labels]


def of_files(folder: object, samples: Sequence[tuple]) -> Fingerprint:
    """Return the digest of the names below `folder` of listed files, (path, ...), in their order.

    For packed data, whose index has no names, it is the id of the pack.
    """
    if pack := getattr(samples, "pack", None):
        return {"pack": pack.manifest.id}
    prefix = f"{folder}/"
    return {"file names": digest(str(path).removeprefix(prefix) for path, *_ in samples)}


def digest(values: Iterable[object]) -> str:
    """Return 16 hexadecimal digits that differ for other texts or numbers, or another order."""
    text = "\0".join(map(str, values))
    return sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]

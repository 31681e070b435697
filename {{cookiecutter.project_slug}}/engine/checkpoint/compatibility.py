"""Comparison of a checkpoint with the data and the settings of the run that loads it."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from engine import UserError, summarize
from engine.data import SizedDataset
from engine.text import printable

DataSets = Mapping[str, SizedDataset]  # by name, such as "train"


def describe_data(data_sets: DataSets) -> dict[str, int]:
    """Return the number of samples of each data set."""
    return {name: len(data_set) for name, data_set in data_sets.items()}


def adapt_classes(path: Path, saved: list[str], own: list[str], data_sets: DataSets) -> str:
    """Give the data sets the checkpoint's order of classes; return what to add to the message.

    Labels are positions in the list of classes, so a checkpoint fits only data of the same list. A
    data set of the same classes in another order is changed by its method ``reorder_classes``.

    Args:
        path: of the checkpoint.
        saved: names of its classes; empty if they are unknown.
        own: names of the classes of the data; empty if there are none.

    Raises UserError if the classes differ, or a data set cannot change their order.
    """
    if not saved or saved == own:
        return ""
    difference = describe_difference(saved, own)
    if difference:
        raise UserError(
            f"--resume {path}: it was trained on other classes ({difference}): give the classes "
            f"their old names, or start from its weights, with a new head, by --weights {path}"
        )
    can_reorder = all(hasattr(data_set, "reorder_classes") for data_set in data_sets.values())
    if len(set(own)) < len(own) or not can_reorder:
        index = [one != other for one, other in zip(saved, own, strict=True)].index(True)
        raise UserError(
            f"--resume {path}: its classes have another order than those of the data: class "
            f"{index} is {printable(saved[index])} there and {printable(own[index])} here; "
            "restore that order, or give the data sets a method reorder_classes(names)"
        )
    for data_set in data_sets.values():
        data_set.reorder_classes(saved)  # type: ignore[attr-defined]  # checked above
    return ", with the labels of the data in its order of the classes"


def describe_difference(saved: list[str], own: list[str]) -> str:
    """Return the names that only one of two lists of classes has; "" if there are none."""
    sides = {
        "only in the checkpoint": Counter(saved) - Counter(own),
        "only in the data": Counter(own) - Counter(saved),
    }
    return "; ".join(
        f"{side}: {summarize([printable(name) for name in names.elements()])}"
        for side, names in sides.items()
        if names
    )


def compare_samples(saved: dict[str, int], own: dict[str, int]) -> str:
    """Return the data sets whose number of samples differs from that of a checkpoint, if any."""
    return ", ".join(
        f"{name}: {saved[name]} samples there, {own[name]} here"
        for name in own
        if saved.get(name, own[name]) != own[name]
    )

"""Weights of samples by which all classes count equally in the training loss."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine import UserError
from engine.data import DatasetWrapper, SizedDataset, require_default_collate
from engine.distributed.consistency import IGNORED
from engine.fingerprint import labels_of


def balanced_weights(labels: Sequence[int] | Tensor) -> Tensor:
    """Return a weight for each sample, float32 (N,), inversely proportional to its class's size.

    The mean of the weights is 1, as with ``class_weight="balanced"`` of scikit-learn. Samples with
    the label IGNORED have no loss, and the weight 0.
    """
    numbers = torch.as_tensor(labels)
    is_counted = numbers != IGNORED
    _, classes, sizes = numbers[is_counted].unique(return_inverse=True, return_counts=True)
    weights = torch.zeros(len(numbers))
    weights[is_counted] = (len(classes) / (len(sizes) * sizes.double()))[classes].float()
    return weights


class WeightedDataset(DatasetWrapper):
    """`dataset` with the weight of each sample, a float32 scalar, as its last element.

    Raises UserError if it has no attribute ``labels``, or that is no list of a number for each.
    """

    def __init__(self, dataset: SizedDataset) -> None:
        require_default_collate(dataset, "--class-weights")
        super().__init__(dataset)
        labels = labels_of(dataset)
        try:
            if labels is None:
                raise ValueError
            self.weights = balanced_weights(labels)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(
                "--class-weights: the training data needs an attribute .labels, the list of the "
                "labels of all samples, as numbers"
            ) from None

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        image, label, *further = self.dataset[index]
        if further:
            raise UserError(
                "--class-weights: the training samples have weights of their own: leave it out, or "
                "multiply them by balanced_weights (engine/data/class_weights.py)"
            )
        return image, label, self.weights[index]

"""Losses of ``apex.contrib.xentropy`` and ``apex.contrib.focal_loss``, and its ``clip_grad``."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .multi_tensor import in_fp32


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of each sample; it keeps the logits and no copy of them in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        ctx.save_for_backward(logits, labels)
        ctx.smoothing = smoothing
        log_probabilities = torch.log_softmax(logits, -1, dtype=wide)
        losses = F.nll_loss(log_probabilities, labels, reduction="none")
        if smoothing:
            losses = (1 - smoothing) * losses - smoothing * log_probabilities.mean(-1)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, labels = ctx.saved_tensors
        wide = torch.promote_types(logits.dtype, torch.float32)
        probabilities = logits.softmax(-1, dtype=wide)
        if ctx.smoothing:
            probabilities.sub_(ctx.smoothing / logits.size(-1))
        target = torch.tensor(ctx.smoothing - 1, dtype=wide, device=logits.device)
        probabilities.scatter_add_(-1, labels[:, None], target.expand(len(labels), 1))
        return probabilities.mul_(grad[:, None]).to(logits.dtype), None, None


class SoftmaxCrossEntropyLoss:
    """Cross entropy of each sample, with label smoothing; called as ``.apply(logits, labels)``."""

    @staticmethod
    def apply(
        logits: Tensor,
        labels: Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> Tensor:
        """Return the losses (N,) of `logits` (N, classes), computed in fp32, in their type.

        Samples whose label is `padding_idx` have loss 0; it may be outside of the classes.
        `half_to_float` returns fp32.
        """
        is_padding = labels == padding_idx
        losses = _CrossEntropy.apply(logits, labels.masked_fill(is_padding, 0), smoothing)
        losses = losses.masked_fill(is_padding, 0.0)
        return losses if half_to_float else losses.to(logits.dtype)


def focal_loss(
    cls_output: Tensor,
    cls_targets_at_level: Tensor,
    num_positive_sum: Tensor,
    num_real_classes: int,
    alpha: float,
    gamma: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the sum of the sigmoid focal losses, divided by `num_positive_sum`, in fp32.

    Args:
        cls_output: logits (…, classes).
        cls_targets_at_level: the class of each sample (…); -1: none of them, -2: not counted.
        num_positive_sum: a tensor of one element.
        num_real_classes: how many classes to count; the others are padding.
        alpha: the weight of positive matches; negative ones have 1 − alpha.
        gamma: the exponent of the probability of the other outcome.
        label_smoothing: the targets become `label_smoothing` / 2, and 1 minus that.

    Source: Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017.
    """
    (logits,) = in_fp32([cls_output[..., :num_real_classes]])
    classes = torch.arange(num_real_classes, device=logits.device)
    is_positive = cls_targets_at_level.unsqueeze(-1) == classes
    targets = is_positive.to(logits.dtype) * (1 - label_smoothing) + label_smoothing / 2
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    others = torch.where(is_positive, -logits, logits)  # a power of their sigmoid, of any exponent
    weights = torch.where(is_positive, alpha, 1 - alpha) * (gamma * F.logsigmoid(others)).exp()
    counted = (cls_targets_at_level != -2).unsqueeze(-1)
    return torch.where(counted, weights * losses, 0.0).sum() / num_positive_sum.squeeze()


FocalLoss = SimpleNamespace(apply=focal_loss)  # Apex's autograd function


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip the gradients of `parameters` to the norm `max_norm` together, in place.

    Returns their norm before, in fp32 at least. Unlike torch's function, it computes norms of half
    gradients in fp32, which do not overflow. Raises RuntimeError for a norm that is inf or nan if
    `error_if_nonfinite`; this waits for the device.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [parameter.grad for parameter in given if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(in_fp32(grads), float(norm_type), error_if_nonfinite)
    torch.nn.utils.clip_grads_with_norm_(given, float(max_norm), norm)
    return norm

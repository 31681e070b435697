"""Optimizers of ``amp_C``, which update lists of tensors in place, on torch's foreach functions.

Gradients, parameters and state are fp32, half or float64; half ones are updated in fp32. `step`
counts from 1; `bias_correction` and `grad_averaging` are 0 or 1.
"""

import torch
from torch import Tensor

from .multi_tensor import Lists, in_fp32, write_back


def update_moments(
    grads: list[Tensor], means: list[Tensor], squares: list[Tensor], factor: float, beta1: float,
    beta2: float,
) -> None:  # fmt: skip
    """Update both moments; `factor` is that of the gradient in the first one."""
    torch._foreach_mul_(means, beta1)
    torch._foreach_add_(means, grads, alpha=factor)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)


def _adam_direction(
    means: list[Tensor], squares: list[Tensor], corrections: tuple[float, float], epsilon: float
) -> list[Tensor]:
    """Return the corrected first moment, divided by the root of the corrected second."""
    denominators = torch._foreach_div(squares, corrections[1])
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, epsilon)
    directions = torch._foreach_div(means, corrections[0])
    torch._foreach_div_(directions, denominators)
    return list(directions)


def _corrections(
    bias_correction: int, beta1: float, beta2: float, step: int
) -> tuple[float, float]:
    return (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)


@torch.no_grad()
def multi_tensor_adam(  # noqa: PLR0913, amp_C's signature
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Take a step of Adam: [gradients, parameters, first moments, second moments].

    `mode` 0 adds the weight decay to the gradient, 1 to the update.
    """
    grads, values, means, squares = (in_fp32(tensors) for tensors in tensor_lists)
    if mode == 0:
        grads = list(torch._foreach_add(grads, values, alpha=weight_decay))
    update_moments(grads, means, squares, 1 - beta1, beta1, beta2)
    corrections = _corrections(bias_correction, beta1, beta2, step)
    updates = _adam_direction(means, squares, corrections, epsilon)
    if mode == 1:
        torch._foreach_add_(updates, values, alpha=weight_decay)
    torch._foreach_add_(values, updates, alpha=-lr)
    write_back(tensor_lists[1], values)
    write_back(tensor_lists[2], means)
    write_back(tensor_lists[3], squares)


@torch.no_grad()
def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Take a step of Adagrad: [gradients, parameters, sums of squares]; `mode` as in Adam."""
    grads, values, sums = (in_fp32(tensors) for tensors in tensor_lists)
    if mode == 0:
        grads = list(torch._foreach_add(grads, values, alpha=weight_decay))
    torch._foreach_addcmul_(sums, grads, grads)
    denominators = torch._foreach_sqrt(sums)
    torch._foreach_add_(denominators, epsilon)
    updates = torch._foreach_div(grads, denominators)
    if mode == 1:
        torch._foreach_add_(updates, values, alpha=weight_decay)
    torch._foreach_add_(values, updates, alpha=-lr)
    write_back(tensor_lists[1], values)
    write_back(tensor_lists[2], sums)


@torch.no_grad()
def multi_tensor_sgd(  # noqa: PLR0913, amp_C's signature
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Take a step of SGD: [gradients, parameters, momenta], and half copies of the parameters.

    Does nothing if `noop_flag` is set, for which it waits. Gradients are first multiplied by
    `scale`. In the `first_run`, they become the momenta.
    """
    if noop_flag.item():
        return
    grads = list(torch._foreach_mul(in_fp32(tensor_lists[0]), scale))
    values, momenta = in_fp32(tensor_lists[1]), in_fp32(tensor_lists[2])
    if wd and not wd_after_momentum:
        torch._foreach_add_(grads, values, alpha=wd)
    if momentum:
        if first_run:
            torch._foreach_copy_(momenta, grads)
        else:
            torch._foreach_mul_(momenta, momentum)
            torch._foreach_add_(momenta, grads, alpha=1 - dampening)
        grads = list(torch._foreach_add(grads, momenta, alpha=momentum)) if nesterov else momenta
    if wd and wd_after_momentum:
        grads = list(torch._foreach_add(grads, values, alpha=wd))
    torch._foreach_add_(values, grads, alpha=-lr)
    write_back(tensor_lists[1], values)
    write_back(tensor_lists[2], momenta)
    if len(tensor_lists) == 4:
        torch._foreach_copy_(tensor_lists[3], values)


@torch.no_grad()
def multi_tensor_lamb(  # noqa: PLR0913, amp_C's signature
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool | None = None,
) -> None:
    """Take a step of LAMB: [gradients, parameters, first moments, second moments].

    `global_grad_norm` (1,) is the norm of all gradients, which are divided by its quotient with
    `max_grad_norm` where that is above 1. `mode` as in Adam. As in Apex, the gradients are
    overwritten, by the updates before they are scaled to the parameters' norms.
    """
    grads, values, means, squares = (in_fp32(tensors) for tensors in tensor_lists)
    clip = (global_grad_norm / max_grad_norm).clamp(min=1).squeeze()
    grads = list(torch._foreach_div(grads, clip))
    if mode == 0:
        torch._foreach_add_(grads, values, alpha=weight_decay)
    factor = 1 - beta1 if grad_averaging else 1.0
    update_moments(grads, means, squares, factor, beta1, beta2)
    corrections = _corrections(bias_correction, beta1, beta2, step)
    updates = _adam_direction(means, squares, corrections, epsilon)
    if mode == 1:
        torch._foreach_add_(updates, values, alpha=weight_decay)
    torch._foreach_copy_(tensor_lists[0], updates)
    if use_nvlamb or weight_decay:
        sizes, lengths = torch._foreach_norm(values), torch._foreach_norm(updates)
        ratios = [
            torch.where((size > 0) & (length > 0), size / length, 1.0)
            for size, length in zip(sizes, lengths, strict=True)
        ]
        torch._foreach_mul_(updates, ratios)
    torch._foreach_add_(values, updates, alpha=-lr)
    write_back(tensor_lists[1], values)
    write_back(tensor_lists[2], means)
    write_back(tensor_lists[3], squares)


@torch.no_grad()
def multi_tensor_novograd(  # noqa: PLR0913, amp_C's signature
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """Take a step of NovoGrad: [gradients, parameters, first moments].

    `grad_norms` (n,) has the running norm of each gradient, and is updated: of `norm_type` 2, or
    the largest magnitude for 0. `mode` 0 adds the weight decay to the normalized gradient, before
    the first moment; 1 to the update.
    """
    grads, values, means = (in_fp32(tensors) for tensors in tensor_lists)
    order = 2 if norm_type == 2 else float("inf")
    norms = torch.stack(torch._foreach_norm(grads, order)).to(grad_norms)
    if norm_type == 2:
        blend = (beta2 * grad_norms.square() + (1 - beta2) * norms.square()).sqrt()
    else:
        blend = beta2 * grad_norms + (1 - beta2) * norms
    grad_norms.copy_(blend)
    first, second = _corrections(bias_correction, beta1, beta2, step)
    denominators = list((grad_norms / second**0.5 + epsilon).unbind())
    if mode == 0:
        grads = list(torch._foreach_div(grads, denominators))
        torch._foreach_add_(grads, values, alpha=weight_decay)
    torch._foreach_mul_(means, beta1)
    torch._foreach_add_(means, grads, alpha=1 - beta1 if grad_averaging else 1)
    updates = torch._foreach_div(means, first)
    if mode == 1:
        torch._foreach_div_(updates, denominators)
        torch._foreach_add_(updates, values, alpha=weight_decay)
    torch._foreach_add_(values, updates, alpha=-lr)
    write_back(tensor_lists[1], values)
    write_back(tensor_lists[2], means)

"""Names of the functions of torch.nn.functional that O1 casts: scripts edit these lists.

They do so before ``amp.initialize``, which reads them, as in NVIDIA's Tacotron 2.
"""

import functools
from collections.abc import Callable
from typing import Any

from apex_native import amp
from torch.nn import functional

MODULE = functional
FP16_FUNCS = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "linear",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
]
FP32_FUNCS = [
    "cosine_similarity",
    "gelu",
    "grid_sample",
    "interpolate",
    "log_softmax",
    "softmax",
    "softmin",
    "softplus",
    "group_norm",
    "layer_norm",
    "local_response_norm",
    "normalize",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
]


def _uncast(function: Callable) -> Callable:
    """Make `function` run on the types of its arguments."""

    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> Any:
        with amp.disable_casts():
            return function(*args, **kwargs)

    return wrapper


def _decorators() -> dict[str, Callable]:
    """Return how to cast each function that the lists name."""
    decorators = dict.fromkeys(FP16_FUNCS, amp.half_function)
    return decorators | dict.fromkeys(FP32_FUNCS, amp.float_function)


def _apply() -> None:
    """Replace the functions that are in another list now, or in none."""
    decorators = _decorators()
    for name in _UNCHANGED.keys() | decorators.keys():
        decorate = decorators.get(name, _uncast)
        if decorate is not _UNCHANGED.get(name) and hasattr(MODULE, name):  # Apex ignores others
            setattr(MODULE, name, decorate(getattr(MODULE, name)))


_UNCHANGED = _decorators()
amp._amp_state.registered.append(_apply)

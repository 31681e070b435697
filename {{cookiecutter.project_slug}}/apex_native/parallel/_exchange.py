"""The statistics of each channel over all processes of a group, from the sums of each process.

GPUs that reach each other's memory have a mailbox for that, whose kernels make the sums, too, where
no compiler does. For others NCCL or gloo carries the sums, in operators, because torch.compile must
not look into it.
"""

import importlib
import os
import shutil
import socket
from collections.abc import Callable
from functools import cache
from types import ModuleType
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.torch_version import TorchVersion

from .._say import say
from . import _formula

# By the group itself, not by its name, which the next group may get.
_mailboxes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple, object | None]] = WeakKeyDictionary()


def moments(
    x: Tensor,
    arithmetic: ModuleType,
    eps: float,
    running: tuple[Tensor, Tensor] | None,
    momentum: float | Tensor,
    group: str,
    mailbox: Tensor | None,
) -> Tensor:
    """The statistics of each channel of x (N, C, …) over the group of that name; updates `running`.

    Args:
        arithmetic: `_formula` or `_rows`, for which x must lie in rows.
        eps: added to the variance.
        running: the running mean and variance, (C,) each.
        momentum: how far these go to the new ones, from 0 to 1.
        mailbox: the group's, as `mailbox_of` has it.

    Returns (4, C): mean, 1 / √(variance + eps), number of values, and unbiased variance.
    """
    if mailbox is not None and arithmetic is not _formula:
        from . import _mailbox

        return _mailbox.moments(x, eps, running, momentum, mailbox)
    with torch.no_grad():
        sums, shift = arithmetic.sum_powers(x)
        count = x.numel() // x.shape[1]
        if mailbox is not None:
            from . import _mailbox

            statistics = _mailbox.moments_of_sums(sums, shift, count, eps, mailbox)
        else:
            carried = _moments_op if torch.compiler.is_compiling() else _moments
            statistics = carried(sums, shift, count, eps, group)
        if running is not None:
            for kept, new in zip(running, statistics[::3], strict=True):
                kept.lerp_(new.to(kept.dtype), momentum)
    return statistics


def means(
    grad: Tensor,
    x: Tensor,
    arithmetic: ModuleType,
    statistics: Tensor,
    group: str,
    mailbox: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Σ grad and Σ grad · x̂ of each channel in this process, and their means over all.

    As for `moments`, grad and x lie in rows if `arithmetic` is `_rows`. Returns (2, C) and (2, C);
    the means are by the number of values in `statistics`.
    """
    if mailbox is not None and arithmetic is not _formula:
        from . import _mailbox

        return _mailbox.means(grad, x, statistics, mailbox)
    sums = arithmetic.sum_gradients(grad, x, statistics)
    if mailbox is not None:
        from . import _mailbox

        return _mailbox.means_of_sums(sums, statistics, mailbox)
    carried = _means_op if torch.compiler.is_compiling() else _means
    return carried(sums, statistics, group)


@cache
def kernels() -> ModuleType | None:
    """`_rows`, if its kernels can be built here."""
    if not any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))):
        say("SyncBatchNorm: torch's operations, which are slower, as Triton finds no C compiler")
        return None
    try:
        return importlib.import_module("._rows", __package__)
    except ImportError as error:
        say(f"SyncBatchNorm: torch's operations, which are slower, as Triton is missing ({error})")
        return None


@torch.compiler.assume_constant_result
def mailbox_of(
    group: str, channels: int, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """The address of a mailbox for input of `dtype`; None where NCCL or gloo has to carry the sums.

    Every process of the group must ask for its first one at once.
    """
    if device.type != "cuda" or dtype == torch.float64:
        return None
    members = _resolve_process_group(group)
    known = _mailboxes.setdefault(members, {})
    size = max(2048, 1 << (channels - 1).bit_length())  # so that one serves most models
    key = size, device
    if key not in known:
        with torch.cuda.device(device):  # NCCL's objects travel by way of the current one
            known[key] = _make_mailbox(members, size, device)
    return known[key] and known[key].address


def _moments(sums: Tensor, shift: Tensor, count: int, eps: float, group: str) -> Tensor:
    members = _resolve_process_group(group)
    first, second = sums.double().sum(0)
    away = first / max(count, 1)
    mean = away + shift
    squares = (second - first * away).clamp(min=0)
    here = torch.stack([mean, squares, torch.full_like(mean, count)])
    everywhere = [torch.empty_like(here) for _ in range(members.size())]
    dist.all_gather(everywhere, here, members)
    means, squares, counts = torch.stack(everywhere, dim=1)
    total = counts.sum(0).clamp(min=1)  # nan has no way out of the running statistics
    mean = (means * counts).sum(0) / total
    squares = (squares + (means - mean).square() * counts).sum(0)
    invstd = (squares / total + eps).rsqrt()
    return torch.stack([mean, invstd, total, squares / (total - 1).clamp(min=1)]).to(sums.dtype)


def _means(sums: Tensor, statistics: Tensor, group: str) -> tuple[Tensor, Tensor]:
    local = sums.double().sum(0)
    everywhere = local.clone()
    dist.all_reduce(everywhere, group=_resolve_process_group(group))
    return local.to(sums.dtype), (everywhere / statistics[2]).to(sums.dtype)


def _make_mailbox(group: dist.ProcessGroup, channels: int, device: torch.device) -> object | None:
    """A Mailbox, if every process of `group` finds that it can; all must ask at once."""
    everyone = [None] * group.size()
    here = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    dist.all_gather_object(everyone, here, group)
    problems = list(everyone)
    dist.all_gather_object(problems, _problem(everyone, here, device), group)
    problem = next(filter(None, problems), None)
    if problem:
        say(f"SyncBatchNorm: NCCL carries the sums, more slowly, because {problem}")
        return None
    from ._mailbox import Mailbox  # it needs Triton, which takes a while to import

    return Mailbox(group, channels, device)


def _problem(everyone: list[tuple], here: tuple, device: torch.device) -> str | None:
    """Why this process can't write into the memory of the others, or None."""
    hosts, uuids = (set(values) for values in zip(*everyone, strict=True))
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    visible = {str(gpu.uuid): index for index, gpu in enumerate(properties)}
    if TorchVersion(torch.__version__) < (2, 9):
        return f"torch {torch.__version__} is older than 2.9"
    if kernels() is None:
        return "Triton can't build kernels here"
    if torch.version.hip:
        return "the GPUs are AMD's, on which shared memory was never tried"
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return "NCCL_P2P_DISABLE is set"
    if len(hosts) > 1:
        return "the processes are on several hosts"
    if len(uuids) < len(everyone):
        return "processes share a GPU"
    if not uuids <= visible.keys():
        return "a process doesn't see the others' GPUs (CUDA_VISIBLE_DEVICES)"
    others = [visible[uuid] for uuid in uuids - {here[1]}]
    if not all(torch.cuda.can_device_access_peer(device, other) for other in others):
        return "the GPUs can't reach each other's memory"
    return None


def _define(function: Callable, schema: str, fake: Callable) -> Callable:
    """`function` as an operator, for torch.compile; that of another copy of this file, if any."""
    name = function.__name__.strip("_")
    if not hasattr(torch.ops.apex_native, name):
        torch.library.define(f"apex_native::{name}", schema)
        torch.library.impl(f"apex_native::{name}", ["CPU", "CUDA"], function)
        torch.library.register_fake(f"apex_native::{name}", fake)
    return getattr(torch.ops.apex_native, name)


_moments_op = _define(
    _moments,
    "(Tensor sums, Tensor shift, SymInt count, float eps, str group) -> Tensor",
    lambda sums, shift, count, eps, group: sums.new_empty(4, sums.shape[-1]),
)
_means_op = _define(
    _means,
    "(Tensor sums, Tensor statistics, str group) -> (Tensor, Tensor)",
    lambda sums, statistics, group: (torch.empty_like(sums[0]), torch.empty_like(sums[0])),
)

"""What can be tried before a run and seen in its first step, so that a mistake is a sentence then.

Later it would be an error that names something else, a hang, or a result that is slightly wrong.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from engine.checkpoint import unwrap
from engine.errors import UserError, first_few

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def try_out(model: nn.Module, criterion: Callable, images: Tensor, targets: Tensor) -> None:
    """Trains a copy of `model` on a small batch, up to the loss, where the model is.

    Raises UserError if it can't: images too small for it, outputs that the loss doesn't take, or a
    batch norm left with a single value by a batch of one.
    """
    try:
        loss = criterion(copy.deepcopy(model).train()(images), targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError("the loss is not one number")
    except (RuntimeError, ValueError, TypeError, AssertionError, AttributeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"this --arch can't train on a batch of {len(images)} of these images "
            f"({' × '.join(map(str, images.shape[1:]))}): {reason}; choose another --arch, or "
            "another --batch-size"
        ) from None


def sample(dataset: torch.utils.data.Dataset, count: int) -> list[Tensor]:
    """A batch of the first `count` samples of `dataset`."""
    return torch.utils.data.default_collate([dataset[index] for index in range(count)])


class Audit:
    """Looks once at what is about to train, and once at what its first backward pass leaves.

    The first look, made here, passes over the weights and over the epoch's indices, and reads no
    data: on two CPU cores it takes 0.04 s for a ResNet-50, and 0.9 s for ImageNet's 1.3 million
    indices. The second one takes less than 1 ms. Every process makes an Audit, before its loop.

    Args:
        model: inside its DistributedDataParallel, if there are several processes.
        amp: real Apex's or apex_native's, after ``initialize``.
        batches: those to train on; of a DataLoader, the processes' shares are compared.
        say: prints a line on rank 0.
        wrapped: the parts of the model that have a DistributedDataParallel each, if not all of it.

    Raises UserError: the optimizer misses a parameter; a weight, batch norm or master has another
    type than the opt_level gives it; processes share a GPU, or start with different weights; their
    shares overlap, leave samples out, or differ in length.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        amp: ModuleType,
        batches: Iterable,
        say: Callable[[str], None],
        wrapped: Sequence[nn.Module] = (),
    ) -> None:
        self.model, self.wrapped, self.is_first = model, wrapped or [model], True
        self.say = say
        module = unwrap(model)
        device = next(module.parameters()).device
        # What a process can find alone comes first: it must not leave others in a collective.
        _require_all_in(optimizer, module)
        _require_types(module, optimizer, amp._amp_state.opt_properties)
        _require_own_device(device)
        _require_equal_weights(module)
        if isinstance(batches, DataLoader) and not isinstance(batches.dataset, IterableDataset):
            _require_fair_shares(batches, device)

    def gradients(self) -> None:
        """Call it after each backward pass, before the optimizer's step; all but the first is free.

        Raises UserError that names the parameters without a gradient, unless the model was told to
        accept them. torch's DistributedDataParallel would raise in the next step, Apex's hangs or
        averages wrongly as soon as processes differ in which ones they are. In one process, where
        they harm nothing, it is a warning.
        """
        accepting = ("find_unused_parameters", "delay_allreduce")  # torch's name, Apex's name
        accepts = any(getattr(part, name, False) for part in self.wrapped for name in accepting)
        if not self.is_first or accepts:
            return
        self.is_first = False
        parameters = unwrap(self.model).named_parameters()
        unused = [name for name, p in parameters if p.requires_grad and p.grad is None]
        if not unused:
            return
        problem = (
            f"no gradient reaches {first_few(unused)}: use them in the loss, set their "
            "requires_grad to False"
        )
        if dist.get_world_size() == 1:
            self.say(f"warning: {problem}; several processes would not go on")
            return
        is_torchs = type(self.wrapped[0]) is nn.parallel.DistributedDataParallel
        flag = "find_unused_parameters=True" if is_torchs else "--delay-allreduce"
        raise UserError(f"{problem}, or accept it with {flag}")


def device_identity(device: torch.device) -> str:
    """What tells one GPU from all others, in other machines too; nothing for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _require_own_device(device: torch.device) -> None:
    devices: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(devices, device_identity(device))
    for rank, one in enumerate(devices):
        if one and devices.index(one) != rank:
            raise UserError(
                f"ranks {devices.index(one)} and {rank} train on the same GPU ({one}): call "
                "torch.cuda.set_device(local_rank) before init_process_group"
            )


def _require_equal_weights(module: nn.Module) -> None:
    names, weights = zip(*module.named_parameters(), strict=True)
    # Sums of the bits as whole numbers: exact, in any order, and without a copy of the weights.
    sums = torch.stack([w.detach().view(BITS[w.element_size()]).sum() for w in weights])
    lowest, highest = sums.clone(), sums
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    different = [names[index] for index in (lowest != highest).nonzero().flatten().tolist()]
    if different:
        raise UserError(
            f"the processes start with different weights ({first_few(different)}): wrap the model "
            "in DistributedDataParallel, and resume from the same file everywhere"
        )


def _require_fair_shares(batches: DataLoader, device: torch.device) -> None:
    if not len(batches):  # drop_last leaves nothing
        images = len(batches.sampler)
        raise UserError(
            f"--batch-size {batches.batch_size} is more than the {images} training images of each "
            f"process: use at most {max(1, images)}, or fewer processes"
        )
    with torch.random.fork_rng(devices=[]):  # a sampler may draw from it
        share = [list(batch) for batch in batches.batch_sampler or [batches.sampler]]
    indices = torch.tensor(list(chain.from_iterable(share)), dtype=torch.int64)
    total, processes = len(batches.dataset), dist.get_world_size()
    readers = torch.bincount(indices, minlength=total).clamp(max=1).int().to(device)
    dist.all_reduce(readers)
    steps = torch.tensor([len(batches), -len(batches)], device=device)
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    most, fewest = steps[0].item(), -steps[1].item()
    shared, left_out = (readers > 1).sum().item(), (readers == 0).sum().item()
    if most != fewest:
        raise UserError(
            f"one process has {fewest} batches and another {most}: the others would wait for it "
            "for ever; give the DataLoader a DistributedSampler, and drop_last=True"
        )
    if shared >= processes:  # fewer may be padding
        raise UserError(
            f"{shared} of {total} samples are read by several processes: give the DataLoader "
            "sampler=DistributedSampler(dataset), and no shuffle"
        )
    if left_out >= processes * max(map(len, share), default=1):  # fewer make short batches
        raise UserError(
            f"{left_out} of {total} samples are read by no process: give the sampler the number "
            "of processes that there are"
        )


def _require_all_in(optimizer: Optimizer, module: nn.Module) -> None:
    held = {p for group in optimizer.param_groups for p in group["params"]}
    stash = optimizer._amp_stash
    held.update(parameter for parameter, _ in getattr(stash, "masters", ()))  # apex_native's
    held.update(getattr(stash, "all_fp16_params", ()))  # Apex's, once it has made masters
    missing = [n for n, p in module.named_parameters() if p.requires_grad and p not in held]
    if missing:
        raise UserError(
            f"the optimizer does not train {first_few(missing)}: make it after the model is "
            "complete, from model.parameters(), or set their requires_grad to False"
        )


def _require_types(module: nn.Module, optimizer: Optimizer, level: object) -> None:
    """`level` is amp's record of what ``initialize`` was told."""
    weights = level.cast_model_type or torch.float32
    wrong = []
    for prefix, part in module.named_modules():
        is_spared = level.keep_batchnorm_fp32 and isinstance(part, _BatchNorm) and part.affine
        wanted = torch.float32 if is_spared else weights
        for name, parameter in part.named_parameters(prefix, recurse=False):
            if parameter.is_floating_point() and parameter.dtype != wanted:
                wrong.append(f"{name} ({_type(parameter)}, not {_type(wanted)})")
    is_apexs = hasattr(optimizer, "_amp_lazy_init")
    if level.master_weights and not (is_apexs and wrong):  # of wrong types Apex can't make masters
        if is_apexs:
            optimizer._amp_lazy_init()  # as it would in the first backward pass
        masters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        others = {_type(master) for master in masters if master.dtype != torch.float32}
        wrong += [f"master weights ({dtype}, not float32)" for dtype in others]
    if wrong:
        raise UserError(
            f"{level.opt_level} is not what trains: {first_few(wrong)}; leave all casts to "
            "amp.initialize, and call nothing like .half() or .float() after it"
        )


def _type(value: object) -> str:
    return str(getattr(value, "dtype", value)).removeprefix("torch.")

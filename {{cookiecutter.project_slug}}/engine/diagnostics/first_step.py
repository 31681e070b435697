"""Checks of the model before training, of the training's first step, and of its numbers.

Undetected, these mistakes would become an error about something else, a hang, or wrong results.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # no public class is a base of Apex's too
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from apex_native.amp.casting import nested_tensors
from engine import PROJECT, UserError, distributed, summarize
from engine.backend import Backend, bit_sums, is_sharded, local_shard, unwrap
from engine.data import rng_preserved, to_device
from engine.data.loading import TrainLoader
from engine.optim import eval_mode, state_preserved, without_compilation

if TYPE_CHECKING:
    from engine.monitoring.logger import Logger
    from engine.monitoring.meter import LogRecord

# Of a model or a loss that does not fit the batch.
ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AssertionError, AttributeError)
# In training they do not read their statistics.
NORMS = (_BatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
MAX_NONFINITE_LOSSES = 10  # consecutive
MAX_DIFFERENCE = 1e-3  # between the norms of a gradient in two processes, of the larger one
MIN_LOSS_SCALE = 2.0**-16  # 32 overflows below the initial dynamic scale


def check_model(
    model: nn.Module,
    criterion: Callable,
    prepare: Callable,
    sample: Sequence[Tensor] | None,
    val_sample: Sequence[Tensor],
    device: torch.device,
) -> None:
    """Raise UserError if the model can't train on a batch, validate such images, or be saved.

    Args:
        prepare: returns the inputs and the targets of a batch.
        sample: tensors on the CPU, as the model is; None in an evaluation.
        val_sample: the same of the validation data, of which one sample is enough.
        device: on which a copy is tried if the model can't compute on the CPU.
    """
    to_device(val_sample, torch.device("cpu"), torch.preserve_format)  # refuses all but tensors
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and not is_lazy(value) and distributed.is_expanded(value):
            raise UserError(
                f"{name} of the model is expanded, and can't be loaded from a checkpoint: add "
                ".contiguous() where it is registered"
            )
    if len({tensor.shape[:1] for tensor in val_sample}) == 1:  # a collate_fn may make others
        val_sample = [tensor[:1] for tensor in val_sample]

    def check(model: nn.Module, device: torch.device) -> None:
        if sample is not None:
            batch = to_device(sample, device, torch.preserve_format)
            check_trainable(model, criterion, prepare, batch)
        check_evaluable(model, prepare, to_device(val_sample, device, torch.preserve_format))

    try:
        check(model, torch.device("cpu"))
    except UserError as error:
        # A GPU ends the process for an index out of range, without a message of its own.
        if device.type == "cpu" or isinstance(error.__context__, LookupError):
            raise
        try:  # an own kernel may be for a GPU alone, and for half types
            with torch.autocast(device.type):
                check(copy.deepcopy(model).to(device), device)
            torch.cuda.synchronize(device)
        except (UserError, *ERRORS):
            raise error from None


def check_trainable(
    model: nn.Module, criterion: Callable, prepare: Callable, batch: Sequence[Tensor]
) -> None:
    """Compute the loss of a copy of the model in training mode. Raises UserError if that fails.

    For example, images may be too small for the model, the loss may not accept its output, or
    batch norm may be left with a single value by a batch of one.

    Args:
        prepare: returns the inputs and the targets of `batch`.
        batch: tensors on the model's device.
    """
    inputs, targets = prepare(batch)
    with _explaining("train on", batch, "--arch, image size or --batch-size"):
        try:
            copied = copy.deepcopy(model)
            copied.train()  # which may return None, if a class overrides it
            loss = criterion(copied(inputs), targets)
        except ERRORS:  # perhaps of a model that can't be copied, or whose hooks are closures of it
            with state_preserved(model):
                model.train()
                loss = criterion(model(inputs), targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError("the loss is not a single number")


@torch.no_grad()
def check_evaluable(model: nn.Module, prepare: Callable, batch: Sequence[Tensor]) -> None:
    """Compute the model's output in eval mode. Raises UserError if that fails.

    Args:
        prepare, batch: as for `check_trainable`.
    """
    inputs, _ = prepare(batch)
    explaining = _explaining("validate", batch, "--arch or image size")
    with explaining, eval_mode(model), state_preserved(model):
        model(inputs)


@torch.no_grad()
def check_average(
    model: nn.Module, average: nn.Module, prepare: Callable, sample: Sequence[Tensor]
) -> None:
    """Raise UserError if `average`, a copy of `model`, computes with parts of the original.

    Hooks and lambdas of the copy do that if they are closures, such as of ``self``.

    Args:
        prepare: returns the inputs and the targets of a batch.
        sample: tensors on the device of the models, of several samples.
    """
    calls: list[nn.Module] = []
    parts = [slice(0, 1), slice(-1, None)]  # a copy may return features of the first one
    if len({tensor.shape[:1] for tensor in sample}) > 1:  # as a collate_fn may make them
        parts = [slice(None)]

    def output(one: nn.Module) -> Tensor:
        for part in parts:
            with rng_preserved():
                found = one(prepare([tensor[part].clone() for tensor in sample])[0])
        values = torch.cat([tensor.flatten().double() for tensor in nested_tensors(found)])
        return values.nan_to_num(0, 0, 0)  # such as logits of -inf

    with eval_mode(model, average), state_preserved(model, average):
        hooks = [
            one.register_forward_pre_hook(lambda *_: calls.append(model)) for one in model.modules()
        ]
        found = output(average)
        for hook in hooks:
            hook.remove()
        expected = output(model)
    is_near = (found - expected).norm() <= 0.01 * expected.norm()  # GPUs may choose other kernels
    if calls or not is_near:
        raise UserError(
            "--ema: the copy of the model for the average computes with layers or features of the "
            "model itself, as by a hook or a lambda that refers to self: use methods of the model "
            "for it (self.layer.register_forward_hook(self.keep)), or leave --ema out"
        )


@contextmanager
def _explaining(action: str, batch: Sequence[Tensor], choices: str) -> Iterator[None]:
    """Raise UserError if the model does not fit the batch.

    Args:
        action: what the model can't do, for the message.
        choices: what to change.
    """
    try:
        yield
    except ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        shapes = ", ".join(" × ".join(map(str, tensor.shape)) for tensor in batch)
        line = _owners_line(error)
        fix = "or add --no-channels-last" if "view size" in reason else f"choose another {choices}"
        raise UserError(
            f"this --arch can't {action} a batch of {len(batch[0])} samples (tensors of shape "
            f"{shapes}): {reason}; {fix}"
            f"{f', or correct {line}' if line else ''}"
        ) from None


def _owners_line(error: BaseException) -> str:
    """Return the last line of the project's own scripts that led to `error`; "" without one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).parent == PROJECT:
            return f"{Path(frame.filename).name}, line {frame.lineno}"
    return ""


class FirstStepAudit:
    """Checks of what is about to train and, once they are finite, of the gradients.

    Every rank constructs an audit before its loop. That passes over the weights and over the
    epoch's indices, and reads no data: on two CPU cores it takes 0.04 s for a ResNet-50, and 0.9 s
    for ImageNet's 1.3 million indices. The check of the gradients takes some milliseconds.

    Args:
        model: as it is trained, inside DistributedDataParallel if there are several ranks.
        optimizer: returned by amp.initialize.
        batches: of the training. If it is a loader, the ranks' shards are compared.

    Raises UserError if the optimizer misses a parameter, or trains tensors outside the model; a
    weight, batch norm or master weight has another type than the opt_level specifies; ranks share a
    GPU or start with different weights; or their shards overlap, leave samples out, or differ in
    length.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        backend: Backend,
        batches: Iterable,
        logger: Logger,
    ) -> None:
        self.model = model
        self.module = unwrap(model)
        self.optimizer = optimizer
        self.backend = backend
        self.logger = logger
        self.is_done = False
        self._is_alone = dist.get_world_size() == 1 or is_sharded(self.module)
        self._has_compared_states = self._is_alone
        self._is_from_torch = type(model) is nn.parallel.DistributedDataParallel
        self._frozen = [p for p in self.module.parameters() if not p.requires_grad]
        self._lrs: list[float] = []  # of the last step
        self._has_warned_of_lrs = self._has_warned_of_weights = self._has_warned_of_masters = False
        self._is_in_training = self.module.training
        self.accepts_unused = any(
            getattr(model, flag, False)
            for flag in ("find_unused_parameters", "delay_allreduce")  # torch's name, Apex's name
        )
        device = next(self.module.parameters()).device
        # Checks without communication come first: a rank that fails alone must not leave others in
        # a collective.
        _require_all_trained(backend.trained_parameters(optimizer), self.module)
        _require_types(self.module, optimizer, backend)
        _require_no_others_trained(optimizer, self.module, backend)
        _require_own_device(device)
        _warn_of_unsaved_state(optimizer, logger)
        if is_sharded(self.module):
            logger.info(_describe_shards(self.module, optimizer))
        else:
            _require_equal_weights(self.module)
        if isinstance(batches, DataLoader | TrainLoader):
            _require_fair_shards(batches, device)

    def check_learning_rates(self) -> None:
        """Log a warning once if they have changed since `check_gradients`, before they are set."""
        now = self._learning_rates()[: len(self._lrs)]  # without groups that were added
        if self._lrs != now and not self._has_warned_of_lrs:
            self._has_warned_of_lrs = True
            self.logger.warning(
                "the learning rate was changed after a step, as by a scheduler, without effect: "
                "set_learning_rates of main.py sets it for each step; change the formula there"
            )

    def _learning_rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def check_gradients(self) -> None:
        """Check once that every parameter has a gradient, the average of all ranks' gradients.

        Call it after each backward pass. A parameter without a gradient makes torch's
        DistributedDataParallel raise in the next step; Apex's hangs or averages wrongly as soon as
        these parameters differ between ranks. After an overflow, the next step is checked, and
        once more if parameters that were frozen no longer are.

        Raises UserError with their names. With a single rank, it is a warning.
        """
        self._lrs = self._learning_rates()
        if self._is_in_training and not self.module.training:
            self._is_in_training = False
            self.logger.warning(
                "the model trains in eval mode, as after model.eval() in an own evaluation: put it "
                "into the body of `with eval_mode(model):`, which is in engine.optim"
            )
        if any(parameter.requires_grad for parameter in self._frozen):
            self._frozen = [p for p in self._frozen if not p.requires_grad]
            self.is_done = False
            _require_all_trained(self.backend.trained_parameters(self.optimizer), self.module)
            return  # they may have been unfrozen after the forward pass of this step
        if self.is_done:
            self._warn_of_different_states()
            return
        trained = self._trained()
        unused = [name for name, parameter in trained.items() if parameter.grad is None]
        if unused and not self.accepts_unused:
            self._report_unused(unused)
        self.is_done = self._is_alone or _require_averaged(trained)
        if self.is_done and dist.get_world_size() > 1:
            self._warn_of_different_buffers()

    def check_weights(self) -> None:
        """Log a warning once if the trained weights differ between the processes.

        And one if they are not their fp32 masters, rounded.
        """
        self._check_masters()
        if self._is_alone or self._has_warned_of_weights:
            return
        if different := _different(self._trained()):
            self._has_warned_of_weights = True
            self.logger.warning(
                f"the processes have different weights ({summarize(different)}): each validates "
                "its own, and those of rank 0 are saved; GPUs must be of one kind, and random "
                "numbers of a step the same, as from a generator seeded by --seed and the step"
            )

    def _check_masters(self) -> None:
        if self._has_warned_of_masters or not self._unlike_masters():
            return
        self.backend.fp32_state_dict(self.model, self.optimizer)  # masters follow what torch counts
        if written := self._unlike_masters():
            self._has_warned_of_masters = True
            self.logger.warning(
                f"weights were written to ({summarize(written)}), and not their fp32 masters, "
                "which are trained and saved: change apex.amp.master_params(run.optimizer) instead"
            )

    def _unlike_masters(self) -> list[str]:
        masters = self.backend.master_weights(self.optimizer)
        return [
            name
            for name, one in self.module.named_parameters()
            if one in masters and not _is_rounded(local_shard(one), local_shard(masters[one]))
        ]

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def _warn_of_different_buffers(self) -> None:
        """Log a warning if buffers or frozen parameters differ between the processes."""
        are_equal = self._is_from_torch and self.model.broadcast_buffers  # before each forward pass
        frozen = {k: v for k, v in self.module.named_parameters() if distributed.is_frozen(v)}
        saved = {} if are_equal else distributed.saved_buffers(self.module)
        norms = [one for one in self.module.modules() if isinstance(one, NORMS) and one.training]
        statistics = {buffer for norm in norms for buffer in norm.buffers(recurse=False)}
        read = {name for name in saved if saved[name] not in statistics} | frozen.keys()
        if different := [name for name in _different(saved | frozen) if name in read]:
            kind = "buffers" if {*different} <= saved.keys() else "frozen parameters or buffers"
            self.logger.warning(
                f"the {kind} {summarize(different)} of the model differ between the processes, "
                "and each validation and resumption makes them those of rank 0: all-reduce what "
                "updates them"
            )

    def _warn_of_different_states(self) -> None:
        """Log a warning if the optimizer's state differs after the first step."""
        if self._has_compared_states:
            return
        self._has_compared_states = True
        masters = self.backend.master_weights(self.optimizer)
        entries: dict[str, Any] = {}
        for name, parameter in self.module.named_parameters():
            state = self.optimizer.state.get(masters.get(parameter, parameter))
            if isinstance(state, dict):  # an own optimizer may keep others
                entries |= {f"{entry} of {name}": value for entry, value in state.items()}
        own = {name: int(one) for name, one in bit_sums(entries).items()}
        gathered = distributed.all_gather(own, dist.group.WORLD)
        names = sorted(set().union(*gathered))
        if different := [name for name in names if len({one.get(name) for one in gathered}) > 1]:
            self.logger.warning(
                f"the optimizer's state differs between the processes ({summarize(different)}): "
                "checkpoints have that of rank 0, so resumed runs are not exact; GPUs must be of "
                "one kind, and the optimizer must compute all updates in each process"
            )

    def _report_unused(self, names: list[str]) -> None:
        fix = "use them in the loss, set their requires_grad to False"
        problem = f"no gradient reaches {summarize(names)}: {fix}"
        if dist.get_world_size() == 1:
            self.logger.warning(f"{problem}; with several processes this is an error")
            return
        if is_sharded(self.module):
            raise UserError(problem)
        flag = "find_unused_parameters=True" if self._is_from_torch else "--delay-allreduce"
        raise UserError(f"{problem}, or accept it with {flag}")


def _require_averaged(parameters: dict[str, nn.Parameter]) -> bool:
    """Raise UserError if gradients differ between the ranks; return False if any is not finite."""
    norms = torch.stack([_gradient_norm(parameter) for parameter in parameters.values()])
    is_finite = norms.isfinite().all().float()
    lowest, highest = _bounds(torch.cat([norms.nan_to_num(posinf=0), is_finite[None]]))
    if not lowest[-1]:
        return False
    # GPUs of other kinds round in other ways; gradients of other samples differ by far more.
    is_different = highest - lowest > MAX_DIFFERENCE * highest
    if different := list(compress(parameters, is_different.tolist())):
        raise UserError(
            f"the gradients of {summarize(different)} are not averaged over the processes: call "
            "run.model, not a model inside it, and backward() once for what it returns; parts that "
            "were frozen when it was wrapped are not averaged (if each process is to have "
            "gradients of its own, leave check_gradients out)"
        )
    return True


def _is_rounded(weight: Tensor, master: Tensor) -> bool:
    return torch.allclose(weight, master.to(weight), rtol=0, atol=0, equal_nan=True)


def _gradient_norm(parameter: nn.Parameter) -> Tensor:
    """Return the norm of a gradient in fp32; 0 without one."""
    grad = parameter.grad
    if grad is None:
        return torch.zeros((), device=parameter.device)
    values = grad.coalesce().values() if grad.is_sparse else grad
    values = torch.view_as_real(values) if values.is_complex() else values
    return torch.linalg.vector_norm(values, dtype=torch.float32)


def device_identity(device: torch.device) -> str:
    """Return an identifier of a GPU that is unique across hosts; an empty string for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def find_shared_gpu(devices: list[str]) -> str:
    """Return which ranks share a GPU, by the `device_identity` of each; an empty string if none."""
    for rank, device in enumerate(devices):
        if device and devices.index(device) != rank:
            return f"ranks {devices.index(device)} and {rank} have the same GPU ({device})"
    return ""


def _require_own_device(device: torch.device) -> None:
    if shared := find_shared_gpu(distributed.all_gather(device_identity(device), dist.group.WORLD)):
        fix = "call torch.cuda.set_device(local_rank) before init_process_group"
        raise UserError(f"{shared}: {fix}")


def _require_equal_weights(module: nn.Module) -> None:
    if different := _different(dict(module.named_parameters())):
        fix = "wrap the model in DistributedDataParallel, and resume from the same file everywhere"
        raise UserError(
            f"the processes start with different weights ({summarize(different)}): {fix}"
        )


def _different(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of those that differ between the ranks. Only dense ones are compared."""
    sums = bit_sums(tensors)
    if not sums:
        return []
    lowest, highest = _bounds(torch.stack(list(sums.values())))
    return list(compress(sums, (lowest != highest).tolist()))


def _bounds(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest of each value over all ranks."""
    lowest, highest = values.clone(), values.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return lowest, highest


def _describe_shards(module: nn.Module, optimizer: Optimizer) -> str:
    """Return a message about what this rank holds of a sharded model, with Adam's or SGD's state.

    Raises UserError on a rank whose parameters are not sharded.
    """
    if whole := [name for name, p in module.named_parameters() if local_shard(p) is p]:
        raise UserError(f"{summarize(whole)} are not sharded: create them before fully_shard")
    local = sum(local_shard(parameter).numel() for parameter in module.parameters())
    total = sum(parameter.numel() for parameter in module.parameters())
    copies = 4 if "betas" in optimizer.param_groups[0] else 3  # weight, gradient, moments
    return (
        f"rank 0 holds {local:,} of {total:,} parameters: {4 * copies * local / 2**30:.2f} GiB "
        "with gradients and optimizer"
    )


def describe_large_batch(batch_size: int | None, num_samples: int) -> str:
    """Return an error message for a batch size of more than the samples of each process."""
    problem = f"--batch-size {batch_size} is more than the {num_samples} training samples"
    fix = f"use at most {max(1, num_samples)}, or fewer processes"
    return f"{problem} of each process: {fix}"


def _require_fair_shards(batches: DataLoader | TrainLoader, device: torch.device) -> None:
    if isinstance(batches.dataset, IterableDataset):
        return
    if not len(batches):  # drop_last leaves nothing
        num_samples = len(batches.sampler)  # type: ignore[arg-type]  # Sampler has no __len__
        raise UserError(describe_large_batch(batches.batch_size, num_samples))
    lengths = distributed.all_gather(len(batches), dist.group.WORLD)
    if len(set(lengths)) > 1:
        problem = f"one process has {min(lengths)} batches and another {max(lengths)}"
        fix = "give the DataLoader a DistributedSampler, and drop_last=True"
        raise UserError(f"{problem}, which would wait for it forever: {fix}")
    with torch.random.fork_rng(devices=[]):  # a sampler may draw from it
        shard = [list(batch) for batch in batches.batch_sampler or (batches.sampler,)]
    indices = torch.tensor(list(chain.from_iterable(shard)), dtype=torch.int64)
    # Samples that repeat within a rank, in another order on each, are drawn with replacement. Fewer
    # repeats than ranks may be a sampler's padding.
    own = len(indices) - len(indices.unique()), hash(tuple(indices.tolist()))
    repeats, orders = zip(*distributed.all_gather(own, dist.group.WORLD), strict=True)
    if sum(repeats) >= len(lengths) and len(set(orders)) == len(lengths):
        return
    total = len(batches.dataset)  # type: ignore[arg-type]  # Dataset has no __len__
    readers = torch.bincount(indices, minlength=total).clamp(max=1).int().to(device)
    dist.all_reduce(readers)
    duplicates = int((readers > 1).sum())
    omitted = int((readers == 0).sum())
    if duplicates >= len(lengths):  # fewer may be padding
        problem = f"{duplicates} of {total} samples are read by several processes"
        fix = "give the DataLoader sampler=DistributedSampler(dataset), and no shuffle"
        if isinstance(batches, TrainLoader):  # whose sampler is the owner's
            fix = "its __iter__ must yield every num_replicas-th sample of the order, from rank on"
            problem += f", by {type(batches.sampler).__name__}"
    elif omitted >= len(lengths) * max(map(len, shard), default=1):  # fewer make short batches
        problem = f"{omitted} of {total} samples are read by no process"
        fix = "give the sampler the actual number of processes"
    else:
        return
    # A sampler may balance the classes.
    is_for_all = getattr(batches.sampler, "num_replicas", None) == len(lengths)
    if not is_for_all or len(set(orders)) < len(lengths):
        raise UserError(f"{problem}: {fix}")
    distributed.print_on_rank_zero(f"warning: {problem} in this epoch")


def _require_all_trained(trained: set[Tensor], module: nn.Module) -> None:
    if missing := [n for n, p in module.named_parameters() if p.requires_grad and p not in trained]:
        fix = (
            "create it from the complete model, or set their requires_grad to False; to unfreeze "
            "parts of a trained model, pass its checkpoint to --weights of a new run"
        )
        raise UserError(f"the optimizer does not train {summarize(missing)}: {fix}")


def _require_no_others_trained(optimizer: Optimizer, module: nn.Module, backend: Backend) -> None:
    """Raise UserError if `optimizer` trains tensors that no one averages or saves."""
    own = {*module.parameters(), *backend.master_weights(optimizer).values()}
    others = backend.trained_parameters(optimizer) - own
    if shapes := sorted(str(tuple(other.shape)) for other in others if other.requires_grad):
        raise UserError(
            f"the optimizer trains tensors outside the model (of shape {summarize(shapes)}), such "
            "as weights of the loss, which are neither averaged over the processes nor saved: make "
            "them parameters of the model that build_model returns"
        )


def _warn_of_unsaved_state(optimizer: Optimizer, logger: Logger) -> None:
    """Log a warning for an optimizer within `optimizer` that is not saved with it, as SAM's."""
    if getattr(optimizer.state_dict, "__func__", None) is not Optimizer.state_dict:
        return
    for name, inner in vars(optimizer).items():
        if isinstance(inner, Optimizer) and inner.state is not optimizer.state:
            logger.warning(
                f"checkpoints lack the state of the optimizer's {name}, which a resumed run starts "
                f"anew: override state_dict() and load_state_dict() of {type(optimizer).__name__}"
            )


def _require_types(module: nn.Module, optimizer: Optimizer, backend: Backend) -> None:
    amp = backend.amp_properties()
    cast_type = amp.cast_model_type or torch.float32
    is_fused = any(kind.__name__.startswith("Fused") for kind in type(optimizer).__mro__)
    complex_ones = [
        name for name, p in module.named_parameters() if p.is_complex() and p.requires_grad
    ]
    if complex_ones and (is_fused or backend.has_dynamic_loss_scale()):
        raise UserError(
            f"{summarize(complex_ones)} of the model are complex: make them real, and call "
            "torch.view_as_complex in forward(), or use an optimizer of torch at O0 or O4"
        )
    wrong = []
    for prefix, part in module.named_modules():
        keeps_fp32 = amp.keep_batchnorm_fp32 and isinstance(part, _BatchNorm) and part.affine
        expected = torch.float32 if keeps_fp32 else cast_type
        for name, parameter in part.named_parameters(prefix, recurse=False):
            if parameter.is_floating_point() and parameter.dtype != expected:
                wrong.append(f"{name} ({_name(parameter.dtype)}, not {_name(expected)})")
    if amp.master_weights and not wrong:  # real Apex can't make masters of weights of wrong types
        backend.master_weights(optimizer)  # real Apex puts them into the groups only now
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        masters = [parameter for parameter in parameters if parameter.requires_grad]
        types = {_name(master.dtype) for master in masters if master.dtype != torch.float32}
        wrong = [f"master weights ({dtype}, not float32)" for dtype in types]
    if wrong:
        fix = (
            "leave all casts to amp.initialize, and call nothing like .half() or .float() after it"
        )
        raise UserError(f"the model does not match {amp.opt_level}: {summarize(wrong)}; {fix}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_finite(record: LogRecord | None, model: nn.Module, inputs: object) -> None:
    """Raise FloatingPointError if training cannot recover.

    Args:
        record: of the latest logging step, if there is one.
        model: inside its DistributedDataParallel or not.
        inputs: of a step, as in ``model(inputs)``, to find the first layer that is not finite.
    """
    if record is None:
        return
    if record.nonfinite_losses >= MAX_NONFINITE_LOSSES:
        count = f"{record.nonfinite_losses:.0f}"
        cause = f"{count} losses in a row, up to step {record.step}, are not finite"
    elif record.loss_scale < MIN_LOSS_SCALE:
        scale = f"{record.loss_scale:g}"
        cause = f"the loss scale is down to {scale}: no scale keeps the gradients finite"
    else:
        return
    raise FloatingPointError(
        f"{cause}. {first_nonfinite_layer(unwrap(model), inputs)}. Resume from an earlier "
        "checkpoint with a lower --lr, or inspect the data; no checkpoint with NaN was written"
    )


@torch.no_grad()
def first_nonfinite_layer(model: nn.Module, inputs: object) -> str:
    """Return a sentence about the first layer of a forward pass whose numbers are not finite."""
    if is_sharded(model):  # not all ranks come here, and a forward pass needs them
        return "The layers of a sharded model are not searched"
    if not _is_finite(inputs):
        return "What goes into the model is not finite"
    found: list[str] = []

    def look(name: str, module: nn.Module, inputs: tuple, output: object) -> None:
        if not _is_finite(list(module.parameters(recurse=False))):
            found.append(f"The first layer that is not finite is {name}, in its weights")
        if not _is_finite(list(module.buffers(recurse=False))):
            found.append(f"The first layer that is not finite is {name}, in its statistics")
        if not _is_finite(output):
            found.append(f"The first layer whose output is not finite is {name}")

    hooks = [
        module.register_forward_hook(lambda *call, name=name: look(name, *call))
        for name, module in model.named_modules()
        if name
    ]
    try:
        # In eval mode, no layer communicates with other ranks; compiled code has no hooks.
        with eval_mode(model), without_compilation():
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else "Every layer's output is finite, the loss is not"


def _is_finite(value: object) -> bool:
    floats = (tensor for tensor in nested_tensors(value) if tensor.is_floating_point())
    return all(bool(tensor.isfinite().all()) for tensor in floats)

"""Adapter of the Apex implementation in use: NVIDIA's Apex or apex_native.

All that differs between the two is in here; no other module reads private attributes of Apex.
"""

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

import apex_native
from apex_native.amp.casting import HALF_TYPES
from apex_native.parallel import SPECIAL, is_special
from engine import UserError, distributed, summarize
from engine.models import convert_norms

CALLS = (  # that a project may use; Apex's version is always 0.1, so they are probed
    "amp.initialize",
    "amp.scale_loss",
    "parallel.DistributedDataParallel",
    "parallel.convert_syncbn_model",
    "optimizers.FusedAdam",
)
INTEGER_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
EXTENSIONS = ("amp_C", "apex_C", "syncbn")  # compiled; only amp_C, for FusedAdam, is required
BUILD = "build Apex with its C++ and CUDA extensions"


@dataclass(frozen=True)
class Backend:
    """Implementation of Apex's calls that a run uses: apex_native, or NVIDIA's as ApexBackend."""

    apex: ModuleType  # the package called `name`
    reason: str  # which implementation is used and why, for the log
    name: ClassVar[str] = "apex_native"

    def loss_scale(self) -> Tensor | float:
        """Return the current loss scale without waiting for the device."""
        return self.apex.amp.current_loss_scale()

    def has_dynamic_loss_scale(self) -> bool:
        """Return whether overflows change the loss scale."""
        return self.apex.amp.has_dynamic_loss_scale()

    def amp_properties(self) -> Any:
        """Return the settings of the opt_level, as ``amp.initialize`` resolved them.

        Its attributes are opt_level, cast_model_type, which is None if the weights are not cast,
        keep_batchnorm_fp32 and master_weights.
        """
        return self.apex.amp.properties()

    def without_casts(self, function: Callable, *args: object) -> Any:
        """Call `function` without the casts of O1 and O4, which would round a metric's sums."""
        with self._casts_disabled():
            return function(*args)

    def update_metrics(self, update: Callable, outputs: Any, targets: Any) -> None:
        """Call `update` with a model's outputs in fp32, without casts.

        If `in_fp32` does not know a class in them, they stay as they are, and so do the casts; the
        first time, that is a warning.
        """
        try:
            outputs = in_fp32(outputs)
        except TypeError as error:
            if self.amp_properties().opt_level != "O0":
                _warn_of_half(str(error))
            update(outputs, targets)
        else:
            self.without_casts(update, outputs, targets)

    def _casts_disabled(self) -> AbstractContextManager:
        return self.apex.amp.disable_casts()

    def trained_parameters(self, optimizer: Optimizer) -> set[Tensor]:
        """Return what `optimizer` trains, the model's parameters behind its masters included."""
        trained = {tensor for group in optimizer.param_groups for tensor in group["params"]}
        return trained.union(self.master_weights(optimizer))

    def master_weights(self, optimizer: Optimizer) -> dict[Tensor, Tensor]:
        """Return the fp32 masters by their half-precision parameter; create them if necessary."""
        return dict(self.apex.amp.master_pairs(optimizer))

    def fp32_state_dict(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the state of the unwrapped model, in fp32 at every opt_level.

        It has the masters where there are any, so that a resumed run continues from exactly the
        same weights. With keep_vars, apex_native returns these themselves; else it copies all. As
        ``state_dict`` returns it, it has the versions of the modules as an attribute.
        """
        state: dict[str, Tensor] = unwrap(model).state_dict(keep_vars=True)
        for name, value in state.items():
            state[name] = value.detach() if isinstance(value, Tensor) else value
        return state

    def load_fp32_state_dict(
        self, model: nn.Module, optimizer: Optimizer, state: Mapping[str, Tensor]
    ) -> None:
        """Load what `fp32_state_dict` returned into the model and the masters.

        A class's own load_state_dict may write to what state_dict() returns, which is a copy here,
        or to the rounded weights alone.
        """
        masters = self.master_weights(optimizer)  # made now, since apex_native loads them, too
        unwrap(model).load_state_dict(state)
        with torch.no_grad():
            for name, parameter in unwrap(model).named_parameters():
                if parameter in masters and name in state:
                    parameter.copy_(state[name])
                    masters[parameter].copy_(state[name])

    @contextmanager
    def gradient_sync(self, model: Any, enabled: bool) -> Iterator[None]:
        """Average the gradients of the forward and backward passes in the body only if `enabled`.

        Gradients of passes without averaging accumulate and are averaged in the next pass with it.
        They must still be scaled then: use ``amp.scale_loss(..., delay_unscale=True)`` until then.
        """
        with ExitStack() as stack:
            if is_sharded(model):  # its gradients accumulate unsharded
                model.set_requires_gradient_sync(enabled)
            elif not enabled and dist.get_world_size() > 1:
                if hasattr(model, "no_sync"):  # of torch and of apex_native
                    stack.enter_context(model.no_sync())
                else:  # of Apex
                    model.disable_allreduce()
                    stack.callback(model.enable_allreduce)
            yield

    def syncbn_group(self, size: int, timeout_s: float) -> dist.ProcessGroup | None:
        """Return the group of `size` ranks that share the statistics of batch norm; 0 means all.

        Apex's function for it has no timeout, and torch's default may be shorter than the job's.
        Raises UserError if `size` does not divide the number of processes.
        """
        processes = dist.get_world_size()
        if size and processes % size:
            raise UserError(f"--sync-bn-group {size} must divide {processes} processes")
        if not size:
            return None
        return dist.new_subgroups(size, timeout=distributed.operation_limit(timeout_s))[0]

    def convert_syncbn_model(
        self, model: nn.Module, process_group: dist.ProcessGroup | None
    ) -> nn.Module:
        """Return `model` with SyncBN, also in place of batch norms that end in an activation."""
        convert = partial(self._convert_norms, process_group=process_group)
        modes = {name: module.training for name, module in model.named_modules()}
        trained = {name: one.requires_grad for name, one in model.named_parameters()}
        converted = convert_norms(model, convert)
        for name, module in converted.named_modules():  # Apex's new norms are in training mode
            module.training = modes.get(name, module.training)
        for name, parameter in converted.named_parameters():  # and not frozen
            parameter.requires_grad_(trained.get(name, parameter.requires_grad))
        return converted

    def _convert_norms(
        self, model: nn.Module, process_group: dist.ProcessGroup | None
    ) -> nn.Module:
        return self.apex.parallel.convert_syncbn_model(model, process_group=process_group)

    def memory_format(
        self, channels_last: bool | None, warn: Callable[[str], None]
    ) -> torch.memory_format:
        """Return the memory format of images and weights with Apex's DistributedDataParallel.

        That of real Apex returns gradients in NCHW order, whatever the order of the weights is:
        `warn` gets a message, or a UserError is raised if channels_last was requested.
        """
        if channels_last is False:
            return torch.contiguous_format
        if self.name != "apex" or dist.get_world_size() == 1:
            return torch.channels_last
        if channels_last:
            raise UserError("--channels-last: real Apex's DDP mixes up its gradients; leave it out")
        warn("NCHW, because real Apex's DDP mixes up the gradients of channels_last weights")
        return torch.contiguous_format

    def tune_communication(self, model: nn.Module, *, compress: bool, cuda_graphs: bool) -> None:
        """Configure how DistributedDataParallel averages gradients; ignore a model without it.

        Args:
            compress: send fp32 gradients as bfloat16: half the bytes, and for any loss scale the
                range of fp32, but averages are rounded to 8 bits.
            cuda_graphs: average all gradients after the backward pass, so that a compiled model is
                one CUDA graph and not one for each bucket.

        Raises UserError if `compress` is set and the weights are 16-bit, as their gradients are.
        """
        if cuda_graphs:
            # torch has no other switch. Without this one, the graphs are correct, but slower.
            with suppress(AttributeError):
                torch._dynamo.config.optimize_ddp = False
        if compress and any(parameter.itemsize == 2 for parameter in model.parameters()):
            raise UserError(
                "--compress-gradients: at this --opt-level they have 16 bits already; leave it out"
            )
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            return
        if compress:
            model.register_comm_hook(None, bf16_compress_hook)
        average_at_once = getattr(model, "average_at_once", None)  # apex_native's
        if cuda_graphs and average_at_once and not model.find_unused_parameters:
            average_at_once()


class ApexBackend(Backend):
    """NVIDIA's Apex, up to release 25.05, the last one with ``amp`` and ``parallel``.

    ``amp`` publishes the loss scale, but neither whether it is dynamic, nor the settings of the
    opt_level, nor which master belongs to which parameter. These are read from ``amp._amp_state``
    and an optimizer's ``_amp_stash`` and ``_amp_lazy_init``. An Apex without them is reported as
    a UserError that recommends apex_native.
    """

    name = "apex"

    def loss_scale(self) -> float:
        return self.apex.amp.state_dict()["loss_scaler0"]["loss_scale"]

    def has_dynamic_loss_scale(self) -> bool:
        scalers = _private(_private(self.apex.amp, "_amp_state"), "loss_scalers")
        return any(_private(scaler, "dynamic") for scaler in scalers)

    def amp_properties(self) -> Any:
        return _private(_private(self.apex.amp, "_amp_state"), "opt_properties")

    def _casts_disabled(self) -> AbstractContextManager:
        has_casts = self.amp_properties().opt_level == "O1"  # else Apex has none to disable
        return self.apex.amp.disable_casts() if has_casts else nullcontext()

    def trained_parameters(self, optimizer: Optimizer) -> set[Tensor]:
        # The groups hold the parameters until masters are created, which is not done here.
        trained = {tensor for group in optimizer.param_groups for tensor in group["params"]}
        stash = getattr(optimizer, "_amp_stash", None)  # None before amp.initialize
        return trained.union(getattr(stash, "all_fp16_params", ()))

    def master_weights(self, optimizer: Optimizer) -> dict[Tensor, Tensor]:
        # Apex creates them in the first backward pass, and moments that are loaded before that are
        # rounded to fp16.
        if not self.amp_properties().master_weights:
            return {}
        _private(optimizer, "_amp_lazy_init")()
        stash = _private(optimizer, "_amp_stash")
        masters = _private(stash, "all_fp32_from_fp16_params")
        return dict(zip(_private(stash, "all_fp16_params"), masters, strict=True))

    def _convert_norms(
        self, model: nn.Module, process_group: dist.ProcessGroup | None
    ) -> nn.Module:
        # Apex drops what a subclass does in its forward pass, such as an activation.
        own = {
            name: part
            for name, part in model.named_modules(remove_duplicate=False)
            if isinstance(part, _BatchNorm) and is_special(part)
        }
        for name in own:
            model.set_submodule(name, nn.Identity())
        model = super()._convert_norms(model, process_group)
        for name, part in own.items():
            model.set_submodule(name, part)
        if own:
            distributed.print_on_rank_zero(
                f"warning: not converted to SyncBN: {summarize([*own])} with {SPECIAL}"
            )
        return model

    def fp32_state_dict(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        state = super().fp32_state_dict(model, optimizer)
        masters = self.master_weights(optimizer)
        for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
            if parameter in masters:
                state[name] = masters[parameter].detach()
        return state


def in_fp32(value: Any) -> Any:
    """Return a tensor, or those in lists, tuples, dicts and dataclasses, in fp32 if they are half.

    Copies have the classes of the originals, such as of the outputs of transformers' models.

    Raises TypeError for objects of other classes, which may hold half tensors.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF_TYPES else value
    if isinstance(value, dict) or is_dataclass(value):
        return _items_in_fp32(value)
    if kind in (list, tuple):
        return kind(map(in_fp32, value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*map(in_fp32, value))
    if value is None or isinstance(value, int | float | str | torch.Size | np.ndarray):
        return value
    raise TypeError(kind.__name__)


def _items_in_fp32(value: Any) -> Any:
    """Return a copy of a dict or a dataclass with its values in fp32."""
    converted = copy.copy(value)
    if isinstance(value, dict):
        for key, item in value.items():
            converted[key] = in_fp32(item)
            if isinstance(key, str) and getattr(value, key, None) is item:
                setattr(converted, key, converted[key])
    else:
        for field in fields(value):  # of a dataclass, perhaps a frozen one
            if hasattr(value, field.name):
                object.__setattr__(converted, field.name, in_fp32(getattr(value, field.name)))
    return converted


@cache
def _warn_of_half(kind: str) -> None:
    distributed.print_on_rank_zero(
        f"warning: the outputs of the model hold a {kind}, which is not converted to fp32: Metrics "
        "may compute in 16 bits; return tensors, lists, tuples, dicts or dataclasses from forward"
    )


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP shards `model`, by its public method: to import its class takes long."""
    return hasattr(model, "set_requires_gradient_sync")


def local_shard(tensor: Any) -> Tensor:
    """Return this process's shard of a tensor that FSDP shards, or else `tensor` itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def bit_sums(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a sum for each plain tensor or shard, by which a change of its values is noticed.

    Its bits are summed as integers: exactly, in any order, and without a copy of those of fp32.
    """
    sums = {}
    for name, tensor in tensors.items():
        shard = local_shard(tensor)
        is_plain = type(shard) in (Tensor, nn.Parameter) and shard.layout is torch.strided
        is_plain = is_plain and not (shard.is_quantized or shard.is_nested)
        if is_plain and (kind := INTEGER_TYPES.get(shard.itemsize)):
            bits = shard.detach().resolve_conj().resolve_neg().view(kind)
            sums[name] = bits.sum(dtype=kind if kind == torch.int32 else None).long()
    return sums


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside a DistributedDataParallel or DataParallel, or else `model` itself.

    The class decides, because a model may have a submodule called ``module``.
    """
    is_torchs = isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel)
    is_apexs = type(model).__module__.startswith("apex.parallel.")
    return model.get_submodule("module") if is_torchs or is_apexs else model


def load_backend(choice: str, opt_level: str, **needs: bool) -> Backend:
    """Return the implementation of Apex's calls to use.

    Args:
        choice: "apex" (real Apex, or an error), "native" (apex_native), or "auto": real Apex if it
            has every call, its compiled extensions and a GPU, else apex_native.
        opt_level, needs: as for `problem_with_apex`.

    Raises UserError if `choice` is "apex" and Apex cannot be used.
    """
    if choice == "native":
        return Backend(apex_native, "apex_native, as requested")
    problem = problem_with_apex(opt_level, **needs)
    if problem is None:
        return ApexBackend(importlib.import_module("apex"), "real Apex")
    if choice == "apex":
        raise UserError(
            f"--backend apex: {problem.reason}; use --backend native, which needs no Apex"
        )
    return Backend(apex_native, f"apex_native, because {problem.reason}")


class Problem(NamedTuple):
    """Reason why real Apex cannot be used, and the remedy, which is empty if there is none."""

    reason: str
    remedy: str = ""


def problem_with_apex(
    opt_level: str,
    *,
    compiled: bool = False,
    replicated: bool = False,
    compressed: bool = False,
    sharded: bool = False,
) -> Problem | None:
    """Return why real Apex cannot be used here, or None if it can.

    Args:
        opt_level: O4 and O5 are not in NVIDIA's Apex.
        compiled: whether the model is compiled.
        replicated: whether DataParallel copies the model.
        compressed: whether DDP compresses gradients, for which Apex's has no hook.
        sharded: whether FSDP shards the parameters.
    """
    reasons = (
        (compiled, "torch.compile can't follow Apex's replacements of torch's functions"),
        (replicated, "DataParallel's copies would call the forward that Apex ties to one GPU"),
        (compressed, "real Apex's DDP can't compress gradients"),
        (sharded, "Apex's kernels don't take FSDP's sharded parameters"),
        (not torch.cuda.is_available(), "Apex needs a GPU"),
        (opt_level not in ("O0", "O1", "O2", "O3"), f"NVIDIA's Apex has no {opt_level}"),
    )
    problems = (Problem(reason) for applies, reason in reasons if applies)
    return _problem_with_installation() or next(problems, None)


def parts_of_apex() -> dict[str, bool]:
    """Return which of CALLS and EXTENSIONS are installed and can be used."""
    parts = {call: f"apex.{call}" for call in CALLS} | {name: name for name in EXTENSIONS}
    return {part: _is_usable(path) for part, path in parts.items()}


def _is_usable(path: str) -> bool:
    try:
        found = resolve_name(path)
    except Exception:  # a module built for another torch fails in many ways on import
        return False
    return callable(found) or isinstance(found, ModuleType)


def _problem_with_installation() -> Problem | None:
    try:
        apex = importlib.import_module("apex")
    except Exception as error:  # a broken or foreign package may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == "apex":
            return Problem("Apex is not installed")
        reason = f"the package called apex can't be imported ({type(error).__name__}: {error})"
        return Problem(reason, "build Apex for this torch, or pip uninstall apex")
    parts = parts_of_apex()
    missing = [call for call in CALLS if not parts[call]]
    if len(missing) == len(CALLS):
        return Problem(f"{apex} is not NVIDIA's Apex", "pip uninstall apex")
    if missing:
        return Problem(f"this Apex no longer has {', '.join(missing)} (removed in May 2025)")
    if not parts["amp_C"]:
        reason = "Apex was installed without its compiled extensions (amp_C is missing)"
        return Problem(reason, BUILD)
    return None


def _private(owner: object, name: str) -> Any:
    """Return a private attribute of Apex that has no public equivalent."""
    if not hasattr(owner, name):
        raise UserError(
            f"this Apex has no {name}, which checkpoints depend on; use --backend native"
        )
    return getattr(owner, name)

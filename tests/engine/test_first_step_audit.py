"""engine.diagnostics.first_step: mistakes are errors at the first step, with names and the fix."""

import contextlib
import importlib
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from engine import UserError, backend, distributed
from engine.backend import ApexBackend, Backend
from engine.diagnostics import first_step
from engine.diagnostics.first_step import (
    FirstStepAudit,
    check_evaluable,
    check_model,
    check_trainable,
    device_identity,
)
from engine.optim import Ema
from processes import Processes
from self_initializing import SelfInitializing
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

HAS_APEX = backend.problem_with_apex("O1", compiled=False) is None
CPU = torch.device("cpu")
SAMPLES = 23  # 11 for each of two processes, in batches of 4


class UnreadableDataset(Dataset):
    """Dataset with a length only."""

    def __len__(self) -> int:
        return SAMPLES


class StreamDataset(IterableDataset):
    """Dataset without indices."""

    def __iter__(self) -> Iterator:
        raise AssertionError("the audit reads no data")


class Net(nn.Module):
    """Model with a convolution, a batch norm, a linear layer, and one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.head, self.spare = nn.Linear(4, 2), nn.Linear(4, 2)
        self.uses_spare = True

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(self.conv(images)).mean((2, 3))
        return self.head(features) + (self.spare(features) if self.uses_spare else 0)


class PrintLogger:
    """Logger of the audit."""

    def warning(self, message: str) -> None:
        print(f"warning: {message}")


class Run:
    """Everything from which main.py constructs its audit, in one rank."""

    def __init__(self, package: str, kind: str, level: str, ddp: str = "apex", **options) -> None:
        rank = dist.get_rank()
        self.apex = importlib.import_module(package)
        self.device = torch.device(kind, rank if kind == "cuda" else None)
        self.module = Net().to(self.device)
        self.module.conv.requires_grad_(not options.get("frozen"))
        model = nn.Sequential(self.module) if options.get("nested") else self.module
        parameters = self.parts() if "leave_out" in options else self.module.parameters()
        self.optimizer = self.apex.optimizers.FusedAdam(parameters)
        # On the CPU, amp takes another type where there is no arithmetic in this one.
        casts = {"cast_model_type": torch.bfloat16} if kind == "cpu" and level in "O2 O3 O5" else {}
        self.model, _ = self.apex.amp.initialize(
            model, self.optimizer, opt_level=level, verbosity=0, **casts
        )
        if ddp == "apex":
            delay = options.get("accepts_unused", False)
            self.model = self.apex.parallel.DistributedDataParallel(
                self.model, delay_allreduce=delay
            )
        elif ddp == "torch":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        sampler = DistributedSampler(UnreadableDataset(), drop_last=True)
        self.batches = DataLoader(UnreadableDataset(), 4, sampler=sampler, drop_last=True)
        self.called = self.model
        self.backward_passes = 1

    def parts(self) -> list[nn.Parameter]:
        return [*self.module.conv.parameters(), *self.module.norm.parameters()]

    def audit(self) -> FirstStepAudit:
        kind = Backend if self.apex.__name__ == "apex_native" else ApexBackend
        backend = kind(self.apex, "")
        return FirstStepAudit(self.model, self.optimizer, backend, self.batches, PrintLogger())

    def train(self, audit: FirstStepAudit) -> None:
        for _ in range(2):
            images = torch.randn(2, 3, 8, 8, device=self.device) + dist.get_rank()
            loss = self.called(images).float().square().sum()
            self.optimizer.zero_grad()
            for _ in range(self.backward_passes):
                with self.apex.amp.scale_loss(loss, self.optimizer) as scaled_loss:
                    scaled_loss.backward(retain_graph=self.backward_passes > 1)
            audit.check_gradients()
            self.optimizer.step()


def audit_error(fault: Callable | None, *how: str, **options) -> str:
    """Return the audit's error in this rank for a run that `fault` changes."""
    run = Run(*how, **options)
    try:
        if fault:
            fault(run)
        run.train(run.audit())
    except UserError as error:
        return str(error)
    finally:
        first_step.device_identity = device_identity
        if run.apex.__name__ == "apex_native":
            run.apex.amp.initialize(nn.Identity(), enabled=False)
    return ""


needs_two_gpus = pytest.mark.gpu(2)
needs_apex = pytest.mark.skipif(not HAS_APEX, reason="needs NVIDIA Apex")
SETTINGS = [
    pytest.param(("apex_native", "cpu"), id="cpu"),
    pytest.param(("apex_native", "cuda"), marks=needs_two_gpus, id="gpu"),
    pytest.param(("apex", "cuda"), marks=[needs_two_gpus, needs_apex], id="real_apex"),
]


@pytest.fixture(scope="session")
def two_gpus_for_apex() -> Iterator[Processes]:
    """Return processes of their own: Apex changes torch's functions for the rest of a process."""
    processes = Processes("nccl")
    yield processes
    processes.stop()


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> tuple[Processes, str, str]:
    """Return the processes, the package, and the type of their devices."""
    package, kind = request.param
    on_gpus = "two_gpus_for_apex" if package == "apex" else "two_gpus"
    processes = "two_processes" if kind == "cpu" else on_gpus
    return request.getfixturevalue(processes), package, kind


@pytest.mark.parametrize("ddp", ["apex", "torch"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_correct_run_passes(setting, level, ddp):
    processes, package, kind = setting
    if package == "apex" and level in ("O4", "O5"):
        pytest.skip("NVIDIA's Apex has no such level")
    assert processes(audit_error, None, package, kind, level, ddp) == ["", ""]


def bypassed(run: Run) -> None:
    run.called = run.module


def two_backward_passes(run: Run) -> None:
    run.backward_passes = 2


@pytest.mark.parametrize("fault", [bypassed, two_backward_passes])
@pytest.mark.parametrize("ddp", ["apex", "torch"])
@pytest.mark.parametrize(
    ("kind", "processes"),
    [("cpu", "two_processes"), pytest.param("cuda", "two_gpus", marks=needs_two_gpus)],
)
def test_gradients_that_are_not_averaged_are_an_error(request, kind, processes, ddp, fault):
    """Real Apex fails by itself: it finds a gradient that it has averaged already."""
    run = request.getfixturevalue(processes)
    for answer in run(audit_error, fault, "apex_native", kind, "O1", ddp):
        assert answer.startswith("the gradients of conv.weight") and "not averaged" in answer


@pytest.mark.parametrize("fault", [bypassed, two_backward_passes])
def test_gradients_are_compared_where_unused_parameters_are_accepted(two_processes, fault):
    how = "apex_native", "cpu", "O1"
    for answer in two_processes(audit_error, fault, *how, accepts_unused=True):
        assert "not averaged" in answer


def norms_of_gradients(rank_has_one: int) -> str:
    """Return the error for gradients of all kinds, of which one rank may have one more."""
    parameters = {
        "half": nn.Parameter(torch.ones(3, dtype=torch.float16)),
        "complex": nn.Parameter(torch.ones(3, dtype=torch.cfloat)),
        "sparse": nn.Parameter(torch.ones(3, 2)),
        "unused": nn.Parameter(torch.ones(3)),
        "one": nn.Parameter(torch.ones(3)),
    }
    for name in ("half", "complex"):
        parameters[name].grad = torch.ones_like(parameters[name])
    parameters["sparse"].grad = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (3, 2))
    if rank_has_one in (2, dist.get_rank()):
        parameters["one"].grad = torch.ones(3)
    try:
        first_step._require_averaged(parameters)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rank_has_one", [0, 1, 2])
def test_gradients_of_all_kinds_are_compared(two_processes, rank_has_one):
    for answer in two_processes(norms_of_gradients, rank_has_one):
        assert ("the gradients of one are not averaged" in answer) == (rank_has_one < 2)
        assert bool(answer) == (rank_has_one < 2)


def overflowing_once(run: Run) -> None:
    """Have the first backward pass overflow, and no gradient be averaged."""
    losses = iter([float("inf"), 1.0])
    run.called = lambda images: run.module(images) * next(losses)


def test_gradients_that_overflow_are_compared_a_step_later(two_processes):
    for answer in two_processes(audit_error, overflowing_once, "apex_native", "cpu", "O1"):
        assert "not averaged" in answer


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_frozen_parameters_in_the_optimizer_pass(setting, level):
    """They have no fp32 masters."""
    processes, package, kind = setting
    if package == "apex" and level == "O5":
        pytest.skip("NVIDIA's Apex has no such level")
    assert processes(audit_error, None, package, kind, level, frozen=True) == ["", ""]


def weights_differ(run: Run) -> None:
    with torch.no_grad():
        run.module.head.weight += dist.get_rank()


def same_gpu(run: Run) -> None:
    first_step.device_identity = lambda device: "GPU-8a1b"


def no_sampler(run: Run) -> None:
    run.batches = DataLoader(UnreadableDataset(), 4, drop_last=True)


def shuffled_without_sampler(run: Run) -> None:
    run.batches = DataLoader(UnreadableDataset(), 4, shuffle=True, drop_last=True)


def drawn_with_replacement(run: Run, seed: int | None = None) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    sampler = WeightedRandomSampler([1.0] * 3 + [0.1] * 20, 11, generator=generator)
    run.batches = DataLoader(UnreadableDataset(), 4, sampler=sampler, drop_last=True)


def drawn_alike(run: Run) -> None:
    drawn_with_replacement(run, 0)


def another_world(run: Run) -> None:
    sampler = DistributedSampler(
        UnreadableDataset(), num_replicas=8, rank=dist.get_rank(), drop_last=True
    )
    run.batches = DataLoader(UnreadableDataset(), 1, sampler=sampler)


def uneven_shards(run: Run) -> None:
    shard = range(dist.get_rank(), SAMPLES, 2)  # 12 and 11
    run.batches = DataLoader(UnreadableDataset(), 4, sampler=shard, drop_last=True)


def half_model(run: Run) -> None:
    run.module.head.bfloat16()


def half_norm(run: Run) -> None:
    run.module.norm.bfloat16()


def single_model(run: Run) -> None:
    run.module.float()


def half_masters(run: Run) -> None:
    if hasattr(run.optimizer, "_amp_lazy_init"):
        run.optimizer._amp_lazy_init()
    # Real Apex can only make them of right weights, and single ones are their own masters.
    weights = set(run.module.parameters())
    for parameter in run.optimizer.param_groups[0]["params"]:
        if parameter not in weights:
            parameter.data = parameter.data.bfloat16()


def complex_weights(run: Run) -> None:
    run.module.filter = nn.Parameter(torch.ones(2, dtype=torch.cfloat, device=run.device))
    run.optimizer.add_param_group({"params": [run.module.filter]})


def unused(run: Run) -> None:
    run.module.uses_spare = False


FAULTS = [
    (weights_differ, "O1", ["different weights (head.weight)", "the same file"]),
    (same_gpu, "O1", ["ranks 0 and 1", "GPU-8a1b", "set_device(local_rank)"]),
    (no_sampler, "O1", ["20 of 23 samples", "several processes", "DistributedSampler"]),
    (another_world, "O1", ["19 of 23 samples", "no process", "number of processes"]),
    (uneven_shards, "O1", ["2 batches", "3", "drop_last=True"]),
    (half_model, "O1", ["head.weight (bfloat16, not float32)", "amp.initialize"]),
    (half_norm, "O2", ["norm.weight (bfloat16, not float32)", "norm.bias"]),
    (single_model, "O2", ["conv.weight (float32, not ", " and 3 more"]),
    (half_norm, "O0", ["norm.weight (bfloat16, not float32)"]),
    (complex_weights, "O0", ["filter of the model are complex", "view_as_complex"]),
    (complex_weights, "O1", ["filter of the model are complex"]),
    (half_masters, "O2", ["master weights (bfloat16, not float32)"]),
    (unused, "O1", ["spare.weight, spare.bias", "requires_grad", "--delay-allreduce"]),
    (unused, "O2", ["spare.weight, spare.bias"]),
]


@pytest.mark.parametrize(
    ("fault", "level", "words"), FAULTS, ids=[f"{f.__name__}-{level}" for f, level, _ in FAULTS]
)
def test_fault_is_an_error_with_its_fix_on_every_rank(setting, fault, level, words):
    processes, package, kind = setting
    for answer in processes(audit_error, fault, package, kind, level):
        assert [part for part in words if part not in answer] == [], answer


def test_shuffle_without_distributed_sampler_is_an_error(two_processes):
    answers = two_processes(audit_error, shuffled_without_sampler, "apex_native", "cpu", "O0")
    assert all("are read by several processes" in answer for answer in answers)


def test_samples_may_be_drawn_with_replacement_but_not_the_same_by_all(two_processes):
    how = "apex_native", "cpu", "O0"
    assert two_processes(audit_error, drawn_with_replacement, *how) == ["", ""]
    answers = two_processes(audit_error, drawn_alike, *how)
    assert all("are read by several processes" in answer for answer in answers)


class Balancing(DistributedSampler):
    """Sampler that reads samples of some classes more or less often than others."""

    def __init__(self, indices: list[int]) -> None:
        super().__init__(indices, num_replicas=2, rank=dist.get_rank())
        self.indices = indices

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices[self.rank :: 2])


def said_of_a_sampler(indices: list[int]) -> str:
    """Return the audit's error, or else its warning."""

    def replace_sampler(run: Run) -> None:
        run.batches = DataLoader(UnreadableDataset(), 1, sampler=Balancing(indices))

    with patch.object(distributed, "print_on_rank_zero") as said:
        error = audit_error(replace_sampler, "apex_native", "cpu", "O0")
    return error or said.call_args.args[0]


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([*range(4)], "warning: 19 of 23 samples are read by no process in this epoch"),
        (
            [*range(10), 1, 0],
            "warning: 2 of 23 samples are read by several processes in this epoch",
        ),
        ([0, 0, 1, 1, 2, 2], "3 of 23 samples are read by several processes: give the DataLoader"),
    ],
)
def test_sampler_may_balance_classes_but_not_read_the_same_in_all_processes(
    two_processes, indices, expected
):
    assert two_processes(said_of_a_sampler, indices)[0].startswith(expected)


def test_optimizer_without_some_parameters_is_an_error(setting):
    processes, package, kind = setting
    for level in ("O1", "O2"):
        for answer in processes(audit_error, None, package, kind, level, leave_out=True):
            assert answer.startswith("the optimizer does not train head.weight, head.bias, spare.w")


def unfrozen_later(trained: bool, ddp: str) -> str:
    """Return the error of training after a layer is unfrozen, which the optimizer may train."""
    run = Run("apex_native", "cpu", "O0", ddp, frozen=True)
    if not trained:
        frozen = {*run.module.conv.parameters()}
        for group in run.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p not in frozen]
    try:
        audit = run.audit()
        run.train(audit)
        assert audit.is_done
        run.module.conv.requires_grad_(True)
        run.train(audit)
        assert audit.is_done
        run.train(audit)
    except (UserError, RuntimeError) as error:
        return str(error)
    finally:
        run.apex.amp.initialize(nn.Identity(), enabled=False)
    return ""


@pytest.mark.parametrize(
    ("trained", "ddp", "start"),
    [
        (True, "none", ""),
        (False, "none", "the optimizer does not train conv.weight, conv.bias: "),
        (False, "torch", "the optimizer does not train conv.weight, conv.bias: "),
        (True, "torch", "the gradients of conv.weight, conv.bias are not averaged over the"),
    ],
)
def test_parts_that_are_unfrozen_later_are_checked(two_processes, one_process, trained, ddp, start):
    """As in scripts that train the head first; DDP averages what it was created with."""
    processes = one_process if ddp == "none" else two_processes
    for answer in processes(unfrozen_later, trained, ddp):
        assert answer.startswith(start) and bool(answer) == bool(start)


def weights_of_the_loss(run: Run, dtype: torch.dtype = torch.float32) -> None:
    loss = nn.Linear(3, 1, dtype=dtype, device=run.device)
    run.optimizer.add_param_group({"params": loss.parameters()})


def half_weights_of_the_loss(run: Run) -> None:
    weights_of_the_loss(run, torch.bfloat16 if run.device.type == "cpu" else torch.float16)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("fault", [weights_of_the_loss, half_weights_of_the_loss])
def test_optimizer_with_tensors_outside_the_model_is_an_error(setting, level, fault):
    """They would be neither averaged nor saved. Their masters are not those of the model either."""
    processes, package, kind = setting
    if package == "apex" and level in ("O4", "O5"):
        pytest.skip("NVIDIA's Apex has no such level")
    for answer in processes(audit_error, fault, package, kind, level):
        assert "tensors outside the model (of shape (1, 3), (1,)), such" in answer


def test_unused_parameters_with_torch_ddp_name_its_flag(two_processes):
    answers = two_processes(audit_error, unused, "apex_native", "cpu", "O1", "torch")
    assert all(answer.endswith("accept it with find_unused_parameters=True") for answer in answers)


@pytest.mark.parametrize("nested", [False, True])
def test_unused_parameters_are_accepted_with_delay_allreduce(setting, nested):
    processes, package, kind = setting
    options = {"accepts_unused": True, "nested": nested}
    assert processes(audit_error, unused, package, kind, "O1", **options) == ["", ""]


def test_unused_parameters_of_a_submodule_are_named(two_processes):
    for answer in two_processes(audit_error, unused, "apex_native", "cpu", "O1", nested=True):
        assert "no gradient reaches 0.spare.weight, 0.spare.bias" in answer


def audit_warnings(fault: Callable, *how: str) -> str:
    """Return the audit's output for a run that `fault` changes, but not to an error."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert audit_error(fault, *how) == ""
    return printed.getvalue()


def test_unused_parameters_in_one_process_are_a_warning(one_process):
    [printed] = one_process(audit_warnings, unused, "apex_native", "cpu", "O1", "none")
    assert printed.startswith("warning: no gradient reaches spare.weight, spare.bias: use them")
    assert len(printed.splitlines()) == 1


class Centred(nn.Module):
    """Layer that subtracts a running mean, of this rank or of all."""

    def __init__(self, is_averaged: bool, is_buffer: bool) -> None:
        super().__init__()
        self.is_averaged = is_averaged
        if is_buffer:
            self.register_buffer("centre", torch.zeros(2))
        else:
            self.centre = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        mean = inputs.detach().exp().mean(0)  # that of what batch norm returns is always the same
        if self.is_averaged:
            dist.all_reduce(mean)
        self.centre.lerp_(mean, 0.5)
        return inputs - self.centre


def buffer_warnings(ddp: str, is_averaged: bool, is_buffer: bool) -> str:
    """Return the audit's output for a model with a buffer or the like that each step updates."""

    def centred(run: Run) -> None:
        run.module.head = nn.Sequential(run.module.head, Centred(is_averaged, is_buffer))
        torch.manual_seed(dist.get_rank())  # for other images in each process

    return audit_warnings(centred, "apex_native", "cpu", "O0", ddp)


@pytest.mark.parametrize(
    ("ddp", "is_averaged", "is_buffer", "is_warned"),
    [
        ("apex", False, True, True),
        ("apex", True, True, False),
        ("torch", False, True, False),
        ("apex", False, False, True),
        ("apex", True, False, False),
        ("torch", False, False, True),
    ],
)
def test_buffers_or_frozen_parameters_that_differ_between_processes_are_a_warning(
    two_processes, ddp, is_averaged, is_buffer, is_warned
):
    kind = "buffers" if is_buffer else "frozen parameters or buffers"
    expected = f"warning: the {kind} head.1.centre of the model differ between the processes"
    for printed in two_processes(buffer_warnings, ddp, is_averaged, is_buffer):
        assert printed.startswith(expected) if is_warned else printed == ""


def state_warnings(level: str, fault: str) -> str:
    """Return the audit's output for an optimizer whose state may be that of each process."""

    def partial(run: Run) -> None:
        step = run.optimizer.step

        def step_and_change() -> None:
            step()
            *_, last = run.apex.amp.master_params(run.optimizer)
            state = run.optimizer.state[last]
            if fault == "values":
                state["exp_avg"] += dist.get_rank()
            elif fault == "entries" and dist.get_rank() == 0:
                state.clear()

        run.optimizer.step = step_and_change

    return audit_warnings(partial, "apex_native", "cpu", level)


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("fault", ["", "values", "entries"])
def test_optimizer_whose_state_differs_between_processes_is_a_warning(two_processes, level, fault):
    """As Muon's by Keller Jordan, whose processes have the momentum of some weights each."""
    expected = "warning: the optimizer's state differs between the processes (exp_avg of spare.bias"
    for printed in two_processes(state_warnings, level, fault):
        assert printed.startswith(expected) if fault else printed == ""


def frozen_norm_warnings() -> str:
    """Return the audit's output for a norm in eval mode, whose statistics each rank has loaded."""

    def loaded_by_rank_0(run: Run) -> None:
        run.module.norm.eval().running_mean.add_(dist.get_rank() == 0)

    return audit_warnings(loaded_by_rank_0, "apex_native", "cpu", "O0")


def test_statistics_of_frozen_norms_that_differ_are_a_warning(two_processes):
    for printed in two_processes(frozen_norm_warnings):
        assert printed.startswith("warning: the buffers norm.running_mean of the model differ")


def output_with(run: Run, change: Callable[[], object]) -> str:
    """Return the audit's output for a run with a change of the weights after each step."""
    step = run.optimizer.step

    def step_and_change() -> None:
        step()
        with torch.no_grad():
            change()

    run.optimizer.step = step_and_change
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        audit = run.audit()
        run.train(audit)
        audit.check_weights()
        audit.check_weights()
    run.apex.amp.initialize(nn.Identity(), enabled=False)
    return printed.getvalue()


def weight_warnings(has_noise: bool) -> str:
    """Return the audit's output for a run whose steps may add noise of the process."""
    run = Run("apex_native", "cpu", "O0")
    torch.manual_seed(dist.get_rank())
    return output_with(run, lambda: run.module.head.bias.add_(has_noise * torch.randn(2)))


def test_weights_that_differ_between_processes_are_a_warning(two_processes):
    assert two_processes(weight_warnings, False) == ["", ""]
    expected = "warning: the processes have different weights (head.bias): each validates its own"
    for printed in two_processes(weight_warnings, True):
        assert printed.startswith(expected) and printed.count("\n") == 1


def master_warnings(is_data: bool) -> str:
    """Return the audit's output for a run whose steps clip the half weights."""
    run = Run("apex_native", "cpu", "O5")
    bias = run.module.head.bias
    return output_with(run, lambda: (bias.data if is_data else bias).fill_(0.5))


def test_half_weights_without_their_masters_are_a_warning(two_processes):
    """WGAN's clipping writes to ``.data``, which masters follow at the start only."""
    assert two_processes(master_warnings, False) == ["", ""]
    expected = "warning: weights were written to (head.bias), and not their fp32 masters, which are"
    for printed in two_processes(master_warnings, True):
        assert printed.startswith(expected) and printed.count("\n") == 1


def mode_warnings() -> str:
    """Return the audit's output for a run whose model is left in eval mode."""
    run = Run("apex_native", "cpu", "O0")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        audit = run.audit()
        run.module.eval()
        run.train(audit)
    run.apex.amp.initialize(nn.Identity(), enabled=False)
    return printed.getvalue()


def test_training_in_eval_mode_is_a_warning(two_processes):
    for printed in two_processes(mode_warnings):
        assert printed.startswith("warning: the model trains in eval mode, as after model.eval()")
        assert printed.count("\n") == 1


class Sam(torch.optim.Optimizer):
    """An optimizer around another one, whose state it does not save, as davda54/sam."""

    def __init__(self, parameters: list[nn.Parameter], shares_state: bool) -> None:
        super().__init__(parameters, {})
        self.base_optimizer = torch.optim.SGD(self.param_groups, 0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups
        if shares_state:
            self.base_optimizer.state = self.state


class Saving(Sam):
    """The same, saved with the other one."""

    def state_dict(self) -> dict:
        return self.base_optimizer.state_dict()


def warnings_of_an_optimizer_in_another(kind: type, shares_state: bool) -> str:
    run = Run("apex_native", "cpu", "O0", "none")
    run.optimizer = kind([*run.module.parameters()], shares_state)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run.audit()
    run.apex.amp.initialize(nn.Identity(), enabled=False)
    return printed.getvalue()


@pytest.mark.parametrize(
    ("kind", "shares_state", "is_warned"),
    [(Sam, False, True), (Sam, True, False), (Saving, False, False)],
)
def test_optimizer_in_another_that_is_not_saved_is_a_warning(
    one_process, kind, shares_state, is_warned
):
    (printed,) = one_process(warnings_of_an_optimizer_in_another, kind, shares_state)
    assert (
        "warning: checkpoints lack the state of the optimizer's base_opt" in printed
    ) == is_warned


def padded(run: Run) -> None:
    sampler = DistributedSampler(UnreadableDataset())
    run.batches = DataLoader(UnreadableDataset(), 4, sampler=sampler)


def stream(run: Run) -> None:
    run.batches = DataLoader(StreamDataset(), 4)


def no_loader(run: Run) -> None:
    run.batches = [None] * 3


@pytest.mark.parametrize("change", [padded, stream, no_loader])
def test_valid_batches_pass(two_processes, change):
    assert two_processes(audit_error, change, "apex_native", "cpu", "O0") == ["", ""]


def check_random_numbers(run: Run) -> None:
    run.batches = DataLoader(
        UnreadableDataset(), 4, shuffle=True
    )  # its sampler draws from torch's own
    torch.manual_seed(0)
    with pytest.raises(UserError):
        run.audit()
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(0)))


def test_audit_draws_no_random_numbers_of_the_training(two_processes):
    two_processes(audit_error, check_random_numbers, "apex_native", "cpu", "O0")


def prepare(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    images, labels = batch
    return images / 2, labels


def test_trainable_model_passes_and_is_unchanged():
    model = Net().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = [torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)]
    check_trainable(model, nn.functional.cross_entropy, prepare, batch)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("batch", "criterion", "reason"),
    [
        ([torch.randn(2, 3, 2, 2), torch.zeros(2)], nn.functional.cross_entropy, "Kernel size"),
        ([torch.randn(1, 3, 3, 3), torch.zeros(1)], nn.functional.cross_entropy, "more than 1 val"),
        (
            [torch.randn(2, 3, 8, 8), torch.zeros(2)],
            lambda output, _: output,
            "the loss is not a single number",
        ),
        (
            [torch.randn(2, 3, 8, 8), torch.full((2,), 9)],
            lambda output, labels: nn.functional.cross_entropy(output, labels.long()),
            "Target 9 is out of bounds",
        ),
    ],
    ids=["small_images", "single_value", "no_scalar_loss", "label_of_no_class"],
)
def test_untrainable_model_is_an_error(batch, criterion, reason):
    with pytest.raises(UserError) as error:
        check_trainable(Net(), criterion, prepare, batch)
    shape = " × ".join(map(str, batch[0].shape))
    start = (
        f"this --arch can't train on a batch of {len(batch[0])} samples (tensors of shape {shape}"
    )
    assert str(error.value).startswith(start)
    assert reason in str(error.value)
    assert str(error.value).endswith("choose another --arch, image size or --batch-size")


def test_hooks_that_are_closures_of_the_model_are_accepted() -> None:
    """A copy's hooks change the original."""

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.features = nn.Linear(2, 2), {}
            self.layer.register_forward_hook(
                lambda module, inputs, output: self.features.update(low=output)
            )

        def forward(self, inputs):
            self.layer(inputs)
            return self.features.pop("low")

    model = Hooked()
    batch = [torch.ones(1, 2), torch.ones(1, 2)]
    check_trainable(model, nn.functional.mse_loss, tuple, batch)
    assert model.features == {}


def test_model_that_can_not_validate_images_of_a_size_is_an_error() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    check_evaluable(model, prepare, [torch.randn(1, 3, 8, 8), torch.zeros(1)])
    assert model.training
    with pytest.raises(UserError) as error:
        check_evaluable(model, prepare, [torch.randn(1, 3, 9, 9), torch.zeros(1)])
    message = str(error.value)
    assert message.startswith("this --arch can't validate a batch of 1 samples (tensors of shape 1")
    assert message.endswith("choose another --arch or image size")


def test_check_of_the_validation_initializes_no_layer() -> None:
    model = nn.Sequential(SelfInitializing(), nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    check_evaluable(model, prepare, [torch.randn(1, 3, 8, 8), torch.zeros(1)])
    assert (model[0].mean, model[0].deviation, model[0].is_initialized) == (0, 1, False)


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(2, 2), "weight", 0.5)


def with_lock() -> nn.Module:
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    return model


def weight_normed() -> nn.Module:
    return torch.nn.utils.weight_norm(nn.Linear(2, 2))


@pytest.mark.parametrize("build", [pruned, with_lock, weight_normed])
def test_model_that_can_not_be_copied_is_checked(build):
    model, batch = build(), [torch.ones(1, 2), torch.ones(1, 2)]
    model.eval()
    before = model.weight.detach().clone()
    check_trainable(model, nn.functional.mse_loss, tuple, batch)
    assert torch.equal(model.weight, before) and not model.training
    with pytest.raises(UserError, match="this --arch can't train on a batch of 1 samples"):
        check_trainable(model, nn.functional.mse_loss, tuple, [torch.ones(1, 3), torch.ones(1, 2)])
    with pytest.raises(UserError, match="--ema: the model can't be copied"):
        Ema(model, 0.9)


def test_batch_whose_tensors_are_not_all_of_its_size_is_validated_whole():
    """A collate_fn may put the boxes of all images, or the edges of all graphs, into one tensor."""

    class Sums(nn.Module):
        def forward(self, inputs):
            values, groups, count = inputs
            return torch.zeros(int(count)).index_add(0, groups, values)

    batch = [torch.ones(5), torch.tensor([0, 0, 0, 1, 1]), torch.tensor(2)]
    check_model(Sums(), nn.functional.mse_loss, lambda inputs: (inputs, None), None, batch, CPU)


def test_batch_with_names_is_an_error():
    batch = [torch.ones(2, 2), torch.ones(2, 2), ("1.png", "2.png")]
    with pytest.raises(UserError, match="element 2 of each batch is a tuple and not a tensor"):
        check_model(nn.Linear(2, 2), nn.functional.mse_loss, lambda b: b[:2], batch, batch, CPU)


def test_expanded_buffer_is_an_error():
    """load_state_dict can't write to one."""
    batch = [torch.ones(2, 2), torch.ones(2, 2)]
    model = nn.Linear(2, 2)
    check_model(model, nn.functional.mse_loss, tuple, batch, batch, CPU)
    model.register_buffer("grid", torch.ones(2, 1).expand(2, 3))
    with pytest.raises(UserError, match="grid of the model is expanded"):
        check_model(model, nn.functional.mse_loss, tuple, batch, batch, CPU)


class KeepsNorm(nn.Sequential):
    """As in many programs, it returns nothing."""

    def train(self, mode=True):
        super().train(mode)
        self[0].eval()


def test_method_train_may_return_nothing():
    batch, model = [torch.ones(2, 3), torch.ones(2, 3)], KeepsNorm(nn.BatchNorm1d(3))
    check_model(model, nn.functional.mse_loss, tuple, batch, batch, CPU)
    assert not model[0].num_batches_tracked


class NeedsGpu(nn.Linear):
    """As kernels that are for one, and for half types."""

    def forward(self, inputs):
        output = super().forward(inputs)
        if output.dtype != torch.float16 or not output.is_cuda:
            raise RuntimeError("half types on a GPU are supported alone")
        return output


@pytest.mark.gpu
def test_model_that_can_only_compute_on_a_gpu_is_checked_there():
    batch, model = [torch.ones(2, 3), torch.ones(2, 2)], NeedsGpu(3, 2)
    check_model(model, nn.functional.mse_loss, tuple, batch, batch, torch.device("cuda"))
    assert not model.weight.is_cuda
    with pytest.raises(UserError, match="half types on a GPU are supported alone"):
        check_model(model, nn.functional.mse_loss, tuple, batch, batch, CPU)
    batch = [torch.ones(2, 3), torch.ones(2, 5)]
    with pytest.raises(UserError, match="size of tensor"):
        model = nn.Linear(3, 2)
        check_model(model, nn.functional.mse_loss, tuple, batch, batch, torch.device("cuda"))


def test_view_of_another_memory_format_is_an_error_with_its_flag():
    images = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    with pytest.raises(UserError, match="view size is not .*; or add --no-channels-last"):
        check_trainable(nn.Identity(), lambda x, _: x.view(-1).sum(), tuple, [images, images])


def test_error_names_the_line_of_the_owners_script(monkeypatch):
    monkeypatch.setattr(first_step, "PROJECT", Path(__file__).parent)

    def criterion(output, targets):
        return output.missing  # the line that is named

    line = criterion.__code__.co_firstlineno + 1
    with pytest.raises(UserError, match=f", or correct {Path(__file__).name}, line {line}$"):
        check_trainable(nn.Linear(2, 2), criterion, tuple, [torch.ones(1, 2), torch.ones(1)])


class WithFeatures(nn.Module):
    """Model whose head also takes features that a hook of its first layer keeps."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
        self.features: dict[str, Tensor] = {}
        if kind == "closure":
            self.body.register_forward_hook(lambda *call: self.features.update(x=call[2]))
        else:
            self.body.register_forward_hook(self.keep)
        self.compute = (lambda x: self.body(x)) if kind == "lambda" else self.body

    def keep(self, *call: object) -> None:
        self.features.update(x=call[2])

    def forward(self, images: Tensor) -> Tensor:
        self.compute(images)
        return self.head(self.features["x"].mean((2, 3)))


class Masked(nn.Linear):
    """Model of unlikely classes, which changes its inputs and is random in eval mode, too."""

    def forward(self, inputs: Tensor) -> Tensor:
        output = super().forward(inputs.add_(torch.rand(3)))
        output[:, 0] = -torch.inf
        return output


def test_average_of_an_unusual_model_is_right() -> None:
    model, sample = Masked(3, 2), [torch.randn(4, 3), torch.zeros(4)]
    first_step.check_average(model, Ema(model, 0.9).module, tuple, sample)


@pytest.mark.parametrize("kind", ["closure", "lambda", "method"])
def test_average_that_computes_with_parts_of_the_model_is_an_error(kind: str) -> None:
    """A copy keeps functions, and so the objects that their closures refer to."""
    model = WithFeatures(kind)
    sample = [torch.randn(4, 3, 8, 8), torch.zeros(4)]
    with torch.no_grad():
        model(sample[0][:1])  # as a check of the model does
    is_right = kind == "method"
    expected = contextlib.nullcontext() if is_right else pytest.raises(UserError, match="self.keep")
    with expected:
        first_step.check_average(model, Ema(model, 0.9).module, tuple, sample)

"""engine/check.py: what is wrong with a run is said in its first step, by name."""

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from processes import Processes
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from engine import backend, check
from engine.check import device_identity
from engine.errors import UserError

HAS_APEX = backend.problem_with_apex("O1", compiled=False) is None
SAMPLES = 23  # 11 for each of two processes, in batches of 4


class Numbers(Dataset):
    """Samples that can't be read."""

    def __len__(self) -> int:
        return SAMPLES


class Stream(IterableDataset):
    """Samples that have no numbers."""

    def __iter__(self) -> None:
        raise AssertionError("the audit reads no data")


class Net(nn.Module):
    """A convolution, a batch norm, a linear layer, and one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.head, self.spare = nn.Linear(4, 2), nn.Linear(4, 2)
        self.uses_spare = True

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(self.conv(images)).mean((2, 3))
        return self.head(features) + (self.spare(features) if self.uses_spare else 0)


class Run:
    """What main.py has when it makes its Audit, in one process."""

    def __init__(self, package: str, kind: str, level: str, ddp: str = "apex", **options) -> None:
        rank = dist.get_rank()
        self.is_part = options.get("is_part", False)
        self.apex = importlib.import_module(package)
        self.device = torch.device(kind, rank if kind == "cuda" else None)
        self.module = Net().to(self.device)
        parameters = self.parts() if "leave_out" in options else self.module.parameters()
        self.optimizer = self.apex.optimizers.FusedAdam(parameters)
        # On the CPU, amp takes another type where there is no arithmetic in this one.
        casts = {"cast_model_type": torch.bfloat16} if kind == "cpu" and level in "O2 O3 O5" else {}
        self.model, _ = self.apex.amp.initialize(
            self.module, self.optimizer, opt_level=level, verbosity=0, **casts
        )
        if ddp == "apex":
            delay = options.get("accepts_unused", False)
            self.model = self.apex.parallel.DistributedDataParallel(
                self.model, delay_allreduce=delay
            )
        elif ddp == "torch":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        sampler = DistributedSampler(Numbers(), drop_last=True)
        self.batches = DataLoader(Numbers(), 4, sampler=sampler, drop_last=True)

    def parts(self) -> list[nn.Parameter]:
        return [*self.module.conv.parameters(), *self.module.norm.parameters()]

    def audit(self) -> check.Audit:
        if self.is_part:
            whole = nn.Sequential(self.module)
            return check.Audit(whole, *self.others(), [self.model])
        return check.Audit(self.model, *self.others())

    def others(self) -> tuple:
        return self.optimizer, self.apex.amp, self.batches, print

    def steps(self, audit: check.Audit) -> None:
        for _ in range(2):
            loss = self.model(torch.randn(2, 3, 8, 8, device=self.device)).float().square().sum()
            self.optimizer.zero_grad()
            with self.apex.amp.scale_loss(loss, self.optimizer) as scaled_loss:
                scaled_loss.backward()
            audit.gradients()
            self.optimizer.step()


def said(fault: Callable | None, *how: str, **options) -> str:
    """What the audit says in this process of a run with `fault`, which changes the Run."""
    run = Run(*how, **options)
    try:
        if fault:
            fault(run)
        run.steps(run.audit())
    except UserError as error:
        return str(error)
    finally:
        check.device_identity = device_identity
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
    """Apex changes torch's functions for as long as a process lives."""
    processes = Processes("nccl")
    yield processes
    processes.stop()


@pytest.fixture(params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> tuple[Processes, str, str]:
    """Processes, the package, and the kind of their devices."""
    package, kind = request.param
    on_gpus = "two_gpus_for_apex" if package == "apex" else "two_gpus"
    processes = "two_processes" if kind == "cpu" else on_gpus
    return request.getfixturevalue(processes), package, kind


@pytest.mark.parametrize("ddp", ["apex", "torch"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_run_without_fault_passes(setting, level, ddp):
    processes, package, kind = setting
    if package == "apex" and level in ("O4", "O5"):
        pytest.skip("NVIDIA's Apex has no such level")
    assert processes(said, None, package, kind, level, ddp) == ["", ""]


def weights_differ(run: Run) -> None:
    with torch.no_grad():
        run.module.head.weight += dist.get_rank()


def same_gpu(run: Run) -> None:
    check.device_identity = lambda device: "GPU-8a1b"


def no_sampler(run: Run) -> None:
    run.batches = DataLoader(Numbers(), 4, drop_last=True)


def shuffled_without_sampler(run: Run) -> None:
    run.batches = DataLoader(Numbers(), 4, shuffle=True, drop_last=True)


def another_world(run: Run) -> None:
    sampler = DistributedSampler(Numbers(), num_replicas=8, rank=dist.get_rank(), drop_last=True)
    run.batches = DataLoader(Numbers(), 1, sampler=sampler)


def uneven_shares(run: Run) -> None:
    share = range(dist.get_rank(), SAMPLES, 2)  # 12 and 11
    run.batches = DataLoader(Numbers(), 4, sampler=share, drop_last=True)


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


def unused(run: Run) -> None:
    run.module.uses_spare = False


FAULTS = [
    (weights_differ, "O1", ["different weights (head.weight)", "the same file"]),
    (same_gpu, "O1", ["ranks 0 and 1", "GPU-8a1b", "set_device(local_rank)"]),
    (no_sampler, "O1", ["20 of 23 samples", "several processes", "DistributedSampler"]),
    (another_world, "O1", ["19 of 23 samples", "no process", "number of processes"]),
    (uneven_shares, "O1", ["2 batches", "3", "drop_last=True"]),
    (half_model, "O1", ["head.weight (bfloat16, not float32)", "amp.initialize"]),
    (half_norm, "O2", ["norm.weight (bfloat16, not float32)", "norm.bias"]),
    (single_model, "O2", ["conv.weight (float32, not ", " and 3 more"]),
    (half_norm, "O0", ["norm.weight (bfloat16, not float32)"]),
    (half_masters, "O2", ["master weights (bfloat16, not float32)"]),
    (unused, "O1", ["spare.weight, spare.bias", "requires_grad", "--delay-allreduce"]),
    (unused, "O2", ["spare.weight, spare.bias"]),
]


@pytest.mark.parametrize(
    ("fault", "level", "words"), FAULTS, ids=[f"{f.__name__}-{level}" for f, level, _ in FAULTS]
)
def test_a_fault_is_named_with_the_remedy_on_every_rank(setting, fault, level, words):
    processes, package, kind = setting
    for answer in processes(said, fault, package, kind, level):
        assert [part for part in words if part not in answer] == [], answer


def test_reading_everything_everywhere_in_another_order_is_seen(two_processes):
    answers = two_processes(said, shuffled_without_sampler, "apex_native", "cpu", "O0")
    assert all("are read by several processes" in answer for answer in answers)


def test_an_optimizer_of_a_part_of_the_model_is_seen(setting):
    processes, package, kind = setting
    for level in ("O1", "O2"):
        for answer in processes(said, None, package, kind, level, leave_out=True):
            assert answer.startswith("the optimizer does not train head.weight, head.bias, spare.w")


def test_torchs_own_wrapper_is_told_its_own_flag(two_processes):
    answers = two_processes(said, unused, "apex_native", "cpu", "O1", "torch")
    assert all(answer.endswith("accept it with find_unused_parameters=True") for answer in answers)


@pytest.mark.parametrize("is_part", [False, True])
def test_parameters_may_be_unused_if_that_was_said(setting, is_part):
    processes, package, kind = setting
    options = {"accepts_unused": True, "is_part": is_part}
    assert processes(said, unused, package, kind, "O1", **options) == ["", ""]


def test_unused_parameters_of_a_part_are_named(two_processes):
    for answer in two_processes(said, unused, "apex_native", "cpu", "O1", is_part=True):
        assert "no gradient reaches 0.spare.weight, 0.spare.bias" in answer


def said_alone(*how: str) -> tuple[str, str]:
    """What the audit of a run without DistributedDataParallel raises, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        raised = said(unused, *how)
    return raised, printed.getvalue()


@pytest.fixture(scope="module")
def one_process() -> Iterator[Processes]:
    processes = Processes("gloo", 1)
    yield processes
    processes.stop()


def test_in_one_process_unused_parameters_are_a_warning(one_process):
    [(raised, printed)] = one_process(said_alone, "apex_native", "cpu", "O1", "none")
    assert raised == ""
    assert printed.startswith("warning: no gradient reaches spare.weight, spare.bias: use them")
    assert len(printed.splitlines()) == 1


def chosen_format(package: str, asked: bool | None) -> tuple[bool | None, list[str]] | str:
    """What backend.channels_last chooses and says, or raises."""
    said = []
    try:
        return backend.channels_last(ModuleType(package), asked, said.append), said
    except UserError as error:
        return str(error)


def test_real_apex_takes_channels_last_in_one_process_only(one_process, two_processes):
    for processes in (one_process, two_processes):
        assert processes(chosen_format, "apex_native", True)[0] == (True, [])
    assert one_process(chosen_format, "apex", True) == [(True, [])]
    assert one_process(chosen_format, "apex", None) == [(None, [])]
    (format, [said]), _ = two_processes(chosen_format, "apex", None)
    assert format is False and said.startswith("NCHW, because real Apex's DDP")
    assert "--channels-last" in two_processes(chosen_format, "apex", True)[1]


def padded(run: Run) -> None:
    sampler = DistributedSampler(Numbers())
    run.batches = DataLoader(Numbers(), 4, sampler=sampler)


def stream(run: Run) -> None:
    run.batches = DataLoader(Stream(), 4)


def no_loader(run: Run) -> None:
    run.batches = [None] * 3


@pytest.mark.parametrize("change", [padded, stream, no_loader])
def test_data_that_can_be_so_passes(two_processes, change):
    assert two_processes(said, change, "apex_native", "cpu", "O0") == ["", ""]


def random_numbers_go_on(run: Run) -> None:
    run.batches = DataLoader(Numbers(), 4, shuffle=True)  # its sampler draws from torch's own
    torch.manual_seed(0)
    with pytest.raises(UserError):
        run.audit()
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(0)))


def test_it_takes_no_random_numbers_from_the_training(two_processes):
    two_processes(said, random_numbers_go_on, "apex_native", "cpu", "O0")

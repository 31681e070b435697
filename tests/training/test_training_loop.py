"""Training steps of main.py against the same training written in torch alone.

main.py itself runs here, on two processes, on the CPU and with real Apex on two GPUs, with a small
model and few samples, for each of the three tasks.
"""

import contextlib
import copy
import csv
import itertools
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from apex_native import amp
from apex_native.parallel import DistributedDataParallel
from engine import UserError, distributed
from engine.backend import load_backend, problem_with_apex
from engine.distributed import watchdog
from engine.distributed.peers import finish_writing
from engine.distributed.watchdog import StopSignals, Watchdog
from engine.monitoring import curves
from engine.monitoring.logger import Logger
from engine.monitoring.meter import Meter
from engine.optim import lr_factor
from processes import Processes
from projects import Project, load_project
from running import assert_same_run, metrics
from self_initializing import SelfInitializing
from tiny import BY_NAME, small_task
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

pytestmark = pytest.mark.xdist_group("in_process")
SAMPLES, BATCH = 80, 8  # 5 batches for each process
FLAGS = ("--batch-size", 8, "--epochs", 2, "--lr", 0.05, "--weight-decay", 0.1)
FLAGS += ("--warmup-epochs", 0.5, "--backend", "native")
LEVELS = ("O0", "O1", "O2")
FLAGS_OF_ALL_TASKS = (
    (),
    ("--clip-grad", 0.1),
    ("--decay-weights-only", "--weight-decay", 2),
    ("--schedule", "step"),
    ("--freeze", "PART"),
    ("--weights", "FILE"),
)


class Samples(torch.utils.data.Dataset):
    """Random images and targets."""

    def __init__(self, project: Project) -> None:
        small = small_task(project.task)
        self.classes = tuple("abcd")[: small.num_classes]
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(SAMPLES, 3, 4, 4, generator=generator)
        self.images[::20] *= 8  # so that some steps have larger gradients than others
        self.targets = self.labels = small.targets(SAMPLES, generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.targets[index]


def draw(logger: Logger, step: int, show: partial) -> None:
    torch.rand(1)  # may draw random numbers


@contextlib.contextmanager
def on_small_data(
    project: Project, output: str | Path, flags: tuple, build_model: Callable | None = None
) -> Iterator[None]:
    """Replace the task's model and data, and what this process has set up already."""
    rank, device = 0, torch.device("cpu")
    if dist.is_initialized():
        rank = dist.get_rank()
        device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else device
    build_model = build_model or small_task(project.task).build_model
    datasets = "read_datasets" if hasattr(project.task, "read_datasets") else "build_datasets"
    command = ["main.py", *map(str, FLAGS + flags), "--output", str(output)]
    with contextlib.ExitStack() as patches:
        for thing, name, value in (
            (sys, "argv", command),
            (project.task, "build_model", lambda *_, **__: build_model()),
            (project.task, datasets, lambda *_: (Samples(project), Samples(project))),
            (distributed, "resolve_ranks", lambda _: (rank, rank, 2)),
            (distributed, "select_device", lambda _: device),
            (distributed, "rendezvous", lambda *_: None),
            (dist, "init_process_group", lambda *_, **__: None),
            (StopSignals, "start", lambda _: None),
            (Watchdog, "start", lambda _: None),
            (curves.BackgroundProcess, "start", lambda _: None),  # it would take a second
            (Logger, "log_image", lambda *given: draw(*given)),  # of samples that are no images
        ):
            patches.enter_context(mock.patch.object(thing, name, value))
        yield


def train(
    folder: Path, output: str | Path, *flags: object, with_norms: bool = False
) -> tuple[dict, list[bool]]:
    """Return the last checkpoint of a run, and whether DDP was to average in each forward pass."""
    project = load_project(folder)
    averages = []
    forward = nn.parallel.DistributedDataParallel.forward

    def recording(self: nn.Module, *args: object, **kwargs: object) -> object:
        averages.append(self.require_backward_grad_sync)
        return forward(self, *args, **kwargs)

    build_model = small_task(project.task).build_normed if with_norms else None
    torch.backends.cudnn.allow_tf32 = False  # as the reference, which is on the CPU
    ddp = mock.patch.object(nn.parallel.DistributedDataParallel, "forward", recording)
    with on_small_data(project, output, flags, build_model), ddp:
        try:
            project.main.main()
        finally:
            amp.initialize(nn.Identity(), enabled=False)
    dist.barrier()
    return torch.load(Path(output, "last.pt"), weights_only=True), averages


def parse_args(project: Project, flags: tuple) -> Namespace:
    with on_small_data(project, "unused", flags):
        return project.main.parse_args()


def make_optimizer(small: object, model: nn.Module, args: Namespace) -> torch.optim.Optimizer:
    """Return torch's optimizer with the parameter groups that the flags describe."""
    if hasattr(args, "momentum"):
        optimizer = torch.optim.SGD([torch.zeros(1)], momentum=args.momentum)
    else:
        optimizer = torch.optim.AdamW([torch.zeros(1)])
    batch = 2 * BATCH * getattr(args, "accumulate", 1)
    factor = batch / args.scale_lr if args.scale_lr else 1
    rates = [args.lr, getattr(args, "text_lr", None) or args.lr]
    for part, lr in zip(small.parts(model), rates, strict=False):
        for kind, decay in (("weight", args.weight_decay), ("bias", args.weight_decay)):
            chosen = [p for name, p in part.named_parameters() if name.endswith(kind)]
            decay *= not (args.decay_weights_only and kind == "bias")
            optimizer.add_param_group({"params": chosen, "lr": lr * factor, "weight_decay": decay})
    return optimizer


def reference(
    project: Project,
    *flags: object,
    groups_of: Callable[[Tensor], list[Tensor]] = lambda chosen: [chosen],
    with_norms: bool = False,
) -> tuple[nn.Module, nn.Module]:
    """Return the trained model and its average, from whole batches in one process and in fp32.

    `groups_of` a batch are what goes through the model at once.
    """
    args, small = parse_args(project, flags), small_task(project.task)
    model = small.build_normed() if with_norms else small.build_model()
    samples = Samples(project)
    if args.weights:
        part = getattr(model, "image_encoder", model)
        part.load_state_dict(torch.load(args.weights, weights_only=True))
    if args.freeze:
        model.get_submodule(small.frozen).requires_grad_(False)
    optimizer = make_optimizer(small, model, args)
    batch = 2 * BATCH * getattr(args, "accumulate", 1)
    options = {"label_smoothing": args.label_smoothing}
    highest = [group["lr"] for group in optimizer.param_groups]
    average = AveragedModel(model, avg_fn=moving_average(args.ema or 0.5))
    average.n_averaged += 1  # the first weights are in it
    for epoch in range(args.epochs):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        taken = 0
        for chosen in order.split(batch):
            factor = lr_factor(epoch + (taken + len(chosen) / 2) / SAMPLES, **schedule(args))
            for group, lr in zip(optimizer.param_groups, highest, strict=True):
                group["lr"] = lr * factor
            taken += len(chosen)
            optimizer.zero_grad()
            for indices in groups_of(chosen):
                given = samples.images[indices], samples.targets[indices]
                if getattr(args, "class_weights", False):
                    sizes = samples.targets.bincount()
                    options["weights"] = SAMPLES / (len(sizes) * sizes[given[1]])
                loss = torch.stack(small.losses(model, *given, **options)).mean()
                (loss * len(indices) / len(chosen)).backward()
            if args.clip_grad:
                total = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
                for parameter in model.parameters():
                    parameter.grad *= (args.clip_grad / total).clamp(max=1)
            optimizer.step()
            average.update_parameters(model)
    return model, average.module


def moving_average(decay: float) -> Callable:
    """Return the update of an average after a number of updates."""

    def average(mean: Tensor, value: Tensor, updates: Tensor) -> Tensor:
        warmed_up = min(decay, updates / (9 + updates))
        return warmed_up * mean + (1 - warmed_up) * value

    return average


def schedule(args: Namespace) -> dict[str, object]:
    """Return the flags that the learning rate's schedule depends on."""
    return {name: vars(args)[name] for name in ("epochs", "warmup_epochs", "schedule")}


def initial_weights(project: Project) -> dict[str, Tensor]:
    """Return what --weights can be of: the image encoder where there are two."""
    model = small_task(project.task).build_model()
    return getattr(model, "image_encoder", model).state_dict()


def distance(state: dict, expected: nn.Module, start: nn.Module) -> float:
    """Return the distance of weights from the expected ones, as a share of that from the start."""
    names = [name for name, _ in start.named_parameters()]

    def flat(state: dict) -> Tensor:
        return torch.cat([state[name].flatten() for name in names])

    begin, end = flat(start.state_dict()), flat(expected.state_dict())
    return ((flat(state) - end).norm() / (end - begin).norm()).item()


class Comparison:
    """Distances of a project's runs from the reference."""

    def __init__(self, project: Project, with_norms: bool = False) -> None:
        self.project, self.small, self.with_norms = project, small_task(project.task), with_norms

    def distance(self, state: dict, expected: nn.Module) -> float:
        build = self.small.build_normed if self.with_norms else self.small.build_model
        return distance(state, expected, build())

    def tolerance(self, level: str) -> float:
        return 1e-4 if level == "O0" else self.small.half_tolerance


def case(task: str, flags: tuple, level: str) -> object:
    """Return parameters; make test has one level of the cases with flags."""
    fast_level = "O1" if task == "classification" else "O0"
    marks = [pytest.mark.slow] if flags and level != fast_level else []
    name = f"{task}-{' '.join(map(str, flags)) or 'plain'}-{level}"
    return pytest.param(task, flags, level, id=name, marks=marks)


CASES = [
    case(task, flags, level)
    for task, small in BY_NAME.items()
    for flags in (*FLAGS_OF_ALL_TASKS, *small.own_flags)
    for level in LEVELS
]


@pytest.mark.parametrize(("task", "flags", "level"), CASES)
def test_steps_match_whole_batches_in_fp32(
    shared_project: Callable,
    two_processes: Processes,
    tmp_path: Path,
    task: str,
    flags: tuple,
    level: str,
) -> None:
    project = load_project(shared_project(task=task))
    compare = Comparison(project)
    if "--weights" in flags:
        flags = ("--weights", str(tmp_path / "weights.pt"))
        weights = {name: 0.7 * value for name, value in initial_weights(project).items()}
        torch.save(weights, flags[1])
    if "--freeze" in flags:
        flags = ("--freeze", compare.small.frozen)
    run = (project.folder, tmp_path / "run", "--opt-level", level)
    (state, averages), _ = two_processes(train, *run, *flags)
    off = compare.distance(state["model"], reference(project, *flags)[0])
    assert off < compare.tolerance(level)
    if flags:
        plain = ("--weight-decay", 2) if "--weight-decay" in flags else ()
        assert compare.distance(state["model"], reference(project, *plain)[0]) > 2 * off
    # The fifth batch is a step by itself, and gradients are averaged once in each step.
    accumulates = "--accumulate" in flags
    assert state["step"] == (6 if accumulates else 10)
    passes = [False, True, False, True, True] if accumulates else [True] * 5
    assert averages == passes * 2


@pytest.mark.parametrize("level", LEVELS)
def test_ema_is_validated_and_saved(
    generated: Project, two_processes: Processes, tmp_path: Path, level: str
) -> None:
    flags, compare = ("--ema", 0.9), Comparison(generated)
    run = (generated.folder, tmp_path, "--opt-level", level)
    (state, _), _ = two_processes(train, *run, *flags)
    model, average = reference(generated, *flags)
    assert compare.distance(state["model"], model) < compare.tolerance(level)
    assert compare.distance(state["ema"], average) < compare.tolerance(level)
    assert compare.distance(state["ema"], model) > 0.01
    samples, row = Samples(generated), metrics(tmp_path)[-1]
    for key, column in (("model", "val_loss"), ("ema", "val_loss_ema")):
        module = copy.deepcopy(average)
        module.load_state_dict(state[key])
        loss = compare.small.losses(module, samples.images, samples.targets)[0].item()
        assert row[column] == pytest.approx(loss, rel=0.01)
    # best.pt has the better one by its own name.
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    metric = generated.task.METRIC
    name = max((metric, f"{metric}_ema"), key=best["results"].get)
    assert best["weights"] == ("ema" if name.endswith("_ema") else "model")
    assert best["best"] == best["results"][name]


def fail_in_validation(folder: Path, output: Path, fault: str) -> str:
    """Return how a run ends whose second validation fails, or in which rank 1 gets a signal."""
    project = load_project(folder)
    metrics_of, compute = project.task.Metrics, project.task.Metrics.compute
    update, calls, signals = metrics_of.update, [], []

    def recording_update(metrics: object, *batch: object) -> None:
        torch.rand(1)  # may draw random numbers
        calls.append("update")
        if fault == "signal" and dist.get_rank() == 1 and calls.count("compute") == 2:
            signals[0].requested = 15
        update(metrics, *batch)

    def recording_compute(metrics: object) -> dict[str, float]:
        calls.append("compute")
        if fault == "error" and calls.count("compute") == 3:  # the first is before the training
            raise ValueError("a mistake in the metric")
        return compute(metrics)

    def make_signals() -> StopSignals:
        signals.append(StopSignals())
        return signals[-1]

    with (
        mock.patch.object(metrics_of, "update", recording_update),
        mock.patch.object(metrics_of, "compute", recording_compute),
        mock.patch.object(watchdog, "exit_process", side_effect=SystemExit) as leave,
        mock.patch.object(project.main, "StopSignals", make_signals),
    ):
        try:
            train(folder, output, "--resume", "auto")
        except ValueError as error:
            finish_writing()  # as before every exit
            dist.barrier()
            return str(error)
        except SystemExit:
            return str(leave.call_args.args[0])
    return ""


@pytest.mark.parametrize(
    ("fault", "end"), [("error", "a mistake in the metric"), ("signal", "143")]
)
def test_epoch_is_saved_before_its_validation(
    shared_project: Callable, two_processes: Processes, tmp_path: Path, fault: str, end: str
) -> None:
    """A resumed run validates it, and ends with the same results to the last bit."""
    folder = shared_project()
    run = (fail_in_validation, folder, tmp_path / "run")
    assert two_processes(*run, fault) == [end] * 2
    state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert (state["epoch"], state["step"], state["results"]) == (2, 10, {})
    assert [row["epoch"] for row in metrics(tmp_path / "run")] == [1]
    assert two_processes(*run, "") == [""] * 2
    assert two_processes(fail_in_validation, folder, tmp_path / "whole", "") == [""] * 2
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def fail_in_show(folder: Path, output: Path) -> str:
    """Return the error of a run whose picture of the validation can't be drawn."""
    project = load_project(folder)
    mistake = mock.patch.object(project.main, "show_samples", side_effect=ValueError("a mistake"))
    with mistake, pytest.raises(ValueError, match="a mistake"):
        train(folder, output)
    finish_writing()
    dist.barrier()
    return str(output)


def test_best_model_is_saved_before_its_picture_is_drawn(
    shared_project: Callable, two_processes: Processes, tmp_path: Path
) -> None:
    two_processes(fail_in_show, shared_project(), tmp_path / "run")
    state = torch.load(tmp_path / "run" / "best.pt", weights_only=True)
    assert state["epoch"] == 1 and "val_accuracy" in state["results"]


def draw_gradients(logger: Logger, step: int, show: partial) -> None:
    """As pictures of what a model looks at, of which rank 0 draws one."""
    if dist.get_rank() == 0:
        model = show.args[0].eval()
        parameter = next(model.parameters())
        model(torch.ones(1, 3, 4, 4)).sum().backward()
        assert parameter.grad.any()


def run_with_pictures(folder: Path, output: Path, has_gradients: bool) -> None:
    picture = draw_gradients if has_gradients else draw
    with mock.patch.object(sys.modules[__name__], "draw", picture):
        train(folder, output, "--epochs", 3, with_norms=True)


def test_pictures_that_need_gradients_do_not_change_the_training(
    shared_project: Callable, two_processes: Processes, tmp_path: Path
) -> None:
    folder = shared_project()
    for has_gradients in (False, True):
        two_processes(run_with_pictures, folder, tmp_path / str(has_gradients), has_gradients)
    assert_same_run(tmp_path / "True", tmp_path / "False")


def run_self_initializing(folder: Path, output: Path, has_check: bool) -> None:
    """Train a model that initializes itself with its first batch."""
    project = load_project(folder)
    check = project.main.check_validation if has_check else mock.Mock()
    small = type(small_task(project.task))
    build_model = small.build_model

    with (
        mock.patch.object(project.main, "check_validation", check),
        mock.patch.object(
            small, "build_model", lambda task: nn.Sequential(SelfInitializing(), build_model(task))
        ),
    ):
        assert fail_in_validation(folder, output, "") == ""


def test_check_of_the_validation_changes_no_result(
    shared_project: Callable, two_processes: Processes, tmp_path: Path
) -> None:
    folder = shared_project()
    for has_check in (False, True):
        two_processes(run_self_initializing, folder, tmp_path / str(has_check), has_check)
    assert_same_run(tmp_path / "True", tmp_path / "False")


def rng_after_validations(folder: Path, output: Path, eval_every: int) -> list[float]:
    """Return the next random numbers after a run whose metrics and pictures draw some."""
    metrics = load_project(folder).task.Metrics
    update = metrics.update

    def draw(*args: object) -> None:
        torch.rand(1)
        update(*args)

    with mock.patch.object(metrics, "update", draw):
        train(folder, output, "--eval-every", eval_every)
    return torch.rand(3).tolist()


def test_validations_leave_the_random_numbers_of_the_training(
    generated: Project, two_processes: Processes, tmp_path: Path
) -> None:
    often, seldom = (
        two_processes(rng_after_validations, generated.folder, tmp_path / str(epochs), epochs)
        for epochs in (1, 2)
    )
    assert often == seldom


def train_model_in_eval_mode(folder: Path, output: Path) -> None:
    project = load_project(folder)
    build = small_task(project.task).build_normed
    with on_small_data(project, output, ("--steps", 3), lambda: build().eval()):
        project.main.main()


def test_model_in_eval_mode_is_put_into_training_mode(
    shared_project: Callable, two_processes: Processes, tmp_path: Path
) -> None:
    two_processes(train_model_in_eval_mode, shared_project(), tmp_path / "run")
    state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)["model"]
    counts = [value for name, value in state.items() if name.endswith("num_batches_tracked")]
    assert counts and all(count == 3 for count in counts)


def types_of_products(folder: Path, output: Path, level: str) -> list[torch.dtype]:
    """Return the types of matrix products in `prepare`, and in both methods of the metrics."""
    task = load_project(folder).task
    prepare, update, compute = task.prepare, task.Metrics.update, task.Metrics.compute
    found, outputs = [], []

    def recording_prepare(batch: list[Tensor]) -> tuple:
        found.append((batch[0] @ batch[0]).dtype)
        return prepare(batch)

    def recording_update(metrics: object, output: Tensor, targets: Tensor) -> None:
        outputs[:] = [output]
        found.extend([output.dtype, (output @ output.T).dtype])
        update(metrics, output, targets)

    def recording_compute(metrics: object) -> dict[str, float]:
        found.append((outputs[0] @ outputs[0].T).dtype)
        return compute(metrics)

    with (
        mock.patch.object(task, "prepare", recording_prepare),
        mock.patch.object(task.Metrics, "update", recording_update),
        mock.patch.object(task.Metrics, "compute", recording_compute),
    ):
        train(folder, output, "--steps", 1, "--opt-level", level)
    return found


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_inputs_and_metrics_are_computed_in_fp32(
    shared_project: Callable, two_processes: Processes, tmp_path: Path, level: str
) -> None:
    """In bfloat16, a confusion matrix that is a product of 0 and 1 could count to 256 only."""
    for found in two_processes(types_of_products, shared_project(), tmp_path, level):
        assert len(found) > 6 and set(found) == {torch.float32}


def inputs_and_counts_of_samples(folder: Path, output: Path) -> tuple[list[float], list[int]]:
    """Return sums of inputs and targets, which are changed in place, in validations with --ema.

    And the numbers of samples that metrics which keep them have counted.
    """
    project, inputs, counts = load_project(folder), [], []
    task = project.task
    update, compute = task.Metrics.update, task.Metrics.compute

    class InPlaceNet(nn.Linear):
        def forward(self, images: Tensor) -> Tensor:
            if not self.training:
                inputs.append(images.sum().item())
                images.add_(1)
            return super().forward(images.flatten(1))

    def counting_update(metrics: object, output: Tensor, targets: Tensor) -> None:
        inputs.append(targets.sum().item())
        update(metrics, output, targets.clone())
        targets.zero_()
        metrics.count = getattr(metrics, "count", 0) + len(targets)

    def recording_compute(metrics: object) -> dict[str, float]:
        counts.append(metrics.count)
        return compute(metrics)

    with (
        on_small_data(project, output, ("--epochs", 1, "--ema", 0.9), partial(InPlaceNet, 48, 4)),
        mock.patch.object(task.Metrics, "update", counting_update),
        mock.patch.object(task.Metrics, "compute", recording_compute),
    ):
        project.main.main()
    return inputs, counts


def test_validations_do_not_depend_on_the_check_or_on_each_other(
    shared_project: Callable, two_processes: Processes, tmp_path: Path
) -> None:
    """With an average of the weights, each batch is validated twice."""
    for inputs, counts in two_processes(inputs_and_counts_of_samples, shared_project(), tmp_path):
        averages = inputs[-18::4], inputs[-17::4]  # of 5 batches
        assert (inputs[-20::4], inputs[-19::4]) == averages
        assert counts[-2:] == [SAMPLES // 2] * 2


def train_with_changed_rates(folder: Path, output: Path, is_late: bool) -> list[str]:
    """Return the warnings of a run whose learning rates an edit changes before or after steps."""
    project, schedulers = load_project(folder), []
    train_step = project.main.train_step

    def changing_step(run: object, *arguments: object) -> object:
        if not schedulers:
            schedulers.append(StepLR(run.optimizer, 1, 0.5))
        run.optimizer.param_groups[0]["lr"] *= 0.9
        inputs = train_step(run, *arguments)
        if is_late:
            schedulers[0].step()
        if run.progress.step == 2:  # which changes no other rate
            added = nn.Parameter(torch.ones(1), requires_grad=False)
            run.optimizer.add_param_group({"params": [added], "lr": 0.1})
        if run.progress.step == 3:  # the added group's rate follows the schedule
            rates = [group["lr"] for group in run.optimizer.param_groups]
            assert rates[-1] == pytest.approx(0.1 * rates[0] / run.base_lrs[0] / 0.9)
        return inputs

    with (
        mock.patch.object(project.main, "train_step", changing_step),
        mock.patch.object(Logger, "warning") as warning,
    ):
        train(folder, output, "--epochs", 1)
    return [call.args[0] for call in warning.call_args_list]


def base_lrs_with_added_group(folder: Path, output: Path, epochs: int) -> list[float]:
    """Return the peak learning rates of a run to which an edit adds a group, perhaps resumed."""
    main = load_project(folder).main
    build, runs = main.build, []

    def build_with_group(args: Namespace) -> object:
        runs.append(build(args))
        added = nn.Parameter(torch.ones(1), requires_grad=False)
        runs[0].optimizer.add_param_group({"params": [added], "lr": 0.1})
        return runs[0]

    with mock.patch.object(main, "build", build_with_group):
        train(folder, output, "--epochs", epochs, "--resume", "auto")
    return runs[0].base_lrs


def test_added_group_has_its_learning_rate_after_a_resumption_too(
    shared_project: Callable, two_processes: Processes, tmp_path: Path
) -> None:
    """The checkpoint has the one that the schedule has reached."""
    folder = shared_project()
    for epochs in (1, 2):
        for rates in two_processes(base_lrs_with_added_group, folder, tmp_path, epochs):
            assert rates[-1] == 0.1


def train_with_noise(folder: Path, output: Path) -> list[str]:
    """Return the warnings of a run whose steps add noise of each process to the weights."""
    main = load_project(folder).main
    train_step = main.train_step

    def noisy_step(run: object, *arguments: object) -> object:
        inputs = train_step(run, *arguments)
        with torch.no_grad():
            next(run.model.parameters()).add_(torch.rand(1))
        return inputs

    with (
        mock.patch.object(main, "train_step", noisy_step),
        mock.patch.object(Logger, "warning") as warning,
    ):
        train(folder, output, "--epochs", 2)
    return [call.args[0] for call in warning.call_args_list]


def test_weights_that_noise_makes_differ_between_processes_are_a_warning(
    shared_project: Callable, two_processes: Processes, tmp_path: Path
) -> None:
    for warnings in two_processes(train_with_noise, shared_project(), tmp_path):
        assert len(warnings) == 1 and "processes have different weights" in warnings[0]


@pytest.mark.parametrize("is_late", [False, True])
def test_scheduler_without_effect_is_a_warning(
    shared_project: Callable, two_processes: Processes, tmp_path: Path, is_late: bool
) -> None:
    """As the step of a scheduler; what an edit sets before the optimizer's step has an effect."""
    start = "the learning rate was changed after a step, as by a scheduler, without effect: "
    for warnings in two_processes(train_with_changed_rates, shared_project(), tmp_path, is_late):
        assert [text.startswith(start) for text in warnings] == [True] * is_late


class ViewNet(nn.Module):
    """A model for contiguous images only, as in many tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(32, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.conv(images).view(-1, 32))


def train_model_of_views(folder: Path, output: Path) -> str:
    """Return the error of a model that needs contiguous images."""
    project = load_project(folder)
    with on_small_data(project, output, (), ViewNet), pytest.raises(UserError) as raised:
        project.main.main()
    return str(raised.value)


def test_model_that_needs_another_memory_format_is_an_error_before_the_training(
    shared_project: Callable, two_processes: Processes, tmp_path: Path
) -> None:
    for message in two_processes(train_model_of_views, shared_project(), tmp_path):
        assert message.startswith("this --arch can't train on a batch of 2 samples")
        assert "Use .reshape(...) instead" in message


def train_with_equal_metrics(folder: Path, output: Path, *flags: object) -> None:
    project = load_project(folder)
    metrics_of, compute = project.task.Metrics, project.task.Metrics.compute

    def compute_equal(metrics: object) -> dict[str, float]:
        return compute(metrics) | {project.task.METRIC: 0.5}

    with mock.patch.object(metrics_of, "compute", compute_equal):
        train(folder, output, *flags)


def test_patience_stops_a_run_that_does_not_improve(
    shared_project: Callable, two_processes: Processes, tmp_path: Path
) -> None:
    run = (train_with_equal_metrics, shared_project(), tmp_path)
    two_processes(*run, "--epochs", 5, "--steps", 10, "--patience", 3)
    assert [row["epoch"] for row in metrics(tmp_path)] == [1, 2]
    two_processes(*run, "--epochs", 9, "--patience", 3, "--resume", "auto")
    assert [row["epoch"] for row in metrics(tmp_path)] == [1, 2, 3, 4]
    state = torch.load(tmp_path / "last.pt", weights_only=True)
    assert (state["epoch"], state["scores"]) == (4, [0.5] * 4)


def stop_after_step(folder: Path, output: Path, step: int, *flags: object) -> None:
    """Train until rank 1 gets a signal in that step, or to the end; then resume it."""
    project = load_project(folder)
    train_step, signals = project.main.train_step, []

    def make_signals() -> StopSignals:
        signals.append(StopSignals())
        return signals[-1]

    def signalled_step(run: object, *arguments: object) -> object:
        if run.progress.step + 1 == step and dist.get_rank() == 1:
            signals[0].requested = 15
        return train_step(run, *arguments)

    with (
        mock.patch.object(project.main, "StopSignals", make_signals),
        mock.patch.object(project.main, "train_step", signalled_step),
        mock.patch.object(watchdog, "exit_process", side_effect=SystemExit),
        contextlib.suppress(SystemExit),
    ):
        train(folder, output, *flags)
    finish_writing()
    dist.barrier()
    train(folder, output, *flags, "--resume", "auto")


@pytest.mark.parametrize(
    "step", [pytest.param(5, marks=pytest.mark.slow), 12]
)  # in an epoch that is not validated, and in one that is
def test_every_nth_epoch_and_the_last_are_validated(
    shared_project: Callable, two_processes: Processes, tmp_path: Path, step: int
) -> None:
    """A run that was stopped and resumed ends with the same results to the last bit."""
    run = (stop_after_step, shared_project())
    flags = ("--epochs", 5, "--eval-every", 2)
    two_processes(*run, tmp_path / "whole", 0, *flags)
    two_processes(*run, tmp_path / "stopped", step, *flags)
    with (tmp_path / "stopped" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["train_loss"] for row in rows)
    for column in ("val_loss", "val_accuracy"):
        assert [bool(row[column]) for row in rows] == [False, True, False, True, True]
    state = torch.load(tmp_path / "stopped" / "last.pt", weights_only=True)
    assert len(state["scores"]) == 3
    assert state["best"] == max(float(row["val_accuracy"] or 0) for row in rows)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_patience_counts_validations(
    shared_project: Callable, two_processes: Processes, tmp_path: Path
) -> None:
    run = (train_with_equal_metrics, shared_project(), tmp_path)
    two_processes(*run, "--epochs", 9, "--eval-every", 2, "--patience", 2)
    state = torch.load(tmp_path / "last.pt", weights_only=True)
    assert (state["epoch"], state["scores"]) == (6, [0.5] * 3)


def test_validation_within_an_epoch_does_not_count_for_patience(shared_project: Callable) -> None:
    """A resumed run that was stopped before the validation at the end of --steps begins with it."""
    main = load_project(shared_project()).main
    progress = Namespace(pending_row={"epoch": 2}, samples=64, scores=[0.5])
    saved: list[list[float]] = []
    run = mock.Mock(progress=progress)
    run.logger.monitored.best.return_value.score = 0.75
    run.checkpoints.save.side_effect = lambda _: saved.append(progress.scores)
    with (
        mock.patch.object(main, "evaluate", return_value={"val_accuracy": 0.75}),
        mock.patch.object(main, "show_samples"),
    ):
        main.validate_epoch(run)
    assert saved == [[0.5, 0.75]] and progress.scores == [0.5]


@torch.no_grad()
def validated_with(folder: Path, metric: str) -> dict[str, float]:
    """Return the results of a batch in a project whose METRIC is `metric`."""
    project = load_project(folder)
    samples, small = Samples(project), small_task(project.task)
    inputs, targets = project.task.prepare([samples.images[:8], samples.targets[:8]])
    with mock.patch.object(project.task, "METRIC", metric):
        options = Namespace(report=False)
        metrics = project.task.Metrics(small.num_classes, torch.device("cpu"), options)
        metrics.update(small.build_model()(inputs), targets)
        return metrics.compute()


def test_results_do_not_depend_on_the_metric_that_selects_the_best_model(
    generated: Project, two_processes: Processes
) -> None:
    expected = two_processes(validated_with, generated.folder, generated.task.METRIC)
    assert expected[0].keys() == {"val_loss", generated.task.METRIC}
    assert two_processes(validated_with, generated.folder, "val_loss") == expected


def resume_without_metric(folder: Path, output: Path) -> str:
    """Return the error of a run that is resumed after METRIC has been misspelled."""
    project = load_project(folder)
    train(folder, output, "--steps", 2)
    compute = project.task.Metrics.compute

    def compute_other(metrics: object) -> dict[str, float]:
        return {"val_loss": compute(metrics)["val_loss"]}

    with (
        mock.patch.object(project.task.Metrics, "compute", compute_other),
        pytest.raises(UserError) as failed,
    ):
        train(folder, output, "--resume", "auto")
    return str(failed.value)


def test_missing_metric_is_an_error_in_a_resumed_run(
    shared_project: Callable, two_processes: Processes, tmp_path: Path
) -> None:
    for error in two_processes(resume_without_metric, shared_project(), tmp_path / "run"):
        assert error.startswith("Metrics.compute in task.py returns val_loss but not METRIC")


def start_without_metric(folder: Path, output: Path) -> str:
    """Return the error of a run whose task does not return its METRIC."""
    results = {"val_loss": 1.0, "val_f1": 0.5}
    metrics_of = load_project(folder).task.Metrics
    with (
        mock.patch.object(metrics_of, "compute", return_value=results),
        pytest.raises(UserError) as failed,
    ):
        train(folder, output)
    return str(failed.value)


def test_missing_metric_is_an_error_before_the_training(
    shared_project: Callable, two_processes: Processes, tmp_path: Path
) -> None:
    errors = two_processes(start_without_metric, shared_project(), tmp_path / "run")
    said = (
        "Metrics.compute in task.py returns val_loss, val_f1 but not METRIC, which is val_accuracy"
    )
    assert errors == [f"{said}: set METRIC to one of them"] * 2
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu(2)
@pytest.mark.parametrize("level", LEVELS)
def test_real_apex_steps_match_whole_batches_in_fp32(
    generated: Project, tmp_path: Path, level: str
) -> None:
    if problem := problem_with_apex(level):
        pytest.skip(problem.reason)
    compare = Comparison(generated)
    accumulated = compare.small.accumulated
    flags = (*accumulated, "--clip-grad", 0.1, "--ema", 0.9)
    how = ("--backend", "apex", "--opt-level", level, "--loss-scale", 128)  # which skips no step
    processes = Processes("nccl")  # for once: Apex changes torch's functions for good
    try:
        (state, _), _ = processes(train, generated.folder, tmp_path, *how, *flags)
    finally:
        processes.stop()
    model, average = reference(generated, *flags)
    off = compare.distance(state["model"], model)
    assert off < compare.tolerance(level)
    assert compare.distance(state["ema"], average) < compare.tolerance(level)
    for others in (accumulated, *([("--clip-grad", 0.1)] if accumulated else [])):
        assert compare.distance(state["model"], reference(generated, *others)[0]) > 2 * off
    assert state["step"] == (6 if accumulated else 10)


def train_recording_types(
    folder: Path, output: Path, *flags: object
) -> tuple[dict, set[torch.dtype]]:
    """Return the last checkpoint of a run, and in which types gradients were reduced."""
    types = set()
    reduce = dist.all_reduce

    def recording(tensor: Tensor, *args: object, **kwargs: object) -> object:
        types.add(tensor.dtype)
        return reduce(tensor, *args, **kwargs)

    with mock.patch.object(default_hooks.dist, "all_reduce", recording):
        state, _ = train(folder, output, *flags)
    return state, types


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_gradients_are_reduced_as_bfloat16(
    generated: Project, two_processes: Processes, tmp_path: Path, level: str
) -> None:
    flags = ("--opt-level", level, "--compress-gradients")
    (state, types), _ = two_processes(train_recording_types, generated.folder, tmp_path, *flags)
    assert torch.bfloat16 in types
    expected = reference(generated)[0]
    assert 1e-4 < Comparison(generated).distance(state["model"], expected) < 0.05


def test_compression_of_half_gradients_is_refused(
    generated: Project, two_processes: Processes, tmp_path: Path
) -> None:
    flags = ("--opt-level", "O5", "--compress-gradients")
    if amp.half_type(torch.bfloat16, torch.device("cpu")) != torch.bfloat16:
        pytest.skip("this CPU does not compute in bfloat16")
    with pytest.raises(AssertionError, match="--compress-gradients: .* leave it out"):
        two_processes(train, generated.folder, tmp_path, *flags)


def tuned(delay: bool) -> tuple[list[bool], bool]:
    """Return whether models in apex_native's DDP, in torch's and in none average at once."""
    models = [DistributedDataParallel(nn.Linear(2, 1), delay_allreduce=delay)]
    models += [nn.parallel.DistributedDataParallel(nn.Linear(2, 1)), nn.Linear(2, 1)]
    backend = load_backend("native", "O1")
    with mock.patch.object(torch._dynamo.config, "optimize_ddp", True):
        for model in models:
            backend.tune_communication(model, compress=False, cuda_graphs=True)
        cuts = torch._dynamo.config.optimize_ddp
    return [getattr(model, "averages_at_once", False) for model in models], cuts


@pytest.mark.parametrize("delay", [False, True])
def test_cuda_graphs_are_not_split_and_average_at_once(
    two_processes: Processes, delay: bool
) -> None:
    assert two_processes(tuned, delay) == [([not delay, False, False], False)] * 2


def train_on_nan_losses(folder: Path, output: Path, is_late: bool) -> str:
    """Return the error of four epochs of five steps, whose losses are nan after some seven."""
    task = load_project(folder).task
    calls, criterion = itertools.count(), task.criterion

    def breaks(*args: object, **kwargs: object) -> Tensor:
        # A sum: the weights stay finite, or the second refused checkpoint would end the run before.
        return criterion(*args, **kwargs) + (0.0 if next(calls) < 8 else float("nan"))

    late = mock.patch.object(Meter, "is_asynchronous", is_late)
    broken = mock.patch.object(task, "criterion", breaks)
    with late, broken, pytest.raises(FloatingPointError) as error:
        train(folder, output, "--epochs", 4, "--opt-level", "O0")
    return str(error.value)


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "as on a GPU"])
def test_nan_losses_stop_the_last_epoch(
    generated: Project, two_processes: Processes, tmp_path: Path, is_late: bool
) -> None:
    for error in two_processes(train_on_nan_losses, generated.folder, tmp_path, is_late):
        assert re.match(r"\d+ losses in a row, up to step 20, are not finite", error)


@pytest.mark.parametrize("level", LEVELS)
def test_resume_with_all_features_is_bit_identical(
    generated: Project, two_processes: Processes, tmp_path: Path, level: str
) -> None:
    small = small_task(generated.task)
    flags = ("--opt-level", level, *small.accumulated, "--clip-grad", 0.1, "--ema", 0.9)
    flags += small.augmented
    (whole, _), _ = two_processes(train, generated.folder, tmp_path / "whole", *flags)
    stopped = (generated.folder, tmp_path / "stopped", *flags)
    (state, _), _ = two_processes(train, *stopped, "--steps", 4)
    assert (state["epoch"], state["step"], state["samples"]) == small.stopped
    (resumed, _), _ = two_processes(train, *stopped, "--resume", "auto")
    for part in ("model", "ema"):
        torch.testing.assert_close(resumed[part], whole[part], rtol=0, atol=0)
    assert (resumed["step"], resumed["amp"]) == (whole["step"], whole["amp"])


WITH_NORMS = pytest.mark.parametrize("task", ["classification", "segmentation"])


def check_groups(processes: Processes, project: Project, output: Path, level: str, size: int):
    """Check that processes of a group normalise as one, and train what one process would."""
    flags = ("--sync-bn-group", size, "--opt-level", level)
    (state, _), _ = processes(train, project.folder, output, *flags, with_norms=True)
    compare = Comparison(project, with_norms=True)
    split = {"groups_of": lambda chosen: [chosen[::2], chosen[1::2]]}
    halves = reference(project, with_norms=True, **split)[0]
    whole = reference(project, with_norms=True)[0]
    right, wrong = (halves, whole) if size == 1 else (whole, halves)
    off = compare.distance(state["model"], right)
    assert off < compare.tolerance(level)
    assert compare.distance(state["model"], wrong) > 2 * off


@WITH_NORMS
@pytest.mark.parametrize("level", LEVELS)
def test_syncbn_group_of_one_process(
    shared_project: Callable, two_processes: Processes, tmp_path: Path, task: str, level: str
) -> None:
    project = load_project(shared_project(task=task))
    check_groups(two_processes, project, tmp_path, level, 1)


@pytest.mark.gpu(2)
@WITH_NORMS
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", [1, 2])
def test_syncbn_group_on_gpus(
    shared_project: Callable,
    two_gpus: Processes,
    tmp_path: Path,
    task: str,
    level: str,
    size: int,
) -> None:
    project = load_project(shared_project(task=task))
    check_groups(two_gpus, project, tmp_path, level, size)


def group_sizes(folder: Path, output: Path, size: int) -> list[int]:
    """Return the number of processes that share statistics, for each conversion of a run."""
    sizes = []

    def recording(model: nn.Module, process_group: dist.ProcessGroup | None) -> nn.Module:
        sizes.append(dist.get_world_size(process_group))
        return model

    with mock.patch("apex_native.parallel.convert_syncbn_model", recording):
        train(folder, output, "--sync-bn-group", size, "--steps", 1)
    return sizes


def test_sync_bn_group_sets_the_process_group(
    generated: Project, two_processes: Processes, tmp_path: Path
) -> None:
    run = (group_sizes, generated.folder)
    for size, processes in ((0, 2), (1, 1), (2, 2)):
        assert two_processes(*run, tmp_path / str(size), size) == [[processes]] * 2
    with pytest.raises(AssertionError, match="--sync-bn-group 3 must divide 2 processes"):
        two_processes(*run, tmp_path / "3", 3)

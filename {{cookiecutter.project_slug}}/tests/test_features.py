"""What a flag adds to plain steps, against the same training written out in torch alone.

main.py itself runs here, on two processes, on the CPU and with real Apex on two GPUs, with a small
model and few samples.
"""

import contextlib
import copy
import itertools
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock
from urllib.error import URLError

import pytest
import tiny
import torch
import torch.distributed as dist
import torchvision
from processes import Processes
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import main
import task
from apex_native import amp
from apex_native.parallel import DistributedDataParallel
from engine import backend, checkpoint, distributed, training, weights
from engine.errors import UserError
from engine.report import Meter, Report
from engine.watch import Watch

# % if ddp == "dataparallel"
pytest.skip("the reference is for two processes", allow_module_level=True)
# % endif

SAMPLES, BATCH = 80, 8  # 5 batches for each process
FLAGS = ("--batch-size", 8, "--epochs", 2, "--lr", 0.05, "--weight-decay", 0.1)
FLAGS += ("--warmup-epochs", 0.5, "--backend", "native")
LEVELS = ("O0", "O1", "O2")
# % if task == "contrastive"
FORWARD_PASSES = 2  # of a batch, by each DDP
ACCUMULATED, STOPPED = (), (0, 4, 64)  # after four steps: epoch, step, samples
OWN_FLAGS = [("--scale-lr", 64), ("--text-lr", 0.2), ("--label-smoothing", 0.5)]
# % else
FORWARD_PASSES = 1  # of a batch, by DDP
ACCUMULATED, STOPPED = ("--accumulate", 2), (1, 4, 32)  # after four steps: epoch, step, samples
OWN_FLAGS = [
    ACCUMULATED,
    ("--accumulate", 2, "--clip-grad", 0.1),
    ("--label-smoothing", 0.5),
    ("--scale-lr", 64, "--accumulate", 2),
]
# % endif
# The distance from the reference, as a share of the way that the weights went.
# % if task == "classification"
HALF = 0.05  # on the CPU, where it is mostly bfloat16
# % else
HALF = 0.1  # on the CPU, where it is mostly bfloat16
# % endif
NEAR = {"O0": 1e-4, "O1": HALF, "O2": HALF}


class Samples(torch.utils.data.Dataset):
    classes = tuple("abcd")[: tiny.CLASSES]

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(SAMPLES, 3, 4, 4, generator=generator)
        self.images[::20] *= 8  # so that some steps have larger gradients than others
        self.targets = tiny.targets(SAMPLES, generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.targets[index]


@contextlib.contextmanager
def on_the_small_set(output: str, flags: tuple) -> Iterator[None]:
    rank, device = 0, torch.device("cpu")
    if dist.is_initialized():
        rank = dist.get_rank()
        device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else device
    command = ["main.py", *map(str, FLAGS + flags), "--output", output]
    with contextlib.ExitStack() as patches:
        for thing, name, value in (
            (sys, "argv", command),
            (task, "build_model", lambda *_: tiny.build_model()),
            (task, "build_datasets", lambda *_: (Samples(), Samples())),
            (distributed, "ranks", lambda _: (rank, rank, 2)),
            (distributed, "device_for", lambda _: device),
            (distributed, "join", lambda *_: None),
            (Watch, "is_alive", lambda _: True),  # or it would be started
            (Report, "_draw", lambda _: None),  # in a process of its own, which takes a second
            (Report, "picture", lambda *_: None),  # of samples that are none
        ):
            patches.enter_context(mock.patch.object(thing, name, value))
        yield


def trained(output: str, *flags: object) -> tuple[dict, list[bool]]:
    """The last checkpoint of a run, and whether DDP was to average in each forward pass."""
    averages = []
    forward = nn.parallel.DistributedDataParallel.forward

    def recording(self: nn.Module, *args: object, **kwargs: object) -> object:
        averages.append(self.require_backward_grad_sync)
        return forward(self, *args, **kwargs)

    ddp = mock.patch.object(nn.parallel.DistributedDataParallel, "forward", recording)
    with on_the_small_set(output, flags), ddp:
        try:
            main.main()
        finally:
            amp.initialize(nn.Identity(), enabled=False)
    dist.barrier()
    return torch.load(Path(output, "last.pt"), weights_only=True), averages


def losses_of(model: nn.Module, images: Tensor, targets: Tensor, **options: float) -> list[Tensor]:
    """What the training's loss is the mean of; validation's is the first."""
    # % if task == "contrastive"
    scores = F.normalize(model(images), dim=1) @ model.text_encoder(targets).T
    own = torch.arange(len(images))
    return [F.cross_entropy(logits, own, **options) for logits in (scores, scores.T)]
    # % else
    return [F.cross_entropy(model(images), targets, **options)]
    # % endif


def reference(
    *flags: object, groups_of: Callable[[Tensor], list[Tensor]] = lambda chosen: [chosen]
) -> tuple[nn.Module, nn.Module]:
    """The trained model and its average, from whole batches in one process and in fp32.

    `groups_of` a batch are what goes through the model at once.
    """
    with on_the_small_set("unused", flags):
        args = main.parse_args()
    model, samples = tiny.build_model(), Samples()
    if args.weights:
        part = getattr(model, "image_encoder", model)
        part.load_state_dict(torch.load(args.weights, weights_only=True))
    if args.freeze:
        model.get_submodule(tiny.FROZEN).requires_grad_(False)
    if hasattr(args, "momentum"):
        optimizer = torch.optim.SGD([torch.zeros(1)], momentum=args.momentum)
    else:
        optimizer = torch.optim.AdamW([torch.zeros(1)])
    batch = 2 * BATCH * getattr(args, "accumulate", 1)
    factor = batch / args.scale_lr if args.scale_lr else 1
    # % if task == "contrastive"
    text_lr = args.lr if args.text_lr is None else args.text_lr
    parts = [(model.image_encoder, args.lr), (model.text_encoder, text_lr)]
    # % else
    parts = [(model, args.lr)]
    # % endif
    options = {"label_smoothing": args.label_smoothing}
    for part, lr in parts:
        for kind, decay in (("weight", args.weight_decay), ("bias", args.weight_decay)):
            chosen = [p for name, p in part.named_parameters() if name.endswith(kind)]
            decay *= not (args.decay_weights_only and kind == "bias")
            optimizer.add_param_group({"params": chosen, "lr": lr * factor, "weight_decay": decay})
    highest = [group["lr"] for group in optimizer.param_groups]
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.ema or 0.5))
    average.n_averaged += 1  # the first weights are in it
    for epoch in range(args.epochs):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        taken = 0
        for chosen in order.split(batch):
            middle = (taken + len(chosen) / 2) / SAMPLES
            for group, lr in zip(optimizer.param_groups, highest, strict=True):
                group["lr"] = lr * main.schedule(args, epoch + middle)
            taken += len(chosen)
            optimizer.zero_grad()
            for indices in groups_of(chosen):
                given = samples.images[indices], samples.targets[indices]
                loss = torch.stack(losses_of(model, *given, **options)).mean()
                (loss * len(indices) / len(chosen)).backward()
            if args.clip_grad:
                total = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
                for parameter in model.parameters():
                    parameter.grad *= (args.clip_grad / total).clamp(max=1)
            optimizer.step()
            average.update_parameters(model)
    return model, average.module


def first_weights() -> dict[str, Tensor]:
    """What --weights can be of: the image encoder where there are two."""
    model = tiny.build_model()
    return getattr(model, "image_encoder", model).state_dict()


def flat(state: dict) -> Tensor:
    return torch.cat([state[name].flatten() for name, _ in tiny.build_model().named_parameters()])


def distance(state: dict, expected: nn.Module) -> float:
    start, end = flat(tiny.build_model().state_dict()), flat(expected.state_dict())
    return ((flat(state) - end).norm() / (end - start).norm()).item()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--clip-grad", 0.1),
        ("--decay-weights-only", "--weight-decay", 2),
        ("--schedule", "step"),
        ("--freeze", tiny.FROZEN),
        ("--weights", "FILE"),
        *OWN_FLAGS,
    ],
    ids=lambda flags: " ".join(map(str, flags)) or "plain",
)
def test_steps_are_those_of_whole_batches(
    two_processes: Processes, tmp_path: Path, level: str, flags: tuple
) -> None:
    if "--weights" in flags:
        flags = ("--weights", str(tmp_path / "weights.pt"))
        torch.save({name: 0.7 * value for name, value in first_weights().items()}, flags[1])
    run = str(tmp_path / "run")
    (state, averages), _ = two_processes(trained, run, "--opt-level", level, *flags)
    off = distance(state["model"], reference(*flags)[0])
    assert off < NEAR[level]
    if flags:
        plain = ("--weight-decay", 2) if "--weight-decay" in flags else ()
        assert distance(state["model"], reference(*plain)[0]) > 2 * off
    # The fifth batch is a step by itself, and gradients are averaged once in each step.
    accumulates = "--accumulate" in flags
    assert state["step"] == (6 if accumulates else 10)
    passes = [False, True, False, True, True] if accumulates else [True] * 5 * FORWARD_PASSES
    assert averages == passes * 2


@pytest.mark.parametrize("level", LEVELS)
def test_the_average_is_validated_and_saved(
    two_processes: Processes, tmp_path: Path, level: str
) -> None:
    flags = ("--ema", 0.9)
    (state, _), _ = two_processes(trained, str(tmp_path), "--opt-level", level, *flags)
    model, average = reference(*flags)
    assert distance(state["model"], model) < NEAR[level]
    assert distance(state["ema"], average) < NEAR[level]
    assert distance(state["ema"], model) > 0.3
    # It is what metrics.csv is of.
    samples = Samples()
    module = copy.deepcopy(average)
    module.load_state_dict(state["ema"])
    loss = losses_of(module, samples.images, samples.targets)[0].item()
    row = (tmp_path / "metrics.csv").read_text().splitlines()[-1].split(",")
    assert float(row[3]) == pytest.approx(loss, rel=0.01)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("level", LEVELS)
def test_real_apex_takes_such_steps_too(tmp_path: Path, level: str) -> None:
    if problem := backend.problem_with_apex(level):
        pytest.skip(problem.reason)
    flags = (*ACCUMULATED, "--clip-grad", 0.1, "--ema", 0.9)
    how = ("--backend", "apex", "--opt-level", level, "--loss-scale", 128)  # which skips no step
    processes = Processes("nccl")  # for once: Apex changes torch's functions for good
    try:
        (state, _), _ = processes(trained, str(tmp_path), *how, *flags)
    finally:
        processes.stop()
    model, average = reference(*flags)
    off = distance(state["model"], model)
    assert off < NEAR[level]
    assert distance(state["ema"], average) < NEAR[level]
    for others in (ACCUMULATED, *([("--clip-grad", 0.1)] if ACCUMULATED else [])):
        assert distance(state["model"], reference(*others)[0]) > 2 * off
    assert state["step"] == (6 if ACCUMULATED else 10)


def test_the_average_is_of_fp32_masters() -> None:
    model = tiny.build_model()
    ema = training.Ema(model, 0.9)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)  # fp16 can't hold such steps
    half = {"cast_model_type": torch.float16}  # on the CPU, too
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, **half)
    for parameter in amp.master_params(optimizer):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    ema.update(checkpoint.weights(model, optimizer))
    for name, average in ema.module.state_dict().items():
        expected = 0.9 * before[name] + 0.1 * (before[name].half().float() - 1e-5)
        torch.testing.assert_close(average, expected, rtol=0, atol=1e-7)


def reduced_types(output: str, *flags: object) -> tuple[dict, set[torch.dtype]]:
    """The last checkpoint of a run, and in which types gradients were reduced."""
    types = set()
    reduce = dist.all_reduce

    def recording(tensor: Tensor, *args: object, **kwargs: object) -> object:
        types.add(tensor.dtype)
        return reduce(tensor, *args, **kwargs)

    with mock.patch.object(default_hooks.dist, "all_reduce", recording):
        state, _ = trained(output, *flags)
    return state, types


@pytest.mark.parametrize("level", ("O0", "O1"))
def test_gradients_can_travel_as_bfloat16(
    two_processes: Processes, tmp_path: Path, level: str
) -> None:
    flags = ("--opt-level", level, "--compress-gradients")
    (state, types), _ = two_processes(reduced_types, str(tmp_path), *flags)
    assert torch.bfloat16 in types
    assert NEAR["O0"] < distance(state["model"], reference()[0]) < 0.05


def test_half_gradients_are_not_compressed(two_processes: Processes, tmp_path: Path) -> None:
    flags = ("--opt-level", "O5", "--compress-gradients")
    if amp.models.half_type(torch.bfloat16, torch.device("cpu")) != torch.bfloat16:
        pytest.skip("this CPU does not compute in bfloat16")
    with pytest.raises(AssertionError, match="--compress-gradients: .* leave it out"):
        two_processes(trained, str(tmp_path), *flags)


def tuned(delay: bool) -> tuple[list[bool], bool]:
    """Of models in apex_native's DDP, in torch's and in none: whether they average at once."""
    models = [DistributedDataParallel(nn.Linear(2, 1), delay_allreduce=delay)]
    models += [nn.parallel.DistributedDataParallel(nn.Linear(2, 1)), nn.Linear(2, 1)]
    args = Namespace(cuda_graphs=True, compress_gradients=False)
    with mock.patch.object(torch._dynamo.config, "optimize_ddp", True):
        training.tune_communication(args, *models)
        cuts = torch._dynamo.config.optimize_ddp
    return [bool(getattr(model, "_buckets", None)) for model in models], cuts


@pytest.mark.parametrize("delay", [False, True])
def test_cuda_graphs_are_whole_and_average_at_once(two_processes: Processes, delay: bool) -> None:
    assert two_processes(tuned, delay) == [([not delay, False, False], False)] * 2


def trained_on_bad_losses(output: str, is_late: bool) -> str:
    """The error of a run of four epochs of five steps, whose losses are nan after some seven."""
    calls, criterion = itertools.count(), task.criterion

    def breaks(*args: object) -> Tensor:
        return criterion(*args) * (1.0 if next(calls) < 8 else float("nan"))

    late = mock.patch.object(Meter, "is_late", is_late)
    broken = mock.patch.object(task, "criterion", breaks)
    with late, broken, pytest.raises(FloatingPointError) as error:
        trained(output, "--epochs", 4, "--opt-level", "O0")
    return str(error.value)


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "as on a GPU"])
def test_bad_losses_end_the_last_epoch(
    two_processes: Processes, tmp_path: Path, is_late: bool
) -> None:
    for error in two_processes(trained_on_bad_losses, str(tmp_path), is_late):
        assert re.match(r"\d+ losses in a row, up to step 20, are not finite", error)


@pytest.mark.parametrize("level", LEVELS)
def test_all_of_it_resumes_exactly(two_processes: Processes, tmp_path: Path, level: str) -> None:
    flags = ("--opt-level", level, *ACCUMULATED, "--clip-grad", 0.1, "--ema", 0.9)
    (whole, _), _ = two_processes(trained, str(tmp_path / "whole"), *flags)
    stopped = str(tmp_path / "stopped")
    (state, _), _ = two_processes(trained, stopped, *flags, "--steps", 4)
    assert (state["epoch"], state["step"], state["samples"]) == STOPPED
    (resumed, _), _ = two_processes(trained, stopped, *flags, "--resume", "auto")
    for part in ("model", "ema"):
        torch.testing.assert_close(resumed[part], whole[part], rtol=0, atol=0)
    assert (resumed["step"], resumed["amp"]) == (whole["step"], whole["amp"])


def test_tied_weights_are_averaged_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    ema = training.Ema(model, 0.9)
    before = model[0].weight.detach().clone()
    ema.update({name: torch.zeros(2, 2) for name in model.state_dict()})
    torch.testing.assert_close(ema.module[0].weight, 0.9 * before)


def test_the_schedule_in_steps() -> None:
    args = Namespace(schedule="step", epochs=9, warmup_epochs=2.0)
    rates = [main.schedule(args, epoch) for epoch in (0.5, 2, 2.9, 3, 5.9, 6, 8.9)]
    assert rates == pytest.approx([0.25, 1, 1, 0.1, 0.1, 0.01, 0.01])


def test_no_schedule() -> None:
    args = Namespace(schedule="none", epochs=9, warmup_epochs=0.0)
    assert [main.schedule(args, epoch) for epoch in (0, 0.1, 5, 9)] == [1, 1, 1, 1]


def test_the_cosine_schedule() -> None:
    """From 1 after the warm-up over 0.5 half way to 0 at the end."""
    args = Namespace(schedule="cosine", epochs=10, warmup_epochs=2.0)
    rates = [main.schedule(args, epoch) for epoch in (1, 2, 4, 6, 8, 10, 11)]
    assert rates == pytest.approx([0.5, 1, 0.853553, 0.5, 0.146447, 0, 0], abs=1e-6)


# Weights to begin with, and parts that are frozen


def test_weights_of_other_classes_are_taken_but_for_the_head(tmp_path: Path) -> None:
    file = str(tmp_path / "weights.pt")
    ten, four = (torchvision.models.resnet18(num_classes=count) for count in (10, 4))
    torch.save({"model": nn.DataParallel(ten).state_dict()}, file)
    said = weights.load(four, file, "resnet18")
    assert said == f"weights of {file}, but for fc.weight, fc.bias: 10 classes there, 4 here"
    torch.testing.assert_close(four.conv1.weight, ten.conv1.weight, rtol=0, atol=0)
    torch.save({"model": four.state_dict(), "ema": ten.state_dict()}, file)  # predict.py's choice
    assert weights.load(four, file, "resnet18").startswith(said)
    with pytest.raises(UserError, match="another model than --arch resnet34"):
        weights.load(torchvision.models.resnet34(num_classes=4), file, "resnet34")
    narrow, wide = map(torchvision.models.get_model, ("shufflenet_v2_x0_5", "shufflenet_v2_x1_0"))
    torch.save(narrow.state_dict(), file)  # of the same names
    with pytest.raises(UserError, match="another model"):
        weights.load(wide, file, "shufflenet_v2_x1_0")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("no.pt", "there is no such file"),
        (__file__, "it holds no weights"),
        ("IMAGENET1K_V1", r"resnet18-f37072fd.pth can't be downloaded .*; put that file into"),
    ],
)
def test_weights_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "urlopen", mock.Mock(side_effect=URLError("no network")))
    with pytest.raises(UserError, match=words):
        weights.load(torchvision.models.resnet18(), source, "resnet18")


@pytest.mark.parametrize(
    "weight",
    [torch.ones(10, 512).to_sparse(), torch.ones(10, 512, device="meta"), None],
    ids=["sparse", "meta", "none"],
)
def test_weights_without_their_numbers(tmp_path: Path, weight: torch.Tensor | None) -> None:
    file, model = tmp_path / "weights.pt", torchvision.models.resnet18(num_classes=10)
    torch.save(model.state_dict() | {"fc.weight": weight}, file)
    with pytest.raises(UserError, match="it holds no weights"):
        weights.load(model, str(file), "resnet18")


class Hostile:
    def __reduce__(self) -> tuple:
        return print, ("this is run",)


def test_downloaded_weights_run_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Nor do those that another program has put where torchvision keeps them."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    path = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    path.parent.mkdir(parents=True)
    torch.save({"conv1.weight": Hostile()}, path)
    with pytest.raises(UserError, match=f"{path} holds no weights; remove it"):
        weights.load(torchvision.models.resnet18(), "DEFAULT", "resnet18")
    assert not capsys.readouterr().out


@pytest.mark.parametrize(("terminal", "rank"), [(True, 0), (False, 0), (True, 1)])
def test_a_download_shows_a_bar_to_a_terminal_once(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, rank: int
) -> None:
    model = torchvision.models.resnet18()
    get = mock.Mock(return_value=model.state_dict())
    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", get)
    monkeypatch.setattr(sys, "stderr", mock.Mock(isatty=lambda: terminal))
    monkeypatch.setenv("RANK", str(rank))
    assert weights.load(model, "DEFAULT", "resnet18") == "weights of DEFAULT"
    assert get.call_args.kwargs["progress"] == (terminal and not rank)


def test_a_frozen_part_computes_as_in_validation() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2))
    said = training.freeze(model, ["0"], [model])
    assert said == "28 of 38 parameters are frozen"
    before = copy.deepcopy(model[0].state_dict())
    with training.evaluation(model):
        assert not model.training
    assert model.training
    images = 5 * torch.randn(8, 4)
    model(images).sum().backward()
    torch.testing.assert_close(model[0].state_dict(), before, rtol=0, atol=0)
    with pytest.raises(UserError, match="no such part; it has 0, 1"):
        training.freeze(model, ["layer1"], [model])
    with pytest.raises(UserError, match="nothing is left to train in the model"):
        training.freeze(model, ["1"], [model])
    model.requires_grad_(True)
    with pytest.raises(UserError, match="nothing is left to train in 1"):
        training.freeze(model, ["1"], [*model])


# % if sync_bn

# % if task != "contrastive"


def with_norms() -> contextlib.AbstractContextManager:
    return mock.patch.object(tiny, "build_model", tiny.build_normed)


def trained_with_norms(*args: object) -> tuple[dict, list[bool]]:
    torch.backends.cudnn.allow_tf32 = False  # as the reference, which is on the CPU
    with with_norms():
        return trained(*args)


def check_groups(processes: Processes, tmp_path: Path, level: str, size: int) -> None:
    """Processes of a group normalise as one; what they train is what one process does."""
    flags = ("--sync-bn-group", size, "--opt-level", level)
    (state, _), _ = processes(trained_with_norms, str(tmp_path), *flags)
    with with_norms():
        halves = reference(groups_of=lambda chosen: [chosen[::2], chosen[1::2]])[0]
        whole = reference()[0]
        right, wrong = (halves, whole) if size == 1 else (whole, halves)
        off = distance(state["model"], right)
        assert off < NEAR[level]
        assert distance(state["model"], wrong) > 2 * off


@pytest.mark.parametrize("level", LEVELS)
def test_a_process_can_normalise_by_itself(
    two_processes: Processes, tmp_path: Path, level: str
) -> None:
    check_groups(two_processes, tmp_path, level, 1)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", [1, 2])
def test_gpus_of_a_group_normalise_as_one(
    two_gpus: Processes, tmp_path: Path, level: str, size: int
) -> None:
    check_groups(two_gpus, tmp_path, level, size)


# % endif


def grouped(output: str, size: int) -> list[int]:
    """How many processes share statistics, in each conversion of a run."""
    sizes = []

    def recording(model: nn.Module, process_group: dist.ProcessGroup | None) -> nn.Module:
        sizes.append(dist.get_world_size(process_group))
        return model

    with mock.patch("apex_native.parallel.convert_syncbn_model", recording):
        trained(output, "--sync-bn-group", size, "--steps", 1)
    return sizes


def test_statistics_are_shared_in_groups(two_processes: Processes, tmp_path: Path) -> None:
    for size, processes in ((0, 2), (1, 1), (2, 2)):
        assert two_processes(grouped, str(tmp_path / str(size)), size) == [[processes]] * 2
    with pytest.raises(AssertionError, match="--sync-bn-group 3 must divide 2 processes"):
        two_processes(grouped, str(tmp_path / "3"), 3)


# % endif

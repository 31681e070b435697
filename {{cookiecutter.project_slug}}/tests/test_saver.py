"""What a run is saved with, and how it ends when its numbers have gone bad."""

import random
from argparse import Namespace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import Processes
from torch import nn

from apex_native import amp
from engine import checkpoint, distributed, finite, rng
from engine.report import Log, Report
from engine.saver import Saver


def draws() -> list[float]:
    return [random.random(), np.random.random(), torch.rand(()).item()]


def test_random_numbers_go_on() -> None:
    rng.seed(3)
    random.gauss(0, 1)
    state = rng.state()
    expected = draws()
    rng.restore(state)
    assert draws() == expected


def ask_in_turn() -> list[list[int]]:
    agreement = distributed.Agreement(dist.new_group(backend="gloo"), 2)
    answers = []
    for step in range(5):
        answers.append(agreement.answer())
        agreement.ask(15 if dist.get_rank() == 1 and step == 2 else 0, dist.get_rank() == 0)
    return answers


def test_what_one_process_asks_all_know_after_the_same_step(two_processes: Processes) -> None:
    first, second = two_processes(ask_in_turn)
    assert first == second == [[0, 0], [0, 1], [0, 1], [15, 1], [0, 1]]


def flags(folder: str, **changed: object) -> Namespace:
    """Those of main.py that a Saver knows."""
    given = {"save_every": None, "keep": 2, "timeout": 60, "arch": "linear", "data": None}
    return Namespace(output=Path(folder), **given | changed)


def saved_and_resumed(folder: str) -> tuple[list, list, float]:
    """What each rank draws next, and has lost so far, before and after a resume."""
    args = flags(folder, save_every="2")
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    saver = Saver(args, model, optimizer, amp, lambda line: None)
    rng.seed(rng.mixed(0, dist.get_rank()))
    meter = Report(args.output, 1, "metric").meter(torch.device("cpu"), 1)
    saver.watch.start = lambda: None  # the signals of a test are its own
    for _ in saver.steps(range(4), meter):
        meter.add(torch.tensor(dist.get_rank() + 0.5))
        saver.progress.step += 1
        saver.progress.samples += 8
        draws()
    saver.finish()
    dist.barrier()
    expected = draws()
    rng.seed(99)

    again = Saver(args, model, optimizer, amp, lambda line: None)
    again.resume(Path("auto"), 10)
    assert vars(again.progress) == {"epoch": 0, "step": 4, "samples": 32, "best": -float("inf")}
    next(again.steps([0], meter := Report(args.output, 1, "metric").meter(torch.device("cpu"), 1)))
    return expected, draws(), meter.results()["train_loss"]


def test_each_rank_goes_on_with_its_own_random_numbers(
    two_processes: Processes, tmp_path: Path
) -> None:
    ranks = two_processes(saved_and_resumed, str(tmp_path))
    for expected, resumed, loss in ranks:
        assert resumed == expected
        assert loss == 1.0
    assert ranks[0][0] != ranks[1][0]
    assert {path.name for path in tmp_path.iterdir()} == {"step-2.pt", "step-4.pt", "last.pt"}


@pytest.mark.gpu
def test_a_save_pins_no_memory_of_its_own(tmp_path: Path) -> None:
    """It would hold up the training for some steps; what the first step has pinned serves."""
    if not hasattr(torch.cuda, "host_memory_stats"):
        pytest.skip("torch 2.6 doesn't count what it pins")
    processes = Processes("nccl", 1)
    try:
        [(first, later)] = processes(pinned_blocks, str(tmp_path))
    finally:
        processes.stop()
    assert later == first > 0


def pinned_blocks(folder: str) -> tuple[int, int]:
    """How many blocks torch has pinned after the first step, and after the saves of the others."""
    args = flags(folder, save_every="2")
    model = nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 3)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    saver = Saver(args, model, optimizer, amp, lambda line: None)
    saver.watch.start = lambda: None  # the signals of a test are its own
    meter = Report(args.output, 1, "metric").meter(torch.device("cuda"), 1)
    counts = []
    for _ in saver.steps(range(7), meter):
        counts.append(torch.cuda.host_memory_stats()["num_host_alloc"])
        loss = 1e-3 * model(torch.randn(4, 300).cuda()).sum()  # no overflow skips the first step
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        saver.progress.step += 1
        saver.wait()
    return counts[1], counts[-1]


def best_after_a_resume(folder: str, other: str) -> list[float]:
    """The best result that is known when a run goes on, in its folder and in another one."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    bests = []
    for output in (folder, folder, other):
        parts = (flags(output), model, optimizer, amp, lambda line: None)
        saver = Saver(*parts)
        if not bests:
            saver.save(0.75)
            saver.finish()
            dist.barrier()
        else:
            saver.resume(Path(folder, "last.pt"), 10)
        bests.append(saver.progress.best)
    return bests


def test_a_run_that_goes_on_elsewhere_has_a_best_of_its_own(
    two_processes: Processes, tmp_path: Path
) -> None:
    folders = [tmp_path / "there", tmp_path / "here"]
    for folder in folders:
        folder.mkdir()
    bests, _ = two_processes(best_after_a_resume, *map(str, folders))
    assert bests == [0.75, 0.75, -float("inf")]


def best_after_a_failed_write(folder: str) -> tuple[float, float, list[str]]:
    said = []
    args = flags(folder, save_every="1m")
    model = nn.Linear(3, 3)
    saver = Saver(args, model, torch.optim.SGD(model.parameters()), amp, said.append)
    write = checkpoint.write
    for step, result in enumerate((0.5, 0.9, 0.8), 1):
        saver.progress.step = step
        checkpoint.write = write if result != 0.9 else mock.Mock(side_effect=OSError(28, "full"))
        saver.save(result)
        saver.wait()
    dist.barrier()
    best = torch.load(Path(folder, "best.pt"), weights_only=True)
    return best["best"], saver.progress.best, said


def test_the_best_is_the_best_that_is_on_the_disk(two_processes: Processes, tmp_path: Path) -> None:
    (saved, known, said), _ = two_processes(best_after_a_failed_write, str(tmp_path))
    assert saved == known == 0.8
    assert len(said) == 1 and "step-2.pt could not be written (full)" in said[0]


def steps_of_saves(folder: str) -> list[str]:
    """Which checkpoints there are after ten steps of a quarter of a minute each, one a minute."""
    args = flags(folder, save_every="1m", keep=9)
    model = nn.Linear(3, 3)
    saver = Saver(args, model, torch.optim.SGD(model.parameters()), amp, lambda line: None)
    saver.watch.start = lambda: None
    meter = Report(args.output, 1, "metric").meter(torch.device("cpu"), 1)
    for _ in saver.steps(range(10), meter):
        meter.add(torch.tensor(1.0))
        saver.progress.step += 1
        saver.saved_at -= 15
    saver.finish()
    dist.barrier()
    return sorted(path.name for path in args.output.glob("step-*.pt"))


def test_a_save_can_come_by_the_clock(two_processes: Processes, tmp_path: Path) -> None:
    """All processes agree on it after the next step."""
    names, _ = two_processes(steps_of_saves, str(tmp_path))
    assert names == ["step-10.pt", "step-5.pt"]


@pytest.mark.parametrize(
    "change", [{"losses": 5}, {"losses": ("many", 1)}, {"rng": 5}, {"rng": {"python": 2**70}}]
)
def test_an_altered_state_of_a_process_is_refused(
    two_processes: Processes, tmp_path: Path, change: dict
) -> None:
    with pytest.raises(AssertionError, match="the state of its processes, or .* use another one"):
        two_processes(resumed_with, str(tmp_path), change)


def resumed_with(folder: str, change: dict) -> None:
    args = flags(folder)
    model = nn.Linear(3, 3)
    parts = (args, model, torch.optim.SGD(model.parameters()), amp, lambda line: None)
    saver = Saver(*parts)
    saver.save()
    saver.finish()
    dist.barrier()
    path = Path(folder, "last.pt")
    state = torch.load(path, weights_only=True)
    state["ranks"] = [rank | change for rank in state["ranks"]]
    own = path.with_name(f"{dist.get_rank()}.pt")
    torch.save(state, own)
    Saver(*parts).resume(own, 10)


@pytest.mark.gpu(2)
def test_random_numbers_of_each_gpu_go_on() -> None:
    """DataParallel's threads draw on all of them."""
    rng.seed(0)
    state = rng.state()
    expected = [torch.rand(3, device=f"cuda:{index}").tolist() for index in range(2)]
    rng.restore(state)
    assert [torch.rand(3, device=f"cuda:{index}").tolist() for index in range(2)] == expected


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (lambda net, images: images.fill_(float("inf")), "goes into the model is not finite"),
        (lambda net, images: net[2].weight.data.fill_(float("nan")), "is 2, in its weights"),
        (lambda net, images: net[1].running_mean.fill_(float("nan")), "is 1, in its statistics"),
        (lambda net, images: net[0].weight.data.fill_(3e38), "output is not finite is 0"),
        (lambda net, images: None, "the loss is not"),
    ],
)
def test_the_first_layer_that_is_not_finite_is_named(break_it: object, named: str) -> None:
    net, images = Net(), torch.randn(8, 4)
    break_it(net, images)
    fine = Log(10, 0.1, 1.0, bad=finite.PATIENCE - 1.0, loss_scale=1.0, images_per_second=1.0)
    for log in (None, fine):
        finite.demand(log, net, images)
    for change in ({"bad": float(finite.PATIENCE)}, {"loss_scale": 2.0**-20}):
        with pytest.raises(FloatingPointError, match=named):
            finite.demand(fine._replace(**change), net, images)
    assert net.training


def test_losses_in_a_row_that_are_not_finite_are_counted() -> None:
    meter = Report(Path("unused"), 1, "metric").meter(torch.device("cpu"), 1)
    for loss, bad in ((1.0, 0), (float("nan"), 1), (float("inf"), 2), (2.0, 0), (float("nan"), 1)):
        meter.add(torch.tensor(loss))
        assert meter.bad.item() == bad

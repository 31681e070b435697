"""The time of a training step: of the generated project, of real Apex, and of loops by other means.

    python benchmarks/step.py --contestants project-O1,torch-fp16 [--gpus 2] [--batch-size 256]

Each contestant is an ordinary script that trains on one synthetic batch: the project's own main.py,
a loop in peers/, or any file given by its path. It runs unchanged, in a process of its own (or in
one for each GPU, as under torchrun), but turnstile.py lets it train only in its turn. They warm up
one after the other, then take turns, in another order each round, so that the GPU's clocks and heat
are the same for all. With --starts they are all started again, because cuDNN may choose other
algorithms then. Prints a table, and writes every turn to step.csv.

Contestants are named KIND[-OPTION...][-PRECISION]:

    project             main.py on apex_native: O0 to O5; options adam, compile, graphs (CUDA's),
                        saving (a checkpoint every 25 steps); with several GPUs syncbn, torchddp,
                        bf16grads (--compress-gradients)
    apex                the same main.py on real Apex: O0 to O3; options adam, syncbn, torchddp
    apex_channels_last  Apex's amp by hand on channels_last weights, without its DDP: O0 to O3; adam
    apex_snippet        the loop of the usual snippet: O1, NCHW, Apex's DDP
    torch               torch alone, by hand: fp16, fp32, bf16; options adam, syncbn, compile,
                        graphs
    fabric, accelerate  Lightning Fabric, Hugging Face Accelerate: fp16, fp32, bf16; option adam

Without an option: SGD with momentum, each process's own batch norm, the kind's own DDP with several
GPUs (and on one where its script has it). Without a precision: O1 or fp16. A ratio is to torch by
hand of the same optimizer and precision; for other kinds than torch, of the same options too, if
such a one takes part.
"""

import argparse
import csv
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from datetime import date
from functools import cache
from importlib import metadata, util
from multiprocessing import Pipe, connection
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from cookiecutter.main import cookiecutter
from flags import file_name, whole_number

HERE = Path(__file__).resolve().parent
PEERS = HERE / "peers"
sys.path[:0] = [str(HERE.parent / "tests"), str(PEERS)]
from common import LR, is_segmentation, usual_size  # noqa: E402
from fresh import copy_template  # noqa: E402
from ports import free_port  # noqa: E402

PROJECT_EPOCH = 100  # DUMMY_STEPS of main.py, after which it validates and saves
# What says how large the images of main.py's --dummy are.
IN_TASK_PY = {"classification": "ImageSpec(size=224)", "segmentation": "SIZE = 512"}
PATIENCE_S = 300  # for a first step with compilation; a turn takes seconds
LAST_LINES = 15

APEX = ("apex", "amp_C")
LEVELS = {"O1": "fp16", "O0": "fp32", "O2": "fp16", "O3": "fp16", "O4": "bf16", "O5": "bf16"}
APEX_LEVELS = {level: LEVELS[level] for level in ("O1", "O0", "O2", "O3")}
TYPES = {name: name for name in ("fp16", "fp32", "bf16")}


class Kind(NamedTuple):
    """What contestants of one kind have in common."""

    script: Path | None  # None is the project's main.py
    needs: tuple[str, ...] = ()  # packages
    options: tuple[str, ...] = ()
    precisions: dict[str, str] = {}  # the first is the default; the values are torch's names


COMPILED = ("compile", "graphs")
ON_TORCH = ("adam", "syncbn", *COMPILED)
IN_PROJECT = ("adam", "syncbn", "torchddp")
KINDS = {
    "project": Kind(None, (), (*IN_PROJECT, *COMPILED, "bf16grads", "saving"), LEVELS),
    "apex": Kind(None, APEX, IN_PROJECT, APEX_LEVELS),
    "apex_channels_last": Kind(PEERS / "apex_channels_last.py", APEX, ("adam",), APEX_LEVELS),
    "apex_snippet": Kind(PEERS / "apex_snippet.py", APEX, (), {"O1": "fp16"}),
    "torch": Kind(PEERS / "torch_plain.py", (), ON_TORCH, TYPES),
    "fabric": Kind(PEERS / "with_fabric.py", ("lightning",), ("adam",), TYPES),
    "accelerate": Kind(PEERS / "with_accelerate.py", ("accelerate",), ("adam",), TYPES),
}


class Contestant(NamedTuple):
    """A name that was read; `precision` is "" for a script given by its path."""

    name: str
    kind: Kind
    options: frozenset[str] = frozenset()
    precision: str = ""

    def references(self) -> list[str]:
        """The names of torch by hand that this one is held against, the better ones first."""
        if not self.precision:
            return []
        precision = self.kind.precisions[self.precision]
        plain = torch_name(self.options & {"adam"}, precision)
        is_torch = self.kind is KINDS["torch"]
        return [plain] if is_torch else [torch_name(self.options, precision), plain]


def torch_name(options: Iterable[str], precision: str) -> str:
    """One name for each contestant of the kind torch, however its options were ordered."""
    return "-".join(["torch", *(option for option in ON_TORCH if option in options), precision])


def read_name(name: str, optimizer: str) -> Contestant:
    """The contestant called `name`. Raises ValueError if there is none."""
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise ValueError(f"there is no file {name}")
        return Contestant(Path(name).stem, Kind(Path(name).resolve()))
    kind_name, *options = name.split("-")
    if kind_name not in KINDS:
        raise ValueError(f"{name}: there is no kind {kind_name}, but {', '.join(KINDS)}")
    kind = KINDS[kind_name]
    precision = options.pop() if options and options[-1] in kind.precisions else ""
    unknown = set(options).difference(kind.options)
    if unknown:
        raise ValueError(f"{name}: {kind_name} has no {', '.join(sorted(unknown))}")
    if optimizer == "adamw":
        options.append("adam")
    return Contestant(name, kind, frozenset(options), precision or next(iter(kind.precisions)))


def obstacle(contestant: Contestant, gpus: int, device: str) -> str | None:
    """Why `contestant` can't take part here, or None."""
    absent = [name for name in contestant.kind.needs if util.find_spec(name) is None]
    if absent:
        return f"{' and '.join(absent)} can't be imported"
    if contestant.kind.needs == APEX and device == "cpu":
        return "Apex needs a GPU"
    if contestant.kind is KINDS["apex_channels_last"] and gpus > 1:
        return "it has no DDP, so it runs on one GPU only"
    shared = contestant.options & {"syncbn", "torchddp", "bf16grads"}
    if contestant.kind.script is None and gpus == 1 and shared:
        return f"main.py has no {' and no '.join(sorted(shared))} in one process"
    return None


def command(contestant: Contestant, args: argparse.Namespace, folder: Path) -> list[str]:
    """The script and its flags; what it needs and makes is in `folder`."""
    kind, options, precision = contestant.kind, contestant.options, contestant.precision
    if not precision:
        return [str(kind.script)]
    optimizer = "adamw" if "adam" in options else "sgd"
    flags = ["--arch", args.arch, "--batch-size", str(args.batch_size)]
    flags += ["--compile"] if "compile" in options else []
    flags += ["--cuda-graphs"] if "graphs" in options else []
    if kind.script is None:
        answers = {
            "task": "segmentation" if is_segmentation(args.arch) else "classification",
            "fused_adam": "yes" if "adam" in options else "no",
            "sync_bn": "yes" if "syncbn" in options else "no",
            "ddp": "torch" if "torchddp" in options else "apex",
        }
        script = main_py(folder, args.image_size, **answers)
        flags += ["--compress-gradients"] if "bf16grads" in options else []
        flags += ["--save-every", "25"] if "saving" in options else []
        flags += ["--backend", "apex" if kind.needs else "native", "--opt-level", precision]
        # The time of a kernel depends on the numbers, and those on the learning rate.
        flags += ["--lr", str(LR[optimizer]), "--schedule", "none", "--warmup-epochs", "0"]
        flags += ["--dummy", "--epochs", "1000", "--output", tempfile.mkdtemp(dir=folder)]
    else:
        script = kind.script
        flags += ["--image-size", str(args.image_size)]
        flags += ["--precision", precision]
        flags += ["--optimizer", optimizer]
        flags += ["--sync-bn"] if "syncbn" in options else []
    return [str(script), *flags]


@cache
def main_py(folder: Path, image_size: int | None = None, **answers: str) -> Path:
    """main.py of a project that the template makes in `folder`; its --dummy has such images."""
    template, output = (Path(tempfile.mkdtemp(dir=folder)) for _ in range(2))
    copy_template(template)
    project = cookiecutter(
        str(template),
        no_input=True,
        default_config=True,
        extra_context=answers,
        output_dir=str(output),
    )
    if image_size:  # as an owner would change it
        task, old = Path(project) / "task.py", IN_TASK_PY[answers["task"]]
        new = re.sub(r"\d{2,}", str(image_size), old)
        assert task.read_text().count(old) == 1
        task.write_text(task.read_text().replace(old, new))
    return Path(project) / "main.py"


class Lost(Exception):
    """A contestant has ended, or gives no sign of life. The message says what is known."""


class Running:
    """A contestant's processes: one, or one for each GPU."""

    def __init__(self, contestant: Contestant, args: argparse.Namespace, folder: Path) -> None:
        self.name = contestant.name
        self.replays = "graphs" in contestant.options  # what graphs keep, torch does not count
        self.logs = [folder / f"{self.name}-{rank}.log" for rank in range(args.gpus)]
        self.pipes: list[connection.Connection] = []
        self.processes: list[subprocess.Popen] = []
        self.is_alive = True
        script, *flags = command(contestant, args, folder)
        port = free_port()
        for rank, log in enumerate(self.logs):
            ours, theirs = Pipe()
            counts = (args.warmup, args.settle, args.block)
            numbers = map(str, (theirs.fileno(), *counts))
            with log.open("w") as file:
                process = subprocess.Popen(
                    [sys.executable, HERE / "turnstile.py", *numbers, script, *flags],
                    cwd=Path(script).parent,
                    env=environment(rank, args.gpus, port, args.device),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def answer(self) -> list:
        """What each process says next. Raises Lost if one of them ends, or is silent for long."""
        said, deadline = {}, time.monotonic() + PATIENCE_S
        while len(said) < len(self.pipes):
            silent = [pipe for pipe in self.pipes if pipe not in said]
            ready = connection.wait(silent, deadline - time.monotonic())
            if not ready:
                raise Lost(f"{self.name} gave no sign of life for {PATIENCE_S} s")
            for pipe in ready:
                try:
                    said[pipe] = pipe.recv()
                except EOFError:
                    raise self._lost(pipe) from None
        return list(said.values())

    def go_on(self) -> list:
        """Lets each process run until it says something again; raises Lost as `answer` does."""
        for pipe in self.pipes:
            try:
                pipe.send("go")
            except BrokenPipeError:
                raise self._lost(pipe) from None
        return self.answer()

    def _lost(self, pipe: connection.Connection) -> Lost:
        rank = self.pipes.index(pipe)
        who = f"rank {rank} of {self.name}" if len(self.pipes) > 1 else self.name
        status = self.processes[rank].wait()
        words = self.logs[rank].read_text(errors="replace").splitlines()[-LAST_LINES:]
        return Lost("\n    ".join([f"{who} ended with status {status}; its last words:", *words]))

    def kill(self) -> None:
        """Ends the processes and what they have started."""
        self.is_alive = False
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def environment(rank: int, size: int, port: int, device: str) -> dict[str, str]:
    """As torchrun makes it for several processes; for one, as it is at a prompt."""
    cores = os.cpu_count() or 1
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // size))),
    }
    if device == "cpu":
        variables |= {"CUDA_VISIBLE_DEVICES": ""}
    if size > 1:
        variables |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))
        variables |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "step"}
    return os.environ | variables


class Turn(NamedTuple):
    """A row of step.csv: the slowest process's seconds per step, the largest one's peak bytes.

    0 bytes: not known.
    """

    contestant: str
    round: int
    seconds: float
    memory: int


def compete(
    contestants: list[tuple[Contestant, argparse.Namespace]],
    rounds: int,
    folder: Path,
    starts: int = 1,
) -> Iterator[Turn]:
    """Starts `contestants`, each by its own arguments, so many times, and yields their turns."""
    # They end with the program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for first in range(0, starts * rounds, rounds):
        with ExitStack() as stack:
            running = []
            for contestant, args in contestants:
                running.append(Running(contestant, args, folder))
                stack.callback(running[-1].kill)
            started = [entrant for entrant, _ in survivors(running, Running.answer)]
            # One after the other: cuDNN chooses its algorithms by their time.
            warm = []
            for entrant, _ in survivors(started, Running.go_on):
                say(f"{entrant.name} is warm")
                warm.append(entrant)
            for number in range(first, first + rounds):
                for entrant, said in survivors(in_order(warm, number), Running.go_on):
                    seconds, memory = map(max, zip(*said, strict=True))
                    yield Turn(entrant.name, number, seconds, 0 if entrant.replays else memory)
                say(f"round {number + 1} of {starts * rounds} is over")


def survivors(
    running: list[Running], act: Callable[[Running], list]
) -> Iterator[tuple[Running, list]]:
    """Each of `running` that lives to give an answer to `act`, and its answer."""
    for entrant in running:
        if entrant.is_alive:
            try:
                said = act(entrant)
            except Lost as lost:
                say(str(lost))
                entrant.kill()
            else:
                yield entrant, said


def in_order(items: list, number: int) -> list:
    """`items`, beginning with another one each round, and backwards every other round."""
    start = number % max(1, len(items))
    order = items[start:] + items[:start]
    return order[::-1] if number % 2 else order


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def table(contestants: list[Contestant], turns: list[Turn], args: argparse.Namespace) -> str:
    """Time, speed, ratio and memory, in Markdown, of those that had all their turns."""
    times = {
        one.name: [t.seconds for t in turns if t.contestant == one.name] for one in contestants
    }
    finished = [one for one in contestants if len(times[one.name]) == args.starts * args.rounds]
    torches = [one for one in finished if one.kind is KINDS["torch"]]
    by_hand = {torch_name(one.options, one.precision): one.name for one in torches}
    rows = [["contestant", "ms/step", "min – max", "images/s", "ratio", "to", "peak GiB"]]
    rows.append(["---"] * len(rows[0]))
    for one in finished:
        own = times[one.name]
        to = next((by_hand[name] for name in one.references() if name in by_hand), None)
        memory = max(turn.memory for turn in turns if turn.contestant == one.name)
        rows.append(
            [
                one.name,
                f"{median(own) * 1e3:.2f}",
                f"{min(own) * 1e3:.2f} – {max(own) * 1e3:.2f}",
                f"{args.batch_size * args.gpus / median(own):.0f}",
                f"{median(own) / median(times[to]):.3f}" if to else "–",
                to or "–",
                f"{memory / 2**30:.1f}" if memory else "–",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def conditions(args: argparse.Namespace) -> str:
    """When, on what, with which versions, and by which command."""
    on_gpu = args.device == "cuda"
    on = torch.cuda.get_device_name() if on_gpu else f"CPU, {os.cpu_count()} cores"
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if on_gpu:
        versions.append(f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    for package in ("torchvision", "lightning", "accelerate"):
        if util.find_spec(package):
            versions.append(f"{package} {metadata.version(package)}")
    words = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return f"{date.today()}, {args.gpus} × {on}, {', '.join(versions)}\n\n    {words}\n"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, positive = parser.add_argument, whole_number
    add("--contestants", required=True, help="their names, with commas between them")
    add("--gpus", type=positive, default=1, help="processes of each contestant")
    add("--device", choices=("cuda", "cpu"), default=None, help="default: cuda if there is one")
    add("--arch", default="resnet50", help="one of torchvision's models")
    add("--batch-size", type=positive, default=256, help="of each process")
    add("--image-size", type=positive, help="default: the project's, 224, or 512 of segmentation")
    add("--optimizer", choices=("sgd", "adamw"), default="sgd", help="adamw: adam for every name")
    add_turns(parser, rounds=7)
    add("--at-once", type=positive, help="how many take turns with each other (default: all)")
    add("--output", type=file_name, default=HERE / "step.csv")
    args = parser.parse_args()
    args.image_size = args.image_size or usual_size(args.arch)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.contestants = read_contestants(parser, args, args.optimizer)
    return args


def add_turns(parser: argparse.ArgumentParser, rounds: int) -> None:
    """The flags that say how contestants take turns."""
    add, positive = parser.add_argument, whole_number
    add("--warmup", type=positive, default=10, help="steps before the first turn")
    add("--settle", type=positive, default=2, help="a turn's first, untimed; memory is taken again")
    help_of_block = "timed steps of a turn; 10 has one log of main.py"
    add("--block", type=positive, default=10, help=help_of_block)
    add("--rounds", type=positive, default=rounds, help="turns of each")
    add("--starts", type=positive, default=1, help="so many times --rounds, all started anew")


def read_contestants(
    parser: argparse.ArgumentParser, args: argparse.Namespace, optimizer: str
) -> list[Contestant]:
    """Those that --contestants names; one line and the end, where they can't take these turns."""
    names = dict.fromkeys(args.contestants.split(","))
    try:
        contestants = [read_name(name, optimizer) for name in names]
    except ValueError as error:
        parser.error(str(error))
    steps = args.warmup + args.rounds * (args.settle + args.block)
    if steps > PROJECT_EPOCH and any(one.kind.script is None for one in contestants):
        parser.error(
            f"main.py validates and saves after {PROJECT_EPOCH} steps, and this would be {steps}: "
            "take a smaller --warmup, --settle, --block or --rounds"
        )
    return contestants


def main() -> int:
    args = parse_args()
    present = []
    for contestant in args.contestants:
        reason = obstacle(contestant, args.gpus, args.device)
        if reason:
            say(f"{contestant.name} is left out: {reason}")
        else:
            present.append(contestant)

    turns = []
    size = args.at_once or max(1, len(present))
    with tempfile.TemporaryDirectory() as folder, args.output.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Turn._fields)
        for first in range(0, len(present), size):
            group = [(one, args) for one in present[first : first + size]]
            for turn in compete(group, args.rounds, Path(folder), args.starts):
                turns.append(turn)
                writer.writerow([turn.contestant, turn.round, f"{turn.seconds:.7f}", turn.memory])
                file.flush()  # a run that is cut short leaves what it has measured
    print(conditions(args))
    print(table(present, turns, args))
    return int(len(turns) < len(present) * args.starts * args.rounds)


if __name__ == "__main__":
    sys.exit(main())

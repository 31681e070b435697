"""What `make demo` trains, beside the same by hand: the time to the first step, and from there on.

    python benchmarks/demo.py [--processes 2] [--epochs 4] [--rounds 5]

The generated project as it is, and peers/torch_digits.py, which torchrun starts: the same model,
digits, batches and precision, AdamW, a validation and a checkpoint after each epoch; without the
loss's scale that O1 has, and with it. They take turns, in another order each round; what they
import is read before the first. Prints medians, and the range.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from flags import whole_number
from step import PEERS, conditions, environment, free_port, in_order, main_py

# Of the default project.
TRAINING_DIGITS, BATCH, EPOCHS = 1437, 32, 10

TIMED = """
import itertools
import os
import runpy
import sys
import time
from torch.optim.optimizer import register_optimizer_step_post_hook

count = itertools.count(1)

def tell(*_):
    step = next(count)
    if step in (1, LAST) and os.environ["RANK"] == "0":
        print(f"step {step}: {time.monotonic()}", flush=True)
    if step == LAST:
        os._exit(0)

register_optimizer_step_post_hook(tell)
script = "SCRIPT"
sys.path[0] = os.path.dirname(script)
runpy.run_path(script, run_name="__main__")
"""


def timed(command: list[str | Path], variables: dict[str, str], last: int) -> tuple[float, float]:
    """Seconds until `command` says that it has had one step, and from there to the last."""
    began = time.monotonic()
    with subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        said = process.stdout.read()
    found = dict(re.findall(r"^step (\d+): (.*)", said, re.MULTILINE))
    if len(found) < 2:
        sys.exit(f"it did not have its steps:\n{said}")
    first = float(found["1"])
    return first - began, float(found[str(last)]) - first


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=whole_number, default=2)
    parser.add_argument("--epochs", type=whole_number, default=4)
    parser.add_argument("--rounds", type=whole_number, default=5)
    args = parser.parse_args()
    if args.epochs >= EPOCHS:
        parser.error(f"--epochs: one more step than these is timed, and the runs have {EPOCHS}")
    last = 1 + args.epochs * (TRAINING_DIGITS // (BATCH * args.processes))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def wrapped(script: Path) -> Path:
            kept = script.rename(script.with_name("kept.py"))
            script.write_text(TIMED.replace("SCRIPT", str(kept)).replace("LAST", str(last)))
            return script

        project = wrapped(main_py(folder)).parent
        loop = folder / "loop.py"
        loop.write_text((PEERS / "torch_digits.py").read_text())
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += [f"--nproc-per-node={args.processes}", wrapped(loop), "--project", project]
        commands = {
            "./run.sh": [project / "run.sh"],
            "torch by hand": torchrun,
            "torch by hand, with GradScaler": [*torchrun, "--scale-loss"],
        }
        variables = environment(0, 1, free_port(), "cpu")
        threads = max(1, len(os.sched_getaffinity(0)) // args.processes)  # as run.sh has it
        variables |= {"OMP_NUM_THREADS": str(threads)}
        variables |= {"PYTHON": sys.executable, "NPROC": str(args.processes)}
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for turn in range(args.rounds + 1):
            for name in in_order(list(commands), turn):
                output = ["--output", tempfile.mkdtemp(dir=folder)]
                took[name].append(timed([*commands[name], *output], variables, last))
    print(conditions(argparse.Namespace(device="cpu", gpus=args.processes)))
    said = f"{last - 1} steps and {args.epochs} validation{'s' * (args.epochs > 1)}"
    print(f"| s (range) | to the first step | {said} |")
    print("|---|---|---|")
    for name, (_, *times) in took.items():
        columns = zip(*times, strict=True)
        cells = [f"{median(one):.1f} ({min(one):.1f}–{max(one):.1f})" for one in columns]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

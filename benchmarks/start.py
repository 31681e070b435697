"""The time from the command to the end of the first step: of ./run.sh, and of torchrun with a loop.

    python benchmarks/start.py [--processes 2] [--rounds 5]

The generated project trains on its own data, on the CPU, as it is; the loop, peers/torch_plain.py,
on a synthetic batch of the same size, which it need not load. Both have ResNet-18 in bfloat16. They
take turns; what they import is read before the first. Prints the median, and the range.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from step import PEERS, conditions, environment, free_port, main_py, whole_number

FIRST_STEP = """
import os
import runpy
import sys
import time
from torch.optim.optimizer import register_optimizer_step_post_hook

def tell(*_):
    if os.environ["RANK"] == "0":
        print(f"first step: {time.monotonic()}", flush=True)
    os._exit(0)

register_optimizer_step_post_hook(tell)
script = "SCRIPT"
sys.path[0] = os.path.dirname(script)
runpy.run_path(script, run_name="__main__")
"""


def first_step(command: list[str | Path], variables: dict[str, str]) -> float:
    """Seconds until `command` says that it has had one."""
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
    found = re.search("^first step: (.*)", said, re.MULTILINE)
    if not found:
        sys.exit(f"it had no step:\n{said}")
    return float(found[1]) - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=whole_number, default=2)
    parser.add_argument("--rounds", type=whole_number, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project = main_py(folder)
        kept = project.rename(project.with_name("kept.py"))
        project.write_text(FIRST_STEP.replace("SCRIPT", str(kept)))
        loop = folder / "loop.py"
        loop.write_text(FIRST_STEP.replace("SCRIPT", str(PEERS / "torch_plain.py")))
        torchrun = ("-m", "torch.distributed.run", "--standalone")
        flags = ("--arch", "resnet18", "--batch-size", "32", "--image-size", "32")
        commands = {
            "./run.sh": [project.parent / "run.sh", "--output"],
            "torchrun, torch by hand": [
                *(sys.executable, *torchrun, f"--nproc-per-node={args.processes}"),
                *(loop, *flags, "--precision", "bf16"),
            ],
        }
        variables = environment(0, 1, free_port(), "cpu")
        variables |= {"PYTHON": sys.executable, "NPROC": str(args.processes)}
        took: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(args.rounds + 1):
            for name, command in commands.items():
                output = [folder / str(turn)] if name == "./run.sh" else []
                took[name].append(first_step([*command, *output], variables))
    print(conditions(argparse.Namespace(device="cpu", gpus=args.processes)))
    for name, (_, *seconds) in took.items():
        print(f"{name:24}{median(seconds):.1f} s ({min(seconds):.1f} – {max(seconds):.1f})")


if __name__ == "__main__":
    main()

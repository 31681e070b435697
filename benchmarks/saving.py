"""How long training waits for a checkpoint: steps of main.py with and without a save.

    python benchmarks/saving.py --gpus 2 --ddp fsdp --arch vit_h_14

main.py trains on a synthetic batch and saves every --save-every steps. Each step is timed with the
device synchronized. A save copies the state into the CPU's memory, which the step waits for; then a
thread writes it, beside the next steps. The table has the median step, the steps that saved, and
those beside which a checkpoint was written. The first save, for which pinned memory is allocated,
has a row of its own.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median

from flags import file_name, whole_number
from step import main_py

HERE = Path(__file__).resolve().parent
# Writes (seconds of the step, whether it saved, whether a checkpoint was being written).
RUN = """
import json, sys, threading, time
sys.argv[1:] = {flags!r}
import torch
import torch.distributed as dist
import main
from engine import distributed
from engine.checkpoint import CheckpointManager
from engine.distributed.peers import SHARD_WRITER, WRITER

end_step, started, rows, saved = CheckpointManager.end_step, None, [], []
save = CheckpointManager.save

def timed_save(self, results=None):
    saved.append(1)
    save(self, results)

def timed_end_step(self):
    global started
    is_writing = any(one.name in (SHARD_WRITER, WRITER) for one in threading.enumerate())
    result = end_step(self)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    now = time.perf_counter()
    if started:
        rows.append((now - started, bool(saved), is_writing))
    saved.clear()
    started = now
    if dist.get_rank() == 0:
        with open({result!r}, "w") as file:
            json.dump(rows, file)
    return result

CheckpointManager.save, CheckpointManager.end_step = timed_save, timed_end_step
distributed.run(main.main)
"""


def measure(args: argparse.Namespace, folder: Path) -> tuple[list[tuple[float, bool, bool]], int]:
    """Return the steps of rank 0 and the bytes of a checkpoint."""
    result, output = folder / "steps.json", folder / "run"
    flags = ["--dummy", "--arch", args.arch, "--batch-size", str(args.batch_size)]
    flags += ["--steps", str(args.steps), "--save-every", str(args.save_every), "--keep", "1"]
    flags += ["--output", str(output), "--opt-level", args.opt_level, *args.flags.split()]
    script = main_py(folder, ddp=args.ddp, opt_level=args.opt_level, sync_bn="no")
    timed = script.with_name("timed.py")
    timed.write_text(RUN.format(flags=flags, result=str(result)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={args.gpus}", str(timed)]
    subprocess.run(command, cwd=script.parent, check=True, stdout=sys.stderr)
    last = (output / ("last" if args.ddp == "fsdp" else "last.pt")).resolve()
    files = [last] if last.is_file() else [*last.iterdir()]
    return json.loads(result.read_text()), sum(path.stat().st_size for path in files)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", type=whole_number, default=1, help="processes")
    add("--ddp", choices=["apex", "fsdp"], default="apex", help="answer of the project")
    add("--arch", default="resnet50")
    add("--batch-size", type=whole_number, default=32, help="of each process")
    add("--opt-level", default="O4")
    add("--steps", type=whole_number, default=40)
    add("--save-every", type=whole_number, default=10)
    add("--flags", default="", help="further flags of main.py, such as --flags=--compile")
    add("--output", type=file_name, default=HERE / "saving_steps.csv", metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        steps, size = measure(args, Path(name))
    with args.output.open("w", newline="") as file:
        csv.writer(file).writerows([("seconds", "saved", "beside_writing"), *steps])
    print(f"{date.today()}, {args.arch}, {args.ddp}, {args.gpus} processes: {size / 1e9:.2f} GB\n")
    saves = [seconds for seconds, is_saved, _ in steps if is_saved]
    groups = {
        "without a save": [seconds for seconds, *flags in steps[3:] if flags == [False, False]],
        "first save": saves[:1],
        "later saves": saves[1:],
        "beside a write": [seconds for seconds, *flags in steps if flags == [False, True]],
    }
    print("| steps | median s | longest s |\n|---|---|---|")
    for key, seconds in groups.items():
        if seconds:
            print(f"| {key} ({len(seconds)}) | {median(seconds):.3f} | {max(seconds):.3f} |")


if __name__ == "__main__":
    main()

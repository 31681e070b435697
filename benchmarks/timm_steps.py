"""Steps of six families of timm's models, by main.py and by timm's train.py, on one GPU.

    python benchmarks/timm_steps.py --timm pytorch-image-models/train.py

Both train in fp16 with AdamW and channels_last on a synthetic batch that stays on the GPU. The
speed of main.py is that of its second epoch, of 100 steps; the loader that timm's script is given
starts the clock after ten steps. The two take turns.
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
FAMILIES = (
    "resnet50",
    "convnext_tiny",
    "efficientnet_b0",
    "vit_base_patch16_224",
    "swin_tiny_patch4_window7_224",
    "regnety_032",
)
WARM_UP = 10
# The data set is not read: the loader yields one batch of random values.
OF_TIMM = """
import json, runpy, sys, time
sys.path.insert(0, {folder!r})
import torch
import timm.data

class Loader:
    dataset = sampler = batch_sampler = None
    def __init__(self):
        self.images = torch.randn({batch}, 3, 224, 224, device="cuda")
        self.images = self.images.to(memory_format=torch.channels_last)
        self.labels = torch.randint(1000, ({batch},), device="cuda")
    def __len__(self):
        return {steps} + {warm_up}
    def __iter__(self):
        for number in range(len(self)):
            if number == {warm_up}:
                torch.cuda.synchronize()
                start = time.perf_counter()
            yield self.images, self.labels
        torch.cuda.synchronize()
        speed = {steps} * {batch} / (time.perf_counter() - start)
        with open({result!r}, "w") as file:
            json.dump(speed, file)
        sys.exit()

timm.data.create_dataset = lambda *_, **__: range(len(Loader()) * {batch})
timm.data.create_loader = lambda *_, **__: Loader()
sys.argv[1:] = {flags!r}
runpy.run_path({script!r}, run_name="__main__")
"""


def speed_of_main(script: Path, arch: str, args: argparse.Namespace, folder: Path) -> float:
    """Return images per second of main.py in its second epoch, which has 100 steps."""
    output = Path(tempfile.mkdtemp(dir=folder))
    flags = ["--dummy", "--arch", f"timm:{arch}", "--batch-size", str(args.batch_size)]
    flags += ["--epochs", "2", "--eval-every", "2", "--lr", "1e-5", "--output", str(output)]
    execute([sys.executable, script.name, *flags], script.parent)
    with (output / "metrics.csv").open() as file:
        return float(list(csv.DictReader(file))[-1]["images_per_second"])


def speed_of_timm(arch: str, args: argparse.Namespace, folder: Path) -> float:
    """Return images per second of timm's train.py after the first steps."""
    result, script = folder / "timm.json", args.timm.resolve()
    flags = ["--data-dir", str(folder), "--model", arch, "-b", str(args.batch_size), "--amp"]
    flags += ["--channels-last", "--opt", "adamw", "--lr", "1e-5", "--smoothing", "0"]
    flags += ["--epochs", "1", "--output", str(folder), "--workers", "0"]
    code = OF_TIMM.format(
        folder=str(script.parent),
        batch=args.batch_size,
        steps=args.steps,
        warm_up=WARM_UP,
        result=str(result),
        flags=flags,
        script=str(script),
    )
    execute([sys.executable, "-c", code], folder)
    return json.loads(result.read_text())


def execute(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{command[1][:60]} failed:\n{done.stdout[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--timm", type=Path, required=True, metavar="FILE", help="timm's train.py")
    add("--families", nargs="+", default=FAMILIES, metavar="NAME", help="models of timm")
    add("--batch-size", type=whole_number, default=128)
    add("--steps", type=whole_number, default=100, help="of timm's script that are timed")
    add("--rounds", type=whole_number, default=1)
    add("--output", type=file_name, default=HERE / "timm_steps.csv", metavar="FILE")
    args = parser.parse_args()
    print(f"{date.today()}\n\n| model | main.py images/s | timm's train.py | ratio |")
    print("|---|---|---|---|")
    header = ("date", "model", "main_images_per_s", "timm_images_per_s", "ratio")
    with tempfile.TemporaryDirectory() as name, args.output.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        folder = Path(name)
        script = main_py(folder, opt_level="O1", sync_bn="no")
        for arch in args.families:
            pairs = []
            for _ in range(args.rounds):
                own = speed_of_main(script, arch, args, folder)
                pairs.append((own, speed_of_timm(arch, args, folder)))
            own, other = (median(values) for values in zip(*pairs, strict=True))
            ratio = median(first / second for first, second in pairs)
            writer.writerow((date.today(), arch, f"{own:.1f}", f"{other:.1f}", f"{ratio:.3f}"))
            file.flush()
            print(f"| {arch} | {own:.0f} | {other:.0f} | {ratio:.3f} |", flush=True)


if __name__ == "__main__":
    main()

"""The loss of the default project's first steps on real Apex and on apex_native, in one picture.

    python benchmarks/loss_curves.py [--steps 100] [--nproc 2] [--backends apex native native]

Bakes the default project and runs its own main.py through its own run.sh once for each backend and
opt_level, with one seed. Writes loss_curves.csv and loss_curves.png beside itself. A backend that
is named twice shows how far two runs of the same code differ.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
from cookiecutter.main import cookiecutter
from matplotlib import pyplot as plt

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
from fresh import copy_template  # noqa: E402

# Stands in front of main.py in each process and writes down every loss that its loop hands to the
# meter. The project itself runs as it is.
RECORDER = """
import os, runpy
from pathlib import Path
from engine.monitoring.meter import Meter
losses = []
update = Meter.update
def recording(self, loss):
    losses.append(loss.detach().clone())
    update(self, loss)
Meter.update = recording
runpy.run_path(str(Path(__file__).parent / "main.py"), run_name="__main__")
if os.environ["RANK"] == "0":
    Path(os.environ["LOSSES"]).write_text("\\n".join(str(float(loss)) for loss in losses))
"""


def losses(project: Path, backend: str, level: str, steps: int, nproc: int) -> list[float]:
    """The loss of rank 0 at each step of a run."""
    with tempfile.TemporaryDirectory() as folder:
        (project / "recorded.py").write_text(RECORDER)
        launcher = project / "recorded.sh"
        launcher.write_text((project / "run.sh").read_text().replace("main.py", "recorded.py"))
        launcher.chmod(0o755)
        out = Path(folder) / "losses.txt"
        flags = ["--backend", backend, "--opt-level", level, "--steps", str(steps)]
        environment = {"PYTHON": sys.executable, "NPROC": str(nproc), "LOSSES": str(out)}
        subprocess.run(
            [launcher, *flags, "--output", f"{folder}/run"],
            env=os.environ | environment,
            check=True,
        )
        return [float(line) for line in out.read_text().split()]


NAMES = {"apex": "real Apex", "native": "apex_native", "native 2": "apex_native, a second run"}
STYLES = {"apex": ("C1", 2.6, "-"), "native": ("C0", 1.2, "-"), "native 2": ("C2", 0.9, "--")}


def draw(curves: dict[tuple[str, str], list[float]], title: str) -> None:
    """One panel for each opt_level, one line for each run."""
    levels = sorted({level for level, _ in curves})
    rows = (len(levels) + 1) // 2
    figure, panels = plt.subplots(
        rows, 2, figsize=(11, 3.4 * rows), sharex=True, sharey=True, squeeze=False
    )
    for panel, level in zip(panels.flat, levels, strict=False):
        for (of, name), values in curves.items():
            if of == level:
                color, width, line = STYLES.get(name, ("C3", 0.9, ":"))
                panel.plot(values, color=color, lw=width, ls=line, label=NAMES.get(name, name))
        panel.set(title=level, yscale="log")
        panel.grid(alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("step")
    for panel in panels[:, 0]:
        panel.set_ylabel("training loss of rank 0")
    panels.flat[0].legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(HERE / "loss_curves.png", dpi=110)


def distances(curves: dict[tuple[str, str], list[float]]) -> str:
    """How far each pair of runs lies apart at each level, as a table in Markdown."""
    levels = sorted({level for level, _ in curves})
    runs = list(dict.fromkeys(name for _, name in curves))
    lines = ["| mean difference of the loss | " + " | ".join(levels) + " |"]
    lines.append("|---" * (len(levels) + 1) + "|")
    for first, second in combinations(runs, 2):
        cells = []
        for level in levels:
            pairs = zip(curves[level, first], curves[level, second], strict=True)
            cells.append(f"{fmean(abs(one - other) for one, other in pairs):.3f}")
        pair = f"{NAMES.get(first, first)} – {NAMES.get(second, second)}"
        lines.append(f"| {pair} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--levels", nargs="+", default=["O0", "O1", "O2", "O3"])
    parser.add_argument("--backends", nargs="+", default=["apex", "native", "native"])
    parser.add_argument("--title", default="The same main.py, the same seed")
    parser.add_argument("--redraw", action="store_true", help="from loss_curves.csv")
    args = parser.parse_args()
    table = HERE / "loss_curves.csv"

    if args.redraw:
        curves: dict[tuple[str, str], list[float]] = {}
        with table.open() as file:
            for row in csv.DictReader(file):
                curves.setdefault((row["level"], row["run"]), []).append(float(row["loss"]))
        draw(curves, args.title)
        print(distances(curves))
        return

    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template"
        template.mkdir()
        copy_template(template)
        project = Path(cookiecutter(str(template), no_input=True, output_dir=folder))
        for level in args.levels:
            for index, backend in enumerate(args.backends):
                again = args.backends[:index].count(backend)
                name = f"{backend} {again + 1}" if again else backend
                curves[level, name] = losses(project, backend, level, args.steps, args.nproc)
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["level", "run", "step", "loss"])
        for (level, name), values in curves.items():
            writer.writerows([level, name, step, loss] for step, loss in enumerate(values))
    draw(curves, args.title)
    print(distances(curves))


if __name__ == "__main__":
    main()

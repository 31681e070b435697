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
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from cookiecutter.main import cookiecutter  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402

HERE = Path(__file__).parent

# Stands in front of main.py in each process and writes down every loss that its loop hands to the
# meter. The project itself runs as it is.
RECORDER = """
import os, runpy
from pathlib import Path
from engine import report
losses = []
add = report.Meter.add
def recording(self, loss):
    losses.append(loss.detach().clone())
    add(self, loss)
report.Meter.add = recording
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


def draw(curves: dict[tuple[str, str], list[float]], title: str) -> None:
    """One panel for each opt_level, one line for each run."""
    levels = sorted({level for level, _ in curves})
    figure, panels = plt.subplots(
        1, len(levels), figsize=(4 * len(levels), 3.6), sharey=True, squeeze=False
    )
    styles = {"apex": ("C1", 2.6, "-"), "native": ("C0", 1.2, "-"), "native 2": ("C2", 0.9, "--")}
    for panel, level in zip(panels[0], levels, strict=True):
        for (of, name), values in curves.items():
            if of == level:
                color, width, line = styles.get(name, ("C3", 0.9, ":"))
                label = {"apex": "real Apex", "native": "apex_native"}.get(name, name)
                panel.plot(values, color=color, lw=width, ls=line, label=label)
        panel.set(title=level, xlabel="step", yscale="log")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("training loss of rank 0")
    panels[0][-1].legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(HERE / "loss_curves.png", dpi=120)


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
        return

    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        project = Path(cookiecutter(str(HERE.parent), no_input=True, output_dir=folder))
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


if __name__ == "__main__":
    main()

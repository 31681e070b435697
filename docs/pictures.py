"""Makes the pictures in docs/ of a run: run.svg, curves.png and tensorboard.png.

pip install pyte && python docs/pictures.py GENERATED_PROJECT

It trains the project, whose terminal run.svg shows in the seventh epoch. TensorBoard is looked at
with Chromium, which must be installed.
"""

import contextlib
import io
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pyte
from rich.console import Console
from rich.terminal_theme import NIGHT_OWLISH
from rich.text import Text

WIDTH, HEIGHT = 104, 24
SHOWN = re.compile(r"epoch 7/\d+: +[4-9]\d%.*images/s")
DOCS = Path(__file__).parent
PORT = 6106
PAGE = f"http://localhost:{PORT}/#scalars&_smoothingWeight=0&tagFilter=loss$|accuracy|lr"


def screen_of(project: Path) -> list[str]:
    """The lines on the screen of ``./run.sh`` when the seventh epoch is half done."""
    screen = pyte.Screen(WIDTH, HEIGHT)
    stream = pyte.ByteStream(screen)
    shown: list[str] = []
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (HEIGHT, WIDTH))
    with subprocess.Popen(["./run.sh"], cwd=project, stdout=theirs, stderr=theirs):
        os.close(theirs)
        with contextlib.suppress(OSError):  # the run is over
            while said := os.read(ours, 4096):
                stream.feed(said)
                if not shown and any(SHOWN.search(line) for line in screen.display):
                    shown = [line.rstrip() for line in screen.display if line.strip()]
    return shown


def photograph(project: Path, path: Path) -> None:
    """TensorBoard with the project's runs, as a browser shows it."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", "runs", "--port", str(PORT)]
    with subprocess.Popen(command, cwd=project, stderr=subprocess.DEVNULL) as server:
        for _ in range(60):
            with contextlib.suppress(URLError), urlopen(PAGE):
                break
            time.sleep(1)
        time.sleep(10)  # in which it reads the events
        browser = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars"]
        browser += ["--window-size=1440,780", "--virtual-time-budget=60000", f"--screenshot={path}"]
        subprocess.run([*browser, PAGE], check=True, stderr=subprocess.DEVNULL)
        server.terminate()


def main() -> None:
    project = Path(sys.argv[1])
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    console.print(Text("$ ./run.sh", style="bold"))
    for line in screen_of(project):
        console.print(Text(line))
    console.save_svg(str(DOCS / "run.svg"), title=project.name, theme=NIGHT_OWLISH)
    (curves,) = project.glob("runs/*/curves.png")
    shutil.copyfile(curves, DOCS / "curves.png")
    photograph(project, DOCS / "tensorboard.png")


if __name__ == "__main__":
    main()

"""Draws docs/run.svg: the terminal in which a default project is in its seventh epoch.

pip install pyte && python docs/picture_of_a_run.py [GENERATED_PROJECT]
"""

import io
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pyte
from rich.console import Console
from rich.terminal_theme import NIGHT_OWLISH
from rich.text import Text

WIDTH, HEIGHT = 104, 24
UNTIL = re.compile(r"epoch 7/\d+: +[4-9]\d%.*images/s")


def screen_of(project: Path) -> list[str]:
    """The lines on the screen of ``./run.sh`` when the seventh epoch is half done."""
    screen = pyte.Screen(WIDTH, HEIGHT)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (HEIGHT, WIDTH))
    with subprocess.Popen(["./run.sh"], cwd=project, stdout=theirs, stderr=theirs) as process:
        while True:
            stream.feed(os.read(ours, 4096))
            if any(UNTIL.search(line) for line in screen.display):
                process.terminate()
                return [line.rstrip() for line in screen.display if line.strip()]


def main() -> None:
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    console.print(Text("$ ./run.sh", style="bold"))
    for line in screen_of(Path(sys.argv[1])):
        console.print(Text(line))
    console.save_svg(
        str(Path(__file__).parent / "run.svg"), title="ddp_training", theme=NIGHT_OWLISH
    )


if __name__ == "__main__":
    main()

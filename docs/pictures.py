"""Pictures in docs/ of a run: run.svg, curves.png and tensorboard.png.

pip install pyte && python docs/pictures.py GENERATED_PROJECT [--terminal]

Trains the project and records its terminal, which run.svg replays. Chromium, which must be
installed, takes the picture of TensorBoard; --terminal leaves out both other pictures.
"""

import contextlib
import os
import pty
import select
import shutil
import subprocess
import sys
import termios
import time
from itertools import pairwise
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen
from xml.sax.saxutils import escape

import pyte

WIDTH, HEIGHT = 80, 24
PROMPT = "$ ./run.sh"
INTERVAL_S = 1.0  # between two frames of the recording
REPLAY_S, PAUSE_S = 15.0, 5.0  # duration of the replay, and of its last frame
CHARACTER, LINE, MARGIN, BAR = 8.4, 19, 14, 34  # pixels
DOCS = Path(__file__).parent
PORT = 6106
PAGE = f"http://localhost:{PORT}/#scalars&_smoothingWeight=0&tagFilter=loss$|accuracy|lr"

Frame = tuple[str, ...]  # the lines of a screen


def record(project: Path) -> list[Frame]:
    """Return the screens of ``./run.sh``, one for each interval in which something changed."""
    screen = pyte.Screen(WIDTH, HEIGHT - 1)
    stream = pyte.ByteStream(screen)
    frames: list[Frame] = [(PROMPT,)]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (HEIGHT - 1, WIDTH))
    with (
        subprocess.Popen(["./run.sh"], cwd=project, stdout=theirs, stderr=theirs),
        contextlib.suppress(OSError),  # the run is over
    ):
        os.close(theirs)
        due = time.monotonic()
        while True:
            if select.select([ours], [], [], INTERVAL_S)[0]:
                stream.feed(os.read(ours, 4096))
            if time.monotonic() >= due:
                due = time.monotonic() + INTERVAL_S
                _append(frames, screen)
    _append(frames, screen)
    return frames


def _append(frames: list[Frame], screen: pyte.Screen) -> None:
    frame = (PROMPT, *(line.rstrip() for line in screen.display))
    if frame != frames[-1]:
        frames.append(frame)


def animate(frames: list[Frame], title: str) -> str:
    """Return an SVG that replays the frames; without animation, it shows the last one."""
    rows = max(number for frame in frames for number, line in enumerate(frame, 1) if line)
    width, height = WIDTH * CHARACTER + 2 * MARGIN, rows * LINE + BAR + MARGIN
    texts = []
    for row in range(rows):
        lines = [frame[row] if row < len(frame) else "" for frame in frames]
        changes = [0, *(n for n in range(1, len(lines)) if lines[n] != lines[n - 1]), len(lines)]
        for first, end in pairwise(changes):
            if lines[first]:
                texts.append(_text(lines[first], row, first, end, len(frames)))
    lights = "".join(
        f'<circle cx="{MARGIN + 6 + 18 * n}" cy="17" r="5.5" fill="{colour}"/>'
        for n, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'font-family="ui-monospace,Menlo,Consolas,DejaVu Sans Mono,monospace" font-size="14">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#1b2330"/>{lights}\n'
        '<g fill="#e3e8ef">\n' + "\n".join(texts) + "\n</g>\n</svg>\n"
    )


def _text(line: str, row: int, first: int, end: int, count: int) -> str:
    """Return a line that is visible from frame `first` to before frame `end` of `count`."""
    total = REPLAY_S + PAUSE_S
    y, length = BAR + LINE * (row + 0.8), len(line) * CHARACTER
    position = f'x="{MARGIN}" y="{y:.0f}" textLength="{length:.1f}"'
    start, stop = (REPLAY_S * number / count / total for number in (first, end))
    is_last = end == count
    values, times = ("0;1", f"0;{start:.4f}") if is_last else ("0;1;0", f"0;{start:.4f};{stop:.4f}")
    motion = (
        f'<animate attributeName="opacity" values="{values}" keyTimes="{times}" '
        f'calcMode="discrete" dur="{total:.0f}s" repeatCount="indefinite"/>'
    )
    if is_last and first == 0:
        motion = ""
    text = escape(line).replace(" ", "\N{NO-BREAK SPACE}")  # browsers join plain ones
    return f'<text {position} opacity="{int(is_last)}">{text}{motion}</text>'


def photograph(project: Path, path: Path) -> None:
    """Save a picture of TensorBoard with the project's runs, taken in a browser."""
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
    frames = record(project)
    title = f"The terminal of a run of {project.name}"
    (DOCS / "run.svg").write_text(animate(frames, title), encoding="utf-8")
    if "--terminal" in sys.argv:
        return
    (curves,) = project.glob("runs/*/curves.png")
    shutil.copyfile(curves, DOCS / "curves.png")
    photograph(project, DOCS / "tensorboard.png")


if __name__ == "__main__":
    main()

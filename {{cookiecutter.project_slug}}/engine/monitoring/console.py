"""Messages, progress bars and the table of epochs on the console of rank 0."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from textwrap import wrap
from threading import Event, Thread
from typing import Any

from tqdm import tqdm

from engine.distributed.watchdog import time_limit
from engine.text import one_message, short_number

LINE_S = 60.0  # seconds between progress lines where there is no terminal
FIRST_LINE_S = 10.0  # the same, before the first line of a phase
LINE = "{desc}: {n_fmt}/{total_fmt}{postfix}, {remaining} left"
# Of the console's table, which fits a terminal with 80 columns.
WIDTH = 80
WIDTHS = {"epoch": 5, "step": 6, "train_loss": 10, "val_loss": 9, "lr": 9, "loss_scale": 10}
WIDTHS["images_per_second"] = 8
METRIC_WIDTH = 16
HEADINGS = {"images_per_second": "images/s"}


def has_terminal() -> bool:
    """Return whether standard error is a terminal; it is None in a process that has none."""
    return sys.stderr is not None and sys.stderr.isatty()


class Console:
    """Console of a run; it prints nothing on other ranks than 0.

    Args:
        active: whether this is rank 0.
        log_every: batches between two lines of progress where there is no terminal; without it, a
            line a minute.
    """

    def __init__(self, active: bool, log_every: int | None = None) -> None:
        self.active = active
        self.log_every = log_every
        self.warnings: set[str] = set()

    def info(self, message: str) -> None:
        """Print a message."""
        if self.active:
            # A full disk, or a closed pipe; a progress bar is redrawn below the message.
            with contextlib.suppress(OSError), tqdm.external_write_mode():
                print(one_message(message), flush=True)

    def warning(self, message: str) -> None:
        """Print a warning. The same warning is printed once."""
        if message not in self.warnings:
            self.warnings.add(message)
            self.info(f"warning: {message}")

    def progress_bar(
        self, batches: Iterable, description: str, total: int | None = None, **options: str
    ) -> tqdm:
        """Return an iterable over the first `total` batches, or all, that shows the progress.

        On a terminal it is a bar; elsewhere a line a minute, or every `log_every` batches.
        """
        if total is not None:
            batches = islice(batches, total)
        look: dict[str, Any] = {"leave": False, "disable": not self.active, **options}
        if has_terminal():
            look["dynamic_ncols"] = True
        else:
            look |= {"file": _LineStream(self.info), "bar_format": LINE, "delay": 1e-9}
            # After maxinterval, tqdm would show each batch.
            look |= {"miniters": self.log_every or 1, "maxinterval": float("inf")}
            look |= {"mininterval": 0.0 if self.log_every else LINE_S}
        return tqdm(batches, description, total, **look)

    @contextlib.contextmanager
    def phase(self, name: str, limit_s: float) -> Iterator[None]:
        """Show the elapsed time of a phase of the start; exit if it takes longer than the limit.

        The time is shown on a terminal, or logged after FIRST_LINE_S and then every LINE_S seconds.
        """
        is_done = Event()

        def refresh() -> None:
            with self.progress_bar((), name, bar_format="{desc}: {elapsed}") as bar:
                while not is_done.wait(0.5):
                    bar.refresh()

        def log() -> None:
            started = time.monotonic()
            for seconds in chain([FIRST_LINE_S], repeat(LINE_S)):
                if is_done.wait(seconds):
                    return
                elapsed = time.monotonic() - started
                self.info(f"{name}: {elapsed:.0f} s; the limit is {limit_s:g} s, see --timeout")

        thread = Thread(target=refresh if has_terminal() else log, daemon=True)
        thread.start()
        try:
            with time_limit(name, limit_s):
                yield
        finally:
            is_done.set()
            thread.join()

    def print_heading(self, columns: Sequence[str]) -> None:
        """Print the heading of the table of epochs."""
        self._print_cells({name: HEADINGS.get(name, name) for name in columns})

    def print_row(self, row: dict[str, Any], columns: Sequence[str]) -> None:
        """Print a row of the table, and what is not in its `columns` below it."""
        texts = {name: short_number(value) for name, value in row.items()}
        self._print_cells({name: texts.get(name, "") for name in columns})
        further = " ".join(f"{name}={text}" for name, text in texts.items() if name not in columns)
        margin = " " * 6
        for line in wrap(further, WIDTH - len(margin), break_on_hyphens=False):
            self.info(margin + line)

    def _print_cells(self, texts: dict[str, str]) -> None:
        cells = []
        for name, text in texts.items():
            width = WIDTHS.get(name, METRIC_WIDTH)
            cells.append(f"{text if len(text) <= width else text[: width - 1] + '…':>{width}}")
        self.info(" ".join(cells))


class _LineStream:
    """Text stream that passes the progress bars of tqdm on as lines."""

    def __init__(self, write_line: Callable[[str], None]) -> None:
        self.write_line = write_line

    def write(self, text: str) -> None:
        """Pass on a bar, without the control characters of a terminal."""
        if line := text.strip():
            self.write_line(line)

    def flush(self) -> None:
        """Do nothing: `write_line` flushes."""

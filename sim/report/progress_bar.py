"""The progress of a simulation, as a bar or as lines: virtual time, events per second, and the time left."""

import importlib.util
import sys
import time
from contextlib import suppress
from typing import Self

from sim.report.result import Progress
from sim.report.units import count_text, duration_text

NAME_WIDTH = 24
LINE_PERIOD_S = 10.0  # As of `gossip run` without a terminal.


class Display:
    """A display of progress, for a ``with`` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: what was shown stays."""

    def update(self, progress: Progress) -> None:
        """Show the progress of a simulation."""
        self.note(
            progress.done,
            f"{duration_text(progress.virtual_s)} virtual  {count_text(round(progress.events_per_s))} events/s  "
            f"{duration_text(progress.left_s)} left",
        )

    def note(self, done: float, figures: str) -> None:
        """Show the progress of any other work: a share, 0 to 1, and a few words."""
        raise NotImplementedError


class Lines(Display):
    """Lines on stderr for a file or a pipe, one every 10 s."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.due_s = time.monotonic() + LINE_PERIOD_S

    def note(self, done: float, figures: str) -> None:
        now_s = time.monotonic()
        if now_s >= self.due_s:
            self.due_s = now_s + LINE_PERIOD_S
            with suppress(OSError, ValueError):  # A stderr that is gone stops no simulation.
                print(f"{self.name}  {100 * done:.0f} %  {figures}", file=sys.stderr, flush=True)


class Bar(Display):
    """A progress bar: ``with Bar(name) as bar``, and ``bar.update(progress)`` redraws it.

    In a terminal it is on stderr, and vanishes when it stops. In a notebook it needs ipywidgets. Elsewhere nothing is
    written, since redrawn lines are useless in a file.
    """

    def __init__(self, name: str) -> None:
        from rich import progress  # Imported here, so that only a visible bar costs the time.
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        shown = importlib.util.find_spec("ipywidgets") is not None if console.is_jupyter else console.is_terminal
        self.drawn = progress.Progress(
            progress.TextColumn("{task.description}", markup=False), progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.percentage:>3.0f} %  {task.fields[figures]}", markup=False),
            console=console, transient=True, auto_refresh=False, disable=not shown, expand=True,
        )  # fmt: skip
        short = name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…"
        self.task = self.drawn.add_task(short, total=1.0, figures="starts")

    def __enter__(self) -> Self:
        self.drawn.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.drawn.stop()

    def note(self, done: float, figures: str) -> None:
        self.drawn.update(self.task, completed=done, figures=figures)
        self.drawn.refresh()

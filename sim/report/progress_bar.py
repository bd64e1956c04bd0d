"""A progress bar in a terminal or a notebook: virtual time, events per second, and the time left."""

from __future__ import annotations

import importlib
from html import escape
from typing import Any, Self

from sim.report.result import Progress
from sim.report.units import count_text, duration_text

__all__ = ["Bar"]

NAME_WIDTH = 24


class Bar:
    """A progress bar: ``with Bar(name) as bar``, and ``bar.update(progress)`` redraws it.

    In a terminal it is on stderr, and vanishes when it stops; in a notebook it is below the cell. Elsewhere nothing is
    written, since redrawn lines are useless in a file.
    """

    def __init__(self, name: str) -> None:
        from rich import progress  # Imported here, so that only a visible bar costs the time.
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        self.name = name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…"
        self.in_notebook = console.is_jupyter  # rich needs ipywidgets there, which are often not installed.
        self.cell: Any = None
        self.drawn = progress.Progress(
            progress.TextColumn("{task.description}", markup=False), progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.percentage:>3.0f} %  {task.fields[figures]}", markup=False),
            console=console, transient=True, auto_refresh=False, disable=not console.is_terminal, expand=True,
        )  # fmt: skip
        self.task = self.drawn.add_task(self.name, total=1.0, figures="starts")

    def __enter__(self) -> Self:
        if self.in_notebook:
            # IPython is installed, since this is a notebook.
            display = importlib.import_module("IPython.display").display
            self.cell = display(self.bundle(0.0, "starts"), raw=True, display_id=True)
        self.drawn.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.drawn.stop()
        if self.cell is not None:
            self.cell.update({"text/html": "", "text/plain": ""}, raw=True)

    def update(self, progress: Progress) -> None:
        """Draw the progress of a simulation."""
        self.note(progress.done, figures_of(progress))

    def note(self, done: float, figures: str) -> None:
        """Draw the progress of any other work: a share, 0 to 1, and a few words."""
        self.drawn.update(self.task, completed=done, figures=figures)
        self.drawn.refresh()
        if self.cell is not None:
            self.cell.update(self.bundle(done, figures), raw=True)

    def bundle(self, done: float, figures: str) -> dict[str, str]:
        """Return the formats among which a notebook chooses."""
        text = f"{100 * done:.0f} %  {figures}"
        bar = f'<progress value="{done:.3f}" style="width: 20em"></progress>'
        return {
            "text/html": f"<div>{escape(self.name)} {bar} {escape(text)}</div>",
            "text/plain": f"{self.name} {text}",
        }


def figures_of(progress: Progress) -> str:
    return (
        f"{duration_text(progress.virtual_s)} virtual  {count_text(round(progress.events_s))} events/s  "
        f"{duration_text(progress.left_s)} left"
    )

"""A progress bar in a terminal or a notebook: virtual time, events a second, and what is left."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from sim.units import count_text, duration_text

if TYPE_CHECKING:
    from rich.progress import TaskID

    from sim.report import Progress

__all__ = ["Bar"]

TICKS = 1000
NAME_WIDTH = 24


class Bar:
    """``with Bar(name) as bar``: ``bar.update(progress)`` redraws it. On stderr; elsewhere than in a terminal or a
    notebook nothing is written, since a file of redrawn lines helps nobody."""

    def __init__(self, name: str) -> None:
        from rich.console import Console  # here: nobody who sees no bar pays for it
        from rich.progress import BarColumn, Progress, TextColumn

        self.console = Console(stderr=True, highlight=False)
        shown = self.console.is_terminal or self.console.is_jupyter
        self.progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %  {task.fields[figures]}", markup=False),
            console=self.console, transient=True, auto_refresh=False, disable=not shown, expand=True,
        )  # fmt: skip
        name = name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…"
        self.task: TaskID = self.progress.add_task(name, total=TICKS, figures="starts")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def update(self, progress: Progress) -> None:
        """Draw how far it is."""
        self.progress.update(self.task, completed=TICKS * progress.done, figures=figures_of(progress))
        self.progress.refresh()


def figures_of(progress: Progress) -> str:
    return (
        f"{duration_text(progress.virtual_s)} virtual  {count_text(round(progress.events_s))} events/s  "
        f"{duration_text(progress.left_s)} left"
    )

"""A progress bar in a terminal or a notebook: virtual time, events a second, and what is left."""

from __future__ import annotations

import importlib
from html import escape
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sim.units import count_text, duration_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from sim.report import Progress

__all__ = ["Bar"]

TICKS = 1000
NAME_WIDTH = 24


class Bar:
    """``with Bar(name) as bar``: ``bar.update(progress)`` redraws it. On stderr in a terminal, below the cell in a
    notebook; elsewhere nothing is written, since a file of redrawn lines helps nobody."""

    def __init__(self, name: str) -> None:
        from rich.console import Console  # here: nobody who sees no bar pays for it

        console = Console(stderr=True, highlight=False)
        name = name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…"
        self.drawn: InNotebook | InTerminal = InNotebook(name) if console.is_jupyter else InTerminal(name, console)

    def __enter__(self) -> Self:
        self.drawn.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drawn.stop()

    def update(self, progress: Progress) -> None:
        """Draw how far it is."""
        self.drawn.draw(progress.done, figures_of(progress))

    def note(self, done: float, figures: str) -> None:
        """The same of what is no simulation: a share, 0 to 1, and a few words."""
        self.drawn.draw(done, figures)


class InTerminal:
    """A line that is drawn over and over, and gone when it stops."""

    def __init__(self, name: str, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self.progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %  {task.fields[figures]}", markup=False),
            console=console, transient=True, auto_refresh=False, disable=not console.is_terminal, expand=True,
        )  # fmt: skip
        self.task: TaskID = self.progress.add_task(name, total=TICKS, figures="starts")

    def start(self) -> None:
        self.progress.start()

    def draw(self, done: float, figures: str) -> None:
        self.progress.update(self.task, completed=TICKS * done, figures=figures)
        self.progress.refresh()

    def stop(self) -> None:
        self.progress.stop()


class InNotebook:
    """An output of the cell that is replaced over and over. rich would need ipywidgets for it, which many lack."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.output: Any = None

    def start(self) -> None:
        display = importlib.import_module("IPython.display").display  # it is there: this is a notebook
        self.output = display(self.bundle(0.0, "starts"), raw=True, display_id=True)

    def draw(self, done: float, figures: str) -> None:
        self.output.update(self.bundle(done, figures), raw=True)

    def stop(self) -> None:
        self.output.update({"text/html": "", "text/plain": ""}, raw=True)

    def bundle(self, done: float, figures: str) -> dict[str, str]:
        """What a notebook chooses from."""
        text = f"{100 * done:.0f} %  {figures}"
        bar = f'<progress max="{TICKS}" value="{TICKS * done:.0f}" style="width: 20em"></progress>'
        return {
            "text/html": f"<div>{escape(self.name)} {bar} {escape(text)}</div>",
            "text/plain": f"{self.name} {text}",
        }


def figures_of(progress: Progress) -> str:
    return (
        f"{duration_text(progress.virtual_s)} virtual  {count_text(round(progress.events_s))} events/s  "
        f"{duration_text(progress.left_s)} left"
    )

"""The programs of the zoo: each declares its name, its metric and the expected results."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_programs: dict[str, Program] = {}


@dataclass(frozen=True, slots=True)
class Program:
    """One program.

    Attributes:
        name: The name of its file.
        title: The common name of this kind of program.
        run: Takes the class ``Node``, or :class:`tests.zoo.plain.Plain` in its place, and a seed. Returns the metric.
        metric: The name of the value that ``run`` returns.
        best: Whether high or low values are better.
        spread: How much worse the mean of three nodes may be than one process with their batches in each step.
        notices: The kinds of warnings that a node gives of such a program.
        late_notices: The kinds of further warnings from a late node.
        gains: True if other nodes help a run as short as this one. Otherwise it is compared with one node's own steps.
    """

    name: str
    title: str
    run: Callable[[Any, int], float]
    metric: str
    best: Literal["high", "low"]
    spread: float
    notices: tuple[str, ...] = ()
    late_notices: tuple[str, ...] = ()
    gains: bool = True

    def loss(self, value: float, alone: float) -> float:
        """Return by how much a metric is worse than that of one process; below 0 if it is better."""
        return alone - value if self.best == "high" else value - alone

    @property
    def changed_lines(self) -> int:
        """Return the lines of the program that name the node."""
        source = inspect.getsource(self.run).split("\n")[1:]
        return sum(bool(re.search(r"\bNode\(|\bnode(_\w+)?\.|\bNode\b.*,$", line)) for line in source[1:])


def zoo(title: str, metric: str, best: Literal["high", "low"], spread: float, **options: Any) -> Callable[..., Any]:
    """Register a function as a program of the zoo."""

    def register(run: Callable[[Any, int], float]) -> Callable[[Any, int], float]:
        name = run.__module__.rpartition(".")[2]
        _programs[name] = Program(name, title, run, metric, best, spread, **options)
        return run

    return register


def programs() -> dict[str, Program]:
    """Return all programs by name."""
    for file in sorted((Path(__file__).parent / "programs").glob("*.py")):
        importlib.import_module(f"tests.zoo.programs.{file.stem}")
    return dict(sorted(_programs.items()))

"""Which nodes run in this process: one over each model at most, and none that its program has let go of.

Two over one model would each add the other's mixes to it; and a cell of a notebook that is run again makes a second,
after which nobody holds the first to close it.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

__all__ = ["CLOSED", "USED", "closes_with", "enter", "leave", "made"]

USED = "This Node was used already: make a new one for each run."
CLOSED = "This Node is closed, and what is trained reaches nobody: make a new one to go on."

_running: list[Side] = []
_made = 0  # Nodes, in this process


class Side(Protocol):
    """What holds a model and runs a node over it."""

    @property
    def model(self) -> Any: ...

    def close(self) -> None: ...


def enter(side: Side) -> int:
    """This one is about to run: close those over the same model. Returns how many."""
    before = [other for other in _running if other.model is side.model]
    for other in before:
        other.close()
    _running.append(side)
    return len(before)


def leave(side: Side) -> None:
    """It has ended."""
    if side in _running:
        _running.remove(side)


def made() -> int:
    """How many Nodes this process has made."""
    return _made


def closes_with(face: object, side: Side) -> None:
    """Close ``side`` when nobody holds ``face`` any more, or the process ends; not in a forked child, where both may
    go and neither is running."""
    global _made
    _made += 1
    weakref.finalize(face, _close, side, os.getpid())


def _close(side: Side, process: int) -> None:
    if os.getpid() == process:
        side.close()

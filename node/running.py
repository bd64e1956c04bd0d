"""Which nodes run in this process: one over each model at most, and none that its program has let go of.

Two over one model would each add the other's mixes to it; and a cell of a notebook that is run again makes a second,
after which nobody holds the first to close it.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path
from typing import Any, Protocol

__all__ = ["CLOSED", "MADE", "USED", "closes_with", "enter", "leave", "made", "note_made"]

USED = "This Node was used already: make a new one for each run."
CLOSED = "This Node is closed, and what is trained reaches nobody: make a new one to go on."

MADE = "GOSSIP_MADE"  # names the file by which `gossip run` learns of Nodes in processes that its script starts

_running: list[Side] = []
_made = False


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


def made() -> bool:
    """Return whether this process has made a Node, or one of those that it started under :data:`MADE`."""
    return _made or Path(os.environ.get(MADE) or os.devnull).is_file()


def note_made() -> None:
    """Note that this process makes a Node, for itself and for the `gossip run` that it belongs to."""
    global _made
    _made = True
    if path := os.environ.get(MADE):
        with contextlib.suppress(OSError):
            Path(path).touch()


def closes_with(face: object, side: Side) -> None:
    """Close ``side`` when nobody holds ``face`` any more, or the process ends; not in a forked child, where both may
    go and neither is running."""
    note_made()
    weakref.finalize(face, _close, side, os.getpid())


def _close(side: Side, process: int) -> None:
    if os.getpid() == process:
        side.close()

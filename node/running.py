"""The nodes that run in this process: at most one for each model, and none that the program has dropped.

Two nodes over one model would each add the other's mixes. A notebook cell that runs again makes a second node, and then
nothing holds the first one to close it. The module also holds the flag that this process was asked to stop.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path
from typing import Any, Protocol

__all__ = [
    "CLOSED", "MADE", "USED", "closes_with", "enter", "has_made_node", "is_stop_requested", "is_unstepped", "leave",
    "note_made", "note_unstepped", "request_stop",
]  # fmt: skip

USED = "This Node was used already: make a new one for each run."
CLOSED = "This Node is closed, and what is trained reaches no member: make a new Node to go on."

MADE = "GOSSIP_MADE"  # Names the file by which `gossip run` learns of Nodes in processes that its script starts.
UNSTEPPED = "unstepped"  # The text of that file if a loop has trained without a step.

_running: list[Side] = []
_made = _is_unstepped = False
_stop_requested = False  # An exception alone can be lost: some imports catch all exceptions, also that of a signal.


class Side(Protocol):
    """The side of a node in the training thread, which holds the model: a TrainingSide, a Leader or a Follower."""

    @property
    def model(self) -> Any: ...

    def close(self) -> None: ...


def enter(side: Side) -> int:
    """Register a side that is about to run, after closing others over the same model. Return their number."""
    replaced = [other for other in _running if other.model is side.model]
    for other in replaced:
        other.close()
    _running.append(side)
    return len(replaced)


def leave(side: Side) -> None:
    """Remove a side that has ended."""
    if side in _running:
        _running.remove(side)


def has_made_node() -> bool:
    """Return True if this process has made a Node, or a process that it started under :data:`MADE` has."""
    return _made or Path(os.environ.get(MADE) or os.devnull).is_file()


def request_stop() -> None:
    """Note that SIGTERM has arrived."""
    global _stop_requested
    _stop_requested = True


def is_stop_requested() -> bool:
    return _stop_requested


def note_made() -> None:
    """Note that this process makes a Node, for itself and for the `gossip run` that it belongs to."""
    global _made
    _made = True
    if path := os.environ.get(MADE):
        with contextlib.suppress(OSError):
            Path(path).touch()


def note_unstepped() -> None:
    """Note that a loop has trained without a step of its Node, likewise."""
    global _is_unstepped
    _is_unstepped = True
    if path := os.environ.get(MADE):
        with contextlib.suppress(OSError):
            Path(path).write_text(UNSTEPPED)


def is_unstepped() -> bool:
    """Return True if a loop of this process, or of one that it started, has trained without a step of its Node."""
    with contextlib.suppress(OSError):
        return _is_unstepped or Path(os.environ.get(MADE) or os.devnull).read_text() == UNSTEPPED
    return _is_unstepped


def closes_with(node: object, side: Side) -> None:
    """Close ``side`` when the program's ``node`` is garbage-collected or the process ends.

    A forked child does not close it, since neither runs there.
    """
    note_made()
    weakref.finalize(node, _close, side, os.getpid())


def _close(side: Side, process: int) -> None:
    if os.getpid() == process:
        side.close()

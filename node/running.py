"""The nodes that run in this process: at most one for each model, and none that the program has dropped.

Two nodes over one model would each add the other's mixes. A notebook cell that runs again makes a second node, and then
nothing holds the first one to close it. The module also holds the flag that this process was asked to stop.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref
from collections.abc import Callable
from itertools import count
from multiprocessing import current_process
from pathlib import Path
from typing import Any, Protocol, TextIO

from gossip.errors import LayoutError, LocalError

USED = "This Node was used already: make a new one for each run."
CLOSED = "This Node is closed, and what is trained reaches no member: make a new Node to go on."

MADE = "GOSSIP_MADE"  # Names the file by which `gossip run` learns of Nodes in processes that its script starts.
INSPECTS = "GOSSIP_INSPECT"  # If it is set, a Node prints its inventory instead of joining, and ends the program.
UNSTEPPED = "unstepped"  # The text of that file if a loop has trained without a step.

IMPORTED = (
    "This process imports the script again, as multiprocessing's spawn does for each worker, and would start another "
    "node: put what the script does under 'if __name__ == \"__main__\":'."
)

ports: dict[int, int] = {}  # The port on which the Node at each place of this process has listened last.
_places: dict[int, Side] = {}  # The Nodes that are not closed yet, by their place among those of this process.
# This process, and the locked file by which it alone runs the Nodes of its `gossip run`. A forked child has a copy.
_claim: tuple[int, TextIO] | None = None
_running: list[Side] = []
_made = _is_unstepped = False
# The runs that Nodes of each thread train or have trained. A later Node over another model trains another: a fold.
_trained = threading.local()
_stop_requested = False  # An exception alone can be lost: some imports catch all exceptions, also that of a signal.


class Side(Protocol):
    """The side of a node in the training thread, which holds the model: a TrainingSide or a RankSide."""

    @property
    def model(self) -> Any: ...

    def addresses(self) -> dict[int, str]:
        """Return the names of the tensors that exchanges carry, by their addresses in memory."""

    def close(self) -> None: ...


def free_place(model: Any) -> int:
    """Return the first place that no open Node of this process over another model has."""
    return next(place for place in count() if place not in _places or _places[place].model is model)


def claim_address() -> None:
    """Claim the address that `gossip run` or `gossip local` gave to the Nodes of this process.

    Raises:
        LocalError: Another process of the same `gossip run` has it, or this one only imports the script again.
    """
    global _claim
    if getattr(current_process(), "_inheriting", False):
        raise LocalError(IMPORTED)
    path = os.environ.get(MADE)
    if path is None or (_claim is not None and _claim[0] == os.getpid()):
        return
    file = open(path, "a+")  # noqa: SIM115 (it is closed with the last Node)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise LocalError(
            "Another process of this script runs a Node already, at the address that gossip gave to the script: make "
            "Nodes in one process, or give this one listen= and seeds= of its own."
        ) from None
    _claim = os.getpid(), file


def enter(side: Side) -> int:
    """Register a side that is about to run, after closing others over the same model. Return their number.

    Raises:
        LayoutError: Another node, over another model, mixes a tensor that this one mixes.
    """
    replaced = [other for other in _running if other.model is side.model]
    addresses = side.addresses()
    for other in [other for other in _running if other not in replaced]:
        if shared := sorted(addresses[at] for at in addresses.keys() & other.addresses().keys()):
            raise LayoutError(
                f"{shared[0]!r} is in the model of another Node of this process too, and both would mix it: make one "
                "Node over an nn.ModuleList of both models, or name it in local= of one of them."
            )
    for other in replaced:
        other.close()
    _running.append(side)
    return len(replaced)


def leave(side: Side) -> None:
    """Remove a side that has ended."""
    global _claim
    for place in [place for place, other in _places.items() if other is side]:
        del _places[place]
    if side in _running:
        _running.remove(side)
    if not _running and _claim is not None:
        _claim[1].close()
        _claim = None


def trained_runs() -> dict[bytes, Callable[[Any], bool] | None]:
    """Return the runs of this thread's Nodes, each with a test for its model; None for a run that is completed."""
    runs: dict[bytes, Callable[[Any], bool] | None] = vars(_trained).setdefault("runs", {})
    return runs


def note_run(run_id: bytes, model: Any, is_over: bool = False, is_left: bool = True) -> bool:
    """Note a run that a Node of this thread trains, has completed (``is_over``) or has left, but not after an error.

    Returns:
        True if an open Node of this thread over another model trains it too.
    """
    runs = trained_runs()
    is_last = runs.pop(run_id, None)
    if is_over or is_left:
        runs[run_id] = None if is_over else knower_of(model)
    return is_last is not None and not is_last(model) and any(is_last(side.model) for side in _running)


def left_runs(model: Any) -> frozenset[bytes]:
    """Return the runs that a new Node over this model takes no part in: completed ones, and those of closed models."""
    kept = [model, *(side.model for side in _running)]
    return frozenset(run for run, is_of in trained_runs().items() if is_of is None or not any(map(is_of, kept)))


def knower_of(model: Any) -> Callable[[Any], bool]:
    """Return a function that tells whether another model is this one, and does not keep it alive."""
    if type(model) is not dict:
        held = reference_to(model)
        return lambda other: other is held()
    # A dict has no weak references, and a later one may have its id, but not its first tensor.
    number, first = id(model), reference_to(next(iter(model.values())))
    return lambda other: type(other) is dict and id(other) == number and next(iter(other.values())) is first()


def reference_to(thing: Any) -> Callable[[], Any]:
    """Return a weak reference, or a strong one to the few things that have none."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing


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


def closes_with(node: object, side: Side, place: int | None = None) -> None:
    """Close ``side`` when the program's ``node`` is garbage-collected or the process ends.

    Until then the Node has this place in the process; None for a rank that has no address. A forked child does not
    close the side, since neither runs there.
    """
    if place is not None:
        _places[place] = side
    note_made()
    weakref.finalize(node, _close, side, os.getpid())


def _close(side: Side, process: int) -> None:
    if os.getpid() == process:
        side.close()

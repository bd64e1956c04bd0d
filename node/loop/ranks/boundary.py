"""The step boundary of a node of several ranks: changes of the model wait until all ranks are at it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gossip.arithmetic.layout import Layout
from gossip.arithmetic.subsets import Subset
from gossip.averaging.boundary import Adoption, Boundary, Update, Visit
from gossip.averaging.vectors import Floats, Vector
from node.loop.ranks.plain import spoken
from node.loop.ranks.ranks import Ranks

__all__ = ["RanksBoundary", "ShardedBoundary", "UpdateTold"]


@dataclass(frozen=True, slots=True)
class UpdateTold:
    """An update as announced to the other ranks; its values follow, and its positions, if it has some."""

    elements: int
    at: bool  # True if as many positions follow.
    ratio: float | None  # The weight of a vector to merge; None for a vector to add.

    def fits(self, layout: Layout) -> bool:
        """Return True if an exchange of this model can have produced the update."""
        sizes = range(layout.exchanged + 1) if self.at else (layout.exchanged, layout.size)
        return self.elements in sizes and 0.0 <= (self.ratio or 0.0) <= 1.0


spoken(UpdateTold)


class RanksBoundary(Boundary):
    """A step boundary that applies changes only while it is open.

    Snapshots are taken at any boundary, since only rank 0 is involved. A change of the model waits until the boundary
    is open. Until then it counts as owed, so that no snapshot is exchanged without it.
    """

    __slots__ = ("door", "is_open", "lost", "ranks", "waiting")

    def __init__(self, ranks: Ranks, *args: Any) -> None:
        super().__init__(*args)
        self.ranks = ranks
        self.door = threading.Lock()  # Acquired before `self.lock`, never while holding it.
        self.is_open = False
        self.lost = False  # An update is in the other ranks' weights and not in these.
        self.waiting: list[Callable[[], None]] = []  # Requests that wait for the opening, in their order.

    def open(self) -> None:
        with self.door:
            self.is_open = True
            waiting, self.waiting = self.waiting, []
            for wish in waiting:
                wish()

    def shut(self) -> None:
        """Close the boundary; changes that are not applied yet wait for the next time."""
        with self.door:
            self.is_open = False
            with self.lock:
                updates, self.updates = self.updates, []
                adoption, self.adoption = self.adoption, None
                restoring, self.restoring = self.restoring, False
                self.wanted = bool(self.requests)
            self.waiting += [partial(Boundary.want_update, self, update) for update in updates]
            if adoption is not None:
                self.waiting.append(partial(Boundary.want_adoption, self, adoption))
            if restoring:
                self.waiting.append(partial(Boundary.want_restore, self))

    def wish(self, wish: Callable[[], None]) -> None:
        """Make this request at once if the boundary is open, otherwise when it opens."""
        with self.door:
            if self.is_open:
                wish()
            else:
                self.waiting.append(wish)

    @property
    def asks(self) -> bool:
        """Return True if something waits for the opening."""
        return bool(self.waiting)

    # -- called by the network -----------------------------------------------------------------------------------
    @property
    def weighs(self) -> bool:
        """Return False, since each rank adds the values that it receives as they are."""
        return False

    def want_update(self, update: Update) -> None:
        self.wish(partial(Boundary.want_update, self, update))

    def want_adoption(self, adoption: Adoption) -> None:
        self.wish(partial(Boundary.want_adoption, self, adoption))

    def want_restore(self) -> None:
        self.wish(partial(Boundary.want_restore, self))

    def restart(self) -> None:
        """Restart as the base class does, and keep the updates that wait for all ranks."""
        with self.door:
            self.waiting = [wish for wish in self.waiting if getattr(wish, "func", None) is Boundary.want_update]
            super().restart()
            with self.lock:
                self.owed += len(self.waiting)
                if self.restoring and not self.is_open:
                    self.restoring, self.wanted = False, bool(self.updates)
                    self.waiting.append(partial(Boundary.want_restore, self))

    # -- called by the training loop -----------------------------------------------------------------------------
    def apply(self, update: Update, visit: Visit, copies: dict[Subset | None, Vector] | None = None) -> float:
        """Send the update to the other ranks first: applying it here overwrites its vector if it merges or copies."""
        values, positions, ratio = update.vector.array, update.positions, None
        if update.mass is not None:
            ratio = update.mass / (self.mass + update.mass)
        self.ranks.tell("change", UpdateTold(values.size, positions is not None, ratio))
        self.ranks.send(values)
        if positions is not None:
            self.ranks.send(np.array(positions))  # Copied, since they may be read-only.
        lost, ratio = visit.lost, super().apply(update, visit, copies)
        self.lost |= visit.lost > lost
        return ratio


class ShardedBoundary(RanksBoundary):
    """The step boundary of a sharded model, of which no rank has all: snapshots too wait until it is open."""

    __slots__ = ("keeps", "spares")

    def __init__(self, ranks: Ranks, *args: Any) -> None:
        super().__init__(ranks, *args)
        self.spares = self.keeps = False  # Copies that a visit was asked for while the boundary was closed.

    @property
    def asks(self) -> bool:
        return self.wanted or self.spares or self.keeps or super().asks

    @property
    def weighs(self) -> bool:
        return self.model.weighs

    def visit(self, replaced: Callable[[Floats], None], spare: bool = False, keep: bool = False) -> Visit:
        spare, keep = spare or self.spares, keep or self.keeps
        self.spares, self.keeps = (False, False) if self.is_open else (spare, keep)
        if not self.is_open:
            return Visit(decided=self.decided, lives=self.lives)
        return Boundary.visit(self, replaced, spare, keep)

    def apply(self, update: Update, visit: Visit, copies: dict[Subset | None, Vector] | None = None) -> float:
        """Apply it as a node of one process does: the model's state brings it to all ranks."""
        return Boundary.apply(self, update, visit, copies)

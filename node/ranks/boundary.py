"""The step boundary of a node of several ranks. It is *open* while all ranks stand at it; changes wait for that."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from gossip.arithmetic.layout import Layout
from gossip.arithmetic.moments import MomentForm, Role
from gossip.arithmetic.subsets import Subset
from gossip.averaging.boundary import Boundary
from gossip.averaging.model import Pending
from gossip.averaging.vectors import Floats, Moments, Vector
from gossip.averaging.visit import Adoption, Update, Visit
from node.model.optimizer.optimizer_state import MAX_OPTIMIZER_KEYS
from node.model.snapshot import ModelState
from node.model.state import State
from node.ranks.plain import register
from node.ranks.ranks import Ranks


@dataclass(frozen=True, slots=True)
class UpdateTold:
    """The announcement of an update to the other ranks. Its values follow, then its positions unless it covers all."""

    elements: int
    has_positions: bool
    ratio: float | None  # The share of a vector to merge in the new weights; None for a vector to add.
    # The sizes of the portions in which values go from device to device; empty if they go over the hosts.
    portions: tuple[int, ...] = ()

    def fits(self, layout: Layout) -> bool:
        """Return True if an exchange of a model with this layout can have produced the update."""
        sizes = range(layout.exchanged + 1) if self.has_positions else (layout.exchanged, layout.size)
        return self.elements in sizes and 0.0 <= (self.ratio or 0.0) <= 1.0


@dataclass(frozen=True, slots=True)
class MomentsTold:
    """The announcement of a partner's moments to the other ranks. The vector of :class:`Moments` follows."""

    names: tuple[str, ...]
    start: int
    stop: int

    def form(self, elements: int) -> MomentForm | None:
        """Return a form for mixing moments of this many elements; None if no correct rank 0 has sent this."""
        if not (0 < len(self.names) <= MAX_OPTIMIZER_KEYS and 0 <= self.start < self.stop <= elements):
            return None
        roles: tuple[Role, ...] = tuple("plain" for _ in self.names)  # They matter on the way between members alone.
        return MomentForm(self.names, roles, elements)


register(MomentsTold, UpdateTold)


class RanksBoundary(Boundary):
    """A step boundary that applies changes only while it is open, which is when all ranks stand at one boundary.

    Snapshots are taken at any boundary, because only rank 0 takes them. A change of the model waits until the boundary
    opens. Until then an update counts as pending, so that no snapshot is exchanged without it.
    """

    def __init__(self, ranks: Ranks, *args: Any) -> None:
        super().__init__(*args)
        self.ranks = ranks
        self.is_open = False
        self.has_lost_update = False  # An update is in the other ranks' weights and not in these.

    def open(self) -> None:
        """Open the boundary, so that a visit applies the changes that have waited."""
        if self.adoption is not None and not self.adoption.trial:
            self.drop_updates()  # They are for the weights that the adoption replaces.
        with self.lock:
            self.is_open, self.has_requests = True, self.needs_opening or bool(self.requests)

    def shut(self) -> None:
        """Close the boundary. Changes that no visit has applied yet wait."""
        with self.lock:
            self.is_open, self.has_requests = False, bool(self.requests)

    @property
    def needs_opening(self) -> bool:
        """Return True if a request waits for the opening."""
        return bool(self.arrived_updates or self.arrived_moments or self.adoption or self.must_restore)

    @property
    def adds_weighted(self) -> bool:
        """Return False, since each rank adds the values that it receives as they are."""
        return False

    def request_adoption(self, adoption: Adoption) -> None:
        """Request the adoption; updates stay until the opening, since a fault of the network may cancel it."""
        with self.lock:
            waits = not self.is_open
            if waits:
                self.adoption = adoption
        if not waits:
            super().request_adoption(adoption)

    def announce_request(self) -> None:
        if self.is_open or self.requests:  # No visit serves a change before the boundary opens.
            super().announce_request()

    # -- called by the training loop -----------------------------------------------------------------------------
    def apply_update(self, update: Update, visit: Visit, copies: dict[Subset, Vector] | None = None) -> float:
        """Send the update to the other ranks, then apply it here, which may overwrite its vector."""
        values, positions, ratio = update.vector.array, update.positions, None
        if update.statistics is not None:  # The other ranks add what this one would, as they do all values.
            shift = cast(State, self.model).statistics_shift(update.statistics)
            start = update.statistics.start
            own = shift if positions is None else shift[positions[np.searchsorted(positions, start) :] - start]
            values[values.size - own.size :] = own
            self.vectors.give(update.statistics.vector)
            update = replace(update, statistics=None)
        if update.mass is not None:  # A pushed vector is merged by its share of the push-sum mass.
            ratio = update.mass / (self.mass + update.mass)
        relayed = None
        if positions is None and isinstance(self.model, ModelState) and self.ranks.relays(values.nbytes):
            relayed = self.model.begin_relay(values.size, ratio, self.ranks.relay, values)
        portions = () if relayed is None else relayed.portions
        self.ranks.send_command("change", UpdateTold(values.size, positions is not None, ratio, portions))
        if relayed is None:
            self.ranks.broadcast_array(values)
        else:
            update = replace(update, upload=relayed)  # Its values are sent while they are added.
        if positions is not None:
            self.ranks.broadcast_array(np.array(positions))  # A copy, since the positions may be read-only.
        lost_before, ratio = visit.lost_updates, super().apply_update(update, visit, copies)
        self.has_lost_update |= visit.lost_updates > lost_before
        return ratio

    def begin_mix_moments(self, moments: Moments) -> Pending | None:
        """Mix them here, and then on the other ranks. On none if this rank has no memory or other moments by now."""
        pending = super().begin_mix_moments(moments)
        if pending is not None:
            self.ranks.send_command("moments", MomentsTold(moments.form.names, moments.start, moments.stop))
            self.ranks.broadcast_array(moments.vector.array)
        return pending


class ShardedBoundary(RanksBoundary):
    """The step boundary of a sharded model. No rank holds all of it, so snapshots too wait until it is open."""

    def __init__(self, ranks: Ranks, *args: Any) -> None:
        super().__init__(ranks, *args)
        # Copies that visits should have taken while the boundary was closed: for a mix that is due, and for newcomers.
        self.is_spare_due = self.is_copy_due = False

    @property
    def needs_opening(self) -> bool:
        return bool(self.requests) or self.is_spare_due or self.is_copy_due or super().needs_opening

    @property
    def adds_weighted(self) -> bool:
        return self.model.adds_weighted

    def visit(self, on_replaced: Callable[[Floats], None], spare: bool = False, keep: bool = False) -> Visit:
        """Visit as the base class does while open; while closed, note only the copies that are due."""
        spare, keep = spare or self.is_spare_due, keep or self.is_copy_due
        self.is_spare_due, self.is_copy_due = (False, False) if self.is_open else (spare, keep)
        if not self.is_open:
            return Visit(decided_updates=self.decided_updates, replacements=self.replacements)
        return Boundary.visit(self, on_replaced, spare, keep)

    def apply_update(self, update: Update, visit: Visit, copies: dict[Subset, Vector] | None = None) -> float:
        """Apply the update as a node of one process does, because the sharded state brings it to all ranks."""
        return Boundary.apply_update(self, update, visit, copies)

    def begin_mix_moments(self, moments: Moments) -> Pending | None:
        return Boundary.begin_mix_moments(self, moments)

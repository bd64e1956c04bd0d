"""The all-reduce of a group, as one member computes it: the mean of its slice, and the distance of all means from ours.

Each member sends every other member that member's slice. It averages the values of its own slice and sends the mean to
all (reduce-scatter, then all-gather). On real links slices arrive chunk by chunk, in receivers. In the simulator they
arrive whole. A member that is late is left out: the means do without its values, and our weights stay as they are where
its mean is missing. Our own layout sets the memory: two vectors in addition to the snapshot, for the others' values of
our slice and for the difference, and as much again for what late members still send.
"""

import math
from collections.abc import Collection

import numpy as np

from gossip.arithmetic.group_mean import group_mean, member_slices, norm_refusal
from gossip.arithmetic.mixing import subtract
from gossip.averaging.streams import DifferenceReceiver, Receiver, ValuesReceiver
from gossip.averaging.vectors import Floats, Vector, Vectors
from gossip.codecs import ALIGN, Codec
from gossip.config import Config
from gossip.effects import Gather
from gossip.filters.registry import filter_of
from gossip.ids import PeerId
from gossip.wire.messages import MAX_GROUP


class GroupAverage:
    """One member's side of an all-reduce. A member's place is its index in ``members``."""

    def __init__(self, effect: Gather, snapshot: Vector, codec: Codec, config: Config, vectors: Vectors) -> None:
        self.codec, self.config, self.vectors = codec, config, vectors
        self.session, self.members, self.place = effect.session, effect.members, effect.place
        self.ours = ours = snapshot.array
        self.slices = member_slices(ours.size, len(effect.members))
        own_slice = self.slices[self.place]
        length = own_slice.stop - own_slice.start
        # For all members' values of our slice: as long as our vector, but for slices that are rounded to whole blocks.
        self.row_memory = vectors.take_scratch(ours.size + (MAX_GROUP + 1) * ALIGN)
        # All members' values of our slice: (members, length).
        self.rows: Floats = self.row_memory.array[: len(self.members) * length].reshape(len(self.members), length)
        self.difference: Vector | None = vectors.take(ours.size)  # The means minus our vector, until it is taken.
        # The members whose values of our slice have not all arrived, and those whose mean has not: the receiver by the
        # member's place; None for a slice that arrives whole.
        self.missing_values: dict[int, Receiver | None] = {}
        self.missing_means: dict[int, Receiver | None] = {}
        for place, member_slice in enumerate(self.slices):
            if place != self.place and length:
                self.missing_values[place] = None
            if place != self.place and member_slice.stop > member_slice.start:
                self.missing_means[place] = None
        # The receivers of members that were left out, which a link may still fill.
        self.late_values: dict[int, Receiver | None] = {}
        self.late_means: dict[int, Receiver | None] = {}
        self.slice_squares: dict[int, tuple[float, float]] = {}  # |mean - ours|^2 and |ours|^2 by slice.
        self.excluded_places: dict[int, str] = {}  # Why our slice's mean leaves members out, by place.
        self.slice_mean: Floats | None = None  # Mean of our slice, float32 (length,).
        self.is_averaging = False  # The mean of our slice is being computed.
        self.difference_sq = math.nan  # |mean - ours|^2, once all means have arrived.
        self.is_reported = False  # The arrival of all means has been reported.
        self.is_released = False  # The session has ended: a running job gives the vectors back at its end.
        codec.quantised(ours[own_slice], self.rows[self.place], self.session, own_slice.start)

    # -- chunk by chunk ------------------------------------------------------------------------------------------
    def create_receivers(self) -> None:
        """Create the receivers for slices that come chunk by chunk."""
        result, own_slice = self.difference, self.slices[self.place]
        assert result is not None
        for place in self.missing_values:
            self.missing_values[place] = ValuesReceiver(self.session, self.rows[place], self.codec, own_slice.start)
        for place in self.missing_means:
            member_slice = self.slices[place]
            self.missing_means[place] = DifferenceReceiver(
                self.session, self.ours[member_slice], result.array[member_slice], self.codec, origin=member_slice.start
            )

    def chunk_receiver(self, place: int, start: int) -> Receiver | None:
        """Return the receiver of this member's chunk at ``start``: values of our slice, or the mean of its own."""
        own_slice = self.slices[self.place]
        are_values = own_slice.start <= start < own_slice.stop
        missing, late = (self.missing_values, self.late_values) if are_values else (self.missing_means, self.late_means)
        return missing.get(place) or late.get(place)

    def on_received(self, place: int, receiver: Receiver) -> None:
        """Record that this receiver of the member at ``place`` is complete: a mean, or values of our slice."""
        if receiver in (self.late_values.get(place), self.late_means.get(place)):
            return
        if isinstance(receiver, DifferenceReceiver):
            del self.missing_means[place]
            self.slice_squares[place] = receiver.difference_sq, receiver.own_sq
        else:
            del self.missing_values[place]

    # -- late members --------------------------------------------------------------------------------------------
    def leave_out(self, peers: Collection[PeerId] | None, means: bool) -> None:
        """Continue without the missing values of these members, and with ``means`` without their missing means.

        ``peers`` is None for all members.
        """
        for place, peer in enumerate(self.members):
            if peers is not None and peer not in peers:
                continue
            if place in self.missing_values:
                self.late_values[place] = self.missing_values.pop(place)
            if means and place in self.missing_means:
                receiver = self.late_means[place] = self.missing_means.pop(place)
                if isinstance(receiver, DifferenceReceiver):  # Later chunks must not get into the result.
                    receiver.out = np.empty_like(receiver.out)

    @property
    def received_elements(self) -> int:
        """Return the number of elements that have come from the other members, once the receivers exist."""
        received, own_slice = 0, self.slices[self.place]
        for place, their_slice in enumerate(self.slices):
            if place == self.place:
                continue
            for due_slice, missing in ((own_slice, self.missing_values), (their_slice, self.missing_means)):
                if place not in missing:  # All of it has come.
                    received += due_slice.stop - due_slice.start
                elif (receiver := missing[place]) is not None:
                    received += receiver.elements_arrived
        return received

    @property
    def absent(self) -> list[PeerId]:
        """Return the members that were left out."""
        return [self.members[place] for place in sorted({*self.late_values, *self.late_means})]

    # -- whole slices --------------------------------------------------------------------------------------------
    def as_received(self, values: Floats, start: int) -> Floats:
        """Return ``values``, which begin at ``start`` of the vector, as the other members decode them."""
        out = np.empty_like(values)
        self.codec.quantised(values, out, self.session, start)
        return out

    def take_values(self, place: int, values: Floats) -> None:
        """Take a member's values of our slice."""
        if place in self.missing_values:
            self.rows[place] = values
            del self.missing_values[place]

    def take_mean(self, place: int, values: Floats) -> None:
        """Take the mean of a member's slice."""
        if place in self.missing_means:
            member_slice = self.slices[place]
            assert self.difference is not None
            ours = self.as_received(self.ours[member_slice], member_slice.start)
            self.slice_squares[place] = self.subtract(values, ours, member_slice)
            del self.missing_means[place]

    # -- means ---------------------------------------------------------------------------------------------------
    @property
    def can_average(self) -> bool:
        """Return True if all of our slice has arrived and its mean has not been computed."""
        return not self.missing_values and not self.is_averaging and self.slice_mean is None and self.rows.size > 0

    def average_slice(self) -> None:
        """Compute the mean of our slice, and its difference from our values, both as all members decode them.

        It uses no memory that arriving chunks write, so it may run in another thread.
        """
        config, place = self.config, self.place
        assert self.difference is not None
        bound = config.internal.norm_bound
        mean, self.excluded_places = group_mean(self.rows, place, filter_of(config).mean, bound, self.late_values)
        own_slice, ours = self.slices[place], self.rows[place]
        out = self.difference.array[own_slice]
        self.codec.quantised(mean, out, self.session, own_slice.start)
        self.slice_squares[place] = self.subtract(out, ours, own_slice)
        self.slice_mean = mean

    def subtract(self, mean: Floats, ours: Floats, where: slice) -> tuple[float, float]:
        """Put the difference of a slice's mean from ours into the result, and the means of statistics themselves."""
        assert self.difference is not None
        out, head = self.difference.array[where], self.weights_in(where)
        out[head:] = mean[head:]
        return subtract(mean[:head], ours[:head], out[:head])

    def weights_in(self, where: slice) -> int:
        """Return the number of weights at the beginning of a slice; the rest are statistics."""
        weights: int = min(max(self.codec.tail - where.start, 0), where.stop - where.start)
        return weights

    @property
    def is_complete(self) -> bool:
        """Return True if all means are here, ours included."""
        if self.missing_values or self.missing_means or self.is_averaging or self.is_released:
            return False
        return self.difference is not None and (self.slice_mean is not None or not self.rows.size)

    def outcome(self) -> tuple[float, float, dict[PeerId, str], list[PeerId]]:
        """Finish the difference, once all is complete.

        Where a mean is missing, is not finite or is too far away, our weights will stay as they are.

        Returns:
            ``|mean - ours|^2``, ``|ours|^2``, why members' values or means were refused, and the members left out.
        """
        difference_sq = own_sq = 0.0
        refused, unmixed = dict(self.excluded_places), list(self.late_means)
        for place, (slice_difference_sq, slice_own_sq) in sorted(self.slice_squares.items()):
            elements, bound = self.slices[place].stop - self.slices[place].start, self.config.internal.norm_bound
            code = norm_refusal(slice_difference_sq, slice_own_sq, elements, bound)
            if code is None:
                difference_sq, own_sq = difference_sq + slice_difference_sq, own_sq + slice_own_sq
            else:
                refused[place] = code
                unmixed.append(place)
        self.clear(unmixed)
        self.difference_sq = difference_sq
        return difference_sq, own_sq, {self.members[place]: code for place, code in refused.items()}, self.absent

    def clear(self, places: list[int]) -> None:
        """Let these members' slices change nothing, in another vector if a link still fills this one."""
        assert self.difference is not None
        if are_filling(self.late_means):
            filled, self.difference = self.difference, self.vectors.take(self.ours.size)
            self.difference.array[:] = filled.array
        for place in places:
            where = self.slices[place]
            out, head = self.difference.array[where], self.weights_in(where)
            out[:head], out[head:] = 0.0, self.ours[where][head:]  # Statistics are values, not differences.

    # -- results -------------------------------------------------------------------------------------------------
    def take_difference(self) -> Vector | None:
        """Return the difference, which the caller owns from now on."""
        taken, self.difference = self.difference, None
        return taken

    def release(self) -> None:
        """Give the vectors back, except those that a link or a running job may still write to."""
        self.is_released = True
        if self.is_averaging:
            return
        if not are_filling(self.missing_values, self.late_values):
            self.vectors.give(self.row_memory)
        if self.difference is not None and not are_filling(self.missing_means, self.late_means):
            self.vectors.give(self.difference)
        self.difference = None


def are_filling(*tables: dict[int, Receiver | None]) -> bool:
    """Return True if a link is reading into a buffer of one of these receivers."""
    return any(receiver is not None and receiver.is_filling for table in tables for receiver in table.values())

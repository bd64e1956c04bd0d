"""The all-reduce of a group, as one member computes it: the mean of its slice, and the distance of all means from ours.

Each member sends every other member that member's slice. It averages the values of its own slice and sends the mean to
all (reduce-scatter, then all-gather). Slices come chunk by chunk through the receivers, or whole. Our own layout sets
the memory: two vectors in addition to the snapshot, for the others' values of our slice and for the difference.
"""

from __future__ import annotations

import numpy as np

from gossip.arithmetic.group_mean import group_mean, norm_accepts, slices
from gossip.arithmetic.mixing import difference
from gossip.averaging.streams import DifferenceReceiver, Receiver, ValuesReceiver
from gossip.averaging.vectors import Floats, Vector, Vectors
from gossip.codecs import ALIGN, Codec
from gossip.config import Config
from gossip.effects import Gather
from gossip.filters.registry import filter_of
from gossip.ids import PeerId
from gossip.wire.messages import MAX_GROUP

__all__ = ["GroupAverage"]


class GroupAverage:
    """One member's side of an all-reduce. Members are identified by their places."""

    __slots__ = (
        "averaging", "awaited", "codec", "config", "difference", "effect", "left_out", "mean", "members", "missing",
        "ours", "over", "parts", "place", "rows", "session", "slices", "squares", "told", "vectors",
    )  # fmt: skip

    def __init__(self, effect: Gather, snapshot: Vector, codec: Codec, config: Config, vectors: Vectors) -> None:
        self.effect, self.codec, self.config, self.vectors = effect, codec, config, vectors
        self.session, self.members, self.place = effect.session, effect.members, effect.place
        self.ours = ours = snapshot.array
        self.slices = slices(ours.size, len(effect.members))
        own = self.slices[self.place]
        length = own.stop - own.start
        self.rows = vectors.take(ours.size + (MAX_GROUP + 1) * ALIGN)  # Slices consist of whole blocks.
        self.parts: Floats = self.rows.array[: len(self.members) * length].reshape(len(self.members), length)
        self.difference: Vector | None = vectors.take(ours.size)  # The means minus ours, until taken.
        self.missing: dict[int, Receiver | None] = {}  # Members whose values of our slice have not all arrived.
        self.awaited: dict[int, Receiver | None] = {}  # Members whose means have not all arrived.
        for place, where in enumerate(self.slices):
            if place != self.place and length:
                self.missing[place] = None
            if place != self.place and where.stop > where.start:
                self.awaited[place] = None
        self.squares: dict[int, tuple[float, float]] = {}  # |mean - ours|^2 and |ours|^2 by slice.
        self.left_out: list[int] = []  # Members that our slice's mean leaves out.
        self.mean: Floats | None = None  # Mean of our slice.
        self.averaging = False  # The mean of our slice is being computed.
        self.told = False  # The arrival of all means has been reported.
        self.over = False
        codec.quantised(ours[own], self.parts[self.place], self.session, own.start)

    # -- chunk by chunk ------------------------------------------------------------------------------------------
    def stream(self) -> None:
        """Create the receivers for slices that come chunk by chunk."""
        result, own = self.difference, self.slices[self.place]
        assert result is not None
        for place in self.missing:
            self.missing[place] = ValuesReceiver(self.session, self.parts[place], self.codec, own.start)
        for place in self.awaited:
            where = self.slices[place]
            self.awaited[place] = DifferenceReceiver(
                self.session, self.ours[where], result.array[where], self.codec, origin=where.start
            )

    def receiver(self, place: int, start: int) -> Receiver | None:
        """Return the receiver of this member's chunk at ``start``: values of our slice, or the mean of its own."""
        own = self.slices[self.place]
        return (self.missing if own.start <= start < own.stop else self.awaited).get(place)

    def arrived(self, place: int, receiver: Receiver) -> None:
        """Record that this receiver has all of its slice."""
        if isinstance(receiver, DifferenceReceiver):
            del self.awaited[place]
            self.squares[place] = receiver.difference_sq, receiver.own_sq
        else:
            del self.missing[place]

    # -- whole slices --------------------------------------------------------------------------------------------
    def send(self, values: Floats, start: int) -> Floats:
        """Return ``values``, which begin at ``start`` of the vector, as the others decode them."""
        out = np.empty_like(values)
        self.codec.quantised(values, out, self.session, start)
        return out

    def take_values(self, place: int, values: Floats) -> None:
        """Take a member's values of our slice."""
        if place in self.missing:
            self.parts[place] = values
            del self.missing[place]

    def take_mean(self, place: int, values: Floats) -> None:
        """Take the mean of a member's slice."""
        if place in self.awaited:
            where = self.slices[place]
            assert self.difference is not None
            ours = self.send(self.ours[where], where.start)
            self.squares[place] = difference(values, ours, self.difference.array[where])
            del self.awaited[place]

    # -- means ---------------------------------------------------------------------------------------------------
    @property
    def can_average(self) -> bool:
        """Return True if all of our slice has arrived and its mean has not been computed."""
        return not self.missing and not self.averaging and self.mean is None and self.parts.size > 0

    def average(self) -> None:
        """Compute the mean of our slice and its difference from ours, both as all members decode them.

        It uses no memory that arriving chunks write.
        """
        config, place = self.config, self.place
        assert self.difference is not None
        mean, self.left_out = group_mean(self.parts, place, filter_of(config).mean, config.internal.norm_bound)
        own, ours = self.slices[place], self.parts[place]
        out = self.difference.array[own]
        self.codec.quantised(mean, out, self.session, own.start)
        self.squares[place] = difference(out, ours, out)
        self.mean = mean

    @property
    def complete(self) -> bool:
        """Return True if all means are here, ours included."""
        waits = self.missing or self.awaited or self.averaging or self.over or self.difference is None
        return not waits and (self.mean is not None or not self.parts.size)

    def outcome(self) -> tuple[float, float, list[PeerId]]:
        """Return ``|mean - ours|^2``, ``|ours|^2``, and the members whose values were refused."""
        apart_sq = own_sq = 0.0
        refused = list(self.left_out)
        for place, where in enumerate(self.slices):
            if place in self.squares:
                squares = self.squares[place]
                apart_sq, own_sq = apart_sq + squares[0], own_sq + squares[1]
                if norm_accepts(*squares, where.stop - where.start, self.config.internal.norm_bound) is not None:
                    refused.append(place)
        return apart_sq, own_sq, [self.members[place] for place in refused]

    # -- results -------------------------------------------------------------------------------------------------
    def take_difference(self) -> Vector | None:
        """Return the difference, which the caller owns from now on."""
        taken, self.difference = self.difference, None
        return taken

    def release(self) -> None:
        """Give the vectors back, except those that a link or a running job may still write to."""
        self.over = True
        if self.averaging:
            return
        if not any(receiver is not None and receiver.filling for receiver in self.missing.values()):
            self.vectors.give(self.rows)
        filling = any(receiver is not None and receiver.filling for receiver in self.awaited.values())
        if self.difference is not None and not filling:
            self.vectors.give(self.difference)
        self.difference = None

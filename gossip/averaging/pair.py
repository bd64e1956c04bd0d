"""The computation of one side of a pair or push: the difference between its snapshot and the partner's.

Each side subtracts its own snapshot, as the partner decodes it, from the partner's as it arrived. The two differences
are each other's exact negatives (:mod:`gossip.arithmetic.mixing`). On real links the vector arrives chunk by chunk, in
a receiver. In the simulator it arrives whole.
"""

from __future__ import annotations

import math

import numpy as np

from gossip.arithmetic.mixing import is_finite, subtract
from gossip.arithmetic.sketch import Sketcher
from gossip.averaging.streams import DifferenceReceiver
from gossip.averaging.vectors import Floats, Vector, Vectors
from gossip.codecs import ALIGN, Codec, Overflow, Spread
from gossip.codecs.base import block_peaks
from gossip.effects import Transfer
from gossip.kernel.squares import squares


class PairAverage:
    """One side of a pair or push.

    ``codec`` has its bounds, if it needs any. ``spread`` learns from the difference how far members are apart.
    """

    def __init__(
        self, effect: Transfer, snapshot: Vector, codec: Codec, spread: Spread | None, vectors: Vectors,
        sketcher: Sketcher | None = None,
    ) -> None:  # fmt: skip
        self.session, self.partner = effect.session, effect.partner
        self.sends, self.receives = effect.sends, effect.receives
        cut, array = snapshot.cut, snapshot.array
        self.positions = None if cut is None else cut.positions
        self.ours = array if self.positions is None else array[: self.positions.size]
        self.elements = self.ours.size
        self.weights = min(codec.tail, self.elements)  # Statistics follow, which travel as values.
        self.decoded_ours = self.ours  # Our values as the partner decodes them.
        self.codec, self.spread, self.vectors = codec, spread, vectors
        self.difference: Vector | None = None  # The partner's vector minus ours, until the caller takes it.
        self.receiver: DifferenceReceiver | None = None
        self.difference_sq = self.own_sq = 0.0
        # Sketches of the difference if the filter needs one; a part of a model has none.
        self.sketcher = sketcher if self.positions is None else None
        self.sketch: Floats | None = None
        self.is_complete = False  # The partner's vector has arrived as a whole.

    # -- chunk by chunk ------------------------------------------------------------------------------------------
    def create_receiver(self) -> DifferenceReceiver | None:
        """Create the receiver of the partner's chunks; return None if none will come.

        The driver calls :meth:`on_received` once the receiver is complete.
        """
        if self.receives:
            self.difference = self.vectors.take(self.elements)
            self.receiver = DifferenceReceiver(
                self.session, self.ours, self.difference.array, self.codec, self.spread, skips_codec=not self.sends
            )
            self.receiver.sketcher = self.sketcher
        return self.receiver

    def on_received(self) -> None:
        """Take the squared norms from the receiver, which is complete."""
        receiver = self.receiver
        assert receiver is not None
        self.difference_sq, self.own_sq = receiver.difference_sq, receiver.own_sq
        self.is_complete, self.sketch = receiver.is_complete, receiver.sketch
        self.count_smallest_differences()
        self.refuse_spoiled_statistics()

    def count_smallest_differences(self) -> None:
        """Let the squared difference be 0 for equal vectors alone, since members that settle end on equal ones.

        The square of a difference below some 1e-23 is no float32 any more.
        """
        if self.difference_sq == 0.0 and self.difference is not None and self.difference.array[: self.weights].any():
            self.difference_sq = math.ulp(0.0)

    def refuse_spoiled_statistics(self) -> None:
        """Let the exchange be refused if a statistic of the partner is not finite."""
        if self.difference is not None and not is_finite(self.difference.array[self.weights :]):
            self.difference_sq = math.inf

    # -- whole vectors -------------------------------------------------------------------------------------------
    def as_received(self, values: Floats) -> tuple[Floats, bytearray | None]:
        """Return ``values`` as the partner decodes them, and the bytes if decoding needs the partner's own vector.

        Args:
            values: The values that are sent, float32 (elements,).
        """
        encoded: bytearray | None = None
        if self.codec.needs_spread:
            encoded = bytearray(self.codec.encoded_bytes(values.size))
            self.codec.encode(values, encoded, self.session)
        if not self.codec.is_raw:
            decoded = np.empty_like(values)
            self.codec.quantised(values, decoded, self.session)
            values = decoded
        return values, encoded

    def can_decode(self, encoded: bytearray) -> bool:
        """Return True if our vector is close enough to the partner's to decode its bytes (:meth:`as_received`)."""
        try:
            self.codec.decode(encoded, np.empty_like(self.ours), self.ours, self.session)
        except Overflow:
            return False
        return True

    def receive_whole(self, theirs: Floats, other: PairAverage | None = None) -> None:
        """Subtract our values from the partner's vector, as its :meth:`as_received` returned it.

        If the partner's average is known (``other``) and has its difference, ours is the negative of it.
        """
        self.difference = self.vectors.take(self.elements)
        head, out = self.weights, self.difference.array
        out[head:] = theirs[head:]
        if other is not None and other.difference is not None:
            np.negative(other.difference.array[:head], out=out[:head])
            self.difference_sq, self.own_sq = other.difference_sq, squares(self.decoded_ours[:head])
        else:
            self.difference_sq, self.own_sq = subtract(theirs[:head], self.decoded_ours[:head], out[:head])
        self.count_smallest_differences()
        self.refuse_spoiled_statistics()
        if self.sketcher is not None:
            self.sketch = self.sketcher.sketch(out[:head])
        self.is_complete = True

    # -- results -------------------------------------------------------------------------------------------------
    def learn_distance(self) -> None:
        """Learn the distance between members from the difference, which was accepted."""
        if self.spread is None or not self.is_complete:
            return
        if self.receiver is not None:
            self.receiver.learn_distance()
        elif self.difference is not None:
            errors = self.codec.block_errors(self.ours)
            peaks = np.zeros_like(errors)
            peaks[: -(-self.weights // ALIGN)] = block_peaks(self.difference.array[: self.weights], ALIGN)
            self.spread.learn(peaks, errors)

    def take_difference(self) -> Vector | None:
        """Return the difference, which the caller owns from now on."""
        taken, self.difference = self.difference, None
        return taken

    def release(self) -> None:
        """Give the difference back, unless a link still writes to it: then the vector is not reused."""
        is_filling = self.receiver is not None and self.receiver.is_filling
        if self.difference is not None and not is_filling:
            self.vectors.give(self.difference)
        self.difference = None

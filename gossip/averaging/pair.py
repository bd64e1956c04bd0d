"""The computation of one side of a pair or push: the difference between its snapshot and the partner's.

Each side subtracts its own snapshot, as the partner decodes it, from the partner's as it arrived. The two differences
are each other's exact negatives (:mod:`gossip.arithmetic.mixing`). Vectors arrive chunk by chunk through
:meth:`PairAverage.stream`, or whole.
"""

from __future__ import annotations

import numpy as np

from gossip.arithmetic.mixing import difference
from gossip.averaging.streams import DifferenceReceiver
from gossip.averaging.vectors import Floats, Vector, Vectors
from gossip.codecs import ALIGN, Codec, Overflow, Spread
from gossip.codecs.base import peaks
from gossip.effects import Transfer
from gossip.kernel.squares import squares

__all__ = ["PairAverage"]


class PairAverage:
    """One side of a pair or push. ``codec`` is bound if it needs bounds; ``spread`` learns from the difference."""

    __slots__ = (
        "codec", "difference", "difference_sq", "elements", "ours", "own_sq", "partner", "positions", "receiver",
        "receives", "sends", "session", "spread", "values", "vectors", "whole",
    )  # fmt: skip

    def __init__(
        self, effect: Transfer, snapshot: Vector, codec: Codec, spread: Spread | None, vectors: Vectors
    ) -> None:  # fmt: skip
        self.session, self.partner = effect.session, effect.partner
        self.sends, self.receives = effect.sends, effect.receives
        cut, array = snapshot.cut, snapshot.array
        self.positions = None if cut is None else cut.positions
        self.ours = array if self.positions is None else array[: self.positions.size]
        self.elements = self.ours.size
        self.values = self.ours  # Our values as the partner decodes them.
        self.codec, self.spread, self.vectors = codec, spread, vectors
        self.difference: Vector | None = None  # theirs - ours, until the caller takes it.
        self.receiver: DifferenceReceiver | None = None
        self.difference_sq = self.own_sq = 0.0
        self.whole = False  # The whole vector of the partner has arrived.

    # -- chunk by chunk ------------------------------------------------------------------------------------------
    def stream(self) -> DifferenceReceiver | None:
        """Return the receiver of the partner's chunks, None if none will come; report its end to :meth:`arrived`."""
        if self.receives:
            self.difference = self.vectors.take(self.elements)
            self.receiver = DifferenceReceiver(
                self.session, self.ours, self.difference.array, self.codec, self.spread, plain=not self.sends
            )
        return self.receiver

    def arrived(self) -> None:
        receiver = self.receiver
        assert receiver is not None
        self.difference_sq, self.own_sq, self.whole = receiver.difference_sq, receiver.own_sq, receiver.done

    # -- whole vectors -------------------------------------------------------------------------------------------
    def send(self, values: Floats) -> tuple[Floats, bytearray | None]:
        """Return ``values`` as the partner decodes them, and the bytes if decoding needs the partner's own vector."""
        encoded: bytearray | None = None
        if self.codec.needs_spread:
            encoded = bytearray(self.codec.encoded_bytes(values.size))
            self.codec.encode(values, encoded, self.session)
        if not self.codec.raw:
            decoded = np.empty_like(values)
            self.codec.quantised(values, decoded, self.session)
            values = decoded
        return values, encoded

    def decodes(self, encoded: bytearray) -> bool:
        """Return True if the bound that the partner's bytes rely on holds."""
        try:
            self.codec.decode(encoded, np.empty_like(self.ours), self.ours, self.session)
        except Overflow:
            return False
        return True

    def take(self, theirs: Floats, other: PairAverage | None = None) -> None:
        """Subtract our values from the partner's vector, as its :meth:`send` returned it.

        If the partner's average is known (``other``) and has its difference, ours is the negative of it.
        """
        self.difference = self.vectors.take(self.elements)
        if other is not None and other.difference is not None:
            np.negative(other.difference.array, out=self.difference.array)
            self.difference_sq, self.own_sq = other.difference_sq, squares(self.values)
        else:
            self.difference_sq, self.own_sq = difference(theirs, self.values, self.difference.array)
        self.whole = True

    # -- results -------------------------------------------------------------------------------------------------
    def learn(self) -> None:
        """Let codecs learn the distance between members from an accepted difference."""
        if self.spread is None or not self.whole:
            return
        if self.receiver is not None:
            self.receiver.learn()
        elif self.difference is not None:
            self.spread.learn(peaks(self.difference.array, ALIGN), self.codec.errors(self.ours))

    def take_difference(self) -> Vector | None:
        """Return the difference, which the caller owns from now on."""
        taken, self.difference = self.difference, None
        return taken

    def release(self) -> None:
        filling = self.receiver is not None and self.receiver.filling
        # Otherwise a link still writes there, so the vector is not reused.
        if self.difference is not None and not filling:
            self.vectors.give(self.difference)
        self.difference = None

"""What one side of a pair, or of a push, computes: the difference between its snapshot and the partner's.

The two sides compute differences that are each other's exact negatives (:mod:`gossip.arithmetic.mixing`), each from
its own snapshot as the partner decodes it and from the partner's as it arrived: chunk by chunk, as
:meth:`PairAverage.stream` receives it, or the whole vector at once.
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
    """``codec`` is bound already where it needs bounds; ``spread``: what is to learn from the difference."""

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
        self.values = self.ours  # as the partner decodes them
        self.codec, self.spread, self.vectors = codec, spread, vectors
        self.difference: Vector | None = None  # theirs - ours, until somebody takes it
        self.receiver: DifferenceReceiver | None = None
        self.difference_sq = self.own_sq = 0.0
        self.whole = False  # all of theirs is here

    # -- chunk by chunk ------------------------------------------------------------------------------------------
    def stream(self) -> DifferenceReceiver | None:
        """What takes the partner's chunks, where any are to come: tell :meth:`arrived` when it is done."""
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
        """``values`` as the partner will decode them, and the bytes, where those mean nothing without what the partner
        holds."""
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
        """Whether the bound that the partner's bytes rely on held."""
        try:
            self.codec.decode(encoded, np.empty_like(self.ours), self.ours, self.session)
        except Overflow:
            return False
        return True

    def take(self, theirs: Floats, other: PairAverage | None = None) -> None:
        """Theirs is here, as :meth:`send` gave it; ``other``, where it is known, has computed its own difference from
        the same two vectors, and ours is its negative."""
        self.difference = self.vectors.take(self.elements)
        if other is not None and other.difference is not None:
            np.negative(other.difference.array, out=self.difference.array)
            self.difference_sq, self.own_sq = other.difference_sq, squares(self.values)
        else:
            self.difference_sq, self.own_sq = difference(theirs, self.values, self.difference.array)
        self.whole = True

    # -- what came of it -----------------------------------------------------------------------------------------
    def learn(self) -> None:
        """The difference was accepted: what it shows of how far apart members are, codecs may know."""
        if self.spread is None or not self.whole:
            return
        if self.receiver is not None:
            self.receiver.learn()
        elif self.difference is not None:
            self.spread.learn(peaks(self.difference.array, ALIGN), self.codec.errors(self.ours))

    def take_difference(self) -> Vector | None:
        """The caller owns it now."""
        taken, self.difference = self.difference, None
        return taken

    def release(self) -> None:
        filling = self.receiver is not None and self.receiver.filling
        if self.difference is not None and not filling:  # else a link still writes there: it is not used again
            self.vectors.give(self.difference)
        self.difference = None

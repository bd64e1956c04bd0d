"""How far a node's partners lie from it, block by block: learned from the differences that its exchanges bring."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gossip.codecs.values import ALIGN, Floats

__all__ = ["Spread"]


class Spread:
    """The largest ``|d|`` that a node saw lately in each block of 256 positions, as Moniqua needs it.

    It learns from every difference that was accepted, of whatever codec; one that was refused may be an attacker's, and
    would cost precision until it has decayed. Not safe to call from two threads at once.
    """

    DECAY: ClassVar[float] = 0.97
    """A peak shrinks by 3 % an exchange and is forgotten after some thirty: partners are drawn at random, and the next
    may be as far as the farthest of them. Overflows at a margin of 3 on digits (same data | two classes a node): at
    0.7 5.9 | 12 %, at 0.9 1.4 | 3.0 %, at 0.97 1.1 | 1.5 %, with bounds of 16, 18 and 22 times the rms difference."""
    FLOOR: ClassVar[float] = 0.5
    """A block expects at least half of what nine blocks in ten stay below: one that stood still (a unit that never
    fired) may begin to move, and a smaller bound there would save nothing that shows beside the others. Overflows as
    above without it: 1.9 | 3.2 %."""

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.peaks: Floats = np.full(-(-elements // ALIGN), np.nan, np.float32)  # (blocks,), NaN: never seen

    @property
    def known(self) -> bool:
        """Every block was seen at least once: Moniqua can encode."""
        return not np.isnan(self.peaks).any()

    def learn(self, seen: Floats, errors: Floats) -> None:
        """``seen``: the :func:`~gossip.codecs.values.peaks` of a difference before it is weighted, (blocks,); those
        that are not finite teach nothing.

        ``errors`` is what the codec may have lost of the own values, block by block (:meth:`Codec.errors`). It is
        subtracted twice, once for the partner: what is left is no more than what there was. Otherwise a coarse codec
        would learn from its own noise, and its bounds grow without end (2 bits: threefold at every exchange).
        """
        seen = seen - 2 * errors
        self.peaks *= np.float32(self.DECAY)
        seen[~np.isfinite(seen)] = np.nan  # teaches nothing
        np.fmax(self.peaks, np.maximum(seen, np.float32(0.0)), out=self.peaks)

    def reach(self) -> Floats:
        """What to expect of the next partner, without a margin: (blocks,). Only where ``known``."""
        assert self.known, "no exchange has shown how far apart the nodes are"
        if not self.peaks.size:
            return self.peaks.copy()
        return np.maximum(self.peaks, np.float32(self.FLOOR * float(np.quantile(self.peaks, 0.9))))

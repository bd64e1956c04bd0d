"""The distance of a node's partners from it, block by block, learned from the differences in its exchanges.

The codec Moniqua needs a bound on it (:mod:`gossip.codecs.moniqua`), and *overflows* where a partner is farther.
"""

from typing import ClassVar

import numpy as np

from gossip.codecs.values import ALIGN, Floats


class Spread:
    """The largest recent difference from a partner in each block of 256 positions, as Moniqua needs it.

    It learns from every accepted difference, whatever the codec. A refused one may be an attacker's, and would cost
    precision until it has decayed. Not thread-safe.
    """

    DECAY: ClassVar[float] = 0.97
    """A peak shrinks by 3 % an exchange and is forgotten after some thirty.

    Partners are drawn at random, and the next one may be as far as the farthest of them. Measured on digits, with
    bounds of 3 times the peaks:

        decay                                0.7       0.9       0.97
        overflows, same data on all nodes    5.9 %     1.4 %     1.1 %
        overflows, two classes a node        12 %      3.0 %     1.5 %
        bounds over the rms difference       16        18        22
    """
    FLOOR: ClassVar[float] = 0.5
    """A block's bound is at least this share of the 90th percentile of all blocks.

    A block that did not change (a unit that never fired) may begin to change, and a smaller bound there saves nothing.
    Without it, a decay of 0.97 had 1.9 % and 3.2 % overflows.
    """

    def __init__(self, elements: int) -> None:
        self.elements = elements
        # The largest difference of each block, (blocks,), NaN until the first exchange.
        self.peaks: Floats = np.full(-(-elements // ALIGN), np.nan, np.float32)

    @property
    def is_known(self) -> bool:
        """Return True if every block was seen at least once, so that Moniqua can encode."""
        return not np.isnan(self.peaks).any()

    def learn(self, seen: Floats, errors: Floats) -> None:
        """Learn from a difference before it is weighted.

        The codec's error is subtracted twice, once for each side, so that the rest is at most the true difference.
        Otherwise a coarse codec would learn from its own noise, and its bounds would grow without end (2 bits:
        threefold at every exchange).

        Args:
            seen: The :func:`~gossip.codecs.values.block_peaks` of the difference, (blocks,). Peaks that are not finite
                are ignored.
            errors: The bound on what the codec lost of our values, :meth:`Codec.block_errors`: (blocks,).
        """
        true_peaks = seen - 2 * errors
        self.peaks *= np.float32(self.DECAY)
        true_peaks[~np.isfinite(true_peaks)] = np.nan  # np.fmax ignores NaN.
        np.fmax(self.peaks, np.maximum(true_peaks, np.float32(0.0)), out=self.peaks)

    def reach(self) -> Floats:
        """Return the expected distance of the next partner, without a margin: (blocks,). Requires ``is_known``."""
        assert self.is_known, "no exchange has shown how far apart the nodes are"
        if not self.peaks.size:
            return self.peaks.copy()
        return np.maximum(self.peaks, np.float32(self.FLOOR * float(np.quantile(self.peaks, 0.9))))

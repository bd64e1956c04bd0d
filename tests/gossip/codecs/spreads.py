"""Teach a spread one difference, for tests of codecs that need bounds."""

import numpy as np

from gossip.codecs.spread import Spread
from gossip.codecs.values import ALIGN, Floats, block_peaks


def observe(spread: Spread, difference: Floats, errors: Floats | None = None) -> None:
    """Learn as from an accepted exchange; ``errors`` are those of the codec, block by block."""
    seen = block_peaks(difference, ALIGN)
    spread.learn(seen, np.zeros_like(seen) if errors is None else errors)

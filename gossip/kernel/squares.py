"""Sums of squares in one order, whoever computes them: a sum depends on its order, and that of BLAS is another on each
processor. It is written twice, here for numpy and in ``passes.c``, and every bit is equal."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossip import kernel

__all__ = ["BLOCK", "PIECE", "squares", "summed"]

LANES = 64  # a row of squares is added to so many sums at once
BLOCK = 64 * LANES
"""Values whose squares are added up in float32; what is cut at multiples of it and added up in turn has the same sum.
64 numbers are added to each other then, which errs by 4e-6 at most. Passes.c has the same two numbers."""
PIECE = 16 * BLOCK  # squared at a time: 256 KiB stay in the second cache, and five calls of numpy's are few for it

Floats = NDArray[np.float32]


def squares(values: Floats, before: float = 0.0) -> float:
    """``before`` and the squares of float32 ``values`` (1-D, contiguous): in float32 the squares that are 64 apart, one
    after another, up to the end of a block of 4,096; in float64 what comes of those, one after another.

    Not finite where a value is not, or where those squares are more than a float32 holds (values from 2e18 on).
    """
    if kernel.passes is not None:
        return kernel.passes.squares(values.size, values, before)
    return summed(values, before)


def summed(values: Floats, before: float) -> float:
    """The same by numpy."""
    blocks = -(-values.size // BLOCK)
    chain = np.empty(1 + blocks * LANES)
    chain[0] = before
    scratch = np.empty(min(blocks * BLOCK, PIECE), np.float32)
    with np.errstate(all="ignore"):  # what it would warn of, the sum tells
        for first in range(0, values.size, PIECE):
            piece = values[first : first + PIECE]
            rows = scratch[: -(-piece.size // BLOCK) * BLOCK]
            np.multiply(piece, piece, out=rows[: piece.size])
            rows[piece.size :] = 0.0  # adding them changes nothing
            # Row after row. Along the axis that lies together in memory numpy would choose an order of its own.
            lanes: NDArray[Any] = np.add.reduce(rows.reshape(-1, BLOCK // LANES, LANES), axis=1)
            place = 1 + first // BLOCK * LANES
            chain[place : place + lanes.size] = lanes.reshape(-1)
        return float(np.add.accumulate(chain)[-1])  # by what it is, one after another

"""Sums of squares in one fixed order, the same on all machines.

A sum depends on its order, and that of BLAS differs between processors. The sum is written twice, here for numpy and
in ``passes.c``, with the same result to the last bit.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossip import kernel

LANES = 64  # A row of squares is added to this many partial sums at once.
BLOCK = 64 * LANES
"""Values whose squares are summed in float32. Chunks cut at multiples of it have the same sum.

Each partial sum then has 64 numbers, with an error of at most 4e-6. passes.c has the same two constants.
"""
PIECE = 16 * BLOCK  # Squared at a time: 256 KiB stay in the L2 cache, and five numpy calls per piece are few.

Floats = NDArray[np.float32]


def squares(values: Floats, before: float = 0.0) -> float:
    """Return ``before`` plus the squares of float32 ``values`` (1-D, contiguous).

    Squares that are 64 apart are added one after another in float32, up to the end of a block of 4,096. These sums are
    then added one after another in float64. The result is not finite if a value is not, or if a float32 sum overflows
    (values from 2e18).
    """
    if kernel.passes is not None:
        return kernel.passes.squares(values.size, values, before)
    return squares_numpy(values, before)


def squares_numpy(values: Floats, before: float) -> float:
    """Do the same as :func:`squares` with numpy."""
    blocks = -(-values.size // BLOCK)
    addends = np.empty(1 + blocks * LANES)  # In the order in which they are added: ``before``, then partial sums.
    addends[0] = before
    scratch = np.empty(min(blocks * BLOCK, PIECE), np.float32)
    with np.errstate(all="ignore"):  # No warnings: the sum shows overflows.
        for first in range(0, values.size, PIECE):
            piece = values[first : first + PIECE]
            rows = scratch[: -(-piece.size // BLOCK) * BLOCK]
            np.multiply(piece, piece, out=rows[: piece.size])
            rows[piece.size :] = 0.0  # Fill the last block: adding zeros changes nothing.
            # Add row after row. Along the contiguous axis numpy would choose an order of its own.
            lanes: NDArray[Any] = np.add.reduce(rows.reshape(-1, BLOCK // LANES, LANES), axis=1)
            start = 1 + first // BLOCK * LANES
            addends[start : start + lanes.size] = lanes.reshape(-1)
        return float(np.add.accumulate(addends)[-1])  # accumulate adds one after another by definition.

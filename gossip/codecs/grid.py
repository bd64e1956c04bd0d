"""The scales of blocks, by which a codec divides their values, as one byte on a logarithmic grid: four to the octave.

The byte is a float32's exponent and first two bits of mantissa, minus a constant. So scales are 1, 1.25, 1.5 and 1.75
times a power of two. Encoding is a shift, and decoding is exact on every machine. 0 means a block of zeros, 255 one
that is not finite. Between them are 63 octaves, from 1.4e-14 to 2e5.
"""

import numpy as np
from numpy.typing import NDArray

from gossip.codecs.base import Floats

MANTISSA_BITS = 2
SHIFT = 23 - MANTISSA_BITS  # Of the 23 bits of a float32's mantissa, these are cut off.
SMALLEST_SCALE = 2.0**-46
BIAS = ((127 - 46) << MANTISSA_BITS) - 1  # 2**-46 has the float32 exponent 127 - 46, and byte 1.
NOT_FINITE = 255

SCALES: Floats = ((np.arange(256, dtype=np.uint32) + BIAS) << SHIFT).astype(np.uint32).view(np.float32).copy()
SCALES[0] = 0.0
SCALES[NOT_FINITE] = np.nan
LARGEST_SCALE = float(SCALES[NOT_FINITE - 1])
INVERSES: Floats = np.zeros(256, np.float32)  # 0 for zero and for NOT_FINITE.
INVERSES[1:NOT_FINITE] = np.float32(1.0) / SCALES[1:NOT_FINITE]


def scale_bytes(scales: Floats) -> NDArray[np.uint8]:
    """Return the bytes of the smallest scales on the grid that are at least ``scales`` (none negative, NaN allowed)."""
    ceiling = scales.view(np.int32) >> SHIFT
    ceiling += (scales.view(np.int32) & ((1 << SHIFT) - 1)) != 0
    ceiling -= BIAS
    np.clip(ceiling, 1, NOT_FINITE, out=ceiling)
    return ceiling.astype(np.uint8)

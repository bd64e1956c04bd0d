"""Helpers for all codecs: block sizes, the largest magnitude of each block, and typed views of bytes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Buffer = memoryview | bytearray | bytes | NDArray[np.uint8]

ALIGN = 256
"""Chunks begin at multiples of this, the longest run of values with one scale.

Scales belong to absolute positions, so two sides with different chunks still give every value the same scale.
"""

BLOCK_ELEMENTS = 32_768
"""Elements converted at a time: 128 KiB of float32 stay in the L2 cache with source and target.

Measured on one core, bf16 encoding: 3.5 GB/s at 4,096, 9.8 at 32,768, 11.2 at 65,536.
"""


INFINITY, QUIET_NAN = 0x7F800000, 0x7FC00000  # As float32 bits.


def block_peaks(values: Floats, block: int) -> Floats:
    """Return the largest magnitude in each block of ``block`` values: float32 (ceil(n / block),).

    The last block may be shorter. A block with a NaN gives NaN. Magnitudes are compared as integers, which have the
    floats' order: numpy takes the maximum of rows of 256 at 21 GB/s that way, and at 12 GB/s as floats.
    """
    if block == 1:
        return np.abs(values)
    out = np.empty(-(-values.size // block), np.int32)
    scratch = np.empty(min(values.size, BLOCK_ELEMENTS), np.int32)
    bits = values.view(np.int32)
    for first in range(0, values.size, BLOCK_ELEMENTS):
        part = bits[first : first + BLOCK_ELEMENTS]
        magnitudes = np.bitwise_and(part, 0x7FFFFFFF, out=scratch[: part.size])
        row, rows = first // block, part.size // block  # Blocks before the part, and whole blocks in it.
        whole = rows * block
        np.maximum.reduce(magnitudes[:whole].reshape(rows, block), axis=1, out=out[row : row + rows])
        if whole < part.size:
            out[row + rows] = magnitudes[whole:].max()
    out[out > INFINITY] = QUIET_NAN  # Arithmetic with a signalling NaN would warn.
    return out.view(np.float32)


def typed_view(buffer: Buffer, dtype: str, elements: int) -> NDArray[Any]:
    """Return ``buffer`` as an array of ``elements`` numbers of ``dtype``, without a copy.

    Raises:
        AssertionError: The buffer has another length, which is a fault of this program.
    """
    array = np.frombuffer(buffer, dtype)
    assert array.size == elements, f"{array.size} encoded elements where {elements} belong"
    return array

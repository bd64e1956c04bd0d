"""Packing of 8-bit or 4-bit codes into bytes, in whole slices: strided access would cost more than all arithmetic."""

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def packed_bytes(elements: int, bits: int) -> int:
    return -(-elements * bits // 8)


def pack(codes: Bytes, bits: int, out: Bytes) -> None:
    """Pack ``codes`` (each below 2**bits) into ``out``, which has `packed_bytes`.

    With w bytes, byte j holds code j in its lowest bits, and above it codes j + w, j + 2 w, ...; 0 where there is none.
    """
    width = out.size
    if bits == 8:
        out[:] = codes
        return
    out[:] = codes[:width]
    for place in range(1, 8 // bits):
        part = codes[place * width : (place + 1) * width]
        out[: part.size] |= part << (bits * place)


def unpack(data: Bytes, bits: int, codes: Bytes) -> None:
    """Reverse :func:`pack`."""
    width = data.size
    if bits == 8:
        codes[:] = data
        return
    mask = (1 << bits) - 1
    for place in range(8 // bits):
        part = codes[place * width : (place + 1) * width]
        np.right_shift(data[: part.size], bits * place, out=part)
        part &= mask

"""Codes of 8 or 4 bits side by side in bytes, in whole slices: a stride would cost more than all the arithmetic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack", "packed_bytes", "unpack"]

Bytes = NDArray[np.uint8]


def packed_bytes(elements: int, bits: int) -> int:
    return -(-elements * bits // 8)


def pack(codes: Bytes, bits: int, out: Bytes) -> None:
    """``codes`` (each below 2**bits) into the ``packed_bytes`` of ``out``.

    Of n codes and w bytes, byte j holds code j in its lowest bits, then codes j + w, j + 2 w, ...; the last may be 0.
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
    """What :func:`pack` made of ``codes``, back into ``codes``."""
    width = data.size
    if bits == 8:
        codes[:] = data
        return
    mask = (1 << bits) - 1
    for place in range(8 // bits):
        part = codes[place * width : (place + 1) * width]
        np.right_shift(data[: part.size], bits * place, out=part)
        part &= mask

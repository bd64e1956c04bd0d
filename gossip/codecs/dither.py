"""Noise that both sides of a session share, from a table: what is drawn depends on the session and the position alone.

With ``u`` uniform in [-1/2, 1/2), ``Q(x) = s (round(x/s + u) - u)`` errs by at most ``s/2``, uniformly and whatever
``x`` is, so it is unbiased (subtractive dither: Roberts 1962; Schuchman 1964). Both sides subtract the same ``u``:
where they share a scale the difference ``Q(p) - Q(s)`` is ``p - s`` rounded stochastically, and exactly zero where the
two agree. Plain stochastic rounding (no ``- u``) gives the same differences at one scale, and noisier ones at two.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import pack

import numpy as np
import xxhash
from numpy.typing import NDArray

from gossip.codecs.base import ALIGN, BLOCK_ELEMENTS, Floats

__all__ = ["TABLE_ELEMENTS", "beginnings", "noise_table", "segments"]

TABLE_ELEMENTS = 32_768
"""Strata of the noise, and places in the table at which a segment may begin. Odd multiples of 2**-16, so that float32
holds each exactly even beside 127."""


def noise_table(shift: float) -> Floats:
    """``u + shift`` with one ``u`` in the middle of each stratum of [-1/2, 1/2), in an order fixed for all time; then
    the same once more, so that a slice of a whole segment may begin anywhere: over all beginnings every position sees
    every stratum exactly once. (2 * TABLE_ELEMENTS,) float32.

    The order is that of a hash of the stratum's number (splitmix64: Steele, Lea and Flood 2014) and not numpy's
    generator's, whose streams may change between versions: two peers must draw alike.
    """
    mixed = np.arange(1, TABLE_ELEMENTS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    order: NDArray[np.intp] = np.argsort(mixed, kind="stable")
    noise = (order + 0.5) / TABLE_ELEMENTS - 0.5 + shift
    table = np.concatenate([noise, noise]).astype(np.float32)
    table.flags.writeable = False
    return table


def beginning(seed: int, segment: int) -> int:
    """Where in the table the noise of an absolute segment of BLOCK_ELEMENTS begins."""
    return xxhash.xxh3_64_intdigest(pack("<QQ", seed & (1 << 64) - 1, segment)) % TABLE_ELEMENTS


def beginnings(seed: int, start: int, elements: int) -> NDArray[np.int32]:
    """The same of each segment that some of the stream's positions from ``start`` on lie in: (segments,)."""
    assert start % ALIGN == 0, f"a chunk begins at {start}, which is no multiple of {ALIGN}"
    touched = range(start // BLOCK_ELEMENTS, -(-(start + elements) // BLOCK_ELEMENTS) if elements else 0)
    return np.array([beginning(seed, segment) for segment in touched], np.int32)


def segments(table: Floats, seed: int, start: int, elements: int) -> Iterator[tuple[slice, Floats]]:
    """The stream's positions from ``start`` on in pieces of at most BLOCK_ELEMENTS, each with its noise.

    A piece ends where an absolute segment of BLOCK_ELEMENTS does: noise belongs to positions, whatever the chunks.
    """
    assert start % ALIGN == 0, f"a chunk begins at {start}, which is no multiple of {ALIGN}"
    first = 0
    while first < elements:
        segment, inside = divmod(start + first, BLOCK_ELEMENTS)
        count = min(BLOCK_ELEMENTS - inside, elements - first)
        offset = (beginning(seed, segment) + inside) % TABLE_ELEMENTS
        yield slice(first, first + count), table[offset : offset + count]
        first += count

"""Dither (noise) that both sides of a session share. It comes from a table, and depends only on session and position.

With ``u`` uniform in [-1/2, 1/2), the error of ``Q(x) = s (round(x/s + u) - u)`` is uniform, at most ``s/2`` and
independent of ``x``. So ``Q`` is unbiased (subtractive dither: Roberts 1962; Schuchman 1964).

Both sides subtract the same ``u``. If they share a scale, ``Q(p) - Q(s)`` is ``p - s`` rounded stochastically, and
exactly zero where the two agree. Plain stochastic rounding (no ``- u``) gives the same differences at one scale, and
noisier ones at two.
"""

from collections.abc import Iterator
from struct import pack

import numpy as np
import xxhash
from numpy.typing import NDArray

from gossip.codecs.base import ALIGN, BLOCK_ELEMENTS, Floats

TABLE_ELEMENTS = 32_768
"""The number of strata, equal ranges of [-1/2, 1/2), and of places in the table at which a segment may begin.

Values are odd multiples of 2**-16, which float32 holds exactly even after adding 127.
"""


def noise_table(shift: float) -> Floats:
    """Return ``u + shift`` with one ``u`` in the middle of each stratum, in a fixed order, twice.

    Because of the repetition a whole segment may begin anywhere in the table. Over all beginnings every position gets
    every stratum exactly once. The shape is (2 * TABLE_ELEMENTS,) float32.

    The order is that of a hash of the stratum's number (splitmix64: Steele, Lea and Flood 2014). numpy's generators may
    change between versions, and two peers must draw alike.
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


def table_offset(seed: int, segment: int) -> int:
    """Return the place in the table at which the noise of an absolute segment of BLOCK_ELEMENTS begins."""
    seed_64_bits = seed & (1 << 64) - 1
    return xxhash.xxh3_64_intdigest(pack("<QQ", seed_64_bits, segment)) % TABLE_ELEMENTS


def table_offsets(seed: int, start: int, elements: int) -> NDArray[np.int32]:
    """Return :func:`table_offset` for each segment that ``elements`` positions from ``start`` touch: (segments,)."""
    assert start % ALIGN == 0, f"a chunk begins at {start}, which is no multiple of {ALIGN}"
    touched = range(start // BLOCK_ELEMENTS, -(-(start + elements) // BLOCK_ELEMENTS) if elements else 0)
    return np.array([table_offset(seed, segment) for segment in touched], np.int32)


def noise_segments(table: Floats, seed: int, start: int, elements: int) -> Iterator[tuple[slice, Floats]]:
    """Yield a chunk of ``elements`` positions from ``start`` in pieces of at most BLOCK_ELEMENTS, with their noise.

    Each piece is a slice of the chunk. It ends where an absolute segment of BLOCK_ELEMENTS does, because noise belongs
    to positions, whatever the chunks.
    """
    assert start % ALIGN == 0, f"a chunk begins at {start}, which is no multiple of {ALIGN}"
    first = 0
    while first < elements:
        segment, inside = divmod(start + first, BLOCK_ELEMENTS)
        count = min(BLOCK_ELEMENTS - inside, elements - first)
        offset = (table_offset(seed, segment) + inside) % TABLE_ELEMENTS
        yield slice(first, first + count), table[offset : offset + count]
        first += count

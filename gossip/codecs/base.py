"""What every codec is: float32 values to bytes and back, with a stated error.

An exchange computes ``d = w (Q(p) - Q(s))`` on both sides, ``Q`` being "through the codec": each side also knows what
the other decodes of it (:meth:`Codec.quantised`). The two differences are then each other's exact negatives, and with
one ``w`` the mean over the pair moves by exactly nothing, whatever the codec loses.

Everything here works on one chunk in cache-sized blocks: temporaries never exceed 128 KiB, and nothing loops per
element. Bytes are little-endian on every machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gossip.codecs.spread import Spread

__all__ = ["ALIGN", "BLOCK_ELEMENTS", "Buffer", "Codec", "Floats", "numbers", "peaks"]

Floats = NDArray[np.float32]
Buffer = memoryview | bytearray | bytes | NDArray[np.uint8]

ALIGN = 256
"""A chunk begins at a multiple of this: scales belong to absolute positions, so that two sides that cut their streams
differently still give every value the same one. The longest run of values with one scale."""

BLOCK_ELEMENTS = 32_768
"""Elements converted at a time: 128 KiB of float32 stays in the second-level cache with its source and target.
Measured on one core, bf16 encoding: 3.5 GB/s at 4,096, 9.8 at 32,768, 11.2 at 65,536."""


INFINITY, QUIET_NAN = 0x7F800000, 0x7FC00000  # as float32's bits


class Codec(ABC):
    """How float32 values cross the wire. Stateless, so that one instance serves every thread and link.

    ``seed`` is the session's number, the same on both sides: codecs that dither draw the same noise for both, so that
    it leaves the difference where the two agree. ``start`` is the position of ``values[0]`` in the stream, a multiple
    of :data:`ALIGN`. ``near`` are the receiver's own values at those positions, which only Moniqua reads.
    """

    name: ClassVar[str]
    raw: ClassVar[bool] = False
    """The encoded bytes are the little-endian float32 array itself: a sender may send a view of it, unencoded."""
    needs_spread: ClassVar[bool] = False
    """Encodes only with bounds on the disagreement: :meth:`bound` first."""
    block: ClassVar[int] = 1  # consecutive values that share a scale
    relative_error: ClassVar[float]
    """Bound on ``|Q(x) - x| / max |x|`` over the block, where that maximum is between ``smallest`` and ``largest``."""
    smallest: ClassVar[float]  # below it the error is absolute: smallest * relative_error
    largest: ClassVar[float]  # above it a value becomes infinite or NaN, and the finite check refuses the exchange
    known_values: ClassVar[tuple[float, ...]] = (0.0, -0.0, 1.0, -2.5, 1 / 3, 65504.0, float("inf"))
    known_bytes: ClassVar[str]  # hexadecimal: what known_values must encode to, with seed 1

    @abstractmethod
    def encoded_bytes(self, elements: int) -> int:
        """Exactly how many bytes ``elements`` values take: the receiver expects that many and no other number."""

    @abstractmethod
    def encode(self, values: Floats, out: Buffer, seed: int = 0, start: int = 0) -> None:
        """``values`` (1-D, contiguous) into the writable ``out`` of exactly ``encoded_bytes(len(values))`` bytes."""

    @abstractmethod
    def decode(self, data: Buffer, out: Floats, near: Floats | None = None, seed: int = 0, start: int = 0) -> None:
        """``data`` of exactly ``encoded_bytes(len(out))`` bytes into ``out`` (1-D, contiguous)."""

    def quantised(self, values: Floats, out: Floats, seed: int = 0, start: int = 0) -> None:
        """What the partner decodes of ``values``, bit for bit; ``out`` may be ``values`` itself."""
        scratch = np.empty(self.encoded_bytes(min(values.size, BLOCK_ELEMENTS)), np.uint8)
        for first in range(0, values.size, BLOCK_ELEMENTS):
            block = values[first : first + BLOCK_ELEMENTS]
            encoded = scratch[: self.encoded_bytes(block.size)]
            self.encode(block, encoded, seed, start + first)
            self.decode(encoded, out[first : first + BLOCK_ELEMENTS], None, seed, start + first)

    def bound(self, spread: Spread) -> Codec:
        """The codec to use for one session: itself, unless it needs the bounds that ``spread`` has learned."""
        return self

    def error_bound(self, values: Floats, start: int = 0) -> Floats:
        """What ``|Q(x) - x|`` is at most, for each of ``values`` (none of them above ``largest``)."""
        largest = np.repeat(peaks(values, self.block), self.block)[: values.size]
        return np.float32(self.relative_error) * np.maximum(largest, np.float32(self.smallest))

    def errors(self, values: Floats, start: int = 0) -> Floats:
        """The largest of :meth:`error_bound` in each block of ALIGN values: (ceil(n / ALIGN),)."""
        return np.float32(self.relative_error) * np.maximum(peaks(values, ALIGN), np.float32(self.smallest))


def peaks(values: Floats, block: int) -> Floats:
    """The largest magnitude in each run of ``block`` values, the last run maybe shorter: (ceil(n / block),).

    NaN where one of them is. Magnitudes are compared as integers, which order as the floats do: numpy takes the maximum
    of rows of 256 in 21 GB/s that way, and in 12 GB/s as floats.
    """
    if block == 1:
        return np.abs(values)
    out = np.empty(-(-values.size // block), np.int32)
    scratch = np.empty(min(values.size, BLOCK_ELEMENTS), np.int32)
    bits = values.view(np.int32)
    for first in range(0, values.size, BLOCK_ELEMENTS):
        part = bits[first : first + BLOCK_ELEMENTS]
        sizes = np.bitwise_and(part, 0x7FFFFFFF, out=scratch[: part.size])
        rows, whole = part.size // block, part.size // block * block
        row = first // block
        np.maximum.reduce(sizes[:whole].reshape(rows, block), axis=1, out=out[row : row + rows])
        if whole < part.size:
            out[row + rows] = sizes[whole:].max()
    out[out > INFINITY] = QUIET_NAN  # arithmetic with a signalling one would warn
    return out.view(np.float32)


def numbers(buffer: Buffer, dtype: str, elements: int) -> NDArray[Any]:
    """``buffer`` as exactly that many numbers, without a copy; a wrong length is a bug of ours, never the wire's."""
    array = np.frombuffer(buffer, dtype)
    assert array.size == elements, f"{array.size} encoded elements where {elements} belong"
    return array

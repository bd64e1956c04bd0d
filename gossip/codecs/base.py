"""The interface of codecs: float32 values to bytes and back, with a bounded error.

Each side of an exchange computes ``d = w (Q(p) - Q(s))`` from the partner's vector ``p`` and its own ``s`` with the
weight ``w`` (:mod:`gossip.arithmetic.mixing`), where ``Q`` is encoding and decoding. So each side also computes what
the other decodes of its values (:meth:`Codec.quantised`). The two differences are exact negatives. Both sides use the
same ``w``, so the pair's mean stays exactly the same, whatever the codec loses.

All functions work on one chunk, a range of the vector, in cache-sized blocks: temporaries never exceed 128 KiB, and no
Python loop runs per element. Bytes are little-endian on every machine.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from gossip.codecs.spread import Spread
from gossip.codecs.values import ALIGN, BLOCK_ELEMENTS, Buffer, Floats, block_peaks, typed_view
from gossip.kernel.squares import squares

__all__ = ["ALIGN", "BLOCK_ELEMENTS", "Buffer", "Codec", "Floats", "block_peaks", "typed_view"]


class Codec(ABC):
    """A stateless encoding of float32 values. One instance serves all threads and links.

    ``seed`` is the session's number, the same on both sides: codecs with dither (:mod:`gossip.codecs.dither`) draw the
    same noise for both, which cancels where the two agree. ``start`` is the position of ``values[0]`` in the vector, a
    multiple of :data:`ALIGN`. ``near`` are the receiver's own values at those positions, which only
    :mod:`gossip.codecs.moniqua` reads.
    """

    name: ClassVar[str]
    is_raw: bool = False
    """True if the encoded bytes are the little-endian float32 array itself, so that a sender may send a view of it."""
    tail: int = sys.maxsize
    """The position from which on values are statistics, which are sent as they are (:mod:`gossip.codecs.tail`)."""
    needs_spread: ClassVar[bool] = False
    """True if it needs bounds on the distance between members to encode: call :meth:`with_bounds` first."""
    block: ClassVar[int] = 1  # Consecutive values that share a scale.
    relative_error: ClassVar[float]
    """The bound on ``|Q(x) - x| / max |x|`` over a block, if that maximum is between ``smallest`` and ``largest``."""
    smallest: ClassVar[float]  # Below it the error is absolute: smallest * relative_error.
    # Larger values become infinite or NaN. The norm of the difference shows them, and the exchange is refused.
    largest: ClassVar[float]
    # The self-test of :mod:`gossip.codecs` encodes known_values: all members must send the same bytes.
    known_values: ClassVar[tuple[float, ...]] = (0.0, -0.0, 1.0, -2.5, 1 / 3, 65504.0, float("inf"))
    known_bytes: ClassVar[str]  # The encoding of known_values with seed 1, hexadecimal.

    @abstractmethod
    def encoded_bytes(self, elements: int, start: int = 0) -> int:
        """Return the exact number of bytes for ``elements`` values from ``start`` on; the receiver expects no other."""

    @abstractmethod
    def encode(self, values: Floats, out: Buffer, seed: int = 0, start: int = 0) -> None:
        """Encode ``values`` (1-D, contiguous) into ``out``, which has ``encoded_bytes(len(values))`` bytes."""

    @abstractmethod
    def decode(self, data: Buffer, out: Floats, near: Floats | None = None, seed: int = 0, start: int = 0) -> None:
        """Decode ``data`` of ``encoded_bytes(len(out))`` bytes into ``out`` (1-D, contiguous)."""

    def quantised(self, values: Floats, out: Floats, seed: int = 0, start: int = 0) -> None:
        """Compute what the partner decodes of ``values``, bit for bit; ``out`` may be ``values``."""
        scratch = np.empty(self.encoded_bytes(min(values.size, BLOCK_ELEMENTS)), np.uint8)
        for first in range(0, values.size, BLOCK_ELEMENTS):
            block = values[first : first + BLOCK_ELEMENTS]
            encoded = scratch[: self.encoded_bytes(block.size)]
            self.encode(block, encoded, seed, start + first)
            self.decode(encoded, out[first : first + BLOCK_ELEMENTS], None, seed, start + first)

    def subtract(
        self, data: Buffer, values: Floats, out: Floats, own: Floats, seed: int = 0, start: int = 0,
        before: tuple[float, float] = (0.0, 0.0),
    ) -> tuple[float, float]:  # fmt: skip
        """Set ``own = Q(values)`` and ``out = Q(theirs) - own``, where ``data`` encodes theirs.

        This equals :meth:`decode`, :meth:`quantised` and a subtraction. No two of the four buffers overlap.

        Returns:
            The sums of squares of ``out`` and ``own`` (:func:`gossip.kernel.squares.squares`), added to ``before``.
        """
        self.decode(data, out, values, seed, start)
        self.quantised(values, own, seed, start)
        # No warnings: the norm of the difference shows overflows.
        with np.errstate(all="ignore"):
            np.subtract(out, own, out=out)
        return squares(out, before[0]), squares(own, before[1])

    def with_bounds(self, spread: Spread) -> Codec:
        """Return the codec for one session, with the bounds that ``spread`` has learned; itself if it needs none."""
        return self

    def error_bound(self, values: Floats, start: int = 0) -> Floats:
        """Return the bound on ``|Q(x) - x|`` for each of ``values``, none of them above ``largest``.

        ``start`` is for codecs whose bound depends on the position, see :mod:`gossip.codecs.moniqua`.
        """
        peaks = np.repeat(block_peaks(values, self.block), self.block)[: values.size]
        return np.float32(self.relative_error) * np.maximum(peaks, np.float32(self.smallest))

    def block_errors(self, values: Floats, start: int = 0) -> Floats:
        """Return the largest :meth:`error_bound` in each block of ALIGN values: float32 (ceil(n / ALIGN),)."""
        return np.float32(self.relative_error) * np.maximum(block_peaks(values, ALIGN), np.float32(self.smallest))

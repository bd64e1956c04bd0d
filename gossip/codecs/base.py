"""What every codec is: float32 values to bytes and back, with a stated error.

An exchange computes ``d = w (Q(p) - Q(s))`` on both sides, ``Q`` being "through the codec": each side also knows what
the other decodes of it (:meth:`Codec.quantised`). The two differences are then each other's exact negatives, and with
one ``w`` the mean over the pair moves by exactly nothing, whatever the codec loses.

Everything here works on one chunk in cache-sized blocks: temporaries never exceed 128 KiB, and nothing loops per
element. Bytes are little-endian on every machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from gossip.codecs.spread import Spread
from gossip.codecs.values import ALIGN, BLOCK_ELEMENTS, Buffer, Floats, numbers, peaks
from gossip.kernel.squares import squares

__all__ = ["ALIGN", "BLOCK_ELEMENTS", "Buffer", "Codec", "Floats", "numbers", "peaks"]


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

    def subtract(
        self, data: Buffer, values: Floats, out: Floats, own: Floats, seed: int = 0, start: int = 0,
        before: tuple[float, float] = (0.0, 0.0),
    ) -> tuple[float, float]:  # fmt: skip
        """``own = Q(values)`` and ``out = Q(theirs) - own``, theirs being encoded in ``data``: :meth:`decode`, then
        :meth:`quantised`, then a subtraction. None of the four overlap. Returns the sums of squares of ``out`` and of
        ``own`` (:func:`gossip.kernel.squares.squares`), added to those ``before``."""
        self.decode(data, out, values, seed, start)
        self.quantised(values, own, seed, start)
        with np.errstate(all="ignore"):  # what it would warn of, the difference's norm tells
            np.subtract(out, own, out=out)
        return squares(out, before[0]), squares(own, before[1])

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

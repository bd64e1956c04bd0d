"""Moniqua: only the remainder of each value's grid index is sent; the receiver's own value gives the rest.

Lu and De Sa, "Moniqua: Modulo Quantized Communication in Decentralized SGD", ICML 2020. The paper assumes one bound on
the disagreement, known beforehand. Here each node learns a bound for each block from its last exchanges
(:class:`Spread`), and the body states the chosen steps. A hash of the grid indices reveals an exceeded bound, so that
wrong values are never averaged.

With step ``s`` and shared noise ``u`` the sender has indices ``k = round(x / s + u)`` of its values ``x``, and sends
``k mod 2^b``, b = 4. The receiver's own indices are ``j = round(y / s + u)`` of its values ``y``. It takes for ``k``
the number congruent to the remainder that is nearest to ``j``. That is right when ``-2^(b-1) <= k - j < 2^(b-1)``. With
``bound = (2^b - 1/8) s`` this holds whenever ``|x - y| < bound / 2 - s``; the eighth is for the rounding of ``x / s +
u``. It decodes ``s (k - u)``, the sender's own quantised value bit for bit. The error is at most ``s / 2``, without
bias (dither.py).

Measured on eight nodes with a perceptron on digits (17,226 parameters, SGD, a mix every 8 steps, 150 mixes). ``noise``
is the square of ``Q(p) - Q(s) - (p - s)`` over that of ``p - s``. ``overflow`` is the share of exchanges repeated with
int8, whose bytes are included in ``bits``. Left: the same data everywhere; right: two classes a node.

                          noise           overflow        bits a value     accuracy, %
    fp32               0       0          -      -        32     32        96.3   88.9
    int8               0.35    0.06       -      -        8.03   8.03      96.4   89.1
    int4               0.99    0.85       -      -        4.13   4.13      96.3   87.3
    moniqua4           0.40    0.49       4.7 %  7.4 %    4.44   4.65      96.3   90.9

Plain rounding without noise gives the same results; the noise costs nothing and removes the bias. Steps that are a
power of two apart, which two nodes share more often, give 1.3 to 1.9 times the noise. With 8 bits it was within a point
of int8 for the same bytes. 2 bits were not enough for uneven data (docs/decisions/0044).
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from gossip.codecs.base import ALIGN, BLOCK_ELEMENTS, Buffer, Codec, Floats, block_peaks, typed_view
from gossip.codecs.blockwise import by_rows
from gossip.codecs.dither import noise_segments, noise_table
from gossip.codecs.grid import INVERSES, LARGEST_SCALE, NOT_FINITE, SCALES, scale_bytes
from gossip.codecs.packing import pack, packed_bytes, unpack
from gossip.codecs.spread import Spread

HASH_BYTES = 8
FINEST = 2.0**-18
"""The smallest step, as a share of a block's largest magnitude.

Indices then stay below 2**18, where float32 resolves 1/32. Disagreement that small is 500 times below what bf16 could
show.
"""
FUZZ = 1.0 / 16  # In steps: the most that rounding adds to the distance between two indices (twice 1/32).

Indices = NDArray[np.int32]


class Overflow(Exception):
    """The sender's bound was too small: somewhere the two vectors are farther apart, and the decoded values are wrong.

    No peer is to blame: the exchange is repeated with a codec that needs no bound.
    """


class Moniqua4(Codec):
    """A codec of 4 bits a value, a byte for every 256 values and 8 bytes of hash per chunk.

    The error is at most half a step, which is 18 % of the largest recent difference in the block. The body begins with
    the bytes of the blocks' steps (grid.py). The remainders follow, packed in pieces like int8's codes (packing.py),
    and then xxh3 of the indices as little-endian int32.

    Encoding needs the bounds of a node, :meth:`with_bounds`; decoding does not. A block that is not finite becomes NaN.
    """

    name = "moniqua4"
    needs_spread = True
    block = ALIGN
    bits = 4
    half = 2 ** (bits - 1)
    mask = 2**bits - 1  # Of the bits of a remainder.
    margin = 2.0
    """The ratio of the supported distance to the largest recent difference.

    Margins of 1.5, 2 and 3 gave 17, 6.6 and 2.5 % overflow, noise 0.30, 0.42 and 0.59, and 5.44, 4.60 and 4.28 bits. A
    margin of 1.5 has the least noise for its bits, but a repeated exchange also costs time.
    """
    largest = LARGEST_SCALE * 2**18
    known_values = (0.0, -0.0, 1.0, -0.5, 1 / 3, 0.75, -1e-3)
    known_bytes = "aa50a00d0ac5d57cf4b4e69263"

    def __init__(self, reach: Floats | None = None) -> None:
        self.reach = reach  # (Blocks of the stream,): the |x - y| up to which decoding is right.

    def with_bounds(self, spread: Spread) -> Moniqua4:
        """Return the codec for one session with the current bounds, which later exchanges do not change."""
        return type(self)(spread.reach() * np.float32(self.margin))

    def encoded_bytes(self, elements: int, start: int = 0) -> int:
        return -(-elements // ALIGN) + packed_bytes(elements, self.bits) + HASH_BYTES

    def encode(self, values: Floats, out: Buffer, seed: int = 0, start: int = 0) -> None:
        body = typed_view(out, "u1", self.encoded_bytes(values.size))
        chosen = self.step_bytes(values, start)
        body[: chosen.size] = chosen
        inverses = INVERSES[chosen]
        scratch, codes = scratch_arrays(values.size)
        indices = np.empty(scratch.size, "<i4")
        index_hash = xxhash.xxh3_64()
        position = chosen.size
        with np.errstate(invalid="ignore"):
            for piece, noise in noise_segments(NOISE, seed, start, values.size):
                floats, k, remainders = scratch[: noise.size], indices[: noise.size], codes[: noise.size]
                blocks = slice(piece.start // ALIGN, None)
                compute_indices(values[piece], inverses[blocks], noise, floats, k)
                zero_indices(k, chosen[blocks])
                index_hash.update(k.data)
                np.copyto(remainders, k, casting="unsafe")
                remainders &= self.mask
                code_bytes = packed_bytes(noise.size, self.bits)
                pack(remainders, self.bits, body[position : position + code_bytes])
                position += code_bytes
        body[position:] = np.frombuffer(index_hash.intdigest().to_bytes(HASH_BYTES, "little"), np.uint8)

    def decode(self, data: Buffer, out: Floats, near: Floats | None = None, seed: int = 0, start: int = 0) -> None:
        """Decode; raise :class:`Overflow` if ``near`` was too far from the sent values, with ``out`` undefined."""
        assert near is not None, f"{self.name} decodes only next to the receiver's own values"
        body = typed_view(data, "u1", self.encoded_bytes(out.size))
        position = -(-out.size // ALIGN)
        chosen = body[:position]
        scales, inverses = SCALES[chosen], INVERSES[chosen]
        scratch, codes = scratch_arrays(out.size)
        ours, theirs = np.empty(scratch.size, np.int32), np.empty(scratch.size, "<i4")
        index_hash = xxhash.xxh3_64()
        # Values that are not finite, or beyond int32, give any index: the hash reveals them.
        with np.errstate(invalid="ignore", over="ignore"):
            for piece, noise in noise_segments(NOISE, seed, start, out.size):
                j, k, remainders = ours[: noise.size], theirs[: noise.size], codes[: noise.size]
                blocks = slice(piece.start // ALIGN, None)
                compute_indices(near[piece], inverses[blocks], noise, scratch[: noise.size], j)
                code_bytes = packed_bytes(noise.size, self.bits)
                unpack(body[position : position + code_bytes], self.bits, remainders)
                position += code_bytes
                np.copyto(k, remainders)  # Next, k becomes the number of this remainder that is nearest to j.
                k -= j
                k += self.half
                k &= self.mask
                k -= self.half  # The value of k - j nearest to zero.
                k += j
                zero_indices(k, chosen[blocks])
                index_hash.update(k.data)
                compute_values(k, noise, scales[blocks], out[piece])
        if index_hash.intdigest() != int.from_bytes(body[position:].tobytes(), "little"):
            raise Overflow(f"{self.name}: the two vectors lie farther apart than the sender's bound.")

    def quantised(self, values: Floats, out: Floats, seed: int = 0, start: int = 0) -> None:
        chosen = self.step_bytes(values, start)
        scales, inverses = SCALES[chosen], INVERSES[chosen]
        with np.errstate(invalid="ignore"):
            for piece, noise in noise_segments(NOISE, seed, start, values.size):
                decoded, first_block = out[piece], piece.start // ALIGN
                by_rows(values[piece], inverses[first_block:], ALIGN, decoded)
                decoded += noise
                np.rint(decoded, out=decoded)
                decoded -= noise
                by_rows(decoded, scales[first_block:], ALIGN, decoded)
        for row in np.flatnonzero(chosen == NOT_FINITE):
            out[row * ALIGN : (row + 1) * ALIGN] = SCALES[NOT_FINITE]

    def error_bound(self, values: Floats, start: int = 0) -> Floats:
        return np.repeat(self.block_errors(values, start), ALIGN)[: values.size]

    def block_errors(self, values: Floats, start: int = 0) -> Floats:
        return SCALES[self.step_bytes(values, start)] * np.float32(0.5 + FUZZ)

    def step_bytes(self, values: Floats, start: int) -> NDArray[np.uint8]:
        """Return the byte of each block's step: as the bound asks, but no finer than float32 can index."""
        assert self.reach is not None, f"{self.name} encodes only with bounds: with_bounds(spread) first"
        assert start % ALIGN == 0, f"a chunk begins at {start}, which is no multiple of {ALIGN}"
        finest_steps = block_peaks(values, ALIGN)
        finest_steps *= np.float32(FINEST)
        reach = self.reach[start // ALIGN :][: finest_steps.size]
        assert reach.size == finest_steps.size, f"bounds for {self.reach.size} blocks do not reach position {start}"
        # With these steps two values within reach have indices whose difference is below ``half``.
        steps = reach * np.float32(1.0 / (self.half - 1 - FUZZ))
        return scale_bytes(np.maximum(finest_steps, steps))


NOISE = noise_table(0.0)


def scratch_arrays(elements: int) -> tuple[Floats, NDArray[np.uint8]]:
    """Return memory for the floats and for the remainders of one piece."""
    size = min(elements, BLOCK_ELEMENTS)
    return np.empty(size, np.float32), np.empty(size, np.uint8)


def compute_indices(values: Floats, inverses: Floats, noise: Floats, floats: Floats, out: Indices) -> None:
    """Set ``out = round(values inverses + noise)``, where an inverse is ``1 / s``; ``floats`` is scratch memory."""
    by_rows(values, inverses, ALIGN, floats)
    floats += noise
    np.rint(floats, out=floats)
    np.copyto(out, floats, casting="unsafe")


def zero_indices(indices: Indices, chosen: NDArray[np.uint8]) -> None:
    """Set the indices of blocks that are not finite to 0: casting a NaN depends on the machine."""
    if chosen.size and chosen.max() == NOT_FINITE:
        for row in np.flatnonzero(chosen == NOT_FINITE):
            indices[row * ALIGN : (row + 1) * ALIGN] = 0


def compute_values(indices: Indices, noise: Floats, scales: Floats, out: Floats) -> None:
    """Set ``out = scales (indices - noise)``."""
    np.copyto(out, indices, casting="unsafe")
    out -= noise
    by_rows(out, scales, ALIGN, out)

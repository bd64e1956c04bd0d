"""Codecs of 8 and 4 bits a value: each block on a grid of its own, with dither that both sides share.

The resolution of the scales was measured on pairs ``s = p + distance * noise`` of unit weights (a million, normal). The
table has the root mean square of ``Q(p) - Q(s) - (p - s)``:

    distance                              1e-4      1e-3      1e-2      1e-1      1
    int8, scales a power of two           1.6e-3    5.0e-3    1.24e-2   1.31e-2   1.85e-2
    int8, 2 bits of mantissa              1.4e-3    4.4e-3    1.04e-2   1.07e-2   1.33e-2
    int8, 3 bits of mantissa              1.4e-3    4.4e-3    1.01e-2   1.03e-2   1.26e-2
    int4, scales a power of two           7.0e-3    2.0e-2    6.3e-2    1.74e-1   2.59e-1
    int4, 2 bits of mantissa              5.6e-3    1.8e-2    5.7e-2    1.45e-1   1.92e-1
    int4, 3 bits of mantissa              5.5e-3    1.9e-2    5.7e-2    1.40e-1   1.84e-1

Finer is better throughout: a closer fit of the block gains more than a scale that is not shared loses. The third bit
gains too little to give up half of the 63 octaves. Without subtracting the noise the last column reads 1.38e-2 and
2.01e-1; the others are the same.
"""

from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gossip import kernel
from gossip.codecs.base import BLOCK_ELEMENTS, Buffer, Codec, Floats, block_peaks, typed_view
from gossip.codecs.dither import noise_segments, noise_table, table_offsets
from gossip.codecs.grid import INVERSES, LARGEST_SCALE, NOT_FINITE, SCALES, SMALLEST_SCALE, scale_bytes
from gossip.codecs.packing import pack, packed_bytes, unpack

SLACK = 2.0**-8
"""The distance of a block's largest value from the last code, in steps: room for rounding ``x / s + u`` (2e-5)."""


class Blockwise(Codec):
    """A codec ``k = round(x / s + u)`` with one scale ``s`` per block, decoded as ``s (k - u)``: see dither.py.

    Here ``u`` includes :attr:`centre`, so that no code is negative. The body has one byte per block (grid.py), followed
    by the packed codes (packing.py). The codes are packed in pieces that end at absolute multiples of 32,768. A block
    with a NaN, an infinity or a value above ``largest`` becomes NaN as a whole, and its codes are 0. A block of zeros
    stays zero.
    """

    bits: ClassVar[int]  # Of a code.
    known_values = (0.0, -0.0, 1.0, -2.5, 1 / 3, 0.75, -1e-3)

    @cached_property
    def centre(self) -> float:
        """Return the code of 0 before rounding: codes are 0 .. 2 centre, for a value x about ``x / s + centre``."""
        return 2.0 ** (self.bits - 1) - 0.5

    @cached_property
    def noise(self) -> Floats:
        return noise_table(self.centre)

    @cached_property
    def scale_share(self) -> float:
        """Return the ratio of a block's scale, before it is rounded up, to its largest magnitude; a float32."""
        return float(np.float32(1.0 / (self.centre - SLACK)))

    def encoded_bytes(self, elements: int, start: int = 0) -> int:
        return -(-elements // self.block) + packed_bytes(elements, self.bits)

    def encode(self, values: Floats, out: Buffer, seed: int = 0, start: int = 0) -> None:
        if kernel.passes is not None:
            self.run_pass(kernel.passes, values.size, values, None, out, None, None, seed, start)
            return
        body = typed_view(out, "u1", self.encoded_bytes(values.size))
        scales = self.choose_scales(values)
        body[: scales.size] = scales
        inverses = INVERSES[scales]
        scratch = np.empty(min(values.size, BLOCK_ELEMENTS), np.float32)
        codes = np.empty(scratch.size, np.uint8)
        position = scales.size  # Of the next piece's codes in the body, after the scales.
        with np.errstate(invalid="ignore"):  # A block that is not finite makes the cast warn.
            for piece, noise in noise_segments(self.noise, seed, start, values.size):
                first_block = piece.start // self.block
                float_codes, piece_codes = scratch[: noise.size], codes[: noise.size]
                self.compute_codes(values[piece], inverses[first_block:], noise, float_codes)
                np.copyto(piece_codes, float_codes, casting="unsafe")
                self.zero_codes(piece_codes, scales[first_block:])
                code_bytes = packed_bytes(noise.size, self.bits)
                pack(piece_codes, self.bits, body[position : position + code_bytes])
                position += code_bytes

    def decode(self, data: Buffer, out: Floats, near: Floats | None = None, seed: int = 0, start: int = 0) -> None:
        if kernel.passes is not None:
            self.run_pass(kernel.passes, out.size, None, data, None, None, out, seed, start)
            return
        body = typed_view(data, "u1", self.encoded_bytes(out.size))
        position = -(-out.size // self.block)  # Of the next piece's codes in the body, after a byte for each block.
        scales = SCALES[body[:position]]
        codes = np.empty(min(out.size, BLOCK_ELEMENTS), np.uint8)
        for piece, noise in noise_segments(self.noise, seed, start, out.size):
            code_bytes = packed_bytes(noise.size, self.bits)
            unpack(body[position : position + code_bytes], self.bits, codes[: noise.size])
            position += code_bytes
            values = out[piece]
            np.copyto(values, codes[: noise.size])
            values -= noise
            by_rows(values, scales[piece.start // self.block :], self.block, values)

    def quantised(self, values: Floats, out: Floats, seed: int = 0, start: int = 0) -> None:
        if kernel.passes is not None:
            self.run_pass(kernel.passes, values.size, values, None, None, out, None, seed, start)
            return
        chosen = self.choose_scales(values)
        scales, inverses = SCALES[chosen], INVERSES[chosen]
        with np.errstate(invalid="ignore"):
            for piece, noise in noise_segments(self.noise, seed, start, values.size):
                first_block, decoded = piece.start // self.block, out[piece]
                self.compute_codes(values[piece], inverses[first_block:], noise, decoded)
                decoded -= noise
                by_rows(decoded, scales[first_block:], self.block, decoded)
        # The sign of a NaN depends on its operands, so set all of a block to the same NaN.
        for row in np.flatnonzero(chosen == NOT_FINITE):
            out[row * self.block : (row + 1) * self.block] = SCALES[NOT_FINITE]

    def subtract(
        self, data: Buffer, values: Floats, out: Floats, own: Floats, seed: int = 0, start: int = 0,
        before: tuple[float, float] = (0.0, 0.0),
    ) -> tuple[float, float]:  # fmt: skip
        if kernel.passes is None:
            return super().subtract(data, values, out, own, seed, start, before)
        return self.run_pass(kernel.passes, values.size, values, data, None, own, out, seed, start, before)

    def run_pass(  # noqa: PLR0913  The arguments of the C function.
        self, passes: kernel.Passes, elements: int, values: Any, data: Any, encoded: Any, own: Any, out: Any,
        seed: int, start: int, before: tuple[float, float] = (0.0, 0.0),
    ) -> tuple[float, float]:  # fmt: skip
        """Compute those of ``encoded``, ``own`` and ``out`` that are not None, in one pass of the kernel.

        The buffers are those of :class:`gossip.kernel.Passes`. Returns the sums of squares of ``out`` and ``own``.
        """
        return passes.blockwise(
            elements, values, data, encoded, own, out, start, self.block, self.bits, self.scale_share, SCALES, INVERSES,
            self.noise, table_offsets(seed, start, elements), *before,
        )  # fmt: skip

    def zero_codes(self, codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> None:
        """Set the codes of blocks that are not finite to 0: casting a NaN depends on the machine."""
        if scales.max() == NOT_FINITE:
            for row in np.flatnonzero(scales[: -(-codes.size // self.block)] == NOT_FINITE):
                codes[row * self.block : (row + 1) * self.block] = 0

    def compute_codes(self, values: Floats, inverses: Floats, noise: Floats, out: Floats) -> None:
        """Compute the codes of one piece, as floats, into ``out``, which may be ``values``."""
        by_rows(values, inverses, self.block, out)
        out += noise
        np.rint(out, out=out)

    def choose_scales(self, values: Floats) -> NDArray[np.uint8]:
        """Return the byte of each block's scale: (blocks,)."""
        largest = block_peaks(values, self.block)
        chosen = scale_bytes(largest * np.float32(self.scale_share))
        chosen[largest == 0.0] = 0
        return chosen


class Int8(Blockwise):
    """8 bits a value and a byte for every 256: 8.03 bits. Unbiased.

    The error is at most 0.49 % of the block's largest magnitude: half a step, with the scale rounded up by at most a
    quarter. Its root mean square is at most 0.28 % of it.
    """

    name = "int8"
    bits = 8
    block = 256
    relative_error = 1.25 / 254.9
    smallest = SMALLEST_SCALE / 2 / relative_error
    largest = LARGEST_SCALE * 127
    known_bytes = "a3807fab158ea07f"


class Int4(Blockwise):
    """4 bits a value and a byte for every 64: 4.13 bits. Unbiased.

    The error is at most 8.4 % of the block's largest magnitude.
    """

    name = "int4"
    bits = 4
    block = 64
    relative_error = 1.25 / 14.98
    smallest = SMALLEST_SCALE / 2 / relative_error
    largest = LARGEST_SCALE * 7
    known_bytes = "b398a77b01"


def by_rows(values: Floats, factors: Floats, block: int, out: Floats) -> None:
    """Set ``out = values * factors``, with one factor for each ``block`` values; surplus factors are ignored."""
    rows, whole = values.size // block, values.size // block * block
    np.multiply(values[:whole].reshape(rows, block), factors[:rows, np.newaxis], out=out[:whole].reshape(rows, block))
    if whole < values.size:
        np.multiply(values[whole:], factors[rows], out=out[whole:])

"""Codecs with shorter floats: each value is rounded to nearest even by itself. They ignore seed and start."""

import numpy as np
from numpy.typing import NDArray

from gossip import kernel
from gossip.codecs.base import BLOCK_ELEMENTS, Buffer, Codec, Floats, typed_view


class Fp32(Codec):
    """The values themselves: 4 bytes each, no error."""

    name = "fp32"
    is_raw = True
    relative_error = 0.0
    smallest = 0.0
    largest = float(np.finfo(np.float32).max)
    known_bytes = "00000000000000800000803f000020c0abaaaa3e00e07f470000807f"

    def encoded_bytes(self, elements: int, start: int = 0) -> int:
        return 4 * elements

    def encode(self, values: Floats, out: Buffer, seed: int = 0, start: int = 0) -> None:
        typed_view(out, "<f4", values.size)[:] = values

    def decode(self, data: Buffer, out: Floats, near: Floats | None = None, seed: int = 0, start: int = 0) -> None:
        out[:] = typed_view(data, "<f4", out.size)

    def quantised(self, values: Floats, out: Floats, seed: int = 0, start: int = 0) -> None:
        out[:] = values


class Bf16(Codec):
    """bfloat16, rounded to nearest even: 2 bytes each, float32's range, relative error at most 2**-8 (0.4 %).

    Infinities and NaN are kept (a NaN keeps its sign and becomes quiet), so the finite check sees them. Values from
    ``(2 - 2**-8) 2**127`` on, the last 0.2 % of float32's range, round up to infinity.
    """

    name = "bf16"
    relative_error = 2.0**-8
    smallest = 2.0**-126
    largest = (2 - 2.0**-7) * 2.0**127
    known_bytes = "00000080803f20c0ab3e8047807f"

    def encoded_bytes(self, elements: int, start: int = 0) -> int:
        return 2 * elements

    def encode(self, values: Floats, out: Buffer, seed: int = 0, start: int = 0) -> None:
        if kernel.passes is not None:
            kernel.passes.bf16(values.size, values, None, out, None, None, 0.0, 0.0)
            return
        target = typed_view(out, "<u2", values.size)
        scratch = np.empty(min(values.size, BLOCK_ELEMENTS), np.uint32)
        for first in range(0, values.size, BLOCK_ELEMENTS):
            block = values[first : first + BLOCK_ELEMENTS]
            rounded = scratch[: block.size]
            self.round(block, rounded)
            rounded >>= 16
            target[first : first + BLOCK_ELEMENTS] = rounded

    def decode(self, data: Buffer, out: Floats, near: Floats | None = None, seed: int = 0, start: int = 0) -> None:
        if kernel.passes is not None:
            kernel.passes.bf16(out.size, None, data, None, None, out, 0.0, 0.0)
            return
        bits = out.view(np.uint32)
        bits[:] = typed_view(data, "<u2", out.size)
        bits <<= 16

    def quantised(self, values: Floats, out: Floats, seed: int = 0, start: int = 0) -> None:
        if kernel.passes is not None:
            kernel.passes.bf16(values.size, values, None, None, out, None, 0.0, 0.0)
            return
        scratch = np.empty(min(values.size, BLOCK_ELEMENTS), np.uint32)
        for first in range(0, values.size, BLOCK_ELEMENTS):
            block = values[first : first + BLOCK_ELEMENTS]
            rounded = scratch[: block.size]
            self.round(block, rounded)
            np.bitwise_and(rounded, 0xFFFF0000, out=out[first : first + BLOCK_ELEMENTS].view(np.uint32))

    def subtract(
        self, data: Buffer, values: Floats, out: Floats, own: Floats, seed: int = 0, start: int = 0,
        before: tuple[float, float] = (0.0, 0.0),
    ) -> tuple[float, float]:  # fmt: skip
        if kernel.passes is None:
            return super().subtract(data, values, out, own, seed, start, before)
        return kernel.passes.bf16(values.size, values, data, None, own, out, *before)

    @staticmethod
    def round(block: Floats, rounded: NDArray[np.uint32]) -> None:
        """Write each value's 16 bits into the upper half of ``rounded``; the lower half is undefined."""
        bits = block.view(np.uint32)
        # Add half of what is cut off, minus one if the last kept bit is even: ties go to even.
        np.right_shift(bits, 16, out=rounded)
        rounded &= 1
        rounded += np.uint32(0x7FFF)
        rounded += bits
        # The carry turns some NaN into infinity or -0, so NaN is handled apart. One NaN makes the maximum NaN.
        if np.isnan(block.max()):
            nan = np.isnan(block)
            rounded[nan] = bits[nan] | 0x400000  # A quiet NaN: set the payload's top bit.


class Fp16(Codec):
    """IEEE half precision, rounded to nearest even: 2 bytes each, relative error at most 2**-11 (0.05 %).

    Only for values between 6.1e-5 and 65504. Smaller ones have an absolute error of 3e-8. **Values from 65520 on become
    infinite**: the finite check of both sides refuses the exchange, so nothing is clipped silently.
    """

    name = "fp16"
    relative_error = 2.0**-11
    smallest = 2.0**-14
    largest = 65504.0
    known_bytes = "00000080003c00c15535ff7b007c"

    def encoded_bytes(self, elements: int, start: int = 0) -> int:
        return 2 * elements

    def encode(self, values: Floats, out: Buffer, seed: int = 0, start: int = 0) -> None:
        with np.errstate(over="ignore"):  # The finite check refuses overflows, as said above.
            typed_view(out, "<f2", values.size)[:] = values

    def decode(self, data: Buffer, out: Floats, near: Floats | None = None, seed: int = 0, start: int = 0) -> None:
        out[:] = typed_view(data, "<f2", out.size)

"""A codec for vectors that end with statistics, whose values are sent as they are, whatever the weights' codec is."""

from typing import ClassVar

import numpy as np

from gossip.codecs.base import ALIGN, Buffer, Codec, Floats, typed_view


class RawTail(Codec):
    """The codec ``inner`` up to the position ``tail`` of the vector, and plain float32 from there on.

    Statistics of a model (a BatchNorm's running variance) differ by orders of magnitude within a block, and variances
    must stay positive. They are few. :meth:`subtract` leaves the partner's statistics themselves in ``out``, and counts
    them in no square: they are averaged by another rule than weights.
    """

    name = "raw tail"
    relative_error: ClassVar[float] = 0.0
    known_bytes: ClassVar[str] = ""

    def __init__(self, inner: Codec, tail: int) -> None:
        self.inner, self.tail, self.is_raw = inner, tail, inner.is_raw

    def head(self, elements: int, start: int) -> int:
        """Return how many of the elements from ``start`` on are weights."""
        return min(max(self.tail - start, 0), elements)

    def encoded_bytes(self, elements: int, start: int = 0) -> int:
        head = self.head(elements, start)
        return self.inner.encoded_bytes(head, start) + 4 * (elements - head) if head else 4 * elements

    def encode(self, values: Floats, out: Buffer, seed: int = 0, start: int = 0) -> None:
        head, body = self.head(values.size, start), np.frombuffer(out, np.uint8)
        length = len(body) - 4 * (values.size - head)
        if head:
            self.inner.encode(values[:head], body[:length], seed, start)
        typed_view(body[length:], "<f4", values.size - head)[:] = values[head:]

    def decode(self, data: Buffer, out: Floats, near: Floats | None = None, seed: int = 0, start: int = 0) -> None:
        head, body = self.head(out.size, start), np.frombuffer(data, np.uint8)
        length = len(body) - 4 * (out.size - head)
        if head:
            self.inner.decode(body[:length], out[:head], None if near is None else near[:head], seed, start)
        out[head:] = typed_view(body[length:], "<f4", out.size - head)

    def quantised(self, values: Floats, out: Floats, seed: int = 0, start: int = 0) -> None:
        head = self.head(values.size, start)
        if head:
            self.inner.quantised(values[:head], out[:head], seed, start)
        out[head:] = values[head:]

    def subtract(
        self, data: Buffer, values: Floats, out: Floats, own: Floats, seed: int = 0, start: int = 0,
        before: tuple[float, float] = (0.0, 0.0),
    ) -> tuple[float, float]:  # fmt: skip
        head, body = self.head(values.size, start), np.frombuffer(data, np.uint8)
        length = len(body) - 4 * (values.size - head)
        out[head:] = typed_view(body[length:], "<f4", values.size - head)
        own[head:] = values[head:]
        if not head:
            return before
        return self.inner.subtract(body[:length], values[:head], out[:head], own[:head], seed, start, before)

    def block_errors(self, values: Floats, start: int = 0) -> Floats:
        head = self.head(values.size, start)
        errors = np.zeros(-(-values.size // ALIGN), np.float32)
        if head:
            errors[: -(-head // ALIGN)] = self.inner.block_errors(values[:head], start)
        return errors


def with_raw_tail(codec: Codec, tail: int, elements: int) -> Codec:
    """Return the codec for a vector of ``elements``, of which those from ``tail`` on are statistics."""
    return codec if tail >= elements else RawTail(codec, tail)

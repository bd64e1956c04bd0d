"""A codec for vectors whose rows have codecs of their own."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from gossip.codecs.base import Buffer, Codec, Floats


class Rows(Codec):
    """Encodes each row of a vector with its own codec.

    Args:
        codecs: The codec of each row.
        row_elements: The length of a row, a multiple of the codecs' blocks; the last one may be longer.
    """

    name = "rows"
    relative_error: ClassVar[float] = 0.0
    known_bytes: ClassVar[str] = ""

    def __init__(self, codecs: Sequence[Codec], row_elements: int) -> None:
        self.codecs, self.row_elements = codecs, row_elements

    def spans(self, elements: int, start: int) -> Iterator[tuple[Codec, slice, int]]:
        """Yield the codec, the place and the first position of each run of elements that lies in one row."""
        position, stop = start, start + elements
        while position < stop:
            row = min(position // self.row_elements, len(self.codecs) - 1)
            end = stop if row == len(self.codecs) - 1 else min(stop, (row + 1) * self.row_elements)
            yield self.codecs[row], slice(position - start, end - start), position
            position = end

    def encoded_bytes(self, elements: int, start: int = 0) -> int:
        return sum(
            codec.encoded_bytes(where.stop - where.start, first) for codec, where, first in self.spans(elements, start)
        )

    def encode(self, values: Floats, out: Buffer, seed: int = 0, start: int = 0) -> None:
        body, begin = np.frombuffer(out, np.uint8), 0
        for codec, where, first in self.spans(values.size, start):
            end = begin + codec.encoded_bytes(where.stop - where.start, first)
            codec.encode(values[where], body[begin:end], seed, first)
            begin = end

    def decode(self, data: Buffer, out: Floats, near: Floats | None = None, seed: int = 0, start: int = 0) -> None:
        body, begin = np.frombuffer(data, np.uint8), 0
        for codec, where, first in self.spans(out.size, start):
            end = begin + codec.encoded_bytes(where.stop - where.start, first)
            codec.decode(body[begin:end], out[where], None if near is None else near[where], seed, first)
            begin = end

    def quantised(self, values: Floats, out: Floats, seed: int = 0, start: int = 0) -> None:
        for codec, where, first in self.spans(values.size, start):
            codec.quantised(values[where], out[where], seed, first)

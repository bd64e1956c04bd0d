"""A vector streamed both ways at once, chunk by chunk, each decoded, checked and subtracted while still in cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash
from numpy.typing import NDArray

from gossip.codecs import Codec, get_codec
from gossip.errors import ProtocolError
from gossip.frames import encode
from gossip.layout import chunk_count, chunk_slice
from gossip.messages import Chunk
from gossip.mixing import difference

__all__ = ["DifferenceReceiver", "Receiver", "Sender", "SliceReceiver"]

Floats = NDArray[np.float32]


class Sender:
    """A vector as frames: views of it for a raw codec, encoded into one reused buffer for the others."""

    def __init__(self, session: int, vector: Floats, codec: Codec, chunk_elements: int) -> None:
        self.session, self.vector, self.codec = session, vector, codec
        self.chunk_elements = chunk_elements
        self.chunks = chunk_count(vector.size, chunk_elements)
        self.index = 0
        self.buffer = bytearray(0 if codec.raw else codec.encoded_bytes(min(chunk_elements, vector.size)))

    def next_frame(self) -> tuple[bytes, memoryview] | None:
        """The link sends a frame wholly before it asks for the next, so one buffer is enough."""
        if self.index == self.chunks:
            return None
        values = self.vector[chunk_slice(self.index, self.vector.size, self.chunk_elements)]
        if self.codec.raw:
            body = memoryview(values.data).cast("B")
        else:
            body = memoryview(self.buffer)[: self.codec.encoded_bytes(values.size)]
            self.codec.encode(values, body)
        header = encode(Chunk(self.session, self.index, xxhash.xxh3_64_intdigest(body)), len(body))
        self.index += 1
        return header, body

    @property
    def done(self) -> bool:
        return self.index == self.chunks


class Receiver:
    """Chunks in order into a place of ours. Every length comes from our own layout; a frame that says otherwise is a
    protocol error. Subclasses say where bytes go and what becomes of them."""

    def __init__(self, session: int, size: int, codec: Codec, chunk_elements: int) -> None:
        self.session, self.size, self.codec, self.chunk_elements = session, size, codec, chunk_elements
        self.chunks = chunk_count(size, chunk_elements)
        self.index = 0
        self.body = memoryview(b"")

    def place(self, chunk: Chunk, body_bytes: int) -> memoryview:
        """Where the body of the next chunk goes; raises ProtocolError for any other chunk than the next."""
        if chunk.index != self.index or self.index == self.chunks:
            raise ProtocolError(f"Chunk {chunk.index} came where {self.index} of {self.chunks} belongs.")
        where = chunk_slice(self.index, self.size, self.chunk_elements)
        expected = self.codec.encoded_bytes(where.stop - where.start)
        if body_bytes != expected:
            raise ProtocolError(f"A chunk of {body_bytes} bytes came where {expected} belong.")
        self.body = self.buffer(where, expected)
        return self.body

    def arrived(self, chunk: Chunk) -> bool:
        """The body is filled: check it and use it. False for a wrong checksum: the transfer has failed."""
        if xxhash.xxh3_64_intdigest(self.body) != chunk.checksum:
            return False
        self.use(chunk_slice(self.index, self.size, self.chunk_elements))
        self.index += 1
        return True

    @property
    def done(self) -> bool:
        return self.index == self.chunks

    def buffer(self, where: slice, expected: int) -> memoryview:
        raise NotImplementedError

    def use(self, where: slice) -> None:
        raise NotImplementedError


class DifferenceReceiver(Receiver):
    """``out = Q(theirs) - Q(ours)``, with both squared norms added up on the way."""

    def __init__(self, session: int, ours: Floats, out: Floats, codec: Codec, chunk_elements: int) -> None:
        super().__init__(session, ours.size, codec, chunk_elements)
        self.ours, self.out = ours, out
        self.difference_sq = self.own_sq = 0.0
        elements = 0 if codec.raw else min(chunk_elements, ours.size)
        self.bytes = bytearray(codec.encoded_bytes(elements))
        self.theirs = np.empty(elements, np.float32)
        self.quantised = np.empty(elements, np.float32)

    def buffer(self, where: slice, expected: int) -> memoryview:
        return memoryview(self.out[where].data).cast("B") if self.codec.raw else memoryview(self.bytes)[:expected]

    def use(self, where: slice) -> None:
        ours, out = self.ours[where], self.out[where]
        if self.codec.raw:
            self.difference_sq += difference(out, ours, out)
            self.own_sq += float(np.dot(ours, ours))
            return
        theirs, quantised = self.theirs[: out.size], self.quantised[: out.size]
        self.codec.decode(self.body, theirs)
        self.codec.quantised(ours, quantised)
        self.difference_sq += difference(theirs, quantised, out)
        self.own_sq += float(np.dot(quantised, quantised))


class SliceReceiver(Receiver):
    """A raw slice [start, stop) of another's vector into the same place of ours; reports each whole chunk."""

    def __init__(
        self, session: int, out: Floats, start: int, stop: int, chunk_elements: int, report: Callable[[int], None]
    ) -> None:
        super().__init__(session, stop - start, get_codec("fp32"), chunk_elements)
        self.out, self.start, self.report = out, start, report

    def buffer(self, where: slice, expected: int) -> memoryview:
        return memoryview(self.out[self.start + where.start : self.start + where.stop].data).cast("B")

    def use(self, where: slice) -> None:
        if not np.isfinite(self.out[self.start + where.start : self.start + where.stop]).all():
            raise ProtocolError("A donor's weights are not finite.")
        self.report(self.start + where.stop)

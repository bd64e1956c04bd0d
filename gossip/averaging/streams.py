"""Streams of a vector: a sender encodes it chunk by chunk, and a receiver checks and decodes each chunk while in cache.

There is a receiver for each use: the difference from our vector, a member's values, a newcomer's piece, a comparison.
"""

from typing import Protocol

import numpy as np
import xxhash

from gossip.arithmetic.mixing import subtract
from gossip.arithmetic.sketch import Sketcher
from gossip.averaging.coverage import Coverage
from gossip.averaging.vectors import Lease
from gossip.codecs import ALIGN, Codec, Floats, Overflow, Spread, get_codec
from gossip.codecs.base import block_peaks
from gossip.errors import ProtocolError
from gossip.kernel.squares import squares
from gossip.wire.frames import encode
from gossip.wire.messages import Chunk

CODEC_OVERHEAD = 64  # Bytes of a chunk's body besides its values and scales: a hash, and what rounding adds.


class ChunkLimit(Protocol):
    """The largest chunk that suits a link at present."""

    @property
    def elements(self) -> int: ...


class Sender:
    """A stream of frames from a vector: views of it for a raw codec, else chunks encoded into one reused buffer.

    A codec that needs bounds has them already (:meth:`gossip.codecs.Codec.with_bounds`). A session's sender and
    receiver share it, because the partner's view of our values (``quantised``) depends on the bounds.
    """

    sealed = False  # True: the link authenticates every byte, so chunks carry no checksum.

    def __init__(
        self, session: int, vector: Floats, codec: Codec, chunk_elements: int, origin: int = 0,
        lease: Lease | None = None, limit: ChunkLimit | None = None,
    ) -> None:  # fmt: skip
        """Prepare to send ``vector``.

        Args:
            session: Session of the chunks.
            vector: Values to send, float32 (elements,).
            codec: Codec of the chunks.
            chunk_elements: Number of elements of the largest chunk.
            origin: Position of the vector in the whole one, if it is a slice.
            lease: The lease of the memory behind ``vector``; :meth:`let_go` ends it.
            limit: A second limit of the chunks, which may change during the stream.
        """
        self.lease, self.limit = lease, limit
        self.session, self.vector, self.codec, self.origin = session, vector, codec, origin
        # Chunks are multiples of ALIGN, since each scale of a codec belongs to fixed positions.
        self.chunk_elements = min(max(chunk_elements // ALIGN, 1) * ALIGN, vector.size)
        self.position = 0
        self.buffer = bytearray(0 if codec.is_raw else self.largest_body)

    @property
    def largest_body(self) -> int:
        """Return the most bytes that a chunk takes: of weights at the beginning, or of statistics at the end."""
        first, last = self.origin, self.origin + self.vector.size
        sizes = [self.codec.encoded_bytes(self.chunk_elements, start) for start in (first, last)]
        return max(sizes) + CODEC_OVERHEAD

    def next_frame(self, apart: bool = False) -> tuple[bytes, memoryview] | None:
        """Return the header and body of the next chunk, None after the last.

        A link that sends each frame before it asks for the next reuses one buffer. ``apart``: several frames are sent
        at once, so this one gets a buffer of its own.
        """
        if self.done:
            return None
        start, count = self.position, self.chunk_elements
        if self.limit is not None and self.limit.elements < count:
            count = max(self.limit.elements // ALIGN, 1) * ALIGN
        values = self.vector[start : start + count]
        if self.codec.is_raw:
            body = memoryview(values.data).cast("B")
        else:
            body_bytes = self.codec.encoded_bytes(values.size, self.origin + start)
            body = memoryview(bytearray(body_bytes) if apart else self.buffer)[:body_bytes]
            self.codec.encode(values, body, self.session, self.origin + start)
        checksum = 0 if self.sealed else xxhash.xxh3_64_intdigest(body)
        self.position += values.size
        return encode(Chunk(self.session, self.origin + start, values.size, checksum), len(body)), body

    def let_go(self) -> None:
        """End the lease of the vector's memory, which the link no longer reads."""
        if self.lease is not None:
            self.lease.end()

    @property
    def done(self) -> bool:
        return self.position == self.vector.size


class Receiver:
    """A receiver of chunks into our memory, in order or over several connections.

    Our own vector and the largest chunk, one for each connection, bound what is allocated. A frame that does not fit is
    a protocol error. Subclasses choose the buffer and use the values.
    """

    sealed = False  # True as for the sender: a checksum of 0 then means none.

    def __init__(self, session: int, size: int, codec: Codec, origin: int = 0) -> None:
        self.session, self.size, self.codec, self.origin = session, size, codec, origin
        self.coverage = Coverage(size)
        self.open_bodies: dict[int, memoryview] = {}  # Buffers that links fill at present, by the start of their chunk.
        self.free_buffers: list[bytearray] = []  # Buffers that :meth:`scratch_buffer` reuses.
        self.fault = ""  # Reason why :meth:`finish_chunk` returned False: checksum or overflow.

    def begin_chunk(self, chunk: Chunk, body_bytes: int, anywhere: bool = False) -> memoryview:
        """Return the buffer for the body of a chunk.

        Raises:
            ProtocolError: The chunk is not the next one or, with ``anywhere``, not one that is still to come.
        """
        start = chunk.start - self.origin
        if start < 0:
            raise ProtocolError(f"A chunk begins at {chunk.start}, before its vector, which begins at {self.origin}.")
        expected = self.codec.encoded_bytes(chunk.elements, chunk.start)
        if body_bytes != expected:
            raise ProtocolError(f"A chunk has {body_bytes} bytes instead of {expected}.")
        self.coverage.begin_chunk(start, chunk.elements, anywhere)
        body = self.open_bodies[start] = self.body_buffer(slice(start, start + chunk.elements), expected)
        return body

    def finish_chunk(self, chunk: Chunk) -> bool:
        """Check and use the filled body of a chunk. Return False, with the reason in ``fault``, if that fails.

        The reason is "checksum", or "overflow" if a difference exceeds the codec's bound and another codec would do.
        """
        start = chunk.start - self.origin
        body = self.open_bodies.pop(start)
        has_checksum = chunk.checksum or not self.sealed
        if has_checksum and xxhash.xxh3_64_intdigest(body) != chunk.checksum:
            self.fault = "checksum"
            return False
        try:
            self.use_chunk(slice(start, start + chunk.elements), body)
        except Overflow:
            self.fault = "overflow"
            return False
        finally:
            if isinstance(body.obj, bytearray):  # A buffer from scratch_buffer() is free again.
                self.free_buffers.append(body.obj)
        self.coverage.finish_chunk(start)
        return True

    @property
    def position(self) -> int:
        """Return the position before which all elements have arrived."""
        return self.coverage.prefix

    @property
    def elements_arrived(self) -> int:
        """Return the number of elements that have arrived."""
        return self.coverage.arrived_elements

    @property
    def is_filling(self) -> bool:
        """Return True if a link is reading into a buffer of ours."""
        return bool(self.open_bodies)

    @property
    def is_complete(self) -> bool:
        return self.coverage.is_complete

    def scratch_buffer(self, expected: int) -> memoryview:
        """Return a buffer to read into. Usually it is allocated at the first chunk, since all have one size."""
        buffer = self.free_buffers.pop() if self.free_buffers else bytearray()
        if len(buffer) < expected:
            buffer = bytearray(expected)
        return memoryview(buffer)[:expected]

    def body_buffer(self, where: slice, expected: int) -> memoryview:
        """Return a buffer of ``expected`` bytes for the body of the elements ``where``, by default one of its own."""
        return self.scratch_buffer(expected)

    def use_chunk(self, where: slice, body: memoryview) -> None:
        """Use the elements ``where``, which ``body`` encodes. Raises Overflow if the codec's bound is exceeded."""
        raise NotImplementedError


class DifferenceReceiver(Receiver):
    """A receiver that computes ``out = Q(theirs) - Q(ours)``, and the squared norms of ``out`` and ``Q(ours)``.

    From the codec's ``tail`` on, where the model's statistics are, ``out`` gets their values themselves,
    and no norm counts them.

    ``Q`` encodes and decodes with the codec. Norms are summed in the order of the vector, whatever the order of its
    chunks. With ``spread`` the largest difference of each block is found while it is in cache. Call
    :meth:`learn_distance` once the exchange is accepted.
    """

    sketcher: Sketcher | None = None  # Makes ``sketch``, if the filter needs one.

    def __init__(
        self, session: int, ours: Floats, out: Floats, codec: Codec, spread: Spread | None = None,
        skips_codec: bool = False, origin: int = 0,
    ) -> None:  # fmt: skip
        """Prepare to receive. ``skips_codec``: our vector is not sent, so its values are used as they are."""
        super().__init__(session, ours.size, codec, origin)
        self.ours, self.out, self.spread, self.skips_codec = ours, out, spread, skips_codec
        self.weights = min(max(codec.tail - origin, 0), ours.size)  # The rest are statistics.
        blocks = 0 if spread is None else -(-ours.size // ALIGN)
        # The largest difference and the codec's largest error in each block of ALIGN elements: (blocks,).
        self.peaks, self.errors = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
        self.difference_sq = self.own_sq = 0.0
        self.sketch: Floats | None = None  # The sketch of the whole difference, once it is complete.
        self.summed_elements = 0  # Length of the prefix whose squares are summed.
        self.early_chunks: dict[int, int] = {}  # Stops by start, of chunks whose squares wait for those before them.
        self.decoded_ours = np.empty(0, np.float32)  # Our values of a chunk as the partner decodes them.

    def body_buffer(self, where: slice, expected: int) -> memoryview:
        if self.codec.is_raw:
            return memoryview(self.out[where].data).cast("B")
        if self.decoded_ours.size < where.stop - where.start and not self.skips_codec:
            self.decoded_ours = np.empty(where.stop - where.start, np.float32)
        return self.scratch_buffer(expected)

    def use_chunk(self, where: slice, body: memoryview) -> None:
        ours, out = self.ours[where], self.out[where]
        head = min(max(self.weights - where.start, 0), out.size)  # The weights of this chunk.
        is_next = where.start == self.summed_elements
        sums = (self.difference_sq, self.own_sq) if is_next else (0.0, 0.0)
        if self.codec.is_raw or self.skips_codec:
            if not self.codec.is_raw:
                self.codec.decode(body, out, ours, self.session, self.origin + where.start)
            sums = subtract(out[:head], ours[:head], out[:head], sums) if head else sums
        else:
            decoded_ours, start = self.decoded_ours[: out.size], self.origin + where.start
            sums = self.codec.subtract(body, ours, out, decoded_ours, self.session, start, sums)
        if self.spread is not None:
            blocks = slice(where.start // ALIGN, -(-where.stop // ALIGN))
            self.peaks[blocks] = 0.0
            self.peaks[blocks.start : blocks.start - (-head // ALIGN)] = block_peaks(out[:head], ALIGN) if head else 0.0
            self.errors[blocks] = self.codec.block_errors(ours, where.start)
        if not is_next:  # Its sums lack all chunks before it, and are computed again when its turn comes.
            self.early_chunks[where.start] = where.stop
            return
        self.difference_sq, self.own_sq = sums
        self.summed_elements = where.stop
        while self.summed_elements in self.early_chunks:
            self.add_squares(slice(self.summed_elements, self.early_chunks.pop(self.summed_elements)))

    def finish_chunk(self, chunk: Chunk) -> bool:
        is_used = super().finish_chunk(chunk)
        if self.sketcher is not None and is_used and self.is_complete:
            self.sketch = self.sketcher.sketch(
                self.out[: self.weights]
            )  # In one order, whatever that of the chunks was.
        return is_used

    def add_squares(self, where: slice) -> None:
        """Add the squares of a chunk whose turn has come."""
        self.summed_elements = where.stop
        where = slice(where.start, max(where.start, min(where.stop, self.weights)))
        own = self.ours[where]
        if not (self.codec.is_raw or self.skips_codec):
            values, own = own, self.decoded_ours[: own.size]
            self.codec.quantised(values, own, self.session, self.origin + where.start)
        self.difference_sq = squares(self.out[where], self.difference_sq)
        self.own_sq = squares(own, self.own_sq)

    def learn_distance(self) -> None:
        """Let the node's spread learn the distance from the whole difference, which was accepted."""
        assert self.is_complete, "only a whole difference is learned from"
        if self.spread is not None:
            self.spread.learn(self.peaks, self.errors)


class ValuesReceiver(Receiver):
    """A receiver that only decodes another member's values into ``out``, as all members decode them."""

    def __init__(self, session: int, out: Floats, codec: Codec, origin: int = 0) -> None:
        super().__init__(session, out.size, codec, origin)
        self.out = out

    def body_buffer(self, where: slice, expected: int) -> memoryview:
        if self.codec.is_raw:
            return memoryview(self.out[where].data).cast("B")
        return self.scratch_buffer(expected)

    def use_chunk(self, where: slice, body: memoryview) -> None:
        if not self.codec.is_raw:
            self.codec.decode(body, self.out[where], None, self.session, self.origin + where.start)


class PieceReceiver(Receiver):
    """A receiver of elements [start, stop) of a donor's vector, not encoded, into the same place of ours.

    Bytes arrive in a buffer of its own, so that a donor that was given up cannot overwrite what another has sent.
    """

    def __init__(self, session: int, out: Floats, start: int, stop: int) -> None:
        super().__init__(session, stop - start, get_codec("fp32"))
        self.out, self.start = out, start

    def use_chunk(self, where: slice, body: memoryview) -> None:
        self.out[self.start + where.start : self.start + where.stop] = finite_values(body)


class ComparingReceiver(Receiver):
    """A receiver that compares elements [start, stop) of another member's vector with ours, which stays as it is.

    It adds up ``|theirs - ours|^2`` and ``|ours|^2``.
    """

    def __init__(self, session: int, ours: Floats, start: int, stop: int) -> None:
        super().__init__(session, stop - start, get_codec("fp32"))
        self.ours, self.start = ours, start
        self.difference_sq = self.own_sq = 0.0

    def use_chunk(self, where: slice, body: memoryview) -> None:
        theirs = finite_values(body)
        ours = self.ours[self.start + where.start : self.start + where.stop]
        sums = self.difference_sq, self.own_sq
        self.difference_sq, self.own_sq = subtract(theirs, ours, np.empty_like(ours), sums)


def finite_values(body: memoryview) -> Floats:
    """Return the float32 values that a donor sent. Raises ProtocolError if one of them is not finite."""
    values = np.frombuffer(body, np.dtype("<f4"))
    if not np.isfinite(values).all():
        raise ProtocolError("A donor's weights are not finite.")
    return values

"""Chunked streams of a vector in both directions: each chunk is decoded, checked and subtracted while in cache."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from gossip.arithmetic.mixing import difference
from gossip.averaging.coverage import Coverage
from gossip.averaging.vectors import Lease
from gossip.codecs import ALIGN, Codec, Overflow, Spread, get_codec
from gossip.codecs.base import peaks
from gossip.errors import ProtocolError
from gossip.kernel.squares import squares
from gossip.wire.frames import encode
from gossip.wire.messages import Chunk

__all__ = [
    "ComparingReceiver", "DifferenceReceiver", "PieceReceiver", "Receiver", "Sender", "ValuesReceiver",
]  # fmt: skip

Floats = NDArray[np.float32]


class Most(Protocol):
    """A source of the largest chunk size at present."""

    @property
    def elements(self) -> int: ...


class Sender:
    """A stream of frames from a vector: views of it for a raw codec, else chunks encoded into one reused buffer.

    ``codec`` is bound already if it needs bounds: ``get_codec(name).bound(spread)``. A session's sender and receiver
    share it, because the partner's view of our values (``quantised``) depends on the bounds.
    """

    sealed = False  # The link authenticates every byte, so a checksum would be redundant.

    def __init__(
        self, session: int, vector: Floats, codec: Codec, chunk_elements: int, origin: int = 0,
        lease: Lease | None = None, most: Most | None = None,
    ) -> None:  # fmt: skip
        """Prepare to send ``vector``.

        Args:
            session: Session of the chunks.
            vector: Values to send.
            codec: Codec of the chunks.
            chunk_elements: Largest chunk.
            origin: Position of the vector in the whole one, if it is a slice.
            lease: The lease of the memory behind ``vector``; :meth:`let_go` ends it.
            most: Source of a smaller limit of chunks, which may change.
        """
        self.lease, self.most = lease, most
        self.session, self.vector, self.codec, self.origin = session, vector, codec, origin
        # Chunks are multiples of ALIGN, since each scale of a codec belongs to fixed positions.
        self.chunk_elements = min(max(chunk_elements // ALIGN, 1) * ALIGN, vector.size)
        self.position = 0
        self.buffer = bytearray(0 if codec.raw else codec.encoded_bytes(self.chunk_elements))

    def next_frame(self, apart: bool = False) -> tuple[bytes, memoryview] | None:
        """Return the header and body of the next chunk, None after the last.

        One buffer is enough, because the link sends a frame before it asks for the next. With ``apart`` several frames
        are sent at once, so each gets a buffer of its own.
        """
        if self.done:
            return None
        start, count = self.position, self.chunk_elements
        if self.most is not None and self.most.elements < count:
            count = max(self.most.elements // ALIGN, 1) * ALIGN
        values = self.vector[start : start + count]
        if self.codec.raw:
            body = memoryview(values.data).cast("B")
        else:
            count = self.codec.encoded_bytes(values.size)
            body = memoryview(bytearray(count) if apart else self.buffer)[:count]
            self.codec.encode(values, body, self.session, self.origin + start)
        checksum = 0 if self.sealed else xxhash.xxh3_64_intdigest(body)
        self.position += values.size
        return encode(Chunk(self.session, self.origin + start, values.size, checksum), len(body)), body

    def let_go(self) -> None:
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

    sealed = False  # As for the sender; a checksum of 0 then means none.

    def __init__(self, session: int, size: int, codec: Codec, origin: int = 0) -> None:
        self.session, self.size, self.codec, self.origin = session, size, codec, origin
        self.coverage = Coverage(size)
        self.bodies: dict[int, memoryview] = {}  # Buffers that links fill at present, by the start of their chunk.
        self.spare: list[bytearray] = []  # Buffers that :meth:`scratch` reuses.
        self.fault = ""  # Reason why :meth:`arrived` returned False: checksum or overflow.

    def place(self, chunk: Chunk, body_bytes: int, anywhere: bool = False) -> memoryview:
        """Return the buffer for the body of a chunk.

        Raises:
            ProtocolError: The chunk is not the next one or, with ``anywhere``, not one that is still to come.
        """
        start = chunk.start - self.origin
        if start < 0:
            raise ProtocolError(f"A chunk begins at {chunk.start}, before its vector, which begins at {self.origin}.")
        expected = self.codec.encoded_bytes(chunk.elements)
        if body_bytes != expected:
            raise ProtocolError(f"A chunk has {body_bytes} bytes instead of {expected}.")
        self.coverage.begin(start, chunk.elements, anywhere)
        body = self.bodies[start] = self.buffer(slice(start, start + chunk.elements), expected)
        return body

    def arrived(self, chunk: Chunk) -> bool:
        """Check and use a filled body. Return False, with the reason in ``fault``, if that fails.

        The reason is "checksum", or "overflow" if a difference exceeds the codec's bound and another codec would do.
        """
        checked = chunk.checksum or not self.sealed
        if checked and xxhash.xxh3_64_intdigest(self.bodies[chunk.start - self.origin]) != chunk.checksum:
            self.fault = "checksum"
            del self.bodies[chunk.start - self.origin]
            return False
        start = chunk.start - self.origin
        body = self.bodies.pop(start)
        try:
            self.use(slice(start, start + chunk.elements), body)
        except Overflow:
            self.fault = "overflow"
            return False
        finally:
            if isinstance(body.obj, bytearray):  # A buffer from scratch() is free again.
                self.spare.append(body.obj)
        self.coverage.complete(start)
        return True

    @property
    def position(self) -> int:
        """Return the position before which all elements have arrived."""
        return self.coverage.prefix

    @property
    def elements_arrived(self) -> int:
        """Return the number of elements that have arrived."""
        return self.coverage.arrived

    @property
    def filling(self) -> bool:
        """Return True if a link is reading into a buffer of ours."""
        return bool(self.bodies)

    @property
    def done(self) -> bool:
        return self.coverage.done

    def scratch(self, expected: int) -> memoryview:
        """Return a buffer to read into. Usually it is allocated at the first chunk, since all have one size."""
        room = self.spare.pop() if self.spare else bytearray()
        if len(room) < expected:
            room = bytearray(expected)
        return memoryview(room)[:expected]

    def buffer(self, where: slice, expected: int) -> memoryview:
        raise NotImplementedError

    def use(self, where: slice, body: memoryview) -> None:
        raise NotImplementedError


class DifferenceReceiver(Receiver):
    """A receiver that computes ``out = Q(theirs) - Q(ours)`` and both squared norms.

    Norms are summed in the order of the vector, whatever the order of its chunks. With ``spread`` the largest
    difference of each block is found while it is in cache. Call :meth:`learn` once the exchange is accepted.
    """

    def __init__(
        self, session: int, ours: Floats, out: Floats, codec: Codec, spread: Spread | None = None, plain: bool = False,
        origin: int = 0,
    ) -> None:  # fmt: skip
        """Prepare to receive. ``plain``: our vector is not sent, so its values are used without the codec."""
        super().__init__(session, ours.size, codec, origin)
        self.ours, self.out, self.spread, self.plain = ours, out, spread, plain
        blocks = 0 if spread is None else -(-ours.size // ALIGN)
        self.peaks, self.errors = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
        self.difference_sq = self.own_sq = 0.0
        self.summed = 0  # Length of the prefix whose squares are summed.
        self.early: dict[int, int] = {}  # Start to stop of the chunks that wait for their turn to be summed.
        self.own = np.empty(0, np.float32)  # Our values of a chunk as the partner decodes them.

    def buffer(self, where: slice, expected: int) -> memoryview:
        if self.codec.raw:
            return memoryview(self.out[where].data).cast("B")
        if self.own.size < where.stop - where.start and not self.plain:
            self.own = np.empty(where.stop - where.start, np.float32)
        return self.scratch(expected)

    def use(self, where: slice, body: memoryview) -> None:
        ours, out = self.ours[where], self.out[where]
        in_turn = where.start == self.summed
        before = (self.difference_sq, self.own_sq) if in_turn else (0.0, 0.0)
        if self.codec.raw or self.plain:
            if not self.codec.raw:
                self.codec.decode(body, out, ours, self.session, self.origin + where.start)
            before = difference(out, ours, out, before)
        else:
            own, start = self.own[: out.size], self.origin + where.start
            before = self.codec.subtract(body, ours, out, own, self.session, start, before)
        if self.spread is not None:
            blocks = slice(where.start // ALIGN, -(-where.stop // ALIGN))
            self.peaks[blocks] = peaks(out, ALIGN)
            self.errors[blocks] = self.codec.errors(ours, where.start)
        if not in_turn:
            self.early[where.start] = where.stop
            return
        self.difference_sq, self.own_sq = before
        self.summed = where.stop
        while self.summed in self.early:
            self.add(slice(self.summed, self.early.pop(self.summed)))

    def add(self, where: slice) -> None:
        """Add the squares of a chunk whose turn has come."""
        own = self.ours[where]
        if not (self.codec.raw or self.plain):
            values, own = own, self.own[: own.size]
            self.codec.quantised(values, own, self.session, self.origin + where.start)
        self.difference_sq = squares(self.out[where], self.difference_sq)
        self.own_sq = squares(own, self.own_sq)
        self.summed = where.stop

    def learn(self) -> None:
        """Let the node's spread learn the distance from the whole difference, which was accepted."""
        assert self.done, "only a whole difference is learned from"
        if self.spread is not None:
            self.spread.learn(self.peaks, self.errors)


class ValuesReceiver(Receiver):
    """A receiver of another member's values, as all members decode them."""

    def __init__(self, session: int, out: Floats, codec: Codec, origin: int = 0) -> None:
        super().__init__(session, out.size, codec, origin)
        self.out = out

    def buffer(self, where: slice, expected: int) -> memoryview:
        if self.codec.raw:
            return memoryview(self.out[where].data).cast("B")
        return self.scratch(expected)

    def use(self, where: slice, body: memoryview) -> None:
        if not self.codec.raw:
            self.codec.decode(body, self.out[where], None, self.session, self.origin + where.start)


class PieceReceiver(Receiver):
    """A receiver of a raw slice [start, stop) of a donor's vector into the same place of ours.

    Bytes arrive in a buffer of its own, so that a donor that was given up cannot overwrite what another has sent.
    """

    def __init__(self, session: int, out: Floats, start: int, stop: int) -> None:
        super().__init__(session, stop - start, get_codec("fp32"))
        self.out, self.start = out, start

    def buffer(self, where: slice, expected: int) -> memoryview:
        return self.scratch(expected)

    def use(self, where: slice, body: memoryview) -> None:
        self.out[self.start + where.start : self.start + where.stop] = finite_values(body)


class ComparingReceiver(Receiver):
    """A receiver that compares a raw slice [start, stop) of another's vector with ours, which stays as it is.

    It adds up ``|theirs - ours|^2`` and ``|ours|^2``.
    """

    def __init__(self, session: int, ours: Floats, start: int, stop: int) -> None:
        super().__init__(session, stop - start, get_codec("fp32"))
        self.ours, self.start = ours, start
        self.difference_sq = self.own_sq = 0.0

    def buffer(self, where: slice, expected: int) -> memoryview:
        return self.scratch(expected)

    def use(self, where: slice, body: memoryview) -> None:
        theirs = finite_values(body)
        ours = self.ours[self.start + where.start : self.start + where.stop]
        before = self.difference_sq, self.own_sq
        self.difference_sq, self.own_sq = difference(theirs, ours, np.empty_like(ours), before)


def finite_values(body: memoryview) -> Floats:
    """Return the float32 values that a donor sent. Raises ProtocolError if one of them is not finite."""
    values = np.frombuffer(body, np.dtype("<f4"))
    if not np.isfinite(values).all():
        raise ProtocolError("A donor's weights are not finite.")
    return values

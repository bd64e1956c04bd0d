"""A vector streamed both ways at once, chunk by chunk, each decoded, checked and subtracted while still in cache."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from gossip.arithmetic.mixing import difference
from gossip.averaging.coverage import Coverage
from gossip.averaging.vectors import Lease
from gossip.codecs import ALIGN, Codec, Overflow, Spread, get_codec
from gossip.codecs.base import numbers, peaks
from gossip.errors import ProtocolError
from gossip.kernel.squares import squares
from gossip.wire.frames import encode
from gossip.wire.messages import Chunk

__all__ = [
    "ComparingReceiver", "DifferenceReceiver", "PieceReceiver", "Receiver", "Sender", "ValuesReceiver",
]  # fmt: skip

Floats = NDArray[np.float32]


class Most(Protocol):
    """What knows how large a chunk may be now."""

    @property
    def elements(self) -> int: ...


class Sender:
    """A vector as frames: views of it for a raw codec, encoded into one reused buffer for the others.

    ``codec`` is bound already where it needs bounds: ``get_codec(name).bound(spread)``, one for a session's sender and
    receiver both, since what the partner decodes of us (``quantised``) depends on the bounds.
    """

    sealed = False  # the link has a proof of every byte: a checksum would be a second one

    def __init__(
        self, session: int, vector: Floats, codec: Codec, chunk_elements: int, origin: int = 0,
        lease: Lease | None = None, most: Most | None = None,
    ) -> None:  # fmt: skip
        """``origin``: where the vector begins in the one that it is a slice of; ``lease``: of what it is a view of;
        ``most``: says how many elements a chunk may have at the moment, at most ``chunk_elements`` all the same."""
        self.lease, self.most = lease, most
        self.session, self.vector, self.codec, self.origin = session, vector, codec, origin
        self.chunk_elements = min(max(chunk_elements // ALIGN, 1) * ALIGN, vector.size)  # scales belong to positions
        self.position = 0
        self.buffer = bytearray(0 if codec.raw else codec.encoded_bytes(self.chunk_elements))

    def next_frame(self, apart: bool = False) -> tuple[bytes, memoryview] | None:
        """The link sends a frame wholly before it asks for the next, so one buffer is enough; ``apart``: others are
        sent beside it."""
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
    """Chunks into a place of ours: in order, but over several connections. What is allocated is bounded by our own
    vector and by the largest chunk allowed, one for each connection; a frame that does not fit is a protocol error.
    Subclasses say where bytes go and what becomes of them."""

    sealed = False  # as the sender's: a checksum of 0 is none

    def __init__(self, session: int, size: int, codec: Codec, origin: int = 0) -> None:
        self.session, self.size, self.codec, self.origin = session, size, codec, origin
        self.coverage = Coverage(size)
        self.bodies: dict[int, memoryview] = {}  # that links read into at the moment, by where their chunks begin
        self.spare: list[bytearray] = []  # of scratch
        self.fault = ""  # why `arrived` said no: checksum or overflow

    def place(self, chunk: Chunk, body_bytes: int, anywhere: bool = False) -> memoryview:
        """Where the body of the next chunk goes; raises ProtocolError for any other chunk than the next, or,
        ``anywhere``, than one that is still to come."""
        start = chunk.start - self.origin
        if start < 0:
            raise ProtocolError(f"A chunk came from {chunk.start} on, before {self.origin} where its vector begins.")
        expected = self.codec.encoded_bytes(chunk.elements)
        if body_bytes != expected:
            raise ProtocolError(f"A chunk of {body_bytes} bytes came where {expected} belong.")
        self.coverage.begin(start, chunk.elements, anywhere)
        body = self.bodies[start] = self.buffer(slice(start, start + chunk.elements), expected)
        return body

    def arrived(self, chunk: Chunk) -> bool:
        """The body is filled: check it and use it. False when the transfer has failed, with the reason in ``fault``:
        "checksum", or "overflow" where the codec's bound was exceeded and another codec would do."""
        checked = chunk.checksum or not self.sealed
        if checked and xxhash.xxh3_64_intdigest(self.bodies[chunk.start - self.origin]) != chunk.checksum:
            self.fault = "checksum"
            del self.bodies[chunk.start - self.origin]
            return False
        return self.taken(chunk)

    def take(self, values: Floats) -> bool:
        """The next of theirs where they lie, in memory that others may change meanwhile: each is read once, into ours,
        and what was read is checked and used. What the codec makes of it is what would have come as a chunk."""
        chunk = Chunk(self.session, self.origin + self.position, values.size, 0)
        body = self.place(chunk, self.codec.encoded_bytes(values.size))
        if self.codec.raw:
            numbers(body, "<f4", values.size)[:] = values
        else:
            self.codec.encode(values.copy(), body, self.session, chunk.start)
        return self.taken(chunk)

    def taken(self, chunk: Chunk) -> bool:
        """As :meth:`arrived`, of a body that came by a way on which no byte can change."""
        start = chunk.start - self.origin
        body = self.bodies.pop(start)
        try:
            self.use(slice(start, start + chunk.elements), body)
        except Overflow:
            self.fault = "overflow"
            return False
        finally:
            if isinstance(body.obj, bytearray):  # of scratch
                self.spare.append(body.obj)
        self.coverage.arrived(start)
        return True

    @property
    def position(self) -> int:
        """All elements before it are here."""
        return self.coverage.prefix

    @property
    def came(self) -> int:
        """Elements that are here."""
        return self.coverage.came

    @property
    def filling(self) -> bool:
        """Whether a link reads into a buffer of ours at the moment."""
        return bool(self.bodies)

    @property
    def done(self) -> bool:
        return self.coverage.done

    def scratch(self, expected: int) -> memoryview:
        """Bytes to read into before they are used: grown at the first chunk, as a rule, since all are of one size."""
        room = self.spare.pop() if self.spare else bytearray()
        if len(room) < expected:
            room = bytearray(expected)
        return memoryview(room)[:expected]

    def buffer(self, where: slice, expected: int) -> memoryview:
        raise NotImplementedError

    def use(self, where: slice, body: memoryview) -> None:
        raise NotImplementedError


class DifferenceReceiver(Receiver):
    """``out = Q(theirs) - Q(ours)``, with both squared norms added up on the way, in the order of the vector whatever
    order its chunks come in; with ``spread``, also the largest differences of each block, while they are in cache. Call
    :meth:`learn` once the exchange is accepted."""

    def __init__(
        self, session: int, ours: Floats, out: Floats, codec: Codec, spread: Spread | None = None, plain: bool = False,
        origin: int = 0,
    ) -> None:  # fmt: skip
        """``plain``: ours is not sent, and taken as it is."""
        super().__init__(session, ours.size, codec, origin)
        self.ours, self.out, self.spread, self.plain = ours, out, spread, plain
        blocks = 0 if spread is None else -(-ours.size // ALIGN)
        self.peaks, self.errors = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
        self.difference_sq = self.own_sq = 0.0
        self.summed = 0  # elements that both have
        self.early: dict[int, int] = {}  # chunks whose turn to be added up has not come: to, by from
        self.own = np.empty(0, np.float32)  # of a chunk: ours as the partner decodes it
        self.lying: Floats | None = None  # theirs, where they are read from other memory

    def take(self, values: Floats) -> bool:
        """Of what is raw the difference itself is made in the one pass over it."""
        if not self.codec.raw:
            return super().take(values)
        where = slice(self.position, self.position + values.size)
        self.coverage.begin(where.start, values.size)
        self.lying = values
        self.use(where, memoryview(b""))
        self.lying = None
        self.coverage.arrived(where.start)
        return True

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
            before = difference(out if self.lying is None else self.lying, ours, out, before)
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
        """The squares of a chunk whose turn has come."""
        own = self.ours[where]
        if not (self.codec.raw or self.plain):
            values, own = own, self.own[: own.size]
            self.codec.quantised(values, own, self.session, self.origin + where.start)
        self.difference_sq = squares(self.out[where], self.difference_sq)
        self.own_sq = squares(own, self.own_sq)
        self.summed = where.stop

    def learn(self) -> None:
        """The whole difference was accepted: what it shows of the partners' distance goes into the node's spread."""
        assert self.done, "only a whole difference is learned from"
        if self.spread is not None:
            self.spread.learn(self.peaks, self.errors)


class ValuesReceiver(Receiver):
    """Another's values, as everybody decodes them."""

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
    """A raw slice [start, stop) of another's vector into the same place of ours. Bytes arrive in a buffer of its own:
    what a donor that was given up still sends must not land on what another has sent."""

    def __init__(self, session: int, out: Floats, start: int, stop: int) -> None:
        super().__init__(session, stop - start, get_codec("fp32"))
        self.out, self.start = out, start

    def buffer(self, where: slice, expected: int) -> memoryview:
        return self.scratch(expected)

    def use(self, where: slice, body: memoryview) -> None:
        self.out[self.start + where.start : self.start + where.stop] = finite_values(body)


class ComparingReceiver(Receiver):
    """A raw slice [start, stop) of another's vector, beside the same place of ours, which stays as it is: adds up
    ``|theirs - ours|^2`` and ``|ours|^2``."""

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
    """Return the float32 that a donor sent. Raises ProtocolError where one of them is not finite."""
    values = np.frombuffer(body, np.dtype("<f4"))
    if not np.isfinite(values).all():
        raise ProtocolError("A donor's weights are not finite.")
    return values

"""The attacker's connections: from TCP to a finished Hello, after which it may send anything."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Awaitable, Callable

import trio

from gossip.ids import Address, MemberRecord, PeerId
from gossip.wire.frames import encode
from gossip.wire.messages import VERSION_MAX, VERSION_MIN, Chunk, Close, Hello, Message, Widen
from node.links.frame_reader import FrameReader
from node.transport.byte_stream import ByteStream
from node.transport.tcp import TcpNetwork
from node.transport.tls import Contexts, TlsStream

CONNECT_S = 5.0
MessageHandler = Callable[["Line", Message, bytes], Awaitable[None]]
"""A handler of (line, message, body of a chunk)."""


class Line:
    """One connection. ``peer`` is the id of the node that answered; None before its Hello."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.reader = FrameReader(stream)
        self.peer: PeerId | None = None
        self.record: MemberRecord | None = None
        self.lock = trio.Lock()  # a stream allows one sender at a time
        self.open = True
        self.name = b""  # the node's name for this link, needed to open its other stripes
        self.address: Address | None = None  # the dialled address

    async def send(self, message: Message, body: bytes | memoryview = b"") -> None:
        """Send a message. A failure closes the line without an exception, because the attack must go on."""
        await self.write(encode(message, len(body)) + bytes(body))

    async def write(self, data: bytes) -> None:
        try:
            async with self.lock:
                await self.stream.send_all(data)
        except Exception:  # a connection may break in many ways: BrokenLinkError, TLS, a closed socket
            self.close()

    async def hello(self, hello: Hello) -> Hello | None:
        """Exchange Hellos, and return the node's, or None if it closed the connection."""
        await self.write(encode(hello))
        try:
            frame = await self.reader.read_message()
        except Exception:  # the connection broke, as in write()
            frame = None
        theirs = None if frame is None else frame[0]
        if not isinstance(theirs, Hello) or theirs.record is None:
            self.close()
            return None
        self.peer, self.record, self.name = theirs.record.id, theirs.record, theirs.lanes
        return theirs

    async def first(self) -> Message | None:
        """Return the next message, or None if the connection ends."""
        try:
            frame = await self.reader.read_message()
        except Exception:  # the connection broke, as in write()
            return None
        return None if frame is None else frame[0]

    async def read_all(self, handler: MessageHandler) -> None:
        """Read frames until the connection ends, and call ``handler`` for each."""
        try:
            while True:
                frame = await self.reader.read_message()
                if frame is None:
                    return
                message, size = frame
                body = bytearray(size)
                if size:
                    await self.reader.read_exactly(memoryview(body))
                if isinstance(message, Close):
                    return
                await handler(self, message, bytes(body))
        except Exception:  # the attack goes on after any failure of a connection
            return
        finally:
            self.close()

    def close(self) -> None:
        self.open = False
        with contextlib.suppress(Exception):
            self.stream.close_now()


async def plain(address: Address) -> ByteStream:
    """Open a TCP connection; network errors pass to the caller."""
    return await TcpNetwork(None, CONNECT_S).connect(address)


async def tls(address: Address, contexts: Contexts) -> ByteStream:
    stream = TlsStream(await plain(address), contexts, server_side=False)
    try:
        with trio.fail_after(CONNECT_S):
            await stream.handshake()
    except BaseException:
        stream.close_now()
        raise
    return stream


async def open_line(address: Address, contexts: Contexts, fingerprint: str, record: MemberRecord | None) -> Line | None:
    """Open a link to a node, with a record or as an observer (None); return None if that fails."""
    try:
        line = Line(await tls(address, contexts))
    except Exception:  # refused, reset or timed out
        return None
    line.address = address
    if record is None:
        await line.write(encode(Hello(VERSION_MIN, VERSION_MAX, "", "", (), None)))
        return line
    with trio.move_on_after(CONNECT_S):
        if await line.hello(hello_of(fingerprint, record)) is not None:
            return line
    line.close()
    return None


async def open_lane(line: Line, contexts: Contexts, fingerprint: str, record: MemberRecord) -> Line | None:
    """Open another stripe of a link that this side dialled; return None if the node does not admit it."""
    if line.address is None:
        return None
    try:
        lane = Line(await tls(line.address, contexts))
    except Exception:  # refused, reset or timed out
        return None
    with trio.move_on_after(CONNECT_S):
        hello = dataclasses.replace(hello_of(fingerprint, record), joins=line.name)
        if await lane.hello(hello) is not None and isinstance((await lane.first()), Widen):
            return lane
    lane.close()
    return None


def hello_of(fingerprint: str, record: MemberRecord) -> Hello:
    lanes = secrets.token_bytes(16)
    return Hello(VERSION_MIN, VERSION_MAX, "default", fingerprint, (), record, lanes=lanes)


def chunk_of(session: int, start: int, elements: int, body: bytes) -> Chunk:
    import xxhash

    return Chunk(session, start, elements, xxhash.xxh3_64_intdigest(body))

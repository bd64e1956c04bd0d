"""A link without a socket, which breaks and applies backpressure as one over TCP does."""

from __future__ import annotations

import trio

from node.transport.byte_stream import BrokenLinkError

MEMORY_PIPE_BYTES = 65_536  # Less than the payloads of tests, so that they meet the backpressure of a socket.


def memory_stream_pair(capacity_bytes: int = MEMORY_PIPE_BYTES) -> tuple[MemoryStream, MemoryStream]:
    """Return two connected streams without a socket; each direction holds at most ``capacity_bytes`` unread bytes."""
    there, back = _Pipe(capacity_bytes), _Pipe(capacity_bytes)
    return MemoryStream(outgoing=there, incoming=back), MemoryStream(outgoing=back, incoming=there)


class MemoryStream:
    """One end of :func:`memory_stream_pair`. Unlike trio's own, it breaks as a reset socket breaks."""

    peer_host = "memory"

    def __init__(self, *, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._closed = False

    async def receive_into(self, buffer: memoryview) -> int:
        return await self._incoming.take(buffer)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._outgoing.put(memoryview(data).cast("B"))

    async def aclose(self) -> None:
        self._closed = True
        self._outgoing.end()
        self._incoming.break_off()
        await trio.lowlevel.checkpoint()

    def close_now(self) -> None:
        if self._closed:
            return  # A closed socket cannot be reset, so its last bytes still arrive.
        self._closed = True
        self._outgoing.break_off()
        self._incoming.break_off()


class _Pipe:
    """Bytes in one direction.

    ``_ended``: the writer has closed, and the rest may still be read. ``_broken``: no side may read or write.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._unread = bytearray()
        self._ended = False
        self._broken = False
        self._changed = trio.lowlevel.ParkingLot()

    async def put(self, view: memoryview) -> None:
        await trio.lowlevel.checkpoint()
        start = 0
        while True:
            if self._broken or self._ended:
                raise BrokenLinkError("The connection in memory broke.")
            end = start + self._capacity_bytes - len(self._unread)
            self._unread += view[start:end]
            start = min(end, len(view))
            self._changed.unpark_all()
            if start == len(view):
                return
            await self._changed.park()

    async def take(self, buffer: memoryview) -> int:
        await trio.lowlevel.checkpoint()
        while not self._broken:
            if self._unread:
                count = min(len(buffer), len(self._unread))
                buffer[:count] = self._unread[:count]
                del self._unread[:count]
                self._changed.unpark_all()
                return count
            if self._ended:
                return 0
            await self._changed.park()
        raise BrokenLinkError("The connection in memory broke.")

    def end(self) -> None:
        self._ended = True
        self._changed.unpark_all()

    def break_off(self) -> None:
        self._broken = True
        self._changed.unpark_all()

"""Threads that carry large vectors: the same coroutines as in trio's loop, each run to its end on a socket that blocks.

A link's frames are read by one task and written by another. While much of a vector is under way such a task is lent a
thread, which does what the task would have done, chunk after chunk, and comes back with the first thing that is not of
that vector. So nothing of a link is ever touched from two sides, and a task is over when its thread is.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import trio

from node.transport.byte_stream import BrokenLinkError, PlainStream
from node.transport.forks import keep_from_children
from node.transport.sealed import SealedStream

__all__ = ["WHOLE_BYTES", "BlockingStream", "Hands"]

THREADS = 8  # two for each stream of one exchange of our own and of two that others began, and two for a newcomer
WHOLE_BYTES = 65_536  # what is to be filled with so much is a chunk's body, and read in one call
LOOK_MS = 250  # between two looks at whether a vector is still wanted of which nothing comes
# After so long a call of the kernel returns with the bytes that it has moved, so that a slow stream is seen to move.
# Trio's own calls never wait, and are not affected.
CALL_TIMEOUT = struct.pack("ll", 0, 250_000)  # struct timeval: seconds and microseconds

S = TypeVar("S")
T = TypeVar("T")


class BlockingStream:
    """A stream's socket under a descriptor of its own, which waits in the calling thread. Its methods are coroutines
    that never yield, so that :class:`~node.links.frame_reader.FrameReader` reads from it as from any other."""

    def __init__(self, sock: socket.socket, owner: PlainStream) -> None:
        self.socket, self.owner, self.peer_host = sock, owner, owner.peer_host
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, CALL_TIMEOUT)

    def waits(self, over: Callable[[], bool]) -> bool:
        """Until there is something to read; False once it is ``over``."""
        while not self.poll.poll(LOOK_MS):
            if over():
                return False
        return True

    async def receive_into(self, buffer: memoryview) -> int:
        """As :meth:`PlainStream.receive_into`, of what is large all of it, where it comes fast enough."""
        flags = socket.MSG_WAITALL if len(buffer) >= WHOLE_BYTES else 0
        while True:
            try:
                count = self.socket.recv_into(buffer, 0, flags)
                if not count:
                    self.socket.getpeername()
            except BlockingIOError:  # nothing came within the time of one call
                continue
            except OSError as error:
                raise self.broken() from error
            self.owner.bytes_received += count
            return count

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.send_frame(data, b"")

    async def send_frame(self, header: bytes | bytearray | memoryview, body: bytes | memoryview) -> None:
        """Both in one call of the kernel."""
        left = [memoryview(piece) for piece in (header, body) if len(piece)]
        try:
            while left:
                try:
                    sent = self.socket.sendmsg(left)
                except BlockingIOError:  # the other side read nothing within the time of one call
                    continue
                self.owner.bytes_sent += sent
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if sent:
                    left[0] = left[0][sent:]
        except OSError as error:
            raise self.broken() from error

    async def aclose(self) -> None:
        self.close_now()

    def close_now(self) -> None:
        self.socket.close()
        self.owner.take_back()

    def broken(self) -> BrokenLinkError:
        return BrokenLinkError(f"The connection to {self.peer_host} broke.")


class BlockingSealed(BlockingStream):
    """The same of a sealed stream, which is sealed and opened in the calling thread."""

    def __init__(self, sock: socket.socket, owner: PlainStream, stream: SealedStream) -> None:
        super().__init__(sock, owner)
        self.sealer, self.opener = stream.sealer, stream.opener

    def waits(self, over: Callable[[], bool]) -> bool:
        return self.opener.ready or super().waits(over)

    async def receive_into(self, buffer: memoryview) -> int:
        return await self.opener.take(super().receive_into, buffer)

    async def send_frame(self, header: bytes | bytearray | memoryview, body: bytes | memoryview) -> None:
        await self.sealer.send(self.send_sealed, header, body)

    async def send_sealed(self, records: bytes | bytearray | memoryview) -> None:
        await super().send_frame(records, b"")


class Hands:
    """Of one node: so many threads, lent to links."""

    def __init__(self, threads: int = THREADS) -> None:
        self.limiter = trio.CapacityLimiter(threads)

    def lend(self, stream: object) -> BlockingStream | None:
        """What a thread carries a stream with, for :meth:`run`; None where none can, none is free, or this process has
        no descriptor left: then the loop carries it."""
        plain = stream.inner if isinstance(stream, SealedStream) and stream.sealed else stream
        if not isinstance(plain, PlainStream) or not plain.blocks or self.limiter.available_tokens < 1:
            return None
        try:
            sock = plain.lend()
        except OSError:
            return None
        keep_from_children(sock)
        return BlockingSealed(sock, plain, stream) if isinstance(stream, SealedStream) else BlockingStream(sock, plain)

    async def run(self, lent: BlockingStream, name: str, work: Callable[[BlockingStream], Coroutine[Any, Any, T]]) -> T:
        """``work`` in a thread. Cancelling does not end it: whoever cancels closes the stream, which does."""
        try:
            return await trio.to_thread.run_sync(finished, work, lent, thread_name=name, limiter=self.limiter)
        except BrokenLinkError:
            await trio.lowlevel.checkpoint_if_cancelled()  # who cancelled it closed it, and is told of nothing else
            raise
        finally:
            lent.close_now()


def finished(work: Callable[[S], Coroutine[Any, Any, T]], stream: S) -> T:
    """What a coroutine returns that never yields."""
    coroutine = work(stream)
    with contextlib.closing(coroutine):
        try:
            coroutine.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
    raise RuntimeError("what runs in a thread of its own waited for the network's loop")

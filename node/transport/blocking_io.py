"""The blocking I/O pool: threads that carry large vectors by running the same coroutines on a blocking socket.

One task reads a link's frames and another writes them. For a large vector such a task borrows an I/O thread, and waits
while the thread carries chunk after chunk in its place. The thread returns at the first frame that is not of that
vector. So a task and its thread never touch a link's state at the same time.
"""

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

MAX_THREADS = 8  # Two (to send and receive) for each of three exchanges, ours and two of others, and for a newcomer.
WHOLE_BYTES = 65_536  # A buffer of at least this size is a chunk's body, and is filled in one call.
POLL_MS = 250  # The interval at which an idle thread checks whether its vector is still needed.
# A blocking call returns after 250 ms with the bytes that have moved, so that a slow stream is seen to move. The value
# is a struct timeval of seconds and microseconds. trio's own calls never block.
CALL_TIMEOUT = struct.pack("ll", 0, 250_000)

S = TypeVar("S")  # A stream.
T = TypeVar("T")  # The result of a coroutine.


class BlockingStream:
    """A stream's socket under a duplicated descriptor, on which calls block the calling thread.

    Its methods are coroutines that never yield, so that :class:`~node.links.frame_reader.FrameReader` can read from it.
    """

    def __init__(self, sock: socket.socket, owner: PlainStream) -> None:
        self.socket, self.owner, self.peer_host = sock, owner, owner.peer_host
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, CALL_TIMEOUT)

    def wait_readable(self, is_over: Callable[[], bool]) -> bool:
        """Wait for something to read; return False if ``is_over`` returns True first."""
        while not self.poll.poll(POLL_MS):
            if is_over():
                return False
        return True

    async def receive_into(self, buffer: memoryview) -> int:
        """Receive as :meth:`PlainStream.receive_into` does, but fill a large buffer whole if data comes fast enough."""
        flags = socket.MSG_WAITALL if len(buffer) >= WHOLE_BYTES else 0
        while True:
            try:
                count = self.socket.recv_into(buffer, 0, flags)
                if not count:
                    self.socket.getpeername()
            except BlockingIOError:  # Nothing came within the timeout of one call.
                continue
            except OSError as error:
                raise self.broken() from error
            self.owner.bytes_received += count
            return count

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.send_frame(data, b"")

    async def send_frame(self, header: bytes | bytearray | memoryview, body: bytes | memoryview) -> None:
        """Send header and body in one system call."""
        unsent = [memoryview(piece) for piece in (header, body) if len(piece)]
        try:
            while unsent:
                try:
                    sent = self.socket.sendmsg(unsent)
                except BlockingIOError:  # The other side read nothing within the timeout of one call.
                    continue
                self.owner.bytes_sent += sent
                while unsent and sent >= len(unsent[0]):
                    sent -= len(unsent.pop(0))
                if sent:
                    unsent[0] = unsent[0][sent:]
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
    """A sealed stream for a thread, which also encrypts and decrypts."""

    def __init__(self, sock: socket.socket, owner: PlainStream, stream: SealedStream) -> None:
        super().__init__(sock, owner)
        self.sealer, self.opener = stream.sealer, stream.opener

    def wait_readable(self, is_over: Callable[[], bool]) -> bool:
        return self.opener.is_ready or super().wait_readable(is_over)

    async def receive_into(self, buffer: memoryview) -> int:
        return await self.opener.receive(super().receive_into, buffer)

    async def send_frame(self, header: bytes | bytearray | memoryview, body: bytes | memoryview) -> None:
        await self.sealer.send(self.send_sealed, header, body)

    async def send_sealed(self, records: bytes | bytearray | memoryview) -> None:
        await super().send_frame(records, b"")


class BlockingIoPool:
    """A node's pool of threads, which it lends to links."""

    def __init__(self, threads: int = MAX_THREADS) -> None:
        self.limiter = trio.CapacityLimiter(threads)

    def lend(self, stream: object) -> BlockingStream | None:
        """Return a blocking stream for :meth:`run`.

        None means that trio's loop must carry the stream, because threads cannot, none is free, or the process has no
        descriptor left.
        """
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
        """Run ``work`` in a thread. Cancellation does not end it, so the canceller must also close the stream."""
        try:
            return await trio.to_thread.run_sync(run_to_end, work, lent, thread_name=name, limiter=self.limiter)
        except BrokenLinkError:
            # If a canceller has closed the stream, its cancellation is raised, and not this error.
            await trio.lowlevel.checkpoint_if_cancelled()
            raise
        finally:
            lent.close_now()


def run_to_end(work: Callable[[S], Coroutine[Any, Any, T]], stream: S) -> T:
    """Return the result of a coroutine that never yields."""
    coroutine = work(stream)
    with contextlib.closing(coroutine):
        try:
            coroutine.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
    raise RuntimeError("a coroutine in an I/O thread waited for trio's loop")

"""Bytes to one peer and back, over a socket."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import trio

from gossip.errors import RemoteError
from gossip.ids import Address
from node.transport.forks import keep_from_children

__all__ = ["BrokenLinkError", "ByteStream", "Network", "PlainStream", "socket_of"]


class BrokenLinkError(RemoteError):
    """The connection is gone without a word: reset, cut off half-way, or closed by us under a waiting task."""

    def __init__(self, sentence: str) -> None:
        super().__init__("broken", sentence)


class ByteStream(Protocol):
    """A duplex stream of bytes; one task at a time sends, while another may receive.

    A cancelled ``receive_into`` loses nothing. A cancelled ``send_all`` has sent an unknown part: close the stream.
    """

    @property
    def peer_host(self) -> str:
        """The other side's address as the network shows it; not an identity."""

    async def receive_into(self, buffer: memoryview) -> int:
        """Fill the start of ``buffer`` (bytes, not empty) with what is there, waiting for at least one byte.

        Returns the count; 0 once the other side has closed properly. Raises :class:`BrokenLinkError`.
        """

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send every byte, waiting while the other side does not read; raises :class:`BrokenLinkError`."""

    async def aclose(self) -> None:
        """Close properly, in bounded time; tasks waiting on this stream get :class:`BrokenLinkError`."""

    def close_now(self) -> None:
        """Close abruptly, so that the other side sees a broken link and not an end; may be called twice."""


# Calls of the loop never wait in the kernel, whatever the socket is set to: threads use the same one, and wait there.
DONT_WAIT: int = getattr(socket, "MSG_DONTWAIT", 0)
TURNS = 8  # calls in a row that found something to do, of a chunk each at most, before others have theirs


def socket_of(stream: ByteStream) -> PlainStream | None:
    """The socket's stream below what encrypts, where there is one."""
    while (inner := getattr(stream, "inner", None)) is not None:
        stream = inner
    return stream if isinstance(stream, PlainStream) else None


class Network(Protocol):
    """Where streams come from: TCP, or memory in tests."""

    async def connect(self, address: Address) -> ByteStream:
        """Raises OSError or BrokenLinkError when nobody answers."""

    async def serve(self, handler: Callable[[ByteStream], Awaitable[None]], nursery: trio.Nursery) -> None:
        """Accept until cancelled; ``handler`` is an async function, started in ``nursery`` for each stream."""


class PlainStream:
    """A connected TCP socket, which it takes over. Its options (``TCP_NODELAY`` and the like) are set by whoever made
    it.

    The socket is asked first and the scheduler when there is nothing to do: trio's own calls pass through it each time,
    which costs as much as all else of a short message.
    """

    blocks = DONT_WAIT > 0  # whether threads can use it beside trio

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._lent = 0  # descriptors of it that threads have
        self.heard = False  # a byte came
        self.bytes_received = self.bytes_sent = 0  # as the kernel gave and took them, by threads as well
        self._empty = False  # the last look left nothing to read
        self._turns = 0  # calls in a row that did not wait
        try:
            self._peer_host = str(sock.getpeername()[0])
        except OSError as error:  # accepted, and reset before we looked
            sock.close()
            raise BrokenLinkError("The connection was gone before it could be used.") from error
        self._socket = socket.socket(sock.family, sock.type, sock.proto, sock.detach())
        self._socket.setblocking(False)
        keep_from_children(self._socket)

    @property
    def peer_host(self) -> str:
        return self._peer_host

    async def room(self) -> None:
        """Until the kernel takes more, of which less than :meth:`queue_at_most` is unsent."""
        await self._wait(trio.lowlevel.wait_writable)

    def queue_at_most(self, count: int) -> None:
        """Of unsent bytes in the kernel, from now on."""
        with contextlib.suppress(AttributeError, OSError):  # a system without it; or it is closed
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, count)

    def tcp_info(self) -> tuple[bytes, bytes]:
        """The name of its congestion control, and Linux's struct tcp_info; empty where the kernel tells none."""
        try:
            return (
                self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16),
                self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256),
            )
        except (AttributeError, OSError):  # not Linux; or it is closed
            return b"", b""

    async def receive_into(self, buffer: memoryview) -> int:
        if self._turns >= TURNS:  # a fast partner must not starve others
            self._turns = 0
            await trio.lowlevel.checkpoint()
        while (count := self.receive_now(buffer)) is None:
            await self._wait(trio.lowlevel.wait_readable)
            self._empty = False
        return count

    def receive_now(self, buffer: memoryview) -> int | None:
        """As :meth:`receive_into`; None where it would have to wait."""
        if self._empty or self._turns >= TURNS:
            return None
        sock = self._socket
        try:
            count = sock.recv_into(buffer, 0, DONT_WAIT)
            if not count:
                # The kernel reports a reset once, perhaps to a send, and shows the next reader an end. But a socket
                # that was reset has no peer any more, while one whose peer closed properly still has.
                sock.getpeername()
        except BlockingIOError:
            self._empty = True
            return None
        except OSError as error:
            raise self._broken() from error
        self._turns += 1
        self._empty = 0 < count < len(buffer)
        self.heard = True
        self.bytes_received += count
        return count

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        await trio.lowlevel.checkpoint()
        while len(view):
            try:
                sent = self._socket.send(view, DONT_WAIT)
                self.bytes_sent += sent
                view = view[sent:]
            except BlockingIOError:
                await self._wait(trio.lowlevel.wait_writable)
            except OSError as error:
                raise self._broken() from error

    def send_now(self, pieces: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
        """What is left of them once the kernel has taken what it takes without waiting. Of whatever is wrong the next
        call hears that waits."""
        try:
            sent = self._socket.sendmsg(pieces, (), DONT_WAIT)
        except OSError:
            sent = 0
        self.bytes_sent += sent
        left = list(pieces)
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = memoryview(left[0])[sent:]
        return left

    async def _wait(self, ready: Callable[[socket.socket], Awaitable[None]]) -> None:
        self._turns = 0
        if self._socket.fileno() < 0:
            raise self._broken()
        try:
            await ready(self._socket)
        except (OSError, trio.ClosedResourceError) as error:
            raise self._broken() from error

    def lend(self) -> socket.socket:
        """The same connection under a descriptor of its own, whose calls wait in the thread that makes them. Whoever
        has it closes it, and then says :meth:`take_back`. Raises OSError: no descriptor is left, or this is closed."""
        descriptor = os.dup(self._socket.fileno())
        lent = socket.socket(self._socket.family, self._socket.type, self._socket.proto, descriptor)
        lent.settimeout(None)  # of the connection, and so of our descriptor too
        self._lent += 1
        return lent

    def take_back(self) -> None:
        self._lent -= 1

    async def aclose(self) -> None:
        self._close()
        await trio.lowlevel.checkpoint()

    def close_now(self) -> None:
        if self._socket.fileno() < 0:
            return
        # Linger 0 makes it a reset: what is queued is dropped, and the other side knows at once.
        with contextlib.suppress(OSError):  # some systems refuse it once the other side has reset
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close()

    def _close(self) -> None:
        """Threads that wait in the kernel hear nothing of our descriptor's end, but of the connection's."""
        if self._socket.fileno() < 0:
            return
        if self._lent:
            with contextlib.suppress(OSError):  # the other side was faster
                self._socket.shutdown(socket.SHUT_RDWR)
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()

    def _broken(self) -> BrokenLinkError:
        return BrokenLinkError(f"The connection to {self._peer_host} broke.")

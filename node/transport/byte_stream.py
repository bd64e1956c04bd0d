"""Byte streams to one peer over a socket."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import trio

from gossip.errors import RemoteError
from gossip.ids import Address
from node.transport.forks import keep_from_children


class BrokenLinkError(RemoteError):
    """The connection ended without a close: it was reset, cut off half-way, or closed by us while a task waited."""

    def __init__(self, sentence: str) -> None:
        super().__init__("broken", sentence)


class ByteStream(Protocol):
    """A duplex stream of bytes; one task at a time sends, while another may receive.

    A cancelled ``receive_into`` loses nothing. A cancelled ``send_all`` has sent an unknown part: close the stream.
    """

    @property
    def peer_host(self) -> str:
        """Return the other side's address as the network shows it; it proves no identity."""

    async def receive_into(self, buffer: memoryview) -> int:
        """Fill the start of ``buffer`` (bytes, not empty) with available data; wait for at least one byte.

        Returns:
            The number of bytes; 0 once the other side has closed properly.

        Raises:
            BrokenLinkError: The connection broke.
        """

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send every byte, waiting while the other side does not read; raises :class:`BrokenLinkError`."""

    async def aclose(self) -> None:
        """Close properly, in bounded time; tasks waiting on this stream get :class:`BrokenLinkError`."""

    def close_now(self) -> None:
        """Close abruptly, so that the other side sees a broken link and not an end; may be called twice."""


# Threads set the socket to blocking mode, which they share with trio's loop. Calls from the loop must never block.
DONT_WAIT: int = getattr(socket, "MSG_DONTWAIT", 0)  # 0 on systems without it, where no thread borrows the socket.
MAX_READS_IN_A_ROW = 8  # Reads without a wait, of one chunk each at most, before other tasks run.


def socket_of(stream: ByteStream) -> PlainStream | None:
    """Return the plain socket below the encryption, or None if there is none."""
    while (inner := getattr(stream, "inner", None)) is not None:
        stream = inner
    return stream if isinstance(stream, PlainStream) else None


def address_of(socket_address: tuple[Any, ...]) -> Address:
    """Return the address of one end of a connection; an IPv4 one as such where the socket is one of IPv6."""
    return Address(str(socket_address[0]).removeprefix("::ffff:"), int(socket_address[1]))


class Network(Protocol):
    """The source of streams: TCP, or memory in tests."""

    async def connect(self, address: Address, allows: Callable[[str], bool] | None = None) -> ByteStream:
        """Open a stream; raise OSError or BrokenLinkError if nothing answers.

        ``allows`` is asked with each numeric address just before it is dialled.
        """

    async def serve(self, handler: Callable[[ByteStream], Awaitable[None]], nursery: trio.Nursery) -> None:
        """Accept until cancelled; ``handler`` is an async function, started in ``nursery`` for each stream."""


class PlainStream:
    """A stream over a connected TCP socket, which it owns. The creator of the socket sets options like ``TCP_NODELAY``.

    Each call tries the socket first, and enters trio's scheduler only if it would block. trio's own calls enter it each
    time, which costs as much as the rest of a short message.
    """

    blocks = DONT_WAIT > 0  # True if I/O threads can use the socket next to trio.

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._lent_count = 0  # The number of duplicated descriptors that threads hold.
        self.has_received = False  # A byte has come.
        self.bytes_received = self.bytes_sent = 0  # Counted at the kernel, including the bytes that threads move.
        self._is_drained = False  # The last read has taken all that the kernel had, so another would fail.
        self._reads_in_a_row = 0  # Reads since the last wait.
        try:
            peer = sock.getpeername()
            self.local, self.remote, self.peer_host = address_of(sock.getsockname()), address_of(peer), str(peer[0])
        except OSError as error:  # The connection was accepted and then reset.
            sock.close()
            raise BrokenLinkError("The connection was gone before it could be used.") from error
        self._socket = socket.socket(sock.family, sock.type, sock.proto, sock.detach())
        self._socket.setblocking(False)
        keep_from_children(self._socket)

    async def wait_for_room(self) -> None:
        """Wait until the kernel takes more, which is when less than the limit of :meth:`limit_unsent` is unsent."""
        await self._wait(trio.lowlevel.wait_writable)

    async def wait_for_bytes(self) -> None:
        """Wait until there is something to receive."""
        await self._wait(trio.lowlevel.wait_readable)
        self._is_drained = False

    def limit_unsent(self, count: int) -> None:
        """Limit the unsent bytes in the kernel to ``count``."""
        with contextlib.suppress(AttributeError, OSError):  # The system lacks the option, or the socket is closed.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, count)

    def tcp_info(self) -> tuple[bytes, bytes]:
        """Return the name of the congestion control and Linux's struct tcp_info; empty where the kernel has neither."""
        try:
            return (
                self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16),
                self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256),
            )
        except (AttributeError, OSError):  # Not Linux, or the socket is closed.
            return b"", b""

    async def receive_into(self, buffer: memoryview) -> int:
        if self._reads_in_a_row >= MAX_READS_IN_A_ROW:  # A fast partner must not starve other tasks.
            self._reads_in_a_row = 0
            await trio.lowlevel.checkpoint()
        while (count := self.receive_now(buffer)) is None:
            await self._wait(trio.lowlevel.wait_readable)
            self._is_drained = False
        return count

    def receive_now(self, buffer: memoryview) -> int | None:
        """Receive as :meth:`receive_into` does, but return None where that would wait."""
        if self._is_drained or self._reads_in_a_row >= MAX_READS_IN_A_ROW:
            return None
        sock = self._socket
        try:
            count = sock.recv_into(buffer, 0, DONT_WAIT)
            if not count:
                # The kernel reports a reset only once, perhaps to a send; later readers see an end of file. But a
                # reset socket has no peer name, and a socket whose peer closed properly still has one.
                sock.getpeername()
        except BlockingIOError:
            self._is_drained = True
            return None
        except OSError as error:
            raise self._broken() from error
        self._reads_in_a_row += 1
        self._is_drained = 0 < count < len(buffer)
        self.has_received = True
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
        """Send as much as the kernel takes at once, and return the rest. The next call that waits raises any error."""
        try:
            sent = self._socket.sendmsg(pieces, (), DONT_WAIT)
        except OSError:
            sent = 0
        self.bytes_sent += sent
        unsent = list(pieces)
        while unsent and sent >= len(unsent[0]):
            sent -= len(unsent.pop(0))
        if sent:
            unsent[0] = memoryview(unsent[0])[sent:]
        return unsent

    async def _wait(self, ready: Callable[[socket.socket], Awaitable[None]]) -> None:
        self._reads_in_a_row = 0
        if self._socket.fileno() < 0:
            raise self._broken()
        try:
            await ready(self._socket)
        except (OSError, trio.ClosedResourceError) as error:
            raise self._broken() from error

    def lend(self) -> socket.socket:
        """Return the same connection under a duplicated descriptor, whose calls block in the calling thread.

        The borrower closes it and then calls :meth:`take_back`. Raises OSError if no descriptor is left or the stream
        is closed.
        """
        descriptor = os.dup(self._socket.fileno())
        lent = socket.socket(self._socket.family, self._socket.type, self._socket.proto, descriptor)
        lent.settimeout(None)  # This is a property of the open file, and so applies to our descriptor too.
        self._lent_count += 1
        return lent

    def take_back(self) -> None:
        """Note that a borrower has closed its descriptor."""
        self._lent_count -= 1

    async def aclose(self) -> None:
        self._close()
        await trio.lowlevel.checkpoint()

    def close_now(self) -> None:
        if self._socket.fileno() < 0:
            return
        # SO_LINGER with 0 s sends a reset: queued bytes are dropped, and the other side notices at once.
        with contextlib.suppress(OSError):  # Some systems refuse it once the other side has reset.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close()

    def _close(self) -> None:
        """Close our descriptor, and shut the connection down first if threads hold copies.

        Threads that block in the kernel do not notice that our descriptor closes, only that the connection ends.
        """
        if self._socket.fileno() < 0:
            return
        if self._lent_count:
            with contextlib.suppress(OSError):  # The other side has ended the connection already.
                self._socket.shutdown(socket.SHUT_RDWR)
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()

    def _broken(self) -> BrokenLinkError:
        return BrokenLinkError(f"The connection to {self.peer_host} broke.")

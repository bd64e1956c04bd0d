"""Bytes to one peer and back, over a socket."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Protocol

import trio

from gossip.errors import RemoteError
from node.transport.forks import keep_from_children

__all__ = ["BrokenLinkError", "ByteStream", "PlainStream"]


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


# Trio's calls never wait in the kernel, whatever the socket is set to: threads use the same one, and wait there.
DONT_WAIT: int = getattr(socket, "MSG_DONTWAIT", 0)


class PlainStream:
    """A connected TCP socket. Its options (``TCP_NODELAY`` and the like) are set by whoever made it."""

    blocks = DONT_WAIT > 0  # whether threads can use it beside trio

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._socket = sock
        self._lent = 0  # descriptors of it that threads have
        keep_from_children(sock)
        self.heard = False  # a byte came
        try:
            self._peer_host = str(sock.getpeername()[0])
        except OSError as error:  # accepted, and reset before we looked
            sock.close()
            raise BrokenLinkError("The connection was gone before it could be used.") from error

    @property
    def peer_host(self) -> str:
        return self._peer_host

    async def receive_into(self, buffer: memoryview) -> int:
        try:
            count = await self._socket.recv_into(buffer, flags=DONT_WAIT)
            self.heard = True
            if not count:
                # The kernel reports a reset once, perhaps to a send, and shows the next reader an end. But a socket
                # that was reset has no peer any more, while one whose peer closed properly still has.
                self._socket.getpeername()
            return count
        except (OSError, trio.ClosedResourceError) as error:
            raise self._broken() from error

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        sent = 0
        try:
            while sent < len(view):
                sent += await self._socket.send(view[sent:], DONT_WAIT)
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
        self._wake()
        self._socket.close()
        await trio.lowlevel.checkpoint()

    def close_now(self) -> None:
        if self._socket.fileno() < 0:
            return
        # Linger 0 makes it a reset: what is queued is dropped, and the other side knows at once.
        with contextlib.suppress(OSError):  # some systems refuse it once the other side has reset
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._wake()
        self._socket.close()

    def _wake(self) -> None:
        """Threads that wait in the kernel hear nothing of our descriptor's end, but of the connection's."""
        if self._lent and self._socket.fileno() >= 0:
            with contextlib.suppress(OSError):  # the other side was faster
                self._socket.shutdown(socket.SHUT_RDWR)

    def _broken(self) -> BrokenLinkError:
        return BrokenLinkError(f"The connection to {self._peer_host} broke.")

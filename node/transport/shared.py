"""Shared memory between two processes of one host: a test that they can share it, and a socket that passes it on.

Two processes of one user on one Linux host have a second socket next to their link. It carries memory descriptors and
nothing else. Nothing here waits: a descriptor that was passed before a message was sent over the link arrives before
that message.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import select
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from node.model.host_memory import Views
from node.transport.forks import keep_from_children

__all__ = ["MeetingPlace", "Returned", "SideChannel", "connected", "host_name"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES = ("net", "user")  # Namespaces of abstract sockets, and of the user ids that the kernel vouches for.
SESSION = struct.Struct(">Q")
DESCRIPTOR = struct.Struct("i")
CREDENTIALS = struct.Struct("3i")  # As struct ucred: pid, uid, gid.
WAITING = 4  # Descriptors passed and not yet asked for: 3 concurrent exchanges and a newcomer's.
DRAINED = 64  # Messages taken at once: more than an honest partner ever has in flight.
CALLERS = 8  # Other processes that may connect before the partner does, since they can read the socket's name.


def host_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a token that is equal for exactly those processes that can share memory with this one.

    They belong to the same user on the same host since its last boot. The token is a hash and reveals nothing else.
    None where memory cannot or must not be shared.
    """
    if environment.get("GOSSIP_SHARED_MEMORY") == "off" or not hasattr(os, "memfd_create"):
        return None
    # Vectors travel in the byte order of the memory.
    if sys.byteorder != "little" or not hasattr(socket, "SO_PEERCRED"):
        return None
    try:
        names = [BOOT_ID.read_text().strip(), str(os.geteuid())]
        names += [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in NAMESPACES]
    except OSError:
        return None
    return "memory " + hashlib.sha256(" ".join(("gossip host 1", *names)).encode()).hexdigest()[:32]


class Returned(Protocol):
    """A loan of memory; ``end`` is called when the memory may change again."""

    def end(self) -> None: ...


class SideChannel:
    """The side channel of one link, over which memory descriptors go.

    ``lent`` has, by session, the memory that the other side may be reading. Closing the channel revokes it: a reader
    first checks that the channel is :attr:`open`, and then that the data it read was whole.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.passed: dict[int, int] = {}  # descriptors by session
        self.lent: dict[int, Returned] = {}
        self.views = Views()
        self.closed = False

    @property
    def open(self) -> bool:
        """Return True if neither side has closed it, which the kernel knows at once.

        Each call makes its own poll object, because several threads call this and a poll object allows only one at a
        time.
        """
        poll = select.poll()
        with contextlib.suppress(ValueError):  # Another thread has closed it since.
            poll.register(self.socket, select.POLLRDHUP)
            return not self.closed and not poll.poll(0)
        return False

    def pass_on(self, session: int, descriptor: int) -> bool:
        """Pass a descriptor for a session; return True if it will arrive before the next message about the session.

        A side that takes nothing out of its socket gets nothing more: the channel closes.
        """
        try:
            rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, DESCRIPTOR.pack(descriptor)
            self.socket.sendmsg([SESSION.pack(session)], [rights])
        except OSError:
            self.close()
        return not self.closed

    def take(self, session: int) -> int | None:
        """Return the descriptor passed for a session, which the caller closes; None if there is none."""
        space = socket.CMSG_LEN(DESCRIPTOR.size)  # Room for one descriptor: the kernel closes any more that come.
        for _ in range(DRAINED):
            try:
                data, found, flags, _ = self.socket.recvmsg(SESSION.size, space, socket.MSG_CMSG_CLOEXEC)
            except OSError:  # No more messages, or it is closed.
                break
            descriptors = [DESCRIPTOR.unpack(packed)[0] for _, _, packed in found if len(packed) == DESCRIPTOR.size]
            if len(data) != SESSION.size or flags & socket.MSG_TRUNC or len(descriptors) != 1:
                for descriptor in descriptors:  # The message does not follow our format.
                    os.close(descriptor)
                break
            number = SESSION.unpack(data)[0]
            self.drop(number)
            self.passed[number] = descriptors[0]
            if len(self.passed) > WAITING:
                self.drop(next(iter(self.passed)))
        return self.passed.pop(session, None)

    def drop(self, session: int) -> None:
        descriptor = self.passed.pop(session, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Close the socket first: from then on the other side uses nothing that it has not read yet."""
        self.closed = True
        self.socket.close()
        self.views = Views()
        for session in list(self.passed):
            self.drop(session)
        while self.lent:
            self.lent.popitem()[1].end()


class MeetingPlace:
    """A listening socket, to which the other side's process connects."""

    def __init__(self) -> None:
        """Open it; raise OSError where that is impossible."""
        self.name, self.token = secrets.token_bytes(16), secrets.token_bytes(16)
        self.socket = fresh()
        try:
            self.socket.bind(abstract(self.name))
            self.socket.listen(CALLERS)
        except OSError:
            self.socket.close()
            raise

    def met(self) -> SideChannel | None:
        """Return the other side's connection, and no other process's, once it reports that it has connected."""
        for _ in range(CALLERS + 1):
            try:
                caller, _ = self.socket.accept()
            except OSError:
                return None
            with contextlib.suppress(OSError):
                caller.setblocking(False)
                if of_our_user(caller) and secrets.compare_digest(caller.recv(len(self.token)), self.token):
                    keep_from_children(caller)
                    return SideChannel(caller)
            caller.close()
        return None

    def close(self) -> None:
        self.socket.close()


def connected(name: bytes, token: bytes) -> SideChannel | None:
    """Connect to the listening side; return None if it is not there or belongs to another user."""
    sock: socket.socket | None = None
    try:
        sock = fresh()
        sock.connect(abstract(name))
        if of_our_user(sock):
            sock.send(token)
            return SideChannel(sock)
    except OSError:
        pass
    if sock is not None:
        sock.close()
    return None


def fresh() -> socket.socket:
    """Return a non-blocking socket that forked children close."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    keep_from_children(sock)
    return sock


def abstract(name: bytes) -> bytes:
    return b"\0gossip " + name.hex().encode()


def of_our_user(sock: socket.socket) -> bool:
    """Return True if the process at the other end is of our user, according to the kernel."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(found)[1] == os.geteuid())

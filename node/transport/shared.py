"""Memory that two processes of one host share: what says that they can, and the socket that passes it on.

Beside a link whose two ends are processes of one user on one Linux host lies a socket over which descriptors of memory
go, and nothing else. Nothing here waits: what was passed before a message was sent over the link is there when the
message comes.
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
NAMESPACES = ("net", "user")  # of abstract sockets, and of the user numbers that the kernel vouches for
SESSION = struct.Struct(">Q")
DESCRIPTOR = struct.Struct("i")
CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
WAITING = 4  # descriptors that were passed and are not asked for yet: there are 3 exchanges at once, and a newcomer's
DRAINED = 64  # messages taken at once: more than an honest partner ever has under way
CALLERS = 8  # that may knock before the partner does: others can read the name of a socket


def host_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """What all processes say that can share memory with this one, and no other: those of its user on this host, as it
    is booted now. A hash, which tells nobody else anything. None where memory cannot be shared, or is not to be."""
    if environment.get("GOSSIP_SHARED_MEMORY") == "off" or not hasattr(os, "memfd_create"):
        return None
    if sys.byteorder != "little" or not hasattr(socket, "SO_PEERCRED"):  # vectors travel as they lie
        return None
    try:
        names = [BOOT_ID.read_text().strip(), str(os.geteuid())]
        names += [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in NAMESPACES]
    except OSError:
        return None
    return "memory " + hashlib.sha256(" ".join(("gossip host 1", *names)).encode()).hexdigest()[:32]


class Returned(Protocol):
    """What was lent, and ends when it need not stay as it is any more."""

    def end(self) -> None: ...


class SideChannel:
    """The socket of one link. ``lent``: by session, what the other side may be reading. Closing it takes that back: who
    has read something looks first whether it is :attr:`open`, and then whether what it read was whole."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.passed: dict[int, int] = {}  # descriptors by session
        self.lent: dict[int, Returned] = {}
        self.views = Views()
        self.closed = False

    @property
    def open(self) -> bool:
        """Whether neither side has closed it. The kernel knows at once, whatever else is under way. One look, one
        object: threads look at the same time, of which a poll object allows no two."""
        poll = select.poll()
        with contextlib.suppress(ValueError):  # closed since by another thread
            poll.register(self.socket, select.POLLRDHUP)
            return not self.closed and not poll.poll(0)
        return False

    def pass_on(self, session: int, descriptor: int) -> bool:
        """Whether it is there for who hears of this session next. Who takes nothing is given nothing more."""
        try:
            rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, DESCRIPTOR.pack(descriptor)
            self.socket.sendmsg([SESSION.pack(session)], [rights])
        except OSError:
            self.close()
        return not self.closed

    def take(self, session: int) -> int | None:
        """The descriptor that was passed for a session, to be closed; None where none was, or none could be taken."""
        space = socket.CMSG_LEN(DESCRIPTOR.size)  # for one: the kernel closes what more comes
        for _ in range(DRAINED):
            try:
                data, found, flags, _ = self.socket.recvmsg(SESSION.size, space, socket.MSG_CMSG_CLOEXEC)
            except OSError:  # there is no more, or it is closed
                break
            descriptors = [DESCRIPTOR.unpack(packed)[0] for _, _, packed in found if len(packed) == DESCRIPTOR.size]
            if len(data) != SESSION.size or flags & socket.MSG_TRUNC or len(descriptors) != 1:
                for descriptor in descriptors:  # of a message that is none of ours
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
        """The socket first: from here on the other side uses nothing that it has not read yet."""
        self.closed = True
        self.socket.close()
        self.views = Views()
        for session in list(self.passed):
            self.drop(session)
        while self.lent:
            self.lent.popitem()[1].end()


class MeetingPlace:
    """Where one side waits for the other to connect."""

    def __init__(self) -> None:
        """Raises OSError where there can be none."""
        self.name, self.token = secrets.token_bytes(16), secrets.token_bytes(16)
        self.socket = fresh()
        try:
            self.socket.bind(abstract(self.name))
            self.socket.listen(CALLERS)
        except OSError:
            self.socket.close()
            raise

    def met(self) -> SideChannel | None:
        """The other side says that it has connected: the connection, and no other's."""
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
    """To where the other side waits; None where it does not, or is another user's."""
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
    """One that never waits, and is closed in forked children."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    keep_from_children(sock)
    return sock


def abstract(name: bytes) -> bytes:
    return b"\0gossip " + name.hex().encode()


def of_our_user(sock: socket.socket) -> bool:
    """Whether the process at its other end is our user's, as the kernel knows."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(found)[1] == os.geteuid())

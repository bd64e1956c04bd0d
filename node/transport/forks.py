"""Sockets that end with this process: a forked child, like a DataLoader's worker, closes its copies at once.

Close-on-exec does not help with a child that only forks. It would keep the port and all connections open after its
parent was killed. A restart would then find the port in use, and partners would notice the death only by probe
timeouts.
"""

import contextlib
import os
import socket
import weakref

import trio

Socket = trio.socket.SocketType | socket.socket
_ours: weakref.WeakSet[Socket] = weakref.WeakSet()


def keep_from_children(sock: Socket) -> None:
    """Close this socket in forked children, as long as it exists."""
    _ours.add(sock)


def _close_all() -> None:
    """Close the inherited descriptors in the child, bypassing trio, whose loop and thread do not exist there."""
    for sock in list(_ours):
        with contextlib.suppress(OSError):
            if (descriptor := sock.detach()) >= 0:
                os.close(descriptor)
    _ours.clear()


os.register_at_fork(after_in_child=_close_all)

"""Sockets that end with this process: a forked child (a DataLoader's worker) closes its copies at once.

Close-on-exec is of no use to a child that only forks. It would keep the port and every connection open after its parent
was killed: a restart finds the port in use, and partners hear of the death only when their probes time out.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref

import trio

__all__ = ["keep_from_children"]

Socket = trio.socket.SocketType | socket.socket
_ours: weakref.WeakSet[Socket] = weakref.WeakSet()


def keep_from_children(sock: Socket) -> None:
    """Remember a socket until nobody holds it any more."""
    _ours.add(sock)


def _close_all() -> None:
    """In the child. The descriptor alone: trio, its thread and what it waits for did not come along."""
    for sock in list(_ours):
        with contextlib.suppress(OSError):
            if (descriptor := sock.detach()) >= 0:
                os.close(descriptor)
    _ours.clear()


os.register_at_fork(after_in_child=_close_all)

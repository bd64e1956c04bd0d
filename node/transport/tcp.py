"""TCP: listening and dialling, with the socket options a swarm needs."""

import contextlib
import enum
import ipaddress
import random
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import trio

from gossip.errors import ConfigError, LocalError
from gossip.ids import Address, parse_address
from node.transport.byte_stream import BrokenLinkError, ByteStream, PlainStream
from node.transport.forks import keep_from_children

# Connections that the kernel accepts ahead of this program. A burst of strangers must not cost another the second after
# which its SYN is sent again.
BACKLOG = 128
NOT_SENT_BYTES = 131_072  # Unsent bytes that the kernel may queue: a probe waits behind them.
KEEPALIVE_S = 8  # Seconds without data before the kernel asks, each 3 s, whether the other side is still there.
# Milliseconds until a connection ends whose data nobody acknowledges, as when a router has forgotten it. By default
# Linux takes a quarter of an hour, for which a member would seem to be linked.
UNACKNOWLEDGED_MS = 20_000
NEXT_ATTEMPT_S = 0.25  # The Connection Attempt Delay that RFC 8305 recommends.
# The pause between two attempts to meet a member at its router. Where that refuses connections, both must be on their
# way at the same time, and equal pauses would let them miss each other for ever.
LEAST_AGAIN_S, MOST_AGAIN_S = 0.01, 0.05
MAX_TARGETS = 8  # Addresses of one name that are tried, since each takes a descriptor.


def is_loopback(host: str) -> bool:
    """Return True if a host is this machine, by name or number. A name other than localhost may mean any host."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def is_name(host: str) -> bool:
    """Return True if a host must be looked up because it is no numeric address."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return True
    return False


def numeric_address(text: str) -> Address | None:
    """Return the address that another side has sent; None if it is none of numbers."""
    try:
        address = parse_address(text)
    except ConfigError:
        return None
    is_shown_as_it_is = "%" not in address.host and address.host.isprintable()
    return address if is_shown_as_it_is and not is_name(address.host) else None


class Scope(enum.IntEnum):
    """How far an address reaches: to nothing that a dial may mean, this machine, the cable, the network, everywhere."""

    NOWHERE = 0
    LOOPBACK = 1
    LINK = 2
    PRIVATE = 3
    GLOBAL = 4


NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # IPv6 addresses that stand for an IPv4 one in their last 32 bits.


def scope_of(host: str) -> Scope:
    """Return the scope of a numeric address, that of the IPv4 address inside it if there is one; of a name GLOBAL."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return Scope.LOOPBACK if host == "localhost" else Scope.GLOBAL
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        address = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF) if address in NAT64 else inner or address
    if address.is_loopback or address.is_unspecified:  # Linux takes 0.0.0.0 for this machine.
        return Scope.LOOPBACK
    if address.is_multicast or (address.version == 4 and address.is_reserved):
        return Scope.NOWHERE
    if address.is_link_local:
        return Scope.LINK
    return Scope.GLOBAL if address.is_global else Scope.PRIVATE


def routed(target: Address, v6: bool = False) -> str | None:
    """Return our address on the route to ``target``; None if there is no route."""
    with socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(tuple(target))  # This chooses a route; a datagram socket sends nothing when it connects.
            return str(probe.getsockname()[0])
        except OSError:
            return None


class TcpNetwork:
    """Streams over TCP. With ``listen`` None it only dials."""

    def __init__(self, listen: Address | None, connect_timeout_s: float = 5.0) -> None:
        self.listen = listen
        self.connect_timeout_s = connect_timeout_s
        self.sockets: list[trio.socket.SocketType] = []

    async def bind(self) -> Address | None:
        """Begin to listen; return the address with its real port. Raises LocalError: port in use, no such address."""
        if self.listen is None:
            return None
        sock, address = await bound(self.listen, "Cannot", "--listen")
        self.sockets.append(sock)
        return address

    async def serve(self, handler: Callable[[ByteStream], Awaitable[None]], nursery: trio.Nursery) -> None:
        for sock in self.sockets:
            nursery.start_soon(self.accept_from, sock, handler, nursery)
        await trio.sleep_forever()

    async def accept_from(
        self, sock: trio.socket.SocketType, handler: Callable[[ByteStream], Awaitable[None]], nursery: trio.Nursery
    ) -> None:
        """Accept connections of one socket, and start the handler for each."""
        while True:
            try:
                accepted, socket_address = await sock.accept()
            except OSError:  # No descriptor is left, or the connection has ended before it was accepted.
                await trio.sleep(0.1)
                continue
            try:
                tune(accepted, str(socket_address[0]))
                nursery.start_soon(handler, PlainStream(accepted))
            except (OSError, BrokenLinkError):
                accepted.close()

    async def connect(self, address: Address, allows: Callable[[str], bool] | None = None) -> ByteStream:
        """Connect to the first of the host's addresses that answers; a name may stand for IPv6 and IPv4.

        Looking up the name and each attempt may take ``connect_timeout_s``.

        Args:
            address: The host, in any spelling that the system resolves, and the port.
            allows: Asked with each numeric address just before it is dialled; None allows all.

        Raises:
            OSError, BrokenLinkError: Nothing answers, or no address is allowed.
        """
        targets: list[Any] = []
        with trio.move_on_after(self.connect_timeout_s):
            targets = alternated(await resolve(address))[:MAX_TARGETS]
        failures: list[OSError] = []
        dialled = (target for target in targets if allows is None or allows(str(target[4][0])))
        sock = await first_to_answer(dialled, self.connect_timeout_s, failures)
        if sock is not None:
            return PlainStream(sock)
        if failures:
            raise failures[-1]
        raise BrokenLinkError(f"{address} did not answer in {self.connect_timeout_s:g} s.")

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


async def resolve(address: Address, flags: int = 0) -> list[Any]:
    """Return the *targets* of a name, as getaddrinfo gives them. An invalid name (``a..b``) raises OSError."""
    try:
        return await trio.socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError as error:
        raise OSError(f"{address.host!r} is not a name that can be looked up") from error


def alternated(targets: Sequence[Any]) -> list[Any]:
    """Move the first address of the other family to the second place: a broken IPv6 then costs one delay (RFC 8305)."""
    # The first item of a target is its family, IPv4 or IPv6.
    other = next((target for target in targets if target[0] != targets[0][0]), None)
    if other is None:
        return list(targets)
    return [targets[0], other, *(target for target in targets[1:] if target is not other)]


async def first_to_answer(
    targets: Iterable[Any], timeout_s: float, failures: list[OSError]
) -> trio.socket.SocketType | None:
    """Connect to several addresses of one host by Happy Eyeballs (RFC 8305) and close all sockets but the first.

    An attempt begins as soon as the one before it fails or has taken :data:`NEXT_ATTEMPT_S`, and ends after its own
    ``timeout_s``. Errors of failed attempts are appended to ``failures``.
    """
    connected: list[trio.socket.SocketType] = []

    async def attempt(target: Any, ended: trio.Event) -> None:
        """Try one target; the first attempt that succeeds ends the others."""
        family, kind, proto, _, socket_address = target
        try:
            sock = trio.socket.socket(family, kind, proto)
        except OSError as error:  # This kernel has no IPv6, or no descriptor is left.
            failures.append(error)
            ended.set()
            return
        try:
            with trio.move_on_after(timeout_s):
                tune(sock, str(socket_address[0]))
                # Another connection may leave from the same port (:func:`punched`).
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                await sock.connect(socket_address)
                connected.append(sock)
                nursery.cancel_scope.cancel()
        except OSError as error:
            failures.append(error)
        finally:
            if connected[:1] != [sock]:  # Only the first to connect stays open.
                sock.close()
            ended.set()

    try:
        async with trio.open_nursery() as nursery:
            for target in targets:
                ended = trio.Event()
                nursery.start_soon(attempt, target, ended)
                with trio.move_on_after(NEXT_ATTEMPT_S):
                    await ended.wait()
    except BaseException:
        for sock in connected:
            sock.close()
        raise
    return connected[0] if connected else None


async def punched(address: Address, local: Address, timeout_s: float) -> ByteStream:
    """Connect to a numeric address from the port of another connection, while the other side does the same.

    Until the other side's router knows its connection, it drops ours or refuses it, so that attempts are repeated.

    Args:
        address: Where the other side's connection comes from.
        local: The local end of a connection of ours that was dialled, whose port the router maps.
        timeout_s: The time for all attempts.

    Raises:
        OSError, BrokenLinkError: The two did not meet.
    """
    failure: OSError | BrokenLinkError = BrokenLinkError(f"{address} could not be met in {timeout_s:g} s.")
    family, kind, proto, _, target = (await resolve(address, socket.AI_NUMERICHOST))[0]
    with trio.move_on_after(timeout_s):
        while True:
            sock = trio.socket.socket(family, kind, proto)
            try:
                tune(sock, address.host)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                await sock.bind((local.host, local.port))
                await sock.connect(target)
                return PlainStream(sock)
            except OSError as error:
                failure = error
                sock.close()
            except BaseException:
                sock.close()
                raise
            await trio.sleep(random.uniform(LEAST_AGAIN_S, MOST_AGAIN_S))
    raise failure


async def bound(listen: Address, who_cannot: str, option: str) -> tuple[trio.socket.SocketType, Address]:
    """Return a listening socket, and its address with the real port. Raises LocalError: in use, no such address."""
    try:
        sock = await listening(listen, BACKLOG)
    except OSError as error:
        raise LocalError(
            f"{who_cannot} listen on {listen}: {(error.strerror or str(error)).lower()}; choose another port with "
            f"{option}, or port 0 for any free one."
        ) from error
    return sock, Address(listen.host, int(sock.getsockname()[1]))


async def listening(address: Address, backlog: int) -> trio.socket.SocketType:
    """Return a listening socket, which forked children close. Raises OSError."""
    family, kind, proto, _, socket_address = (await resolve(address, socket.AI_PASSIVE))[0]
    sock = trio.socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await sock.bind(socket_address)
        sock.listen(backlog)
        keep_from_children(sock)
    except OSError:
        sock.close()
        raise
    return sock


def tune(sock: trio.socket.SocketType, host: str) -> None:
    """Disable Nagle's delay, enable keepalive, keep the kernel's queue short, and use bbr where the kernel has it.

    At 50 ms, 100 Mbit/s and 1 % loss cubic moves 1.5 Mbit/s and bbr 68. On loopback bbr's pacing halves the rate, so it
    is not used there.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 4),
        ("TCP_NOTSENT_LOWAT", NOT_SENT_BYTES), ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_MS),
    ):  # fmt: skip
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if not is_loopback(host):
        choose_bbr(sock)


def choose_bbr(sock: trio.socket.SocketType) -> None:
    """Select bbr if the system offers it and allows us to."""
    with contextlib.suppress(AttributeError, OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")

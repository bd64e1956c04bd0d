"""Routers that pass connections from outside on to a node: by PCP (RFC 6887), NAT-PMP (RFC 6886) or UPnP.

PCP and NAT-PMP are a datagram each way to the default gateway, and Python has no library for them that is kept. UPnP is
discovery, HTTP and XML: :mod:`miniupnpc`, of the extra ``homes``, speaks it. Each opened port is a lease that ends by
itself if the node does not renew it.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import random
import secrets
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import trio

from gossip.errors import LocalError
from gossip.ids import Address
from node.transport.tcp import routed

__all__ = ["PortKeeper", "PortLease", "open_port"]

LEASE_S = 3_600  # What is asked for. The router may give less.
SERVER_PORT = 5351  # Where PCP and NAT-PMP listen.
ATTEMPTS_S = 0.25, 0.5, 1.0  # The waits for an answer. The protocols advise to begin so, and to go on for minutes.
RETRY_S = 600.0  # Time until a router that refused is asked again.
SSDP = Address("239.255.255.250", 1900)  # Where routers that speak UPnP are asked to answer.
DISCOVERY_MS = 1_000  # The wait for routers that speak UPnP, which must answer within it.
GIVE_BACK_S = 2.0
UPNP_PORTS = 3  # Attempts to find a port that no other machine has.
FREE_PORTS = 49_152  # The first of the ports that nobody registers.
TCP = 6  # Its protocol number.
PCP_REASONS = {2: "it is not allowed", 8: "it has no resources left", 9: "it does not do this", 11: "it is not allowed"}
PMP_REASONS = {2: "it is not allowed", 3: "it has no address outside", 4: "it has no resources left"}
NO_ROUTER = "No router opens ports here (PCP, NAT-PMP{upnp})."


class PortLease(NamedTuple):
    """A port that a router has opened."""

    address: Address  # Outside.
    lasts_s: float  # 0: until it is given back.
    protocol: str


class NoAnswerError(Exception):
    """The router does not speak this protocol."""


async def open_port(port: int, outside: int, lease_s: int = LEASE_S, nonce: bytes = b"\0" * 12) -> PortLease:
    """Ask the router to pass TCP connections to a port of this machine on. A lease of 0 s gives the port back.

    Args:
        port: Our port.
        outside: The port outside that is asked for, or given back. The router may choose another.
        lease_s: The time for which to ask.
        nonce: What a PCP router knows this node by, 12 bytes. Only its holder may renew or give back.

    Raises:
        LocalError: No router answers, or it refuses.
    """
    gateway, refusals = default_gateway(), []
    ways: list[Callable[[], Any]] = [functools.partial(by_upnp, port, outside, lease_s)]
    if gateway is not None:
        ways = [functools.partial(way, gateway, port, outside, lease_s, nonce) for way in (by_pcp, by_pmp)] + ways
    for way in ways:
        try:
            lease: PortLease = await way()
            return lease
        except LocalError as error:
            refusals.append(str(error))
        except (NoAnswerError, OSError):
            continue
    raise LocalError(refusals[-1] if refusals else NO_ROUTER.format(upnp="" if upnp_library() is None else ", UPnP"))


def default_gateway() -> str | None:
    """Return the IPv4 address of the default gateway; None without one, and on systems other than Linux."""
    if not sys.platform.startswith("linux"):
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/net/route").read_text(encoding="ascii").splitlines()[1:]:
            _, target, gateway, flags = line.split()[:4]
            if int(target, 16) == 0 and int(flags, 16) & 2:  # RTF_GATEWAY
                return str(ipaddress.IPv4Address(int(gateway, 16).to_bytes(4, sys.byteorder)))
    return None


async def ask(gateway: str, request: bytes, is_answer: Callable[[bytes], bool]) -> bytes:
    """Send a datagram until its answer comes. Raises OSError or NoAnswerError."""
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as sock:
        await sock.connect((gateway, SERVER_PORT))  # The kernel drops what others send.
        for wait_s in ATTEMPTS_S:
            await sock.send(request)
            with trio.move_on_after(wait_s):
                while True:
                    answer = await sock.recv(1_100)
                    if is_answer(answer):
                        return answer
    raise NoAnswerError


async def by_pcp(gateway: str, port: int, outside: int, lease_s: int, nonce: bytes) -> PortLease:
    """Open a port by the MAP request of PCP."""
    mine = routed(Address(gateway, SERVER_PORT))
    if mine is None:
        raise NoAnswerError
    header = struct.pack("!BBHI16s", 2, 1, 0, lease_s, mapped_v6(mine))
    request = header + struct.pack("!12sB3xHH16s", nonce, TCP, port, outside if lease_s else 0, mapped_v6("0.0.0.0"))

    def is_answer(data: bytes) -> bool:
        return data[:2] in (b"\x02\x81", b"\0\x81") and (len(data) < 60 or data[24:36] == nonce)

    answer = await ask(gateway, request, is_answer)
    if answer[0] != 2 or len(answer) < 60 or answer[3] == 1:  # It speaks NAT-PMP, or another version.
        raise NoAnswerError
    if answer[3]:
        raise refused(gateway, port, PCP_REASONS.get(answer[3], f"PCP error {answer[3]}"))
    (granted_s,), (opened,) = struct.unpack_from("!I", answer, 4), struct.unpack_from("!H", answer, 42)
    host = ipaddress.IPv6Address(answer[44:60])
    return PortLease(Address(str(host.ipv4_mapped or host), opened), float(granted_s), "PCP")


async def by_pmp(gateway: str, port: int, outside: int, lease_s: int, nonce: bytes) -> PortLease:
    """Open a port by NAT-PMP, which has no use for the nonce."""
    first = await ask(gateway, b"\0\0", lambda data: data[:2] == b"\0\x80" and len(data) >= 12)
    request = struct.pack("!BBHHHI", 0, 2, 0, port, outside if lease_s else 0, lease_s)
    answer = first
    if first[2:4] == b"\0\0":
        answer = await ask(gateway, request, lambda data: data[:2] == b"\0\x82" and len(data) >= 16)
    if answer[2:4] != b"\0\0":
        raise refused(gateway, port, PMP_REASONS.get(answer[3], f"NAT-PMP error {answer[3]}"))
    _, opened, granted_s = struct.unpack_from("!HHI", answer, 8)
    return PortLease(Address(str(ipaddress.IPv4Address(first[8:12])), opened), float(granted_s), "NAT-PMP")


def mapped_v6(host: str) -> bytes:
    """Return an IPv4 address as PCP writes it, in 16 bytes."""
    return ipaddress.IPv6Address(f"::ffff:{host}").packed


def refused(gateway: str, port: int, reason: str) -> LocalError:
    return LocalError(f"The router {gateway} did not open port {port}: {reason}.")


# -- UPnP ----------------------------------------------------------------------------------------------------------
def upnp_library() -> Any:
    """Return the module miniupnpc; None if it is not installed."""
    try:
        import miniupnpc
    except ImportError:
        return None
    return miniupnpc


async def by_upnp(port: int, outside: int, lease_s: int) -> PortLease:
    """Open a port by UPnP, in a thread that may go on for some seconds if this is cancelled."""
    library = upnp_library()
    if library is None or routed(SSDP) is None:  # It prints an error of its own where there is no route.
        raise NoAnswerError
    return await trio.to_thread.run_sync(upnp_lease, library, port, outside, lease_s, abandon_on_cancel=True)


def upnp_lease(library: Any, port: int, outside: int, lease_s: int) -> PortLease:
    """Return a lease by UPnP. Raises LocalError or NoAnswerError."""
    router = library.UPnP(discoverdelay=DISCOVERY_MS)
    try:
        router.discover()
        router.selectigd()
    except Exception:  # The library raises plain Exception.
        raise NoAnswerError from None
    reason = ""
    try:
        if not lease_s:
            router.deleteportmapping(outside, "TCP")
            return PortLease(Address("0.0.0.0", outside), 0.0, "UPnP")
        host = str(ipaddress.ip_address(router.externalipaddress()))
        for _ in range(UPNP_PORTS):
            try:
                router.addportmapping(outside, "TCP", router.lanaddr, port, "gossip", "", lease_s)
                return PortLease(Address(host, outside), float(lease_s), "UPnP")
            except Exception as error:
                reason = str(error)
                if "permanent" in reason.lower():  # Old routers open ports for good alone.
                    lease_s = 0
                else:  # Another machine of this network has it.
                    outside = random.randrange(FREE_PORTS, 1 << 16)
    except Exception as error:
        reason = str(error)
    raise LocalError(f"The router did not open port {port}: UPnP says {reason or 'nothing'}.") from None


class PortKeeper:
    """Keeps a port of one node open at its router, and reports the address outside, or why there is none.

    Args:
        report: Called with the address and "", or None and a sentence: after each request and each change.
    """

    def __init__(self, report: Callable[[Address | None, str], None]) -> None:
        self.report = report
        self.nonce = secrets.token_bytes(12)
        self.asked = trio.Event()
        self.lease: PortLease | None = None
        self.is_running = False

    def open(self, port: int, spawn: Callable[..., object]) -> None:
        """Begin to keep a port; later calls ask for it again, since the router may have forgotten it."""
        if self.is_running:
            self.asked.set()
        else:
            self.is_running = True
            spawn(self.keep, port)

    async def keep(self, port: int) -> None:
        """Keep the port open until cancelled, and give it back then."""
        try:
            while True:
                self.asked = trio.Event()
                wait_s = await self.renew(port)
                with trio.move_on_after(wait_s):
                    await self.asked.wait()
        finally:
            self.is_running = False
            if self.lease is not None:
                with trio.move_on_after(GIVE_BACK_S, shield=True), contextlib.suppress(LocalError):
                    await open_port(port, self.lease.address.port, 0, self.nonce)

    async def renew(self, port: int) -> float:
        """Ask for the port and report; return the seconds until it is to be asked for again."""
        try:
            outside = port if self.lease is None else self.lease.address.port
            self.lease = await open_port(port, outside, nonce=self.nonce)
        except LocalError as error:
            self.lease = None
            self.report(None, str(error))
            return RETRY_S
        self.report(self.lease.address, "")
        return max(self.lease.lasts_s, 60.0) / 2 if self.lease.lasts_s else LEASE_S / 2

"""Routers that pass connections from outside on to a node: by PCP (RFC 6887), NAT-PMP (RFC 6886) or UPnP.

PCP and NAT-PMP are a datagram each way to the default gateway, and Python has no library for them that is kept. UPnP is
discovery, HTTP and XML: :mod:`miniupnpc`, of the extra ``homes``, speaks it. An opened port is a lease that ends by
itself if the node does not renew it. Only of old routers that speak UPnP it stays open until it is given back.
"""

import contextlib
import functools
import ipaddress
import math
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import trio

from gossip.errors import LocalError
from gossip.ids import Address
from node.transport.tcp import routed

LEASE_S = 3_600  # The time that is asked for. The router may give less.
SERVER_PORT = 5351  # Where PCP and NAT-PMP listen.
ATTEMPTS_S = 0.25, 0.5, 1.0  # The waits for an answer. The protocols advise to begin so, and to go on for minutes.
RETRY_S = 600.0  # Time until a router that refused is asked again.
RETRY_SOON_S, LEAST_LEASE_S = 30.0, 120.0  # The same while a lease holds; and the shortest lease that is believed.
SSDP = Address("239.255.255.250", 1900)  # Where routers that speak UPnP are asked to answer.
DISCOVERY_MS = 1_000  # The wait for routers that speak UPnP, which must answer within it.
GIVE_BACK_S = 3.0
UPNP_PORTS = 3  # Attempts to find a port that no other machine has.
FREE_PORTS = 49_152  # The first of the ports that nobody registers.
TCP = 6  # Its protocol number.
PCP_REASONS = {2: "it is not allowed", 8: "it has no resources left", 9: "it does not do this", 11: "it cannot"}
PMP_REASONS = {2: "it is not allowed", 3: "it has no address outside", 4: "it has no resources left"}


class PortLease(NamedTuple):
    """A port that a router has opened."""

    address: Address  # Outside.
    port: int  # Ours.
    lasts_s: float  # 0: until it is given back.
    protocol: str


class NoAnswerError(Exception):
    """The router does not speak this protocol."""


async def open_port(
    port: int, outside: int, lease_s: int = LEASE_S, nonce: bytes = b"\0" * 12, protocol: str = ""
) -> PortLease:
    """Ask the router to pass TCP connections to a port of this machine on. A lease of 0 s gives the port back.

    Args:
        port: Our port.
        outside: The port outside that is asked for, or given back. The router may choose another.
        lease_s: The time for which to ask.
        nonce: What a PCP router knows this node by, 12 bytes. Only its holder may renew or give back.
        protocol: That of the lease that is renewed or given back; "" tries all.

    Raises:
        LocalError: No router answers, or it refuses.
    """
    gateway, refusals, tried = default_gateway(), [], []
    ways: dict[str, Callable[[], Any]] = {}
    if gateway is not None:
        for name, way in (("PCP", by_pcp), ("NAT-PMP", by_pmp)):
            ways[name] = functools.partial(way, gateway, port, outside, lease_s, nonce)
    if upnp_library() is not None:
        ways["UPnP"] = functools.partial(by_upnp, port, outside, lease_s)
    for name, ask_router in ways.items():
        if protocol in ("", name):
            tried.append(name)
            try:
                lease: PortLease = await ask_router()
                if lease.address.port or not lease_s:  # No router passes port 0 on.
                    return lease
            except LocalError as error:
                refusals.append(str(error))
            except (NoAnswerError, OSError):
                continue
    nothing = f"No router opens ports here ({', '.join(tried) or 'none was asked'})."
    raise LocalError(refusals[-1] if refusals else nothing)


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
    return PortLease(Address(str(host.ipv4_mapped or host), opened), port, float(granted_s), "PCP")


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
    return PortLease(Address(str(ipaddress.IPv4Address(first[8:12])), opened), port, float(granted_s), "NAT-PMP")


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
    if routed(SSDP) is None:  # The library prints an error of its own where there is no route.
        raise NoAnswerError
    return await trio.to_thread.run_sync(upnp_lease, upnp_library(), port, outside, lease_s, abandon_on_cancel=True)


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
            return PortLease(Address("0.0.0.0", outside), port, 0.0, "UPnP")
        host = str(ipaddress.ip_address(router.externalipaddress()))
        for _ in range(UPNP_PORTS):
            try:
                router.addportmapping(outside, "TCP", router.lanaddr, port, "gossip", "", lease_s)
                return PortLease(Address(host, outside), port, float(lease_s), "UPnP")
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
        nonce: See :func:`open_port`. A node that was killed has the same one when it starts again.
    """

    def __init__(self, report: Callable[[Address | None, str], None], nonce: bytes) -> None:
        self.report, self.nonce = report, nonce
        self.port = 0  # The port to keep open; 0 for none.
        self.asked = trio.Event()
        self.lease: PortLease | None = None
        self.ends_at = 0.0  # The time at which the lease ends.
        self.is_running = False

    def open(self, port: int, spawn: Callable[..., object]) -> None:
        """Keep a port from now on, or none. Calls again ask again, since the router may have forgotten the port."""
        self.port = port
        self.asked.set()
        if port and not self.is_running:
            self.is_running = True
            spawn(self.keep)

    async def keep(self) -> None:
        """Keep the port open until cancelled, and give it back then."""
        try:
            while True:
                self.asked = trio.Event()
                wait_s = math.inf
                if self.port:
                    wait_s = await self.renew(self.port)
                else:
                    await self.give_back()
                with trio.move_on_after(wait_s):
                    await self.asked.wait()
        finally:
            self.is_running = False
            with trio.CancelScope(shield=True):
                await self.give_back()

    async def give_back(self) -> None:
        lease, self.lease = self.lease, None
        if lease is not None:
            with trio.move_on_after(GIVE_BACK_S), contextlib.suppress(LocalError):
                await open_port(lease.port, lease.address.port, 0, self.nonce, lease.protocol)

    async def renew(self, port: int) -> float:
        """Ask for the port and report; return the seconds until it is to be asked for again.

        A lease that holds is no worse for a request that fails.
        """
        lease, now = self.lease, trio.current_time()
        outside, protocol = (port, "") if lease is None else (lease.address.port, lease.protocol)
        try:
            lease = self.lease = await open_port(port, outside, LEASE_S, self.nonce, protocol)
        except LocalError as error:
            if lease is not None and now < self.ends_at:
                return RETRY_SOON_S
            self.lease = None
            self.report(None, str(error))
            return RETRY_S
        lasts_s = min(max(lease.lasts_s, LEAST_LEASE_S), LEASE_S) if lease.lasts_s else LEASE_S
        self.ends_at = now + lasts_s
        self.report(lease.address, "")
        return lasts_s / 2

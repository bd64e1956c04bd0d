"""`gossip doctor`: what lies between this machine and the members of a swarm, and what to change."""

import contextlib
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import trio

from gossip.errors import ConfigError, LocalError, RemoteError
from gossip.ids import Address, parse_address
from node.cli.main import shown
from node.identity.keys import read_secret
from node.observe.status import no_answer, query_over
from node.settings import own_addresses
from node.terminal import plain_console
from node.transport.byte_stream import PlainStream
from node.transport.router import open_port, upnp_library
from node.transport.tcp import Scope, TcpNetwork, is_loopback, is_name, punched, scope_of

MAX_ASKED = 8  # Nodes that are asked, those given included.
MAX_ROWS = 30  # Members that are shown.
PROBE_LEASE_S = 60  # The lease of the port that is opened to see whether the router does so.
INDEPENDENT = "Endpoint-Independent Mapping: members that nobody can dial are met by hole punching"
DEPENDENT = "Address-Dependent, or Address and Port-Dependent, Mapping: hole punching fails"
# How a member that nobody can dial is reached, by the mapping here.
WAYS = {"": "it dials, or hole punching", INDEPENDENT: "hole punching", DEPENDENT: "a relay"}
FORWARD = "forward a port of the router to this machine, and give --listen 0.0.0.0:PORT --advertise HOST:PORT"


class Look(NamedTuple):
    """The answer of one node, and how it was reached."""

    address: Address
    local: Address
    seen: Address | None  # Where it sees this machine; None if it does not say.
    seconds: float  # Until the connection was open.
    answer: dict[str, Any]


class Findings(NamedTuple):
    """All that was found."""

    looks: list[Look]
    silent: list[Address]  # Members that did not answer.
    opened: Address | None  # The port that the router opened.
    refusal: str  # Why it opened none.


def doctor(addresses: Sequence[str], secret_file: Path | None, timeout_s: float) -> None:
    """Print in one screen how this machine is connected. Raises LocalError if no given node answers."""
    secret = None if secret_file is None else read_secret(secret_file)
    found = trio.run(examine, [parse_address(address) for address in addresses], secret, timeout_s)
    if addresses and not found.looks:
        raise no_answer(", ".join(addresses), secret)
    print_findings(found)


# -- looking -----------------------------------------------------------------------------------------------------------
async def examine(given: Sequence[Address], secret: bytes | None, timeout_s: float) -> Findings:
    """Ask the given nodes and some members that they name, all from one port, and ask the router for a port."""
    looks: list[Look] = []
    silent: list[Address] = []
    waiting, asked = [(address, Scope.NOWHERE) for address in given], set(given)
    streams: list[PlainStream] = []  # Open until the end, so that the router keeps what it has mapped.
    try:
        while waiting and len(looks) + len(silent) < MAX_ASKED:
            address, least = waiting.pop(0)
            try:
                look = await ask(address, secret, timeout_s, streams)
            except (OSError, RemoteError, trio.TooSlowError):
                silent.append(address)
                continue
            looks.append(look)
            for member in look.answer["members"]:
                with contextlib.suppress(ConfigError):
                    named = parse_address(member["address"] or "")
                    # A node's word leads to no smaller network than its own.
                    is_near = scope_of(named.host) < max(least, scope_of(address.host))
                    if member["state"] == "alive" and named not in asked and not is_near:
                        asked.add(named)
                        waiting.append((named, scope_of(named.host)))
        opened, refusal = await probe_router()
    finally:
        for stream in streams:
            stream.close_now()
    return Findings(looks, silent, opened, refusal)


async def ask(address: Address, secret: bytes | None, timeout_s: float, streams: list[PlainStream]) -> Look:
    """Ask one node, if possible from the port of the first connection. Raises OSError, RemoteError, TooSlowError."""
    began = time.perf_counter()
    with trio.fail_after(timeout_s):
        stream = None
        if streams and not is_name(address.host):
            with contextlib.suppress(OSError, RemoteError):
                stream = await punched(address, streams[0].local, 1.0)
        stream = stream or await TcpNetwork(None, timeout_s).connect(address)
        assert isinstance(stream, PlainStream)
        streams.append(stream)
        seconds = time.perf_counter() - began
        answer, seen = await query_over(stream, secret)
        return Look(address, stream.local, seen, seconds, answer)


async def probe_router() -> tuple[Address | None, str]:
    """Have the router open a free port, and give it back; return its address outside, or None and why not."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
        try:
            lease = await open_port(port, port, PROBE_LEASE_S)
        except LocalError as error:
            return None, str(error)
        with contextlib.suppress(LocalError):
            await open_port(port, lease.address.port, 0, protocol=lease.protocol)
    return lease.address, ""


# -- telling -----------------------------------------------------------------------------------------------------------
def mapping_of(looks: Sequence[Look]) -> str:
    """Return the mapping behaviour of the NAT in the terms of RFC 4787; "" without one, "unknown" if it is not seen."""
    outside = [look for look in looks if look.seen is not None and look.seen.host != look.local.host]
    if not outside:
        return "" if any(look.seen is not None for look in looks) else "unknown"
    first = [look for look in outside if look.local == outside[0].local]
    if len({look.address.host for look in first}) < 2:
        return "unknown"
    return INDEPENDENT if len({look.seen for look in first}) == 1 else DEPENDENT


def advice(found: Findings, mapping: str) -> str:
    """Return what the user may change, in a sentence or two."""
    hosts = {look.seen.host for look in found.looks if look.seen is not None and look.seen.host != look.local.host}
    if found.opened is not None and found.opened.host in hosts:
        return "Nothing: a node on this machine asks the router for a port by itself."
    if found.opened is not None and hosts:
        return (
            f"The router opens ports at {found.opened.host}, but nodes see this machine elsewhere: another router is "
            "between, perhaps the provider's. Have it pass all on (bridge mode), or ask for a public address."
        )
    if not found.looks:
        return "Name nodes of the swarm, best of two networks, to see how they see this machine."
    if not hosts:
        return "No router is between this machine and these nodes. If a firewall is, open the port of --listen in it."
    needed = "Links to others that nobody can dial go through slower relays. " if mapping == DEPENDENT else ""
    tried = "" if upnp_library() else " UPnP was not tried: pip install 'gossip-trainer[homes]'."
    return f"{needed}To be dialled, turn on UPnP, PCP or NAT-PMP in the router, or {FORWARD}.{tried}"


def print_findings(found: Findings) -> None:
    """Print the findings as tables."""
    from rich.table import Table

    console, mapping = plain_console(), mapping_of(found.looks)
    seen = sorted({look.seen.host for look in found.looks if look.seen is not None})
    machine = Table("this machine", "", show_header=False)
    machine.add_row("its addresses", ", ".join(sorted({one for one in own_addresses() if not is_loopback(one)})) or "-")
    machine.add_row("as nodes see it", ", ".join(seen) or "-")
    unknown = "unknown: name nodes on two hosts outside this network"
    machine.add_row("NAT (RFC 4787)", {"": "none", "unknown": unknown}.get(mapping, mapping))
    machine.add_row("router", found.refusal or f"opens ports, as {found.opened}")
    console.print(machine)
    if found.looks:
        first = found.looks[0]
        direct = {look.answer["id"]: look.seconds for look in found.looks}
        silent = {str(address) for address in found.silent}
        members = Table("member", "address", "from here", f"from {first.answer['id'][:8]}", "MB/s from there")
        own = {"id": first.answer["id"], "address": first.answer["address"]}
        alive = [one for one in first.answer["members"] if one["state"] == "alive"]
        for member in (own, *alive[:MAX_ROWS]):
            if member["id"] in direct:
                way = f"direct, {1e3 * direct[member['id']]:.0f} ms"
            elif member["address"] in silent:
                way = "does not answer"
            elif member["address"]:
                way = "not tried"
            else:
                way = WAYS.get(mapping, "-")
            there = (member.get("link"), member.get("mb_s"))
            members.add_row(member["id"][:8], shown(member["address"]), way, *map(shown, there))
        console.print(members)
        if len(alive) > MAX_ROWS:
            console.print(f"and {len(alive) - MAX_ROWS:,} more members")
    console.print(f"To change: {advice(found, mapping)}", soft_wrap=True)

"""Two undialable nodes mix with each other, by connections that meet and through a relay."""

import socket
import threading

import pytest
import trio
from torch import nn

from gossip.config import Config
from gossip.config.internal import Internal
from gossip.ids import parse_address
from node.links import hidden
from node.transport.byte_stream import BrokenLinkError, PlainStream

PATIENCE_S = 60.0  # A meeting takes some seconds, and a busy machine takes longer.


@pytest.fixture
def mixed(train, until, secret):
    """Start a public node and two that only dial out; return a function that waits until these two have mixed."""

    def start(encrypted, **public):
        options = {"secret": secret} if encrypted else {}
        contact = train(nn.Linear(4, 2), **options, **public)
        inside = [train(nn.Linear(4, 2), seeds=[contact.node.address], listen="none", **options) for _ in range(2)]
        partners = {one.node.id: set() for one in inside}
        for one in inside:
            one.node.on("exchange.done", lambda event, one=one: partners[one.node.id].update(event.partners))
        ids = set(partners)

        def have_mixed():
            return all(ids - {one} <= partners[one] for one in ids)

        return contact, inside, have_mixed

    return start


def relay_of(contact):
    return contact.side.network.service.runtime.relay


class Meeting:
    """A network where two connections meet that leave for each other's port: of the first two, one accepts."""

    def __init__(self):
        self.waiting = {}
        self.lock = threading.Lock()

    async def punched(self, address, local, timeout_s):
        ports = frozenset((address.port, local.port))
        with self.lock:
            server = self.waiting.pop(ports, None)
            if server is None:
                self.waiting[ports] = mine = socket.create_server(("127.0.0.1", 0))
        if server is not None:
            sock = trio.socket.socket()
            await sock.connect(server.getsockname())
            return PlainStream(sock)
        mine.setblocking(False)
        with trio.fail_after(timeout_s), trio.socket.from_stdlib_socket(mine) as listening:
            accepted, _ = await listening.accept()
            return PlainStream(accepted)


@pytest.mark.parametrize("encrypted", [False, True])
def test_both_connect_at_once(mixed, until, encrypted, monkeypatch):
    """The network stands in for routers: without their delay two connections would miss each other."""
    monkeypatch.setattr(hidden, "punched", Meeting().punched)
    contact, inside, have_mixed = mixed(encrypted)
    until(have_mixed, PATIENCE_S)
    assert relay_of(contact).relayed_bytes == 0
    listening = {parse_address(contact.node.address).port}
    for one in inside:  # A member that was met is no stranger, so that its host keeps its allowance of dials.
        proven = one.side.network.service.runtime.connector.budget.proven
        assert {address.port for address in proven} - listening


async def in_vain(address, local, timeout_s):
    raise BrokenLinkError("A router maps each destination anew.")


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_contact_passes_their_bytes_on_where_connections_do_not_meet(mixed, until, encrypted, monkeypatch):
    monkeypatch.setattr(hidden, "punched", in_vain)
    contact, inside, have_mixed = mixed(encrypted)
    until(have_mixed, PATIENCE_S)
    relay = relay_of(contact)
    assert relay.relayed_bytes > 0
    assert len(relay.peer.meetings.tunnels) == 1
    inside[0].stop()
    until(lambda: not relay.peer.meetings.tunnels)


def test_a_node_that_relays_nothing_is_asked_in_vain(mixed, until, monkeypatch):
    monkeypatch.setattr(hidden, "punched", in_vain)
    quick = {"mix_every_steps": 2, "join_timeout_s": 3.0}
    contact, inside, have_mixed = mixed(False, config=Config(**quick, internal=Internal(max_tunnels=0)))
    meetings = inside[0].side.network.peer.meetings
    until(lambda: meetings.failures, PATIENCE_S)
    assert not have_mixed()
    assert relay_of(contact).relayed_bytes == 0


def test_tunnels_take_the_share_of_the_rate_that_they_may(monkeypatch):
    """All tunnels together pass on one MB/s, or a quarter of what this node's own links move."""

    class Traffic:
        bytes_sent = bytes_received = 0

    clock = [100.0]
    monkeypatch.setattr(hidden.trio, "current_time", lambda: clock[0])
    relay = hidden.Relay(None, Traffic)
    turns = [relay.turn(500_000) for _ in range(3)]
    assert turns == [100.0, 100.5, 101.0]
    Traffic.bytes_sent = 40_000_000
    clock[0] = 102.0
    relay.turn(0)
    assert relay.allowance.rate == pytest.approx(5e6)

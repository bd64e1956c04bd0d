"""Limits for strangers without the swarm's secret: the pool of handshakes, and the queue of dials."""

import random
import socket
from collections import Counter
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from gossip.config import Config
from gossip.ids import Address, MemberRecord, PeerId
from node.links.connector import (
    MAX_DIALS,
    MAX_STRANGER_DIALS,
    MAX_STRANGERS,
    Access,
    Connector,
    describe_failure,
)
from node.links.handshake_pool import (
    FIRST_FLIGHT_S,
    MAX_PER_UNKNOWN_HOST,
    MAX_UNKNOWN,
    MAX_VISITORS,
    HandshakePool,
    neighbourhood,
)
from node.transport.byte_stream import BrokenLinkError
from tests.node.links.link_owner import LinkOwner

ME = MemberRecord(PeerId(b"m" * 16), b"", 1, address=Address("10.0.0.1", 7))


class Stream:
    """A connection from some address that may have sent a byte."""

    def __init__(self, host, has_received=False):
        self.peer_host, self.has_received, self.closed = host, has_received, False

    def close_now(self):
        self.closed = True


def handshake_pool(known=()):
    return HandshakePool(lambda: set(known))


# -- the pool ----------------------------------------------------------------------------------------------------------
def test_of_a_full_pool_an_idle_observer_goes_before_a_handshake_and_a_served_one_stays():
    evicted = []
    pool = HandshakePool(lambda: {"here"}, evicted.append)
    visitors = [pool.enter(Stream("here", has_received=True), 0.0) for _ in range(MAX_VISITORS)]
    served, idle = visitors[3:5]
    served.link, idle.link = SimpleNamespace(bulk={1: "a piece"}), SimpleNamespace(bulk={})
    pool.enter(Stream("here"), 5.0)
    assert idle.stream.closed
    assert not evicted, "it has said who it is"
    pool.enter(Stream("here"), 5.0)
    assert visitors[0].stream.closed
    assert evicted == ["here"]
    assert not served.stream.closed


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.7", "192.0.2.7"), ("a name", "a name"),
        ("2001:db8:1:2::5", neighbourhood("2001:db8:1:2:ffff::9")), ("fe80::1%eth0", neighbourhood("fe80::2")),
    ],
)  # fmt: skip
def test_an_ipv6_network_is_one_neighbour(host, place):
    assert neighbourhood(host) == place
    assert neighbourhood(host) != neighbourhood("2001:db8:1:3::5")


def test_one_address_has_eight_places_and_its_silent_connection_is_evicted_first():
    pool = handshake_pool()
    streams = [Stream("192.0.2.1", has_received=number == 0) for number in range(MAX_PER_UNKNOWN_HOST)]
    for number, stream in enumerate(streams):
        pool.enter(stream, 0.1 * number)
    pool.enter(Stream("192.0.2.1"), 0.5 + FIRST_FLIGHT_S)
    assert [stream.closed for stream in streams] == [False, True] + [False] * (MAX_PER_UNKNOWN_HOST - 2)
    assert len(pool) == MAX_PER_UNKNOWN_HOST


def test_the_address_with_the_most_connections_gives_a_place_up():
    pool = handshake_pool()
    few = [Stream(f"192.0.2.{number}", has_received=True) for number in range(MAX_UNKNOWN - MAX_PER_UNKNOWN_HOST)]
    many = [Stream("198.51.100.1", has_received=True) for _ in range(MAX_PER_UNKNOWN_HOST)]
    for stream in (*few, *many):
        pool.enter(stream, 0.0)
    pool.enter(Stream("203.0.113.5"), 0.1)
    assert [stream.closed for stream in many] == [True] + [False] * (MAX_PER_UNKNOWN_HOST - 1)
    assert not any(stream.closed for stream in few)


def test_half_of_the_pool_is_for_addresses_of_members():
    pool = handshake_pool(known={"10.0.0.9"})
    strangers = [Stream(f"192.0.2.{number}") for number in range(200)]
    for stream in strangers:
        pool.enter(stream, 0.0)
    assert len(pool) == MAX_UNKNOWN
    members = [Stream("10.0.0.9") for _ in range(MAX_VISITORS - MAX_UNKNOWN)]
    for stream in members:
        pool.enter(stream, 0.0)
    assert not any(stream.closed for stream in members)
    assert sum(not stream.closed for stream in strangers) == MAX_UNKNOWN


def test_every_connection_is_let_in_and_the_pool_keeps_its_bounds():
    rng, pool = random.Random(1), handshake_pool(known={"10.0.0.9"})
    here = []
    for step in range(3_000):
        stream = Stream(rng.choice(["10.0.0.9", "192.0.2.1", f"198.51.100.{rng.randrange(99)}"]), rng.random() < 0.5)
        here.append((pool.enter(stream, 0.01 * step), stream))
        assert not stream.closed
        if rng.random() < 0.3:
            visitor, _ = here.pop(rng.randrange(len(here)))
            pool.leave(visitor)
        assert len(pool) <= MAX_VISITORS
        unknown = Counter(visitor.host_range for visitor in pool.visitors if not visitor.is_known)
        assert unknown.total() <= MAX_UNKNOWN
        assert max(unknown.values(), default=0) <= MAX_PER_UNKNOWN_HOST


# -- dials -------------------------------------------------------------------------------------------------------------
class Swallowing:
    """A network in which the addresses of one host refuse at once, and all others swallow packets."""

    def __init__(self, answering):
        self.answering, self.under_way, self.most = answering, 0, 0

    async def connect(self, address, allows=None):
        if allows is not None and not allows(address.host):
            raise BrokenLinkError("not allowed")
        if address.host == self.answering:
            await trio.lowlevel.checkpoint()
            raise ConnectionRefusedError
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await trio.sleep_forever()
        finally:
            self.under_way -= 1


def dialling(familiar, dials, then):
    """Make ``dials`` and, 8 s later, ``then``.

    Return the network, the seconds of each of ``then``, and the failed peers.
    """
    network, took, missed = Swallowing("10.0.0.2"), {}, []

    async def main():
        def failed(peer):
            missed.append(peer)
            took[peer] = trio.current_time() - begun

        connector = Connector(Access(network, None), Config(), LinkOwner(ME, missed=failed, is_known=familiar))
        async with trio.open_nursery() as nursery:
            connector.nursery = nursery
            begun = trio.current_time()
            for address, peer in dials:
                connector.dial(address, peer)
            await trio.sleep(8.0)  # By then the addresses that swallow packets are known.
            begun = trio.current_time()
            for address, peer in then:
                connector.dial(address, peer)
            await trio.sleep(4.0)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return network, [took.get(peer) for _, peer in then], missed


def peers_at(host, first, count):
    return [(Address(host, 1 + n), PeerId((first + n).to_bytes(16, "big"))) for n in range(count)]


MEMBERS = peers_at("10.0.0.2", 1_000, 20)


def test_dials_to_strangers_are_two_at_a_time_in_a_bounded_queue_in_which_no_member_waits():
    familiar = {peer for _, peer in MEMBERS}.__contains__
    claimed = [(address, PeerId(bytes(16))) for address, _ in MEMBERS[:1]]  # The address of a member.
    strangers = peers_at("192.0.2.1", 1, 300)
    network, took, missed = dialling(familiar, [*strangers[:30], *claimed, *strangers[30:]], MEMBERS)
    assert network.most == MAX_STRANGER_DIALS
    assert all(seconds is not None and seconds < 0.1 for seconds in took)
    assert len(missed) >= 300 - MAX_STRANGERS - MAX_STRANGER_DIALS


def test_members_whose_addresses_once_swallowed_packets_leave_room_for_those_that_answer():
    silent = peers_at("192.0.2.1", 1, MAX_DIALS)
    _, took, _ = dialling(lambda peer: True, silent, [*silent, *MEMBERS])
    assert all(seconds is not None and seconds < 0.1 for seconds in took[MAX_DIALS:])


def test_the_cause_of_a_failed_dial_is_described():
    assert "no node listens" in describe_failure(ConnectionRefusedError())
    assert "resolved" in describe_failure(socket.gaierror())
    assert describe_failure(BrokenLinkError("x")) == "did not answer"
    assert describe_failure(OSError(113, "No route to host")) == "cannot be reached: no route to host"

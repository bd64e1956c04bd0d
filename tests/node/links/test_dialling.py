"""Dialling: one dead address of a name does not hide another, and no member turns a swarm on a third party."""

import contextlib
import dataclasses
import ipaddress
import socket
from collections import Counter

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from gossip.config import Config
from gossip.ids import Address, MemberRecord, PeerId
from node.links import dial_budget
from node.links.connector import Access, Connector
from node.links.dial_budget import DialBudget, site_of
from node.transport import tcp
from node.transport.byte_stream import BrokenLinkError
from node.transport.tcp import TcpNetwork, alternated, resolve
from tests.node.links.link_owner import LinkOwner

NAMED = Address("node.example", 1)
ME = MemberRecord(PeerId(b"m" * 16), b"k" * 32, 1, address=Address("198.51.100.1", 7700))


def target_of(sock):
    return (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", sock.getsockname())


@contextlib.contextmanager
def black_hole(host):
    """An address that answers no SYN: a listener whose queue is full."""
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket())
        sock.bind((host, 0))
        sock.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(sock.getsockname())
        yield target_of(sock)


@contextlib.contextmanager
def refusing(host):
    with socket.socket() as sock:
        sock.bind((host, 0))  # Without listen(), dials are refused.
        yield target_of(sock)


@contextlib.contextmanager
def answering(host):
    with socket.socket() as sock:
        sock.bind((host, 0))
        sock.listen(8)
        yield target_of(sock)


def stand_for(monkeypatch, targets):
    """Let every name stand for ``targets``."""

    async def resolve(_address, _flags=0):
        await trio.lowlevel.checkpoint()
        return targets

    monkeypatch.setattr(tcp, "resolve", resolve)


def connect(monkeypatch, targets, timeout_s=5.0):
    """Dial a name that stands for ``targets``; return the host that answered and the seconds that it took."""
    stand_for(monkeypatch, targets)

    async def main():
        began = trio.current_time()
        stream = await TcpNetwork(None, timeout_s).connect(NAMED)
        stream.close_now()
        return stream.peer_host, trio.current_time() - began

    return trio.run(main)


@pytest.mark.parametrize("dead", [black_hole, refusing])
def test_an_address_that_does_not_answer_hides_no_other(monkeypatch, dead):
    with dead("127.0.0.2") as first, answering("127.0.0.3") as second:
        host, took_s = connect(monkeypatch, [first, second])
    assert host == "127.0.0.3"
    assert took_s < 3.0


def test_the_systems_error_of_a_failed_dial_is_raised(monkeypatch):
    with refusing("127.0.0.2") as dead, pytest.raises(ConnectionRefusedError):
        connect(monkeypatch, [dead, dead])


def test_an_attempt_at_an_address_that_never_answers_ends_after_its_timeout(monkeypatch):
    with black_hole("127.0.0.2") as dead, pytest.raises(BrokenLinkError, match="did not answer in"):
        connect(monkeypatch, [dead, dead], timeout_s=0.5)


def test_a_cancelled_dial_leaves_no_socket_open(monkeypatch):
    opened, both = [], trio.Event()
    socket_of = trio.socket.socket

    def remembered(*given):
        opened.append(socket_of(*given))
        if len(opened) == 2:
            both.set()
        return opened[-1]

    async def main():
        monkeypatch.setattr(trio.socket, "socket", remembered)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(TcpNetwork(None).connect, NAMED)
            await both.wait()
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    with black_hole("127.0.0.2") as first, black_hole("127.0.0.3") as second:
        stand_for(monkeypatch, [first, second])
        trio.run(main)
    assert len(opened) == 2
    assert all(sock.fileno() < 0 for sock in opened)


def test_the_second_attempt_is_of_the_other_family():
    v6, v4 = (socket.AF_INET6, 0), (socket.AF_INET, 0)
    assert alternated([v6, v6, v6, v4])[:2] == [v6, v4]
    assert alternated([v4, v4]) == [v4, v4]
    assert alternated([]) == []


# -- addresses that others name ----------------------------------------------------------------------------------------
def test_a_host_at_which_nobody_answers_is_dialled_sixteen_times_and_then_once_in_two_minutes():
    budget = DialBudget()
    times = [now for now in range(3_600) if budget.charge(Address("192.0.2.1", 1 + now), float(now))]
    assert times[:16] == list(range(16))
    assert len(times) <= 16 + 3_600 / 120
    assert budget.charge(Address("192.0.2.2", 1), 0.0), "another host has its own"


def test_a_living_host_of_many_members_is_never_held_up():
    budget = DialBudget()
    for port in range(1, 500):
        assert budget.charge(Address("192.0.2.1", port), 0.0)
        budget.mark_proven(Address("192.0.2.1", port))
    dead = [port for port in range(500, 600) if budget.charge(Address("192.0.2.1", port), 0.0)]
    assert len(dead) == 16
    assert budget.charge(Address("192.0.2.1", 7), 0.0), "a member proved to be at this address"


def test_all_names_of_a_domain_and_all_addresses_of_a_network_have_one_budget():
    assert site_of("2001:db8:1:2::5") == site_of("2001:db8:1:2:ffff::9") != site_of("2001:db8:1:3::5")
    assert site_of("a1.victim.example") == site_of("b2.c3.VICTIM.example.") == "victim.example"
    assert site_of("192.0.2.1") == site_of("::ffff:192.0.2.1")


def test_a_dial_budget_remembers_a_bounded_number_of_hosts():
    budget = DialBudget()
    for number in range(3 * dial_budget.MAX_SITES):
        address = Address(f"host.{number}", 1)
        budget.charge(address, 0.0)
        budget.mark_proven(address)
    assert len(budget.buckets) == dial_budget.MAX_SITES
    assert len(budget.proven) == dial_budget.MAX_PROVEN


class Recording(TcpNetwork):
    """TCP whose name lookups are the system's, and that only notes the addresses that it would dial."""

    def __init__(self):
        super().__init__(None, 0.1)
        self.dials = []

    async def connect(self, address, allows=None):
        for target in await resolve(address, socket.AI_NUMERICHOST):
            if allows is None or allows(target[4][0]):
                self.dials.append(target[4][0])
        raise ConnectionRefusedError


PORTS = [Address("192.0.2.1", port) for port in range(1, 101)]


@pytest.mark.parametrize(
    ("familiar", "seeds", "dial_count", "missed_count"),
    [
        (False, [], 16, 16),  # A dial that was not made says nothing about a stranger.
        (True, [], 16, 100),  # Members may restate their address.
        (False, PORTS, 100, 100),
    ],
    ids=["strangers", "members", "seeds"],
)
def test_a_hundred_ports_of_a_third_party_are_dialled_sixteen_times(familiar, seeds, dial_count, missed_count):
    network, missed = Recording(), []

    async def main():
        owner = LinkOwner(ME, missed=missed.append, told=lambda *_: None, is_known=lambda _: familiar)
        connector = Connector(Access(network, None), Config(), owner, frozenset(seeds))
        for number, address in enumerate(PORTS):
            async with trio.open_nursery() as nursery:
                connector.nursery = nursery
                connector.dial(address, PeerId(number.to_bytes(16, "big")))
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()  # A seed's task waits with its notice.

    trio.run(main)
    assert len(network.dials) == dial_count
    assert len(missed) == missed_count


# -- what a host text leads to -----------------------------------------------------------------------------------------
def spelled(number, form):
    """Return a spelling of an IPv4 address (a whole number) that a C library understands."""
    parts = [number >> shift & 0xFF for shift in (24, 16, 8, 0)]
    return {
        "usual": ".".join(str(part) for part in parts),
        "octal": ".".join(f"0{part:03o}" for part in parts),
        "hexadecimal": ".".join(hex(part) for part in parts),
        "one number": str(number),
        "one hexadecimal number": hex(number),
        "three parts": f"{parts[0]}.{parts[1]}.{number & 0xFFFF}",
        "mapped": f"::ffff:{'.'.join(str(part) for part in parts)}",
        "NAT64": f"64:ff9b::{parts[0]:02x}{parts[1]:02x}:{parts[2]:02x}{parts[3]:02x}",
        "6to4": f"2002:{parts[0]:02x}{parts[1]:02x}:{parts[2]:02x}{parts[3]:02x}::1",
    }[form]


FORMS = st.sampled_from([
    "usual", "octal", "hexadecimal", "one number", "one hexadecimal number", "three parts", "mapped", "NAT64", "6to4",
])  # fmt: skip
INSIDE = st.sampled_from([
    "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.9.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "224.0.0.1", "255.255.255.255",
])  # fmt: skip


def dialled_from(mine, texts, seeds=frozenset()):
    """Return the numeric addresses that a node with this address of its own dials if others ask it to try ``texts``."""
    network = Recording()

    async def main():
        me = dataclasses.replace(ME, address=mine and Address(mine, 7))
        connector = Connector(Access(network, None), Config(), LinkOwner(me), seeds)
        for port, text in enumerate(texts, 1):
            await connector.try_dial(Address(text, port))

    trio.run(main)
    return network.dials


@given(st.lists(st.builds(spelled, INSIDE.map(lambda text: int(ipaddress.ip_address(text))), FORMS), max_size=4))
def test_a_node_on_a_public_address_dials_nothing_inside_a_network_in_any_spelling(texts):
    assert dialled_from("198.51.101.7", texts) == []


@given(st.lists(st.builds(spelled, st.just(int(ipaddress.ip_address("198.51.101.9"))), FORMS.filter(
    lambda form: form not in ("NAT64", "6to4")
)), min_size=40, max_size=60))  # fmt: skip
def test_a_host_has_one_budget_for_all_spellings_and_ports(texts):
    """Otherwise a member could have others scan the ports of a host, even of one that it shares."""
    assert len(dialled_from("198.51.101.7", texts)) == dial_budget.BURST


@pytest.mark.parametrize(
    ("mine", "seed", "scopes"),
    [
        ("127.0.0.1", None, "loopback, link, private, public"),
        ("10.0.0.5", None, "private, public"),
        ("169.254.3.3", None, "link, private, public"),
        ("8.8.4.4", None, "public"),
        (None, "127.0.0.1", "loopback, link, private, public"),
        (None, "10.0.0.5", "private, public"),
        (None, "8.8.4.4", "private, public"),
    ],
)
def test_a_node_dials_no_address_of_a_smaller_scope_than_its_own(mine, seed, scopes):
    named = {"127.0.0.1": "loopback", "169.254.169.254": "link", "10.9.0.1": "private", "9.9.9.9": "public"}
    seeds = frozenset([Address(seed, 9)] if seed else [])
    assert ", ".join(named[host] for host in dialled_from(mine, named, seeds)) == scopes


def test_each_address_of_a_name_takes_a_token(monkeypatch):
    async def eight(_address, _flags=0):
        await trio.lowlevel.checkpoint()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"198.51.101.{number % 2}", 7)) for number in range(8)]

    monkeypatch.setattr("tests.node.links.test_dialling.resolve", eight)
    hosts = dialled_from("8.8.4.4", [f"n{number}.example{number}.org" for number in range(20)])
    assert Counter(hosts) == {"198.51.101.0": 16, "198.51.101.1": 16}

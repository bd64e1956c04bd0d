"""The conclusions of `gossip doctor` from its findings."""

import pytest

from gossip.ids import Address
from node.cli.doctor import DEPENDENT, INDEPENDENT, Findings, Look, advice, mapping_of
from tests.node.commands import gossip

LOCAL = Address("192.168.0.2", 50_000)
ROUTER = "203.0.113.7"


def look(number, seen, local=LOCAL):
    """Return what the node at a host of this number says."""
    return Look(Address(f"198.51.100.{number}", 7700), local, seen, 0.01, {"members": []})


def seen_at(*ports, host=ROUTER):
    return [look(number, Address(host, port)) for number, port in enumerate(ports)]


@pytest.mark.parametrize(
    ("looks", "mapping"),
    [
        (seen_at(40_000, 40_000), INDEPENDENT),
        (seen_at(40_000, 40_001), DEPENDENT),
        (seen_at(40_000), "unknown"),
        ([*seen_at(40_000), look(0, Address(ROUTER, 41_000))], "unknown"),
        ([*seen_at(40_000), look(2, Address(ROUTER, 41_000), Address("192.168.0.2", 50_001))], "unknown"),
        ([look(1, LOCAL)], ""),
        ([look(1, None)], "unknown"),
        ([], "unknown"),
    ],
    ids=["one port", "two ports", "one node", "one host", "another port here", "no router", "silent", "nobody"],
)
def test_two_nodes_on_two_hosts_tell_how_the_router_maps_one_port(looks, mapping):
    assert mapping_of(looks) == mapping


@pytest.mark.parametrize(
    ("looks", "opened", "mapping", "said"),
    [
        (seen_at(1, 1), Address(ROUTER, 2), INDEPENDENT, "Nothing"),
        (seen_at(1, 1), Address("100.64.3.2", 2), INDEPENDENT, "another router is between"),
        (seen_at(1, 1), None, INDEPENDENT, "To be dialled, turn on UPnP"),
        (seen_at(1, 2), None, DEPENDENT, "relays. To be dialled"),
        ([look(1, LOCAL)], None, "", "No router is between"),
        ([], None, "unknown", "Name nodes of the swarm"),
    ],
    ids=["opens", "carrier", "punched", "relayed", "public", "nobody"],
)
def test_the_advice_follows_what_was_found(looks, opened, mapping, said):
    assert said in advice(Findings(looks, [], opened, "No router."), mapping)


def test_without_a_node_it_tells_of_this_machine_and_a_silent_seed_is_one_sentence():
    alone = gossip("doctor")
    assert alone.returncode == 0, alone.stderr
    assert "its addresses" in alone.stdout
    silent = gossip("doctor", "127.0.0.1:9", "--timeout", "1")
    assert silent.returncode != 0
    assert silent.stderr.count("\n") == 1
    assert "No node answers at 127.0.0.1:9" in silent.stderr

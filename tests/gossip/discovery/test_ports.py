"""Ports that a router opens for a node that nobody outside can dial."""

import pytest

from gossip.discovery.sightings import Sighting
from gossip.effects import Notice, OpenPort, Punch, Send
from gossip.ids import Address
from gossip.wire.messages import Gossip, Reach
from tests.gossip.discovery.test_bootstrap import HERE, ME, THERE, A, B, C, reachability, record_of
from tests.gossip.discovery.test_meetings import Node, Swarm

ROUTER = "203.0.113.7"
OPENED = Address(ROUTER, 7701)


def at_home(opens_ports=True):
    """Return a node at home whose housemate A can dial it and B and C outside cannot, after their verdict."""
    reach = reachability((A, B, C), others=[record_of(peer) for peer in (A, B, C)])
    reach.opens_ports = opens_ports
    outside = Sighting(THERE, Address(ROUTER, 40_000))
    reach.sightings = {A: Sighting(THERE, HERE), B: outside, C: outside}
    reach.ask(B, 0.0)
    reach.on_reached(B, False, 1.0)
    return reach, reach.tick(1.0)


def asked(effects):
    return [effect.to for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Reach)]


def sentences(effects):
    return [effect.sentence for effect in effects if isinstance(effect, Notice)]


def test_a_node_that_nobody_outside_can_dial_asks_its_router_and_withdraws_its_address_meanwhile():
    reach, effects = at_home()
    assert effects == [OpenPort(ME.address.port)]
    assert reach.members.me.address is None


def test_without_ports_the_user_is_told_at_once():
    _reach, effects = at_home(opens_ports=False)
    (sentence,) = sentences(effects)
    assert "Forward the port" in sentence


def test_an_opened_port_is_published_and_members_outside_say_whether_it_serves():
    reach, _ = at_home()
    assert reach.on_port(OPENED, "", 2.0) == []
    reach.on_reached(C, False, 2.1)
    assert reach.tick(2.1) == [], "a late answer about the other address"
    assert reach.members.me.address == OPENED
    assert asked(reach.tick(12.0)) == [B, C]
    reach.on_reached(B, True, 13.0)
    reach.on_reached(C, True, 13.0)
    assert sentences(reach.tick(13.0)) == [
        f"The router opened {OPENED} for this node, so that other members can dial it."
    ]
    assert reach.on_port(OPENED, "", 1800.0) == [], "a renewed lease is no news"
    assert reach.members.me.homes, "housemates meet by homes"


def test_a_port_that_does_not_serve_is_withdrawn_and_told_and_the_router_is_not_asked_in_a_loop():
    reach, _ = at_home()
    reach.on_port(OPENED, "", 2.0)
    reach.tick(12.0)
    reach.on_reached(B, False, 13.0)
    assert reach.tick(13.0) == [], "C is outside too, and has not answered"
    reach.on_reached(C, False, 13.0)
    effects = reach.tick(13.0)
    assert effects[0] == OpenPort(0)
    assert f"opened {OPENED}, but nobody can connect there" in sentences(effects)[0]
    assert reach.on_port(OPENED, "", 14.0) == [], "until the next round"
    assert reach.members.me.address is None


def test_a_router_that_opens_nothing_is_told_once_with_its_reason():
    reach, _ = at_home()
    (sentence,) = sentences(reach.on_port(None, "The router 192.168.0.1 did not open port 1: it is not allowed.", 2.0))
    assert "it is not allowed. Forward the port" in sentence
    assert reach.on_port(None, "Again.", 602.0) == []


@pytest.mark.parametrize("opened", [Address("192.168.1.2", 7700), Address("198.51.100.9", 80)])
def test_an_address_at_which_nobody_sees_the_node_is_not_published(opened):
    """Two routers are in a row, or the router lies: it must not make others dial a stranger."""
    reach, _ = at_home()
    (sentence,) = sentences(reach.on_port(opened, "", 2.0))
    assert f"other members see this node at {ROUTER}: another router is between" in sentence
    assert reach.members.me.address is None


def test_a_lease_that_the_router_takes_back_is_withdrawn():
    reach, _ = at_home()
    reach.on_port(OPENED, "", 2.0)
    reach.on_port(None, "The router 192.168.0.1 did not open port 1: it has no resources left.", 1800.0)
    assert reach.members.me.address is None


def test_a_router_that_has_another_address_after_a_restart_is_asked_again():
    reach, _ = at_home()
    reach.on_port(OPENED, "", 2.0)
    reach.sightings = {B: Sighting(THERE, Address("203.0.113.8", 40_000))}
    assert reach.ask(B, 10.0) == [OpenPort(ME.address.port)]
    assert reach.members.me.address is None


def test_housemates_whose_router_turns_no_connection_round_meet_inside():
    """Both state a port of their router, which others dial."""
    one, other, public = Node(1, home=ROUTER), Node(2, home=ROUTER), Node(3, Address("198.51.100.1", 7700))
    swarm = Swarm(one, other, public)
    for number, node in enumerate((one, other)):
        node.meetings.listens_at = Address(f"192.168.0.{2 + number}", 7700)
        swarm.link(node, public)
        node.members.update_me(0.0, address=Address(ROUTER, 7700 + number), homes=(public.id,))
    for node, mate in ((one, other), (other, one)):
        node.members.receive(public.id, Gossip((mate.members.me,)), 0.0)
    swarm.tick(one, 1.0)
    assert other.done == [Punch(one.id, one.meetings.listens_at, None, dials=True)]


def test_a_node_with_an_opened_port_meets_nobody_elsewhere():
    """Those outside dial its router's port."""
    one, other, public = Node(1, home=ROUTER), Node(2), Node(3, Address("198.51.100.1", 7700))
    swarm = Swarm(one, other, public)
    for node in (one, other):
        swarm.link(node, public)
        swarm.name_homes(node, public)
    one.members.update_me(0.0, address=OPENED)
    swarm.tick(one, 1.0)
    swarm.tick(other, 1.0)
    assert one.done == other.done == []

"""Meetings of undialable members: questions, punches, relays, and members that lie about addresses."""

import dataclasses
import hashlib
import random

import pytest

from gossip.config import Config
from gossip.discovery.meetings import (
    MAX_MEETINGS,
    MAX_UNASKED,
    MEET_S,
    MEETING_S,
    MESSAGES_BURST,
    RETRY_S,
    Meetings,
)
from gossip.discovery.sightings import Sighting
from gossip.effects import Punch, Send, Tunnel
from gossip.errors import ProtocolError
from gossip.ids import Address, MemberRecord, peer_id_of
from gossip.membership.protocol import Membership
from gossip.wire.messages import Gossip, Meet
from gossip.wire.records import signed

CONTACT = Address("198.51.100.1", 7700)


def key_of(number):
    return hashlib.sha256(bytes([number])).digest()


def sign_with(key):
    return lambda payload: 2 * hashlib.sha256(key + payload).digest()


def verify(key, payload, signature):
    return signature == sign_with(key)(payload)


class Node:
    """A member with its meetings. A node at home has no address; its router maps port 7700 to a port of its own."""

    def __init__(self, number, address=None, *, home="", max_tunnels=2):
        self.key = key_of(number)
        self.id = peer_id_of(self.key)
        self.outside = Address(f"203.0.113.{number}", 40_000 + number) if not home else Address(home, 40_000 + number)
        self.sign = sign_with(self.key)
        self.record = signed(MemberRecord(self.id, self.key, 1, address=address), self.sign)
        rng = random.Random(number)
        self.members = Membership(self.record, sign=self.sign, verify=verify, config=Config(), rng=rng, now=0.0)
        self.linked, self.sightings = {}, {}
        self.meetings = Meetings(self.members, self.linked, self.sightings, max_tunnels, rng)
        self.meetings.listens_at = Address("192.168.0.2", 7700) if address is None else address
        self.done = []

    def knows(self, other, now=0.0):
        self.members.receive(self.id, Gossip((other.record,)), now)


class Swarm:
    """Nodes and the delivery of their messages, without delay unless said."""

    def __init__(self, *nodes):
        self.by_id = {node.id: node for node in nodes}
        self.seen = []

    def link(self, one, contact, now=0.0, told=None, seen=None):
        """Link a node at home with a contact. ``told`` and ``seen`` replace what the contact says that it sees."""
        for node, other, sighting in (
            (one, contact, Sighting(CONTACT, told or one.outside)),
            (contact, one, Sighting(seen or one.outside, CONTACT)),
        ):
            node.members.on_linked(other.id, other.record, now)
            node.linked[other.id], node.sightings[other.id] = None, sighting
            node.meetings.on_linked(other.id, now)

    def name_homes(self, node, *contacts):
        """Name the contacts in a node's record, and tell all others of it."""
        homes = tuple(contact.id for contact in contacts)
        node.record = signed(
            dataclasses.replace(node.record, homes=homes, sequence=node.record.sequence + 1), node.sign
        )
        for other in self.by_id.values():
            if other is not node:
                other.knows(node)

    def deliver(self, node, effects, now, change=None):
        """Deliver the messages of a node, and those that follow; other effects are noted at the nodes."""
        for effect in effects:
            if not isinstance(effect, Send):
                node.done.append(effect)
                continue
            message = effect.message if change is None else change(node, effect)
            self.seen.append(message)
            other = self.by_id[effect.to]
            self.deliver(other, other.meetings.on_meet(node.id, message, now), now, change)

    def tick(self, node, now, change=None):
        self.deliver(node, node.meetings.tick(now), now, change)


def two_homes(home="", **contact):
    """Return two nodes at home and a public one that both have links with, and their swarm."""
    one, other, public = Node(1, home=home), Node(2, home=home), Node(3, CONTACT, **contact)
    swarm = Swarm(one, other, public)
    for node in (one, other):
        swarm.link(node, public)
    for node in (one, other):
        swarm.name_homes(node, public)
    return swarm, one, other, public


def test_both_connect_at_once_to_where_the_contact_sees_the_other():
    swarm, one, other, public = two_homes()
    swarm.tick(one, MEET_S)
    assert other.done == [Punch(one.id, one.outside, public.id, dials=False)]
    swarm.tick(one, one.meetings.deadline)
    assert one.done == [Punch(other.id, other.outside, public.id, dials=True)]
    assert [meet.stage for meet in swarm.seen] == ["ask", "ask", "answer", "answer", "go", "go"]


def test_the_asker_connects_half_a_round_trip_after_its_go():
    _swarm, one, other, public = two_homes()
    (ask,) = one.meetings.tick(MEET_S)
    (passed_on,) = public.meetings.on_meet(one.id, ask.message, MEET_S + 0.1)
    (answer,) = other.meetings.on_meet(public.id, passed_on.message, MEET_S + 0.2)
    (passed_back,) = public.meetings.on_meet(other.id, answer.message, MEET_S + 0.3)
    one.meetings.on_meet(public.id, passed_back.message, MEET_S + 0.4)
    assert one.meetings.meetings[other.id].punch_at == pytest.approx(MEET_S + 0.6)


def test_of_two_that_ask_each_other_the_smaller_id_stays_the_asker():
    swarm, one, other, _public = two_homes()
    first, second = one.meetings.tick(MEET_S), other.meetings.tick(MEET_S)
    swarm.deliver(one, first, MEET_S)
    swarm.deliver(other, second, MEET_S)
    for node in (one, other):
        swarm.tick(node, MEET_S + 0.01)
    smaller, larger = sorted((one, other), key=lambda node: node.id)
    assert [effect.dials for effect in smaller.done] == [True]
    assert [effect.dials for effect in larger.done] == [False]


def test_a_node_that_can_be_dialled_asks_nobody():
    _swarm, _one, _other, public = two_homes()
    assert public.meetings.tick(MEET_S) == []


def test_members_of_one_home_are_dialled_inside_it():
    swarm, one, other, _public = two_homes("203.0.113.9")
    swarm.tick(one, MEET_S)
    assert other.done == [Punch(one.id, one.meetings.listens_at, None, dials=True)]
    assert one.done == []


def test_an_address_inside_a_home_is_a_private_one():
    swarm, one, other, public = two_homes("203.0.113.9")
    one.meetings.listens_at = Address("9.9.9.9", 80)
    assert one.meetings.statement("ask", other.id, public.id).inside == ""
    swarm.tick(one, MEET_S)
    assert other.done == [Punch(one.id, one.outside, public.id, dials=False)]


def test_after_a_punch_in_vain_the_contact_relays():
    swarm, one, other, public = two_homes()
    swarm.tick(one, MEET_S)
    swarm.tick(one, one.meetings.deadline)
    other.meetings.on_not_met(one.id, 4.0)
    swarm.deliver(one, one.meetings.on_not_met(other.id, 4.0), 4.0)
    (name,) = public.meetings.tunnels
    assert one.done[-1] == Tunnel(other.id, public.id, CONTACT, name, dials=True)
    assert other.done[-1] == Tunnel(one.id, public.id, CONTACT, name, dials=False)


def test_a_relay_takes_as_many_tunnels_as_it_may_and_forgets_those_that_nobody_joins():
    _swarm, one, other, public = two_homes(max_tunnels=1)
    for name in (b"a" * 16, b"b" * 16):
        public.meetings.on_meet(one.id, Meet(one.id, other.id, "relay", name=name), 1.0)
    assert list(public.meetings.tunnels) == [b"a" * 16]
    public.meetings.tick(30.0)
    assert not public.meetings.tunnels
    public.meetings.on_meet(one.id, Meet(one.id, other.id, "relay", name=b"c" * 16), 31.0)
    public.meetings.on_tunnel(b"c" * 16, True)
    public.meetings.tick(300.0)
    assert list(public.meetings.tunnels) == [b"c" * 16], "it is in use"
    public.meetings.on_tunnel(b"c" * 16, False)
    assert not public.meetings.tunnels


def test_a_relay_without_room_says_so_and_the_asker_goes_on_to_another_or_gives_up_at_once():
    swarm, one, other, public = two_homes(max_tunnels=0)
    second = Node(4, Address("198.51.100.4", 7700))
    swarm.by_id[second.id] = second
    for node in (one, other):
        swarm.link(node, second)
        swarm.name_homes(node, public, second)
    swarm.tick(one, MEET_S)
    one.meetings.meetings[other.id].contact = public.id
    swarm.deliver(one, one.meetings.on_not_met(other.id, 5.0), 5.0)
    assert list(second.meetings.tunnels) == [one.done[-1].name]
    assert [(effect.relay, effect.dials) for effect in (one.done[-1], other.done[-1])] == [
        (second.id, True), (second.id, False)
    ]  # fmt: skip
    one.meetings.meetings[other.id].stage = "answer"
    second.meetings.max_tunnels = 0
    swarm.deliver(one, one.meetings.on_not_met(other.id, 6.0), 6.0)
    assert other.id not in one.meetings.meetings


def test_one_member_cannot_take_all_tunnels_of_a_relay():
    _swarm, one, other, public = two_homes(max_tunnels=4)
    for number in range(100):
        public.meetings.on_meet(one.id, Meet(one.id, other.id, "relay", name=bytes([number] * 16)), float(number))
        for tunnel in public.meetings.tunnels.values():
            tunnel.is_joined = True
    assert len(public.meetings.tunnels) == 2
    public.meetings.on_meet(other.id, Meet(other.id, one.id, "relay", name=b"x" * 16), 100.0)
    assert len(public.meetings.tunnels) == 3


def test_a_relay_that_was_not_asked_leads_nowhere():
    _swarm, one, other, public = two_homes()
    assert one.meetings.on_meet(public.id, Meet(one.id, other.id, "relay", name=b"n" * 16), 1.0) == []
    assert one.meetings.on_meet(public.id, Meet(Node(9).id, one.id, "relay", name=b"n" * 16), 1.0) == [], "no member"


def test_a_relay_alone_takes_few_meetings_and_makes_no_member_wait():
    _swarm, one, _other, public = two_homes()
    for number in range(MAX_MEETINGS):
        named = Node(10 + number, home="203.0.113.9")
        one.knows(named)
        one.meetings.on_meet(public.id, Meet(named.id, one.id, "relay", name=bytes([number] * 16)), 1.0)
    assert len(one.meetings.meetings) == MAX_UNASKED
    one.meetings.tick(1.0 + MEETING_S)
    assert not one.meetings.failures


def test_a_member_that_could_not_be_met_is_asked_again_later_and_later():
    swarm, one, other, _public = two_homes(max_tunnels=0)
    now, waits = MEET_S, []
    for _ in range(4):
        one.meetings.meetings.clear()
        swarm.tick(one, now)
        one.meetings.fail(other.id, now)
        retry_at = one.meetings.failures[other.id].retry_at
        waits.append(retry_at - now)
        assert one.meetings.begin(retry_at - 0.01) == []
        now = retry_at
    assert RETRY_S * 0.75 <= waits[0] <= RETRY_S * 1.25
    assert waits == sorted(waits)


def test_a_meeting_without_an_answer_ends():
    _swarm, one, other, _public = two_homes()
    one.meetings.tick(MEET_S)
    assert other.id in one.meetings.meetings
    one.meetings.tick(MEET_S + MEETING_S)
    assert other.id not in one.meetings.meetings


# -- members that lie ------------------------------------------------------------------------------------------------
VICTIM = Address("192.0.2.80", 80)


@pytest.mark.parametrize("lies", [("seen",), ("stated", "seen")], ids=["what it sees", "what a member stated"])
def test_a_contact_that_lies_about_a_member_makes_nobody_connect(lies):
    swarm, one, other, public = two_homes()

    def lie(node, effect):
        changed = dataclasses.replace(effect.message, **dict.fromkeys(lies, str(VICTIM)))
        return changed if node is public else effect.message

    swarm.tick(one, MEET_S, lie)
    for node in (one, other):
        node.meetings.tick(5.0)
        assert [effect for effect in node.done if "stated" in lies or isinstance(effect, Punch)] == []


def test_a_member_that_states_the_address_of_another_makes_nobody_connect():
    swarm, one, other, public = two_homes()
    one.sightings[public.id] = Sighting(CONTACT, VICTIM)
    swarm.tick(one, MEET_S)
    assert not any(isinstance(effect, Punch) for effect in other.done)


def test_a_contact_alone_cannot_make_a_member_state_the_address_of_another():
    swarm, one, _other, public = two_homes()
    liar = Node(4, Address("198.51.100.4", 7700))
    swarm.by_id[liar.id] = liar
    swarm.link(one, liar, told=VICTIM)
    assert one.meetings.outside(liar.id) is None
    assert one.meetings.outside(public.id) is None, "one of two lies, and it is not known which"
    honest = Node(5, Address("198.51.100.5", 7700))
    swarm.by_id[honest.id] = honest
    swarm.link(one, honest)
    assert one.meetings.outside(public.id) == one.outside
    assert one.meetings.outside(liar.id) is None


@pytest.mark.parametrize("stage", ["ask", "answer", "go", "relay"])
def test_nobody_speaks_for_another(stage):
    _swarm, one, other, public = two_homes()
    assert public.meetings.on_meet(one.id, Meet(other.id, one.id, stage, name=b"n" * 16), 1.0) == []
    assert not public.meetings.tunnels


def test_a_meeting_that_cannot_be_ends_the_link_that_asks_for_it():
    _, one, other, public = two_homes()
    for meet in (Meet(one.id, other.id, "none"), Meet(one.id, one.id, "ask")):
        with pytest.raises(ProtocolError):
            public.meetings.on_meet(one.id, meet, 1.0)


def test_a_member_that_asks_all_the_time_is_passed_on_at_a_bounded_rate():
    _, one, other, public = two_homes()
    ask = Meet(one.id, other.id, "ask")
    passed_on = [public.meetings.on_meet(one.id, ask, 1.0) for _ in range(1_000)]
    assert sum(map(bool, passed_on)) == MESSAGES_BURST


def test_a_contact_that_invents_askers_fills_no_memory():
    swarm, one, _other, public = two_homes()
    strangers = [Node(number) for number in range(10, 40)]
    for stranger in strangers:
        one.knows(stranger)
        swarm.by_id[stranger.id] = stranger
        swarm.link(stranger, public)
        ask = stranger.meetings.statement("ask", one.id, public.id)
        one.meetings.on_meet(public.id, dataclasses.replace(ask, seen=str(stranger.outside)), 1.0)
    assert len(one.meetings.meetings) == MAX_MEETINGS

"""Whole peers in a small swarm: how they start, join, learn whether others can dial them, and leave."""

import random

import pytest

from gossip.config import Config
from gossip.discovery.seeds import Bootstrap
from gossip.effects import Dial, MemberState, Send, TryDial
from gossip.exchange.session import LocalModel
from gossip.ids import MemberRecord
from gossip.membership.protocol import Membership
from gossip.peer import Peer
from gossip.state_transfer.joining import Phase
from gossip.wire.messages import Abort, Accept, Busy, Commit, Fetch, Offer, Outcome, Reach, Refuse, Settled
from gossip.wire.records import trusting, unsigned
from tests.harness.configs import tuned
from tests.harness.world import ELEMENTS, World, address_of, peer_id

G1, G2 = b"1" * 16, b"2" * 16


# -- beginning -------------------------------------------------------------------------------------------------------
def test_a_first_node_without_seeds_is_ready_at_once():
    swarm = World()
    node = swarm.start()
    assert node.peer.view.ready
    assert node.kinds == ["started"]
    swarm.run(1.5)
    assert node.peer.run_choice.is_alone
    assert node.kinds == ["started"], "a first node that nobody has joined yet is in order"
    swarm.run(swarm.config.join_timeout_s)
    assert node.kinds == ["started", "alone"]
    swarm.start(0)
    swarm.run(10.0)
    assert node.kinds == ["started", "alone", "together"]


def test_a_newcomer_takes_part_in_nothing_before_it_has_the_weights():
    swarm = World(1, config=tuned(chunk_elements=1024))
    swarm.network.chunk_s = 1.0
    first, newcomer = swarm.swarm(2)
    swarm.run(5.0)
    assert newcomer.peer.joining.phase is Phase.COLLECTING
    assert (newcomer.steps, newcomer.mixes, first.mixes) == (0, [], [])
    offer = Offer(5, "f", newcomer.run_id, 0.0, 0.5, "fp32")
    assert newcomer.peer.receive(first.id, offer, swarm.now) == [Send(first.id, Refuse(5, "run_id"))]
    assert newcomer.peer.receive(first.id, Fetch(6, (), 0, 0), swarm.now) == [Send(first.id, Refuse(6, "not-ready"))]


@pytest.mark.parametrize("seed", range(5))
def test_of_members_who_all_wait_for_each_other_the_smallest_id_begins_and_the_others_join(seed):
    swarm = World(seed)
    nodes = [swarm.start((number + 1) % 4, (number + 2) % 4) for number in range(4)]
    took_s = swarm.until(swarm.agreed, 15.0)
    assert took_s < swarm.config.join_timeout_s
    assert nodes[0].kinds[0] == "started"
    assert "whose id is smallest" in nodes[0].notices[0][2]
    assert [node.kinds[0] for node in nodes[1:]] == ["joined"] * 3


def test_a_restarted_node_dials_its_address_book():
    book = [MemberRecord(peer_id(n), b"", 1, address=address_of(n), run_id=G1) for n in range(5, 8)]
    me = MemberRecord(peer_id(9), b"", 1, address=address_of(9), run_id=G2)
    rng = random.Random(1)
    members = Membership(me, sign=unsigned, verify=trusting, config=Config(), rng=rng, now=0.0)
    peer = Peer(members, Config(), LocalModel("f", 10), rng=rng, bootstrap=Bootstrap(book=tuple(book)), now=0.0)
    assert {effect.expect for effect in peer.start(0.0) if isinstance(effect, Dial)} == {r.id for r in book}
    assert not peer.view.ready


def test_alone_is_said_when_everybody_is_gone_and_together_when_somebody_is_back():
    swarm = World(4)
    nodes = swarm.swarm(3)
    swarm.until(swarm.agreed, 10.0)
    swarm.network.partition(lambda number: number == 0)
    swarm.until(lambda: nodes[0].kinds[-1] == "alone", 60.0)
    swarm.network.partition(None)
    swarm.until(lambda: nodes[0].kinds[-1] == "together", 120.0)
    assert nodes[0].kinds == ["started", "alone", "together"]


# -- reach -----------------------------------------------------------------------------------------------------------
def test_a_node_that_nobody_can_dial_says_so_and_keeps_links_to_homes():
    swarm = World(8)
    nodes = swarm.swarm(4)
    hidden = swarm.start(0, dialable=False)
    swarm.run(60.0)
    me = hidden.peer.membership.me
    assert me.address is None
    assert hidden.kinds.count("unreachable") == 1
    assert "--advertise" in next(text for _, kind, text in hidden.notices if kind == "unreachable")
    assert 1 <= len(me.homes) <= 3
    assert set(me.homes) <= set(hidden.links)
    assert nodes[2].peer.membership.record(hidden.id).homes == me.homes
    assert hidden.mixes
    assert all(node.peer.membership.me.address is not None for node in nodes)


def test_a_home_that_dies_is_replaced():
    swarm = World(8)
    swarm.swarm(5)
    hidden = swarm.start(0, dialable=False)
    swarm.run(60.0)
    home = swarm.by_id[hidden.peer.membership.me.homes[0]]
    home.crash()
    swarm.run(20.0)
    assert home.id not in hidden.peer.membership.me.homes
    assert hidden.peer.membership.me.homes


def test_a_member_has_us_dial_its_own_address_alone_and_not_often():
    swarm = World(8)
    a, b = swarm.swarm(2)
    swarm.run(30.0)
    assert a.peer.receive(b.id, Reach(), swarm.now) == [TryDial(b.id, address_of(1))]
    assert a.peer.receive(b.id, Reach(), swarm.now + 1.0) == []
    assert a.peer.receive(b.id, Reach(), swarm.now + 10.0) == [TryDial(b.id, address_of(1))]


# -- numbers that are taken ------------------------------------------------------------------------------------------
def test_a_session_number_in_use_is_not_taken_by_anything_else():
    swarm = World(15, config=tuned(chunk_elements=1024))
    swarm.network.chunk_s = 1.0
    nodes = swarm.swarm(3)
    swarm.until(swarm.agreed, 60.0)
    newcomer = swarm.start(0)
    swarm.until(lambda: bool(newcomer.peer.joining.pieces), 10.0)
    session, piece = next(iter(newcomer.peer.joining.pieces.items()))
    donor = swarm.by_id[piece.donor]
    for message in (Offer(session, "f", donor.run_id, 0.0, 0.5, "fp32"), Fetch(session, (), 0, 10)):
        for one, other in ((newcomer, donor), (donor, newcomer)):
            assert one.peer.receive(other.id, message, swarm.now) == [Send(other.id, Busy(session))]
    assert session in newcomer.peer.joining.pieces
    assert session in donor.peer.donating.table
    assert nodes[0].peer.view.ready


# -- leaving ---------------------------------------------------------------------------------------------------------
def test_one_that_leaves_says_so_and_takes_part_in_nothing_more():
    swarm = World(16)
    nodes = swarm.swarm(4)
    swarm.until(swarm.agreed, 10.0)
    swarm.run(10.0)
    leaver = nodes[2]
    leaver.perform(leaver.peer.leave(swarm.now))
    leaver.stepping = False
    swarm.run(2.0)
    assert {node.peer.membership.state(leaver.id) for node in nodes if node is not leaver} == {MemberState.LEFT}
    assert leaver.peer.deadline == float("inf")
    assert leaver.peer.tick(swarm.now) == []
    offer = Offer(5, "f", leaver.run_id, 0.0, 0.5, "fp32")
    assert leaver.peer.receive(nodes[0].id, offer, swarm.now) == [Send(nodes[0].id, Busy(5))]
    assert leaver.peer.receive(nodes[0].id, Fetch(6, (), 0, 10), swarm.now) == [Send(nodes[0].id, Busy(6))]
    left_at = swarm.now
    swarm.run(20.0)
    assert all(partner != leaver.id for node in nodes for at, _, partner in node.mixes if at > left_at)
    assert leaver.peer.leave(swarm.now) == []


def test_one_that_left_still_says_what_it_committed():
    swarm = World(17)
    a, b = swarm.swarm(2)
    swarm.until(lambda: bool(a.mixes), 30.0)
    _, session, partner = a.mixes[0]
    a.peer.leave(swarm.now)
    assert a.peer.receive(partner, Outcome(session), swarm.now) == [Send(partner, Settled(session, True))]
    assert b.id == partner


def test_every_message_of_an_exchange_that_nobody_knows_is_harmless():
    swarm = World(18)
    a, b = swarm.swarm(2)
    swarm.run(20.0)
    swarm.until(swarm.quiet, 10.0)
    for message in (Commit(99), Abort(99, "x"), Busy(99), Refuse(99, "x"), Settled(99, True)):
        assert a.peer.receive(b.id, message, swarm.now) == []
    assert a.peer.receive(b.id, Accept(99, 0.0, 0.5, "fp32"), swarm.now) == [Send(b.id, Abort(99, "late"))]
    assert a.peer.receive(b.id, Outcome(99), swarm.now) == [Send(b.id, Settled(99, False))]
    assert a.peer.on_snapshotted(99, swarm.now) == a.peer.on_streamed(99, 1.0, 1.0, swarm.now) == []
    assert a.peer.on_failed(99, "broken", swarm.now) == a.peer.on_collected(99, ELEMENTS, swarm.now) == []
    assert a.peer.on_dial_failed(None, swarm.now) == []


def test_a_liar_that_says_nobody_can_dial_us_withdraws_an_address_for_minutes_and_not_for_good():
    swarm = World(1)
    first, late = (swarm.start(*seeds, value=len(seeds), step_s=1.0) for seeds in ((), (0,)))
    first.dialable = late.dialable = True
    reached = first.peer.on_dial_tried
    first.peer.on_dial_tried = lambda asker, ok, now: reached(asker, False, now)  # type: ignore[method-assign]
    swarm.until(lambda: late.peer.membership.me.address is None, 30.0)
    assert late.kinds.count("unreachable") == 1
    others = [swarm.start(0, value=2 + n, step_s=1.0) for n in range(3)]
    swarm.until(lambda: late.peer.membership.me.address is not None and late.peer.reach.verdict is True, 600.0)
    assert all(node.peer.reach.verdict in (True, None) for node in others)
    assert late.kinds.count("unreachable") == 1

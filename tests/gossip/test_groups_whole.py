"""Group means in a whole swarm: as a whole or not at all, whatever is lost and whoever dies."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from gossip.wire.messages import Begin, Commit, Invite, Joined, Message, Settled
from tests.gossip.group_harness import GroupSwarm, together
from tests.gossip.swarm_harness import Node


def first_groups(count: int, seconds: float = 1.5, seed: int = 0, **changes: object) -> GroupSwarm:
    swarm = together(count, seed, **changes)
    swarm.resume()
    swarm.run(seconds)
    return swarm


def test_a_group_takes_everybody_to_the_exact_mean() -> None:
    swarm = first_groups(4)
    swarm.finish()
    assert {node.value for node in swarm.nodes} == {Fraction(150)}
    assert any(len(mixed) == 4 for mixed in swarm.mixed.values())


@pytest.mark.parametrize("number", range(1, 25))
def test_a_lost_message_leaves_no_half_of_a_group(number: int) -> None:
    swarm = together(4, doubt_s=60.0)
    total, lost = swarm.total(), list[Message]()

    def fault(said: int, sender: Node, to: Node, message: Message) -> bool:
        if said == number:
            lost.append(message)
        return said == number

    swarm.fault = fault
    swarm.resume()
    swarm.run(8.0)  # more than an answer may take
    swarm.finish()
    assert lost
    assert swarm.halves() == []
    assert swarm.total() == total
    assert sum(len(mixed) for mixed in swarm.mixed.values()) > 4


def test_those_lost_messages_were_of_every_kind() -> None:
    swarm, kinds = together(4), list[type]()
    swarm.fault = lambda said, sender, to, message: bool(kinds.append(type(message)))
    swarm.resume()
    swarm.run(2.0)
    assert {Invite, Joined, Begin, Commit, Settled} <= set(kinds[:24])


@pytest.mark.parametrize("number", range(1, 25))
def test_a_lost_stream_fails_the_group_as_a_whole(number: int) -> None:
    swarm = together(4)
    total = swarm.total()
    swarm.lost_streams = {number}  # the first 12 are slices, the next 12 means
    swarm.resume()
    swarm.run(6.0)
    swarm.finish()
    assert swarm.halves() == []
    assert swarm.total() == total
    assert max(node.peer.exchanges.failures for node in swarm.nodes) > 0
    assert len(swarm.mixed) > 0


@pytest.mark.parametrize("victim", ["sender", "receiver"])
@pytest.mark.parametrize("number", range(1, 25, 2))
def test_a_member_that_dies_at_any_message_leaves_no_half_of_a_group(number: int, victim: str) -> None:
    swarm = together(5, doubt_s=60.0, group_size=5)
    dead: list[Node] = []

    def fault(said: int, sender: Node, to: Node, message: Message) -> bool:
        if said == number:
            dead.append(sender if victim == "sender" else to)
            swarm.later(0.0, swarm.kill, dead[0])
        return False

    swarm.fault = fault
    swarm.resume()
    swarm.run(3.0)
    swarm.finish()
    assert dead
    assert swarm.halves() == []
    # Its weights went with it; those of the others moved by what it has mixed with them, and by nothing else.
    survivors = sum(node.value + sum(node.shifts, Fraction()) for node in swarm.nodes if node.running)
    assert survivors + dead[0].value + sum(dead[0].shifts, Fraction()) - swarm.total() == 0
    assert any(node.mixes for node in swarm.nodes if node.running)


@pytest.mark.parametrize("seed", range(12))
def test_links_that_break_at_random_leave_no_half_of_a_group(seed: int) -> None:
    swarm, rng = together(6, seed, doubt_s=60.0), random.Random(seed)
    total = swarm.total()
    swarm.resume()
    for _ in range(60):
        swarm.run(0.1)
        swarm.unlink(*rng.sample(swarm.nodes, 2))
    swarm.finish()
    assert swarm.halves() == []
    assert swarm.total() == total
    assert sum(len(mixed) for mixed in swarm.mixed.values()) > 12


def test_a_member_that_hears_of_the_outcome_from_another_mixes_though_the_inviter_died() -> None:
    swarm = together(3, doubt_s=60.0)
    told: list[tuple[Node, Node]] = []

    def fault(said: int, sender: Node, to: Node, message: Message) -> bool:
        if not isinstance(message, Settled) or not message.committed:
            return False
        told.append((sender, to))
        if len(told) == 1:
            swarm.later(2 * swarm.latency(sender, to), swarm.kill, sender)
        return len(told) == 2  # the inviter tells one of two, and dies

    swarm.fault = fault
    swarm.resume()
    swarm.run(3.0)
    inviter, (first, second) = told[0][0], (to for _, to in told[:2])
    assert not inviter.running
    session = next(iter(swarm.mixed))
    assert swarm.mixed[session] == {inviter.id, first.id, second.id}


def test_only_who_is_cut_off_longer_than_doubt_s_drops_a_group_alone() -> None:
    for doubt_s, halves in ((5.0, 1), (60.0, 0)):
        swarm = together(3, doubt_s=doubt_s)
        cut: list[Node] = []

        def fault(said: int, sender: Node, to: Node, message: Message, cut=cut, swarm=swarm) -> bool:
            if isinstance(message, Settled) and message.committed and not cut:
                cut.append(to)
                swarm.later(0.0, swarm.partition, lambda number, apart=to: int(number == apart.number))
                return True
            return False

        swarm.fault = fault
        swarm.resume()
        swarm.run(1.5)
        swarm.quiet()
        swarm.run(30.0)
        assert cut
        swarm.partition(None)
        swarm.fault = lambda said, sender, to, message: False
        for node in swarm.nodes:
            for other in swarm.nodes:
                if other is not node:
                    swarm.dial(node, other.peer.membership.me.address, other.id)
        swarm.run(5.0)
        assert len(swarm.halves()) == halves


def test_everybody_due_at_one_instant_mixes_and_nobody_starves() -> None:
    swarm = together(8, group_size=3)
    for node in swarm.nodes:
        node.peer.schedule.due_steps = 0
    swarm.resume()
    swarm.run(20.0)  # 200 steps, 25 mixes
    assert min(len(node.mixes) for node in swarm.nodes) > 10
    assert all(node.peer.exchanges.failures == 0 for node in swarm.nodes)


def test_invitations_that_cross_become_one_group_of_everybody() -> None:
    swarm = together(4, group_size=0)
    swarm.offer()
    swarm.run(1.5)
    first = next(iter(swarm.members))
    assert swarm.members[first] == swarm.mixed[first] == {node.id for node in swarm.nodes}
    assert swarm.halves() == []

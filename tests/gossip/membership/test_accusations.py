"""Accusations: who may make them, what false ones cost their author, and what one liar can do."""

import hashlib
import random

import pytest

from gossip.effects import MemberChanged, MemberState, Send
from gossip.ids import PeerId
from gossip.membership.accusations import (
    FORGIVEN_S,
    MAX_ACCUSERS,
    MAX_STRIKES,
    SILENCE_S,
    Accusers,
    accusation,
    is_signed,
)
from gossip.wire.messages import Gossip, Hint, Ping
from gossip.wire.records import trusting
from tests.gossip.membership.members import MemberWorld, acquainted, link, member, peer_id, sent, tick_until

ALIVE, SUSPECT, DEAD = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD
LIAR, OTHER = peer_id(90), peer_id(91)


def sign_of(number: int):
    """Return a sign function; any test can check its signatures, which are hashes with the member's id."""
    return lambda payload: hashlib.sha256(peer_id(number) + payload).digest()


def verify(public_key: bytes, payload: bytes, signature: bytes) -> bool:
    return signature == hashlib.sha256(public_key + payload).digest()


# -- whose they are ----------------------------------------------------------------------------------------------------
def test_what_one_member_signs_is_no_accusation_by_another_nor_of_another():
    hint = accusation(peer_id(1), 3, False, peer_id(2), sign_of(2))
    assert is_signed(hint, peer_id(2), verify)
    assert not is_signed(hint, peer_id(4), verify)
    for changed in (
        Hint(peer_id(5), 3, False, peer_id(2), hint.signature),
        Hint(peer_id(1), 4, False, peer_id(2), hint.signature),
        Hint(peer_id(1), 3, True, peer_id(2), hint.signature),
        Hint(peer_id(1), 3, False, peer_id(2)),
    ):
        assert not is_signed(changed, peer_id(2), verify)
        assert is_signed(changed, peer_id(2), trusting)  # a simulation trusts every signature


def test_nobody_accuses_in_the_name_of_another():
    def trusts_records(public_key: bytes, payload: bytes, signature: bytes) -> bool:
        return b"record" in payload or signature == b"signed"

    me = member(verify=trusts_records)
    link(me, 1, 2, 3)
    me.receive(peer_id(1), Gossip((Hint(peer_id(2), 1, False, peer_id(3), b"forged"),)), 1.0)
    assert me.state(peer_id(2)) is ALIVE
    me.receive(peer_id(1), Gossip((Hint(peer_id(2), 1, False, peer_id(3), b"signed"),)), 1.0)
    assert me.state(peer_id(2)) is SUSPECT


def test_an_accusation_is_told_on_as_its_author_signed_it():
    me = acquainted(3)
    said = Hint(peer_id(2), 1, False, peer_id(3), b"as it was")
    me.receive(peer_id(1), Gossip((said,)), 1.0)
    told = [effect.message for effect in tick_until(me, 5.0) if isinstance(effect, Send)]
    assert any(said in message.updates for message in told if isinstance(message, Gossip | Ping))


# -- what false ones cost ----------------------------------------------------------------------------------------------
def accuse(accusers: Accusers, by: PeerId, true: bool, now: float, met: bool = True) -> bool:
    if not accusers.may_accuse(by, met, now):
        return False
    accusers.open_accusation(by, now)
    accusers.close_accusation(by, met, true, now)
    return True


def test_who_is_refuted_three_times_in_a_row_is_not_heard_for_a_while_and_each_time_for_longer():
    accusers, now = Accusers(), 0.0
    for silence_s in (SILENCE_S, 2 * SILENCE_S, 4 * SILENCE_S):
        assert [accuse(accusers, LIAR, False, now) for _ in range(MAX_STRIKES + 1)] == [True] * MAX_STRIKES + [False]
        assert not accusers.may_accuse(LIAR, True, now + silence_s - 0.1)
        now += silence_s
    assert accuse(accusers, OTHER, False, now)


def test_who_was_right_is_heard_again_and_time_forgives():
    accusers = Accusers()
    for now in range(100):  # half of its accusations are right
        assert accuse(accusers, LIAR, now % 2 == 0, float(now))
    for _ in range(MAX_STRIKES):
        accuse(accusers, OTHER, False, 0.0)
    assert not accusers.may_accuse(OTHER, True, SILENCE_S - 1)
    for _ in range(MAX_STRIKES):
        assert accuse(accusers, OTHER, False, SILENCE_S + FORGIVEN_S)
    assert not accusers.may_accuse(OTHER, True, SILENCE_S + FORGIVEN_S)
    assert accusers.may_accuse(OTHER, True, 2 * SILENCE_S + FORGIVEN_S), "no longer than the first time"


def test_whose_latest_was_false_accuses_few_at_a_time():
    accusers = Accusers()
    accuse(accusers, LIAR, False, 0.0)
    for _ in range(MAX_STRIKES - 1):
        assert accusers.may_accuse(LIAR, True, 1.0)
        accusers.open_accusation(LIAR, 1.0)
    assert not accusers.may_accuse(LIAR, True, 1.0)


def test_those_whom_we_never_met_have_one_credit_between_them():
    accusers = Accusers()
    assert [accuse(accusers, peer_id(n), False, 1.0, met=False) for n in range(MAX_STRIKES + 1)] == [True] * 3 + [False]
    assert accuse(accusers, peer_id(50), False, 1.0)


@pytest.mark.parametrize("met", [True, False])
def test_the_table_of_accusers_is_bounded_and_keeps_silenced_ones(met):
    accusers = Accusers()
    for _ in range(MAX_STRIKES):
        accuse(accusers, LIAR, False, 1.0, met)
    for n in range(100, 100 + 2 * MAX_ACCUSERS):
        accuse(accusers, peer_id(n), True, 1.0)
        assert len(accusers) <= MAX_ACCUSERS
    assert not accusers.may_accuse(LIAR, met, 2.0)
    for n in range(100, 100 + MAX_ACCUSERS):
        for _ in range(MAX_STRIKES):
            accuse(accusers, peer_id(n), False, 2.0)
        assert len(accusers) <= MAX_ACCUSERS


def test_false_accusations_of_ourselves_are_forgiven_after_a_while():
    accusers = Accusers()
    for now in (0.0, 1.0, 2 * FORGIVEN_S):
        accusers.record_verdict(OTHER, True, False, now)
    assert accusers.may_accuse(OTHER, True, 2 * FORGIVEN_S)


# -- one liar ----------------------------------------------------------------------------------------------------------
def test_nobody_is_buried_by_the_word_of_one_while_it_answers_us():
    me = acquainted(3)
    link(me, 1, 2, 3)
    me.receive(peer_id(1), Gossip((Hint(peer_id(2), 1, True, peer_id(1)),)), 3.0)
    while me.deadline < 60.0:
        now = me.deadline
        for ping in sent(me.tick(now), Ping):
            me.on_proof_of_life(ping.to, now + 0.01)
        assert me.state(peer_id(2)) is SUSPECT, "until it refutes; its probes carry what is said"


def lie(world: MemberWorld, liar, honest, rng: random.Random) -> None:
    """Accuse a random other member to each honest one, and to the accused, five times a second each."""
    for node in honest:
        about = rng.choice([other for other in honest if other is not node])
        hint = Hint(about.id, about.membership.me.incarnation, True, liar.id)
        liar.send(node.id, Gossip((hint,)))
        liar.send(about.id, Gossip((hint,)))
    world.later(0.2, lie, world, liar, honest, rng)


@pytest.mark.parametrize("seed", range(3))
def test_a_liar_who_says_that_all_others_are_dead_costs_honest_pairs_less_than_a_hundredth_of_their_time(seed):
    world = MemberWorld(seed)
    nodes = world.swarm(5, run_s=10)
    *honest, liar = nodes
    for node in honest:
        liar.perform([Send(node.id, Ping(7, ()))])  # it holds a link to each
    world.run(1)
    lie(world, liar, honest, random.Random(seed))
    apart = looks = 0
    for _ in range(1_200):
        world.run(0.1)
        for node in honest:
            for other in honest:
                looks += other is not node
                apart += other is not node and node.membership.state(other.id) is not ALIVE
    assert apart / looks < 0.01, f"{apart / looks:.1%} of the time"
    assert all(change.after is not DEAD for node in honest for at, change in node.said(MemberChanged) if at > 11)

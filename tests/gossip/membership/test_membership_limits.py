"""The limits of what other members may cost: accusations, announcements, large records and a full table."""

import dataclasses

from gossip.config import Config
from gossip.effects import MemberChanged, MemberState
from gossip.ids import Address
from gossip.wire.frames import MAX_HEADER_BYTES, encode
from gossip.wire.messages import MAX_UPDATES, Digest, Gossip, Hint, Ping, Records
from tests.gossip.membership.members import acquainted, answer_pings, meet, member, peer_id, record_of, sent
from tests.harness.configs import tuned

ALIVE, SUSPECT, DEAD, LEFT = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT


def test_a_flood_of_accusations_from_one_peer_moves_few_and_all_recover():
    me = acquainted(1000)
    hints = [Hint(peer_id(n), 1, dead, peer_id(by)) for n in range(2, 1001) for dead in (False, True) for by in (1, 7)]
    for start in range(0, len(hints), MAX_UPDATES):
        me.receive(peer_id(1), Gossip(tuple(hints[start : start + MAX_UPDATES])), 1.0)
    accused = [peer_id(n) for n in range(1, 1001) if me.state(peer_id(n)) is not ALIVE]
    assert 0 < len(accused) <= 64
    me.receive(peer_id(1), Gossip(tuple(record_of(n, incarnation=2) for n in range(2, 1001))), 2.0)
    assert len(me.alive()) == 1000


def test_one_accuser_holds_a_bounded_number_of_accusations_whoever_tells_them():
    me = acquainted(200)
    for n in range(10, 200):
        me.receive(peer_id(n), Gossip((Hint(peer_id(n - 1), 1, False, peer_id(5)),)), 1.0)
    assert len([n for n in range(1, 201) if me.state(peer_id(n)) is SUSPECT]) == 32


def test_accusing_us_again_and_again_costs_five_incarnations_a_second():
    me = acquainted(3)
    for step in range(1000):
        now = 1.0 + step / 1000
        if me.deadline <= now:
            me.tick(now)
        me.receive(peer_id(1), Gossip((Hint(me.me.id, me.me.incarnation, True, peer_id(1)),)), now)
    assert 5 <= me.me.incarnation <= 7


def test_a_member_that_announces_itself_again_and_again_keeps_nobody_from_being_probed():
    me = acquainted(4)
    me.tick(0.0)
    for incarnation in range(2, 502):
        me.receive(peer_id(1), Gossip((record_of(1, incarnation=incarnation),)), 0.1)
    probed, now = set(), 0.1
    while now < 2 * 4 * Config().internal.probe_period_s:  # two rounds
        now = max(now, me.deadline)
        effects = me.tick(now)
        probed |= {ping.to for ping in sent(effects, Ping)}
        answer_pings(me, effects, now)
    assert probed == {peer_id(n) for n in range(1, 5)}


def test_a_table_of_the_largest_records_is_sent_in_frames_that_fit():
    """Newer versions may sign 256 bytes more, and host names have up to 255."""
    me = acquainted(1)
    far = Address(".".join(["h" * 63] * 3), 65_535)
    most = 2**53 - 1
    for n in range(2, 402):
        me.on_linked(peer_id(n), record_of(
            n, incarnation=most, sequence=most, address=far, homes=(peer_id(1),) * 3, steps=most,
            samples=most, progress=most, run_id=b"g" * 16, loss=0.1, signature=b"s" * 64, extra=(b"n" * 253,),
        ), 0.0)  # fmt: skip
    answers = sent(me.receive(peer_id(1), Digest(b""), 5.0), Records)
    assert sum(len(answer.message.records) for answer in answers) == 402
    for answer in answers:
        assert len(encode(answer.message)) <= MAX_HEADER_BYTES
    assert len(answers) < 8  # frames are nearly full


def test_the_table_stays_within_its_bound_and_forgets_no_departure():
    me = member(config=tuned(max_members=50))
    me.on_linked(peer_id(1), record_of(1), 0.0)
    for n in range(2, 400):  # each comes, works and leaves
        now = float(n)
        me.receive(peer_id(1), Gossip((record_of(n, samples=10),)), now)
        me.receive(peer_id(1), Gossip((record_of(n, samples=10, sequence=1, left=True),)), now)
        me.tick(now + 0.99)
    me.tick(402.0)
    assert len(me.members()) == 1 + 75  # the bound is 100; one member may fill three quarters of it
    me.receive(peer_id(1), Gossip((record_of(310, samples=10),)), 500.0)  # an old record of one long gone
    assert me.state(peer_id(310)) is not ALIVE
    me.receive(peer_id(1), Gossip((record_of(310, incarnation=2, samples=15),)), 500.0)
    assert me.state(peer_id(310)) is ALIVE


def test_the_living_are_never_evicted_for_newcomers():
    me = member(config=tuned(max_members=5))
    me.on_linked(peer_id(1), record_of(1), 0.0)
    for n in range(2, 100):
        me.receive(peer_id(1), Gossip((record_of(n),)), float(n))
    assert sorted(me.alive()) == sorted(peer_id(n) for n in range(1, 10))
    for n in range(2, 10):
        meet(me, n, 200.0)
    for n in range(100, 200):
        me.receive(peer_id(2), Gossip((record_of(n),)), float(n))
        me.on_linked(peer_id(n), record_of(n), float(n))
    assert sorted(me.alive()) == sorted(peer_id(n) for n in range(1, 10))


def test_new_members_are_taken_at_a_bounded_rate():
    me = member(config=tuned(max_members=100))
    me.on_linked(peer_id(1), record_of(1), 0.0)
    me.receive(peer_id(1), Records(tuple(record_of(n) for n in range(2, 130)), b""), 0.0)
    assert len(me.members()) == 101
    me.receive(peer_id(1), Records(tuple(record_of(n) for n in range(130, 200)), b""), 0.01)
    assert len(me.members()) == 111


def test_one_change_is_reported_once_and_by_its_last_state():
    me = acquainted(2)
    again = record_of(2, incarnation=2)
    effects = me.receive(peer_id(1), Records((again, dataclasses.replace(again, left=True)), b""), 1.0)
    assert [e for e in effects if isinstance(e, MemberChanged)] == [MemberChanged(peer_id(2), ALIVE, LEFT)]

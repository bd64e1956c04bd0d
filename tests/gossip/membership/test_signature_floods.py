"""Making a record is cheaper than checking it, so one link may ask for a bounded number of checks."""

import dataclasses

from gossip.wire.messages import MAX_RECORDS, MAX_UPDATES, Digest, Gossip, Records
from tests.gossip.membership.members import link, member, peer_id, record_of
from tests.harness.configs import tuned


class Counting:
    """A Verify that counts its calls, and refuses records that say so themselves."""

    def __init__(self):
        self.asked = 0

    def __call__(self, _key, _payload, signature):
        self.asked += 1
        return signature != b"forged"


def joined(count, verify):
    """Return member 0 with links to 1 and 2, which 1 told of the others."""
    me = member(verify=verify)
    link(me, 1, 2)
    records = tuple(record_of(n) for n in range(2, count + 1))
    for start in range(0, len(records), MAX_RECORDS):
        me.receive(peer_id(1), Records(records[start : start + MAX_RECORDS], b""), 0.0)
    return me


def flood(me, seconds):
    """Let member 2 send full frames of ever newer records, as many as a link may send; return the time afterwards."""
    now, per_s = 10.0, 2_000
    for frame in range(int(seconds * per_s)):
        now = 10.0 + frame / per_s
        news = tuple(record_of(n, sequence=1 + frame) for n in range(3, 3 + MAX_UPDATES))
        me.receive(peer_id(2), Gossip(news), now)
    return now


def test_one_link_has_a_bounded_number_of_signatures_checked_and_who_floods_is_named():
    verify = Counting()
    me = joined(40, verify)
    before = verify.asked
    flood(me, 2.0)  # 128,000 records, 17 s of checking
    assert 0 < verify.asked - before <= 1_200  # 0.16 s
    assert [(who, kind) for who, kind, _ in me.misbehaviour.rows()] == [(peer_id(2).hex(), "flood")]


def test_another_link_is_heard_meanwhile_and_the_flood_afterwards():
    me = joined(40, Counting())
    now = flood(me, 1.0)
    me.receive(peer_id(1), Gossip((record_of(3, incarnation=2),)), now)
    assert me.record(peer_id(3)).incarnation == 2
    me.receive(peer_id(2), Gossip((record_of(4, incarnation=2),)), now)
    assert me.record(peer_id(4)).incarnation == 1
    me.receive(peer_id(2), Gossip((record_of(4, incarnation=2),)), now + 1.0)
    assert me.record(peer_id(4)).incarnation == 2


def test_what_is_known_is_never_checked_again():
    verify = Counting()
    me = joined(40, verify)
    before = verify.asked
    known = tuple(dataclasses.replace(record_of(n)) for n in range(3, 3 + MAX_UPDATES))  # equal, not the same
    older = tuple(record_of(n, incarnation=0, sequence=9) for n in range(3, 3 + MAX_UPDATES))
    for turn in range(1_000):
        me.receive(peer_id(2), Gossip(known if turn % 2 else older), 1.0)
    assert verify.asked == before


def test_a_newcomer_learns_a_full_table_at_once():
    me = joined(10_000, Counting())
    assert len(me.members()) == 10_000


def test_what_we_ask_for_is_no_flood():
    """When a cut into two halves heals, each half is new to the other."""
    me = joined(3_000, Counting())
    me.receive(peer_id(2), Digest(b"\1" * 2048), 100.0)
    back = tuple(record_of(n, incarnation=2) for n in range(3, 3_001))
    for start in range(0, len(back), MAX_RECORDS):
        me.receive(peer_id(2), Records(back[start : start + MAX_RECORDS], b""), 100.1)
    assert all(me.record(peer_id(n)).incarnation == 2 for n in range(3, 3_001))


def test_the_allowance_of_a_whole_table_is_given_once_however_often_a_link_comes_anew():
    verify = Counting()
    me = member(verify=verify, config=tuned(max_members=2_000))
    for turn in range(20):
        now = turn / 10
        me.on_linked(peer_id(1), record_of(1, address=None), now)
        news = tuple(record_of(n, sequence=turn) for n in range(2, 2 + MAX_RECORDS))
        for _ in range(5):
            news = tuple(dataclasses.replace(one, sequence=one.sequence + 100) for one in news)
            me.receive(peer_id(1), Records(news, b""), now)
        me.on_unlinked(peer_id(1), now, orderly=True)
    assert verify.asked <= 4_400

"""Making a record is cheaper than checking it, so one link may ask for a bounded number of checks."""

from __future__ import annotations

import dataclasses

import pytest

from gossip.config import Config
from gossip.errors import RemoteError
from gossip.wire.messages import MAX_RECORDS, MAX_UPDATES, Digest, Gossip, Records
from tests.gossip.membership.members import member, peer_id, record_of
from tests.harness.configs import tuned


class Counting:
    """A Verify that counts its calls, and refuses records that say so themselves."""

    def __init__(self):
        self.asked = 0

    def __call__(self, _key, _payload, signature):
        self.asked += 1
        return signature != b"forged"


def joined(count, verify, now=0.0, **config):
    """Return member 0 with links to 1 and 2, which 1 told of the others."""
    me = member(verify=verify, config=Config(**config))
    me.on_linked(peer_id(1), record_of(1), now)
    me.on_linked(peer_id(2), record_of(2), now)
    records = tuple(record_of(n) for n in range(2, count + 1))
    for start in range(0, len(records), MAX_RECORDS):
        me.receive(peer_id(1), Records(records[start : start + MAX_RECORDS], b""), now)
    return me


def flood(me, by, seconds, start=10.0, per_s=2_000, sequence=1):
    """Send full frames of ever newer records, as many as a link may send; return the time afterwards."""
    now = start
    for frame in range(int(seconds * per_s)):
        now = start + frame / per_s
        news = tuple(record_of(n, sequence=sequence + frame) for n in range(3, 3 + MAX_UPDATES))
        me.receive(peer_id(by), Gossip(news), now)
    return now


@pytest.fixture(scope="module")
def flooded():
    """Return the peer that was flooded for two seconds, and the number of signatures that it checked meanwhile."""
    verify = Counting()
    me = joined(40, verify)
    before = verify.asked
    flood(me, 2, seconds=2.0)  # 128,000 records, 17 s of checking
    return me, verify.asked - before


def test_one_link_has_a_bounded_number_of_signatures_checked(flooded):
    _, asked = flooded
    assert 0 < asked <= 1_200  # 0.16 s


def test_another_link_is_heard_meanwhile_and_the_flood_afterwards():
    me = joined(40, Counting())
    now = flood(me, 2, seconds=1.0)
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


def test_who_floods_is_named(flooded):
    me, _ = flooded
    assert [(who, kind) for who, kind, _ in me.misbehaviour.rows()] == [(peer_id(2).hex(), "flood")]


def test_a_forged_record_among_those_that_are_checked_still_ends_the_link():
    me = joined(40, Counting())
    with pytest.raises(RemoteError, match="not signed"):
        me.receive(peer_id(2), Gossip((record_of(3, sequence=1, signature=b"forged"),)), 1.0)


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

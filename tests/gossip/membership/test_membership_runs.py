"""Which runs living members hold, counted as they change; and members that know each other from the start."""

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip.effects import MemberChanged, MemberState, Send
from gossip.errors import RemoteError
from gossip.ids import Address, MemberRecord
from gossip.membership.protocol import Membership
from gossip.membership.table import Table
from gossip.wire.messages import Gossip, Hint, Records
from gossip.wire.records import is_progress_only
from tests.gossip.membership.members import MemberWorld, acquainted, link, member, peer_id, record_of, sent, tick_until
from tests.harness.configs import tuned

ALIVE, SUSPECT, DEAD, LEFT = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT
RUNS = [bytes([number]) * 16 for number in range(3)]


# -- the table, against a recount ------------------------------------------------------------------------------------
def sharing(table: Table) -> list[MemberRecord]:
    """Return the records of living members that have weights and were contacted in this life."""
    entries = table.entries.values()
    return [one.record for one in entries if one.state is ALIVE and one.record.ready and one.was_contacted]


def recount(table: Table) -> set[bytes]:
    return {record.run_id for record in sharing(table)}


def digest_of(table: Table) -> bytes:
    """Return the digest as other versions compute it too: for each first byte of an id, the XOR of all hashes."""
    hashes = [0] * 256
    for peer, entry in table.entries.items():
        if not entry.is_restored:
            text = peer + entry.record.incarnation.to_bytes(8, "little") + entry.state.value.encode()
            hashes[peer[0]] ^= int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return b"".join(value.to_bytes(8, "little") for value in hashes)


claims = st.builds(
    record_of, st.integers(0, 6), incarnation=st.integers(1, 3), ready=st.booleans(), run_id=st.sampled_from(RUNS),
    samples=st.integers(0, 50),
)  # fmt: skip
held = st.tuples(claims, st.sampled_from([*MemberState]), st.booleans())
forgotten = st.integers(0, 10)  # seconds ago


@given(st.sampled_from([4, 100]), st.lists(held | held | forgotten, max_size=40))
@settings(max_examples=2 * settings.default.max_examples)
def test_whatever_is_added_placed_and_forgotten_runs_states_and_digest_are_those_of_a_recount(limit, operations):
    table = Table(record_of(0, run_id=RUNS[0]), limit, 0.0)  # a full one forgets the longest gone to make room
    for now, operation in enumerate(operations, 1):
        owners, changes = list(table.owners()), table.changes
        if isinstance(operation, int):
            table.drop_gone(now - operation)
        else:
            record, state, restored = operation
            entry = table.entries.get(record.id)
            if entry is None:
                table.add(record, state, now, is_restored=restored and state is DEAD)
            elif is_progress_only(record, entry.record):
                table.update_progress(entry, record, now)
            else:  # our own entry is always ALIVE
                table.update(entry, record, ALIVE if entry is table.mine else state, now)
        assert len(table.entries) <= limit
        assert sorted(table.runs()) == sorted(recount(table))
        assert table.owners() == sorted(record.id for record in sharing(table))
        if table.owners() != owners:
            assert table.changes > changes, "who shares the data would not look again"
        others = [one for one in table.entries.values() if one is not table.mine]
        for state, peers in ((ALIVE, table.alive), (SUSPECT, table.suspects), (DEAD, table.dead)):
            assert sorted(peers) == sorted(one.record.id for one in others if one.state is state)
        assert table.digest() == digest_of(table)
    # Each run goes with the last of its members: a wrong count would leave it there, or end it early.
    for entry in [one for one in table.entries.values() if one is not table.mine]:
        table.update(entry, entry.record, DEAD, 100.0)
        assert sorted(table.runs()) == sorted(recount(table))


# -- the whole membership, against its own list of members -----------------------------------------------------------
def update_of(number: int, rng: random.Random) -> MemberRecord | Hint:
    incarnation = rng.randint(1, 4)
    if rng.random() < 0.3:
        return Hint(peer_id(number), incarnation, rng.random() < 0.5, peer_id(rng.randint(1, 5)))
    return record_of(
        number, incarnation=incarnation, sequence=rng.randint(0, 5), ready=rng.random() < 0.6, left=rng.random() < 0.2,
        run_id=rng.choice(RUNS), samples=rng.randint(0, 50),
    )  # fmt: skip


@given(st.integers(0, 2**32))
@settings(max_examples=2 * settings.default.max_examples)
def test_whatever_is_heard_the_runs_are_those_of_the_living_and_ready(seed):
    rng = random.Random(seed)
    me, now = member(0, run_id=RUNS[0], ready=rng.random() < 0.5), 0.0
    for _ in range(40):
        what = rng.choice(["gossip", "gossip", "records", "wait", "mine", "link"])
        if what == "wait":
            until = now + rng.choice([0.5, 5.0, 40.0])
            while me.deadline <= until:
                now = max(now + 1e-6, me.deadline)
                me.tick(now)
            now = until
        elif what == "link":
            peer = rng.randint(1, 5)
            me.on_linked(peer_id(peer), record_of(peer, incarnation=5, run_id=rng.choice(RUNS)), now)
        elif what == "mine":
            me.update_me(now, ready=rng.random() < 0.7, run_id=rng.choice(RUNS))
        else:
            updates = tuple(update_of(number, rng) for number in rng.sample(range(1, 6), rng.randint(1, 4)))
            message = Gossip(updates) if what == "gossip" else Records(updates, b"")
            me.receive(peer_id(rng.randint(1, 5)), message, now)
        there = [record for record, state in me.members() if state is ALIVE and me.was_contacted(record.id)]
        assert sorted(me.contacted()) == sorted(record.id for record in there)
        living = [record for record in there if record.ready]
        living += [me.me] if me.me.ready else []
        assert sorted(me.runs()) == sorted({record.run_id for record in living})
        assert me.owners() == sorted(record.id for record in living)


@pytest.mark.parametrize("left", [False, True])
def test_of_two_records_of_one_member_in_one_message_the_newer_counts(left):
    me = member(0)
    me.receive(peer_id(3), Gossip((record_of(1, incarnation=4), record_of(1, incarnation=2, left=left))), 1.0)
    assert me.record(peer_id(1)).incarnation == 4
    assert me.state(peer_id(1)) is ALIVE


# -- meeting ---------------------------------------------------------------------------------------------------------
def met(number: int, count: int, now: float = 0.0) -> Membership:
    """Return member ``number`` of ``count`` members that all met at the beginning."""
    me = member(number, run_id=RUNS[0])
    me.add_founders([record_of(other, run_id=RUNS[0]) for other in range(count)], now)
    return me


def test_what_happens_after_a_meeting_is_told():
    me = met(0, 5)
    me.update_me(0.1, ready=False)
    assert any(me.me in one.message.updates for one in sent(tick_until(me, 1.0), Gossip))


def test_meeting_again_and_hearing_of_the_met_changes_nothing():
    me = met(0, 5)
    before = (me.members(), me.changes)
    me.add_founders([record_of(other, run_id=RUNS[0]) for other in range(5)], 1.0)
    me.receive(peer_id(1), Gossip(tuple(record_of(other, run_id=RUNS[0]) for other in range(5))), 1.0)
    assert (me.members(), me.changes) == before


def test_a_meeting_does_not_take_back_what_is_known_better():
    me = acquainted(2)
    me.receive(peer_id(1), Gossip((record_of(2, incarnation=5, left=True),)), 0.5)
    me.add_founders([record_of(1), record_of(2), record_of(3)], 1.0)
    assert me.state(peer_id(2)) is LEFT
    assert me.record(peer_id(2)).incarnation == 5
    assert me.state(peer_id(3)) is ALIVE


def test_a_meeting_refuses_a_record_that_its_owner_did_not_sign():
    me = member(0, verify=lambda key, message, signature: False)
    with pytest.raises(RemoteError):
        me.add_founders([record_of(1)], 0.0)


def test_a_swarm_that_met_agrees_at_once_and_has_nothing_to_tell_or_pull():
    world = MemberWorld(4)
    nodes = [world.start(number, run_id=RUNS[0]) for number in range(8)]
    for node in nodes:
        node.membership.add_founders([other.membership.me for other in nodes], 0.0)
        node.arm()
    assert world.agreed()
    for node in nodes:
        assert node.membership.owners() == sorted(world.by_id)
        assert node.membership.runs() == [RUNS[0]]
    world.run(100)  # three push-pull periods: equal digests are answered with nothing
    assert world.agreed()
    assert not [node for node in nodes if node.said(MemberChanged)]
    messages = [send.message for node in nodes for _, send in node.said(Send)]
    assert not [message for message in messages if isinstance(message, Records) or getattr(message, "updates", ())]
    assert len(messages) > 100
    nodes[3].power_off()
    world.until(lambda: world.states_of(nodes[3].id) == {DEAD}, 20)


def test_of_too_many_who_meet_the_table_takes_what_it_has_room_for():
    config = tuned(max_members=10)
    me = member(0, config)
    me.add_founders([record_of(number, address=Address("host", number)) for number in range(1000)], 0.0)
    assert len(me.members()) < 2 * config.internal.max_members
    assert set(me.runs()) == {b""}


def test_linked_members_hear_at_once_that_this_one_holds_a_run():
    me = acquainted(6, ready=False)
    link(me, 2, 3)
    me.update_me(1.0, ready=True, run_id=RUNS[1])
    assert me.deadline <= 1.0
    told = [one for one in sent(me.tick(1.0), Gossip) if me.me in one.message.updates]
    assert {peer_id(n) for n in (1, 2, 3)} <= {one.to for one in told}
    me.update_me(1.1, ready=True, steps=5)
    assert me.deadline > 1.1

"""The cost of membership, which members it probes, and how it tells its own record; and its cheap data structures."""

import dataclasses
import hashlib
import random

from gossip.config import Config
from gossip.effects import MemberChanged, MemberState, Notice, Send
from gossip.ids import Address
from gossip.membership.dissemination import Rumours, retransmits
from gossip.membership.table import Table
from gossip.wire.frames import MAX_HEADER_BYTES, encode
from gossip.wire.messages import MAX_UPDATES, Ack, Digest, Gossip, Hint, Nack, Ping, PingReq, Records
from tests.gossip.membership.members import MemberWorld, acquainted, meet, member, peer_id, record_of, sent
from tests.harness.configs import tuned

ALIVE, SUSPECT, DEAD, LEFT = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT


# -- limits -----------------------------------------------------------------------------------------------------------
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
        for send in sent(me.tick(now), Ping):
            probed.add(send.to)
            me.receive(send.to, Ack(send.message.seq, ()), now)
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


def test_an_update_is_told_a_bounded_number_of_times_newest_first():
    rumours = Rumours(0.5, 0.0)
    for n in range(40):
        rumours.put(record_of(n), 0.0)
    first = rumours.take(MAX_UPDATES, 1, 1000)
    assert [update.id for update in first] == [peer_id(n) for n in range(39, 7, -1)]
    rumours.put(record_of(99), 0.0)
    assert rumours.take(1, 1, 1000)[0].id == peer_id(99)
    told = 33
    while taken := rumours.take(MAX_UPDATES, 1, 1000):
        told += len(taken)
    assert told == 41 * retransmits(1000) == 41 * 16
    assert len(rumours) == 0


def test_rumours_are_bounded():
    rumours = Rumours(0.5, 0.0)
    for n in range(3000):
        rumours.put(record_of(n), 0.0)
    assert len(rumours) == 1024
    assert rumours.take(1, 1, 3000)[0].id == peer_id(2999)


# -- probes -----------------------------------------------------------------------------------------------------------
def test_a_probe_for_another_is_answered_by_ack_or_nack():
    me = acquainted(5)
    ping = sent(me.receive(peer_id(1), PingReq(77, peer_id(2), ()), 1.0), Ping)[0]
    assert ping.to == peer_id(2)
    effects = me.receive(peer_id(2), Ack(ping.message.seq, ()), 1.1)
    assert Send(peer_id(1), Ack(77, ())) in effects
    me.receive(peer_id(1), PingReq(78, peer_id(3), ()), 1.2)
    effects = me.on_dial_failed(peer_id(3), 1.3)
    assert Send(peer_id(1), Nack(78)) in effects
    assert me.state(peer_id(3)) is ALIVE  # another member asked, and draws its own conclusion
    assert me.receive(peer_id(1), PingReq(79, peer_id(4000), ()), 1.4) == [Send(peer_id(1), Nack(79))]
    me.receive(peer_id(1), PingReq(80, peer_id(4), ()), 1.5)
    nacks = []
    while not nacks:
        nacks = sent(me.tick(me.deadline), Nack)
    assert nacks == [Send(peer_id(1), Nack(80))]


def test_a_helper_that_cannot_reach_the_target_says_so_and_asks_nobody():
    me = acquainted(5)
    me.receive(peer_id(1), PingReq(77, peer_id(2), ()), 1.0)
    # It sends no PingReq, or one death would have all members ask all others.
    assert me.on_dial_failed(peer_id(2), 1.1) == [Send(peer_id(1), Nack(77))]
    assert me.state(peer_id(2)) is ALIVE


def test_nobody_is_suspected_while_one_helper_reaches_it():
    me = acquainted(5)
    asked = sent(me.on_dial_failed(peer_id(2), 1.0), PingReq)
    assert len(asked) == 3
    assert peer_id(2) not in {send.to for send in asked}
    me.receive(asked[0].to, Nack(asked[0].message.seq), 1.1)
    me.receive(asked[1].to, Nack(asked[1].message.seq), 1.1)
    me.receive(asked[2].to, Ack(asked[2].message.seq, ()), 1.1)
    me.receive(asked[0].to, Nack(asked[0].message.seq), 1.1)
    assert me.state(peer_id(2)) is ALIVE


def test_three_nacks_make_a_suspect_and_a_stranger_is_not_counted():
    me = acquainted(8)
    asked = sent(me.on_dial_failed(peer_id(2), 1.0), PingReq)
    helpers = {send.to for send in asked}
    stranger = next(peer_id(n) for n in range(3, 9) if peer_id(n) not in helpers)
    for teller in (stranger, asked[0].to, asked[1].to, asked[0].to):
        me.receive(teller, Nack(asked[0].message.seq), 1.1)
    assert me.state(peer_id(2)) is ALIVE
    effects = me.receive(asked[2].to, Nack(asked[0].message.seq), 1.1)
    assert effects == [MemberChanged(peer_id(2), ALIVE, SUSPECT)]


def test_a_finished_exchange_answers_a_probe():
    me = acquainted(2)
    me.on_unlinked(peer_id(1), 1.0)  # it probes the member at once
    me.on_proof_of_life(peer_id(1), 1.1)
    for _ in range(20):
        if me.deadline > 3.0:
            break
        me.tick(me.deadline)
    assert me.state(peer_id(1)) is ALIVE


def test_who_cannot_be_dialled_is_probed_by_its_homes_alone():
    world = MemberWorld(2)
    world.swarm(6)
    world.run(1)
    hidden = world.start(9, seed=0, address=None, homes=(peer_id(0),))
    world.run(120)
    assert world.agreed()
    assert hidden.membership.me.incarnation == 1  # no member accused it
    hidden.power_off()
    world.until(lambda: world.states_of(hidden.id) == {DEAD}, 40)


def test_who_cannot_be_dialled_and_names_no_homes_is_probed_by_everybody():
    """Before, it refuted a suspicion through another member, vanished with that one, and stayed ALIVE to us."""
    me = acquainted(2, address=None)
    me.on_unlinked(peer_id(1), 1.0)
    me.receive(peer_id(2), Gossip((record_of(1, address=None, incarnation=3),)), 1.5)
    me.on_unlinked(peer_id(2), 2.0)
    while me.state(peer_id(1)) is not DEAD and me.deadline < 120.0:
        me.tick(me.deadline)
    assert me.state(peer_id(1)) is DEAD


# -- our own record ---------------------------------------------------------------------------------------------------
def test_progress_is_signed_once_a_period_and_the_last_value_in_the_end():
    me = acquainted(1)
    sequence, period_s = me.me.sequence, Config().internal.progress_period_s
    for step in range(100):
        me.update_me(1.0 + 0.99 * period_s * step / 100, steps=step + 1, samples=8 * (step + 1))
        assert me.my_samples == 8 * (step + 1)
    assert me.me.sequence == sequence + 1
    me.tick(1.0 + period_s)
    assert (me.me.sequence, me.me.steps, me.me.samples) == (sequence + 2, 100, 800)


def test_everything_else_is_signed_at_once():
    me = acquainted(2)
    me.update_me(1.0, samples=8)
    changes = me.changes
    me.update_me(1.01, samples=16, ready=False)
    assert (me.me.ready, me.me.samples) == (False, 16)
    assert me.changes == changes + 1
    assert me.owners() == sorted([peer_id(1), peer_id(2)])
    sequence = me.me.sequence
    me.update_me(1.02, ready=False)
    assert me.me.sequence == sequence


def test_a_large_swarm_signs_its_progress_less_often():
    me = acquainted(100)
    me.update_me(1.0, samples=1)
    me.update_me(2.5, samples=2)
    assert me.me.samples == 1
    me.update_me(1.0 + 0.1 * 101, samples=3)
    assert me.me.samples == 1, "counts alone are in no hurry"
    me.update_me(1.0 + 0.1 * 101, samples=4, extra=(b"figures",))
    assert me.me.samples == 4
    me.update_me(1.0 + 0.1 * 101 + 0.02 * 1.25 * 101**2, samples=5)
    assert me.me.samples == 5


def test_a_record_of_an_earlier_life_is_continued_above():
    me = member()
    me.update_me(0.0, samples=7, steps=1)
    me.on_linked(peer_id(1), record_of(1), 0.5)
    me.receive(peer_id(1), Gossip((record_of(0, incarnation=40, samples=100, steps=10, left=True),)), 1.0)
    assert (me.me.incarnation, me.me.samples, me.me.steps, me.me.left) == (41, 107, 11, False)
    me.update_me(5.0, steps=2)
    assert me.me.steps == 12


def test_steps_of_an_earlier_life_are_not_lost_with_the_incarnation_known():
    me = acquainted(2, steps=100)
    effects = me.on_linked(peer_id(1), record_of(1, incarnation=2, steps=3), 1.0)
    assert sent(effects, Gossip)[0].message.updates == (record_of(1, steps=100),)
    again = member(1, incarnation=2)
    again.update_me(0.5, steps=3)
    again.receive(peer_id(0), sent(effects, Gossip)[0].message, 1.0)
    assert (again.me.incarnation, again.me.steps) == (3, 103)


def test_two_processes_of_one_key_do_not_add_each_others_counts_for_ever():
    a, b = member(0), member(0)
    a.update_me(0.0, steps=100)
    b.update_me(0.0, steps=101)
    notices = []
    for step in range(100):
        notices += a.receive(peer_id(1), Gossip((b.me,)), float(step))
        notices += b.receive(peer_id(1), Gossip((a.me,)), float(step))
    assert len([effect for effect in notices if isinstance(effect, Notice)]) == 2
    assert a.me.steps < 101 * 2**16


def test_one_change_is_reported_once_and_by_its_last_state():
    me = acquainted(2)
    again = record_of(2, incarnation=2)
    effects = me.receive(peer_id(1), Records((again, dataclasses.replace(again, left=True)), b""), 1.0)
    assert [e for e in effects if isinstance(e, MemberChanged)] == [MemberChanged(peer_id(2), ALIVE, LEFT)]


# -- the table
def test_the_table_agrees_with_a_slow_obvious_one():
    rng = random.Random(4)
    table = Table(record_of(0, samples=3), 40, 0.0)
    held = {peer_id(0): (record_of(0, samples=3), ALIVE)}
    for step in range(3000):
        n = rng.randrange(1, 30)
        run_id = bytes([rng.randrange(3)]) * 16
        record = record_of(n, samples=rng.randrange(100), ready=rng.random() < 0.5, run_id=run_id, incarnation=step)
        state = rng.choice(list(MemberState))
        entry = table.entries.get(record.id)
        if entry is None:
            table.add(record, state, float(step))
        elif rng.random() < 0.3:  # nothing but progress
            counts = {"sequence": entry.record.sequence + 1, "samples": record.samples}
            record, state = dataclasses.replace(entry.record, **counts), entry.state
            run_id = record.run_id
            table.update_progress(entry, record, float(step))
        else:
            table.update(entry, record, state, float(step))
        table.entries[record.id].accusations = (peer_id(0),)
        held[record.id] = (record, state)
    for state in MemberState:
        others = [peer for peer, (_, s) in held.items() if s is state and peer != peer_id(0)]
        assert sorted(table._by_state[state]) == sorted(others)
    assert table.owners() == sorted(p for p, (r, s) in held.items() if s is ALIVE and r.ready)
    assert sorted(table.runs()) == sorted({r.run_id for r, s in held.values() if s is ALIVE and r.ready})
    hashes = [0] * 256
    for peer, (record, state) in held.items():
        text = peer + record.incarnation.to_bytes(8, "little") + state.value.encode()
        hashes[peer[0]] ^= int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    assert table.digest() == b"".join(h.to_bytes(8, "little") for h in hashes)

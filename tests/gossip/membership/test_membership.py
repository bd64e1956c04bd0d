"""The guarantees of membership, in virtual time. A failing schedule names its seed."""

import dataclasses
import random

import pytest

from gossip.config import Config
from gossip.effects import Dial, MemberChanged, MemberState, Send
from gossip.errors import RemoteError
from gossip.membership.detector import suspicion_s
from gossip.wire.messages import MAX_RECORDS, Ack, Digest, Gossip, Hint, Ping, Records
from tests.gossip.membership.members import MemberWorld, acquainted, meet, member, peer_id, record_of, sent, tick_until
from tests.harness.marks import rest_is_slow
from tests.harness.world import address_of

ALIVE, SUSPECT, DEAD, LEFT = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT


# -- crashes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("count", "seed", "within_s"), [*((8, seed, 20) for seed in range(5)), (100, 0, 40)])
def test_a_machine_that_vanishes_is_dead_to_all_in_time(count, seed, within_s):
    world = MemberWorld(seed)
    nodes = world.swarm(count, run_s=20)
    nodes[seed].power_off()
    world.until(lambda: world.states_of(nodes[seed].id) == {DEAD}, within_s)
    assert world.agreed()


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_killed_process_is_out_of_the_sample_within_a_second(count):
    world = MemberWorld(1)
    nodes = world.swarm(count, run_s=20)
    assert world.agreed()
    nodes[1].crash()
    world.run(1)
    assert ALIVE not in world.states_of(nodes[1].id)
    assert all(nodes[1].id not in node.membership.owners() for node in world.running)
    world.run(5)
    assert world.states_of(nodes[1].id) == {DEAD}


def test_nobody_is_accused_for_ten_minutes_without_loss():
    world = MemberWorld(3)
    nodes = world.swarm(8)
    world.until(world.agreed, 10)
    world.run(600)
    for node in nodes:
        assert [change.after for _, change in node.said(MemberChanged)] == 7 * [ALIVE], "each is met, and stays"
    assert {node.membership.me.incarnation for node in nodes} == {1}


@pytest.mark.parametrize("waited", [0, 50], ids=["no message waited", "fifty messages waited"])
def test_a_process_that_was_stopped_accuses_nobody_by_the_time_it_slept(waited):
    me = acquainted(8)
    me.receive(peer_id(1), Gossip((Hint(peer_id(2), 1, False, peer_id(1)),)), 0.1)
    now = me.deadline
    while not sent(me.tick(now), Ping):  # it has a suspicion and a probe in progress ...
        now = me.deadline
    wakes = now + 30  # ... and wakes half a minute later
    effects = []
    for number in range(waited):  # in its sockets; the sleep counts once
        effects += me.receive(peer_id(1), Ping(number, ()), wakes + 0.001 * number)
    effects += me.tick(wakes + 0.1)
    effects += me.receive(peer_id(3), Gossip((Hint(peer_id(2), 1, False, peer_id(3)),)), wakes + 0.2)
    effects += tick_until(me, wakes + 0.4)
    assert not [effect for effect in effects if isinstance(effect, MemberChanged)]
    effects = tick_until(me, wakes + 40)  # its only accuser is asked first, and no member answers at all
    assert MemberChanged(peer_id(2), SUSPECT, DEAD) in effects, "the time in which it was awake counts"


# -- suspicion and refutation -----------------------------------------------------------------------------------------


def test_that_a_suspect_is_dead_is_told_without_frames_of_its_own():
    me, gossiped, pinged, is_dead = acquainted(4), [], [], False
    me.receive(peer_id(1), Gossip(tuple(Hint(peer_id(2), 1, False, peer_id(by)) for by in (1, 3))), 1.0)
    while me.deadline < 60.0:
        now = me.deadline
        effects = me.tick(now)
        for ping in sent(effects, Ping):
            me.receive(ping.to, Ack(ping.message.seq, ()), now)
            pinged += [hint for hint in ping.message.updates if isinstance(hint, Hint) and hint.dead]
        is_dead = is_dead or MemberChanged(peer_id(2), SUSPECT, DEAD) in effects
        gossiped += sent(effects, Gossip) if is_dead else []
    assert is_dead
    assert [hint.peer for hint in pinged] == 4 * [peer_id(2)], "as often as there is need, since the others bury it too"
    assert not gossiped


@pytest.mark.parametrize("incarnation", [0, 2, 3, 2**52])
def test_a_hint_about_another_incarnation_is_ignored(incarnation):
    me = acquainted(3)
    me.receive(peer_id(1), Gossip((Hint(peer_id(2), incarnation, True, peer_id(1)),)), 1.0)
    assert me.state(peer_id(2)) is ALIVE
    me.receive(peer_id(1), Gossip((Hint(me.me.id, incarnation, True, peer_id(1)),)), 1.0)
    assert me.me.incarnation == 1


def test_a_jump_of_over_a_thousand_incarnations_is_refused_of_hearsay_alone():
    me = acquainted(3)
    me.receive(peer_id(1), Gossip((record_of(2, incarnation=1002),)), 1.0)
    assert me.record(peer_id(2)).incarnation == 1
    me.receive(peer_id(1), Gossip((record_of(2, incarnation=1001),)), 1.0)
    assert me.record(peer_id(2)).incarnation == 1001
    me.receive(peer_id(2), Gossip((record_of(2, incarnation=9000),)), 1.0)
    assert me.record(peer_id(2)).incarnation == 9000
    me.on_linked(peer_id(3), record_of(3, incarnation=2**52), 1.0)
    assert me.record(peer_id(3)).incarnation == 2**52


def test_a_member_driven_thousands_of_incarnations_ahead_while_we_heard_nothing_of_it_comes_back():
    world = MemberWorld(2)
    nodes = world.swarm(4, run_s=20)
    world.network.partition(lambda number: number == 3)
    world.until(lambda: world.states_of(nodes[3].id) == {DEAD}, 60)
    now = world.now
    for step in range(2_000):  # it is accused on the other side of the cut, and refutes each time
        me = nodes[3].membership.me
        nodes[3].membership.receive(nodes[0].id, Gossip((Hint(me.id, me.incarnation, False, nodes[1].id),)), now + step)
    assert nodes[3].membership.me.incarnation > 1_500
    world.now += 2_000
    world.network.partition(None)
    world.until(world.agreed, 60)


def test_a_dead_hint_about_one_we_know_is_only_a_suspicion_and_reaches_it():
    me = acquainted(3)
    me.on_linked(peer_id(2), record_of(2), 1.0)
    effects = me.receive(peer_id(1), Gossip((Hint(peer_id(2), 1, True, peer_id(3)),)), 2.0)
    assert me.state(peer_id(2)) is SUSPECT
    assert [send.to for send in sent(effects, Gossip)] == [peer_id(2)]
    me.receive(peer_id(1), Gossip((Hint(peer_id(3), 1, True, peer_id(1)),)), 2.0)
    assert me.state(peer_id(3)) is SUSPECT


def test_a_dead_member_that_speaks_learns_what_is_said_of_it():
    me = acquainted(1)
    me.receive(peer_id(1), Gossip((record_of(2), Hint(peer_id(2), 1, True, peer_id(1)))), 1.0)
    effects = me.receive(peer_id(2), Gossip((record_of(2, sequence=1),)), 5.0)
    assert me.state(peer_id(2)) is DEAD
    assert [send.message.updates for send in sent(effects, Gossip)] == [(Hint(peer_id(2), 1, True, peer_id(1)),)]
    assert not sent(me.receive(peer_id(2), Gossip((record_of(2, sequence=2),)), 5.5), Gossip)  # once a second
    me.receive(peer_id(2), Gossip((record_of(2, incarnation=2),)), 5.6)
    assert me.state(peer_id(2)) is ALIVE


def test_a_ping_to_a_suspect_carries_the_suspicion():
    me = acquainted(2)
    me.receive(peer_id(1), Gossip((Hint(peer_id(2), 1, False, peer_id(1)),)), 0.1)
    pings = []
    while not pings:
        pings = [ping for ping in sent(me.tick(me.deadline), Ping) if ping.to == peer_id(2)]
    assert pings[0].message.updates[0] == Hint(peer_id(2), 1, False, peer_id(1))


def test_suspicion_shrinks_with_accusers_between_lifeguards_bounds():
    config = Config()
    times = [suspicion_s(config, 100, accusers) for accusers in (1, 2, 3, 4)]
    assert times[0] == pytest.approx(4 * 2 * 2.0)  # 4 max(1, log10 100) periods of 2 s
    assert times == sorted(times, reverse=True)
    assert times[3] == pytest.approx(times[0] / 3)
    assert suspicion_s(config, 2, 1) == pytest.approx(8 / 3)  # no other member could confirm


def test_a_leaver_is_known_to_have_left_within_3_s_and_never_dies():
    world = MemberWorld(5)
    nodes = world.swarm(30)
    world.until(world.agreed, 10)
    nodes[0].leave()
    world.run(3)
    assert world.states_of(nodes[0].id) == {LEFT}
    world.run(120)
    assert world.states_of(nodes[0].id) == {LEFT}
    changes = [c.after for n in nodes[1:] for _, c in n.said(MemberChanged) if c.peer == nodes[0].id]
    assert DEAD not in changes
    assert nodes[0].membership.deadline == float("inf")


# -- partitions and restarts ------------------------------------------------------------------------------------------
def test_a_restored_member_is_not_trusted_until_heard_of_and_told_to_nobody():
    me = member()
    me.restore([record_of(1), record_of(2)], 0.0)
    assert me.alive() == []
    assert me.state(peer_id(1)) is DEAD
    dials = [effect for effect in me.tick(0.0) if isinstance(effect, Dial)]
    assert {(dial.address, dial.expect) for dial in dials} == {(address_of(n), peer_id(n)) for n in (1, 2)}
    effects = me.on_linked(peer_id(3), record_of(3), 1.0)
    effects += me.receive(peer_id(3), Digest(b""), 1.1)
    assert {record.id for send in sent(effects, Records) for record in send.message.records} == {me.me.id, peer_id(3)}
    me.receive(peer_id(3), Records((record_of(1),), b""), 1.2)
    assert me.state(peer_id(1)) is ALIVE
    effects = me.on_linked(peer_id(2), record_of(2), 1.3)
    assert me.state(peer_id(2)) is ALIVE
    assert MemberChanged(peer_id(2), None, ALIVE) in effects


def test_the_book_has_the_living_first_and_keeps_those_who_left():
    me = acquainted(2)
    dead = (record_of(3), Hint(peer_id(3), 1, True, peer_id(1)), record_of(4))
    me.receive(peer_id(1), Gossip((record_of(2, left=True), *dead, record_of(5))), 5.0)
    for number in (3, 4):
        meet(me, number, 5.0)
    assert {record.id for record in me.book()[:2]} == {peer_id(1), peer_id(4)}
    assert {record.id for record in me.book()} == {peer_id(n) for n in (1, 2, 3, 4)}


# -- joining and push-pull --------------------------------------------------------------------------------------------
def test_a_table_of_a_thousand_arrives_over_one_link():
    world = MemberWorld(0)
    first = world.start(0)
    first.membership.on_linked(peer_id(1), record_of(1), 0.0)
    updates = tuple(record_of(n) for n in range(2, 1001))
    for start in range(0, len(updates), MAX_RECORDS):
        first.membership.receive(peer_id(1), Records(updates[start : start + MAX_RECORDS], b""), 0.0)
    newcomer = world.start(2000, seed=0)
    world.run(0.2)
    assert len(newcomer.membership.alive()) == 1001
    assert newcomer.id in first.membership.alive()


def test_a_push_pull_makes_two_tables_one_and_then_says_nothing():
    a, b = member(0), member(100)
    a.on_linked(peer_id(1), record_of(1), 0.0)
    b.on_linked(peer_id(101), record_of(101), 0.0)
    a.receive(peer_id(1), Records(tuple(record_of(n) for n in range(2, 90)), b""), 0.0)
    b.receive(peer_id(101), Records(tuple(record_of(n, left=n % 2 == 0) for n in range(102, 180)), b""), 0.0)

    def talk(effects_a, effects_b, now):
        frames = 0
        queue = [(a, b, e) for e in effects_a] + [(b, a, e) for e in effects_b]
        while queue:
            one, other, effect = queue.pop(0)
            if isinstance(effect, Send) and effect.to == other.me.id:
                frames += isinstance(effect.message, Records)
                queue += [(other, one, e) for e in other.receive(one.me.id, effect.message, now)]
        return frames

    assert talk(a.on_linked(b.me.id, b.me, 1.0), b.on_linked(a.me.id, a.me, 1.0), 1.0) > 0
    assert len(a.members()) == len(b.members())
    assert {*a.alive(), a.me.id} == {*b.alive(), b.me.id}
    digest = a._table.digest()
    assert digest == b._table.digest()
    assert talk([Send(b.me.id, Digest(digest))], [], 40.0) == 0


def test_a_want_is_answered_once_and_only_after_our_own_digest():
    me = acquainted(20)
    wanted = Records((), bytes(range(256)))
    me._table.entries[peer_id(2)].answer_due = False
    assert not sent(me.receive(peer_id(2), wanted, 1.0), Records)
    assert len(sent(me.receive(peer_id(1), wanted, 1.0), Records)) == 1  # it was asked when it linked
    assert not sent(me.receive(peer_id(1), wanted, 1.0), Records)


def test_one_digest_a_second_is_answered():
    me = acquainted(20)
    answers = [len(sent(me.receive(peer_id(2), Digest(b""), 1.0 + 0.1 * i), Records)) for i in range(11)]
    assert answers == [1, *[0] * 9, 1]


def test_a_digest_of_another_length_is_the_senders_fault():
    with pytest.raises(RemoteError):
        acquainted(2).receive(peer_id(1), Digest(b"12345678"), 1.0)


def test_a_forged_record_changes_nothing_of_its_message():
    def verify(_key, _payload, signature):
        return signature == b""

    me = member(verify=verify)
    me.on_linked(peer_id(1), record_of(1), 0.0)
    forged = dataclasses.replace(record_of(3), signature=b"forged")
    with pytest.raises(RemoteError):
        me.receive(peer_id(1), Gossip((record_of(2), forged)), 1.0)
    assert len(me.members()) == 1


# -- random schedules -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [*rest_is_slow(range(25), 12), 1026, 1266, 1382])  # the last three once failed
def test_views_converge_once_faults_stop(seed):
    """Kills, crashes, restarts, leaves, cuts and loss for a minute; invariants all along; one view after calm."""
    rng = random.Random(f"schedule {seed}")
    world = MemberWorld(seed, loss=rng.choice((0.0, 0.05, 0.2)))
    count = rng.randint(3, 10)
    nodes = world.swarm(count, run_s=5)
    highest = {node.id: node.membership.me.incarnation for node in nodes}
    samples = dict.fromkeys((node.id for node in nodes), 0)  # samples of the current life
    for _ in range(60):
        living = world.running
        node = rng.choice(list(world.by_id.values()))
        what = rng.choice(("crash", "power_off", "start", "start", "leave", "cut", "heal", "calm", "calm", "calm"))
        if what in ("crash", "power_off", "leave") and not node.gone and len(living) > 2:
            getattr(node, what)()
        elif what == "start" and node.gone:
            book = node.membership.book() if rng.random() < 0.5 else []
            world.start(node.number, [n for n in range(count) if n != node.number], book)
            samples[node.id] = 0
        elif what == "cut":
            sides = [rng.random() < 0.5 for _ in range(count)]
            world.network.partition(sides.__getitem__)
        elif what == "heal":
            world.network.partition(None)
        for node in world.running:
            samples[node.id] += 10
            node.membership.update_me(world.now, samples=samples[node.id], steps=samples[node.id] // 10)
            node.arm()
        world.run(1.0)
        for node in world.running:
            me = node.membership.me
            highest[me.id] = max(highest[me.id], me.incarnation)
        for node in world.running:
            for record, _ in node.membership.members():
                assert record.incarnation <= highest[record.id], f"incarnation not the owner's (seed {seed})"
    world.network.partition(None)
    world.network.loss = 0.0
    world.until(world.agreed, 400)
    world.until(lambda: len({node.membership._table.digest() for node in world.running}) == 1, 200)

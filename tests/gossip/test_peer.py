"""Whole peers in a small swarm: who begins, who joins, who merges, how often they mix, and how they part."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise
from statistics import mean

import pytest

from gossip.config import Config
from gossip.effects import Dial, MemberState, Notice, Send, Snapshot, TryDial
from gossip.ids import MemberRecord
from gossip.joining import Phase
from gossip.messages import Abort, Accept, Busy, Commit, Fetch, Offer, Outcome, Reach, Refuse, Settled
from gossip.runs import Run, outranks
from tests.gossip.swarm_harness import ELEMENTS, Swarm, address_of, peer_id

G1, G2, G3 = b"1" * 16, b"2" * 16, b"3" * 16


def sent(node, kind):
    return [(at, to, message) for at, to, message in node.sent if isinstance(message, kind)]


def two_runs(seed, left, right, apart_s=40.0, config=None, **how):
    """Two swarms of these sizes that could not see each other for a while; returns the swarm and both sides."""
    swarm = Swarm(seed, config=config)
    swarm.cut = lambda a, b: (a < left) != (b < left)
    nodes = [swarm.start(*([0] if number else []), **how) for number in range(left)]
    nodes += [swarm.start(*([left] if number > left else [0]), **how) for number in range(left, left + right)]
    swarm.run(apart_s)
    return swarm, nodes[:left], nodes[left:]


# -- beginning -------------------------------------------------------------------------------------------------------
def test_a_first_node_without_seeds_is_ready_at_once():
    swarm = Swarm()
    node = swarm.start()
    assert node.peer.ready
    assert node.kinds == ["started"]
    swarm.run(1.0)
    assert node.kinds == ["started", "alone"]
    assert node.peer.alone


def test_newcomers_take_the_weights_and_then_mix():
    swarm = Swarm(1)
    nodes = swarm.swarm(5)
    took_s = swarm.until(swarm.agreed, 10.0)
    assert took_s < 5.0
    assert [node.kinds for node in nodes[1:]] == [["joined"]] * 4
    assert all(node.value == nodes[0].value == 0 for node in nodes)
    assert {node.genesis for node in nodes} == {nodes[0].genesis}
    swarm.run(10.0)
    assert all(node.mixes for node in nodes)
    assert nodes[0].kinds == ["started", "alone", "together"]


def test_a_newcomer_takes_part_in_nothing_before_it_has_the_weights():
    swarm = Swarm(1, config=Config(chunk_elements=1024))
    swarm.chunk_s = 1.0
    first, newcomer = swarm.swarm(2)
    swarm.run(5.0)
    assert newcomer.peer.joining.phase is Phase.COLLECTING
    assert (newcomer.steps, newcomer.mixes, first.mixes) == (0, [], [])
    offer = Offer(5, "f", newcomer.genesis, 0.0, 0.5, "fp32", ())
    assert newcomer.peer.receive(first.id, offer, swarm.now) == [Send(first.id, Refuse(5, "genesis"))]
    assert newcomer.peer.receive(first.id, Fetch(6, (), 0, 0), swarm.now) == [Send(first.id, Refuse(6, "not-ready"))]


@pytest.mark.parametrize("seed", range(5))
def test_of_members_who_all_wait_for_each_other_the_smallest_id_begins_and_the_others_join(seed):
    swarm = Swarm(seed)
    nodes = [swarm.start((number + 1) % 4, (number + 2) % 4) for number in range(4)]
    took_s = swarm.until(swarm.agreed, 15.0)
    assert took_s < swarm.config.join_timeout_s
    assert nodes[0].kinds[0] == "started"
    assert "whose id is smallest" in nodes[0].notices[0][2]
    assert [node.kinds[0] for node in nodes[1:]] == ["joined"] * 3


def test_seeds_that_are_down_are_dialled_for_ever_and_training_begins_meanwhile():
    swarm = Swarm(2)
    swarm.cut = lambda a, b: True
    node = swarm.start(7)
    swarm.run(1_000.0)
    times = [at for at, _ in node.dials]
    gaps = [b - a for a, b in pairwise(times)]
    for number, gap in enumerate(gaps):
        backoff = min(60.0, 2.0**number)
        assert 0.75 * backoff <= gap <= 1.25 * backoff
    assert times[0] == 0.0
    assert times[-1] > 900.0
    assert node.kinds == ["started", "alone"]
    assert node.notices[0][0] == pytest.approx(swarm.config.join_timeout_s, abs=1.1)
    assert node.steps > 0


def test_a_restarted_node_dials_its_address_book():
    swarm = Swarm()
    first = swarm.start()
    book = [MemberRecord(peer_id(n), b"", 1, address=address_of(n), genesis=G1) for n in range(5, 8)]
    peer = type(first.peer)(
        MemberRecord(peer_id(9), b"", 1, address=address_of(9), genesis=G2), sign=lambda _: b"",
        verify=lambda *_: True, config=Config(), fingerprint="f", elements=10, rng=random.Random(1), book=book, now=0.0,
    )  # fmt: skip
    assert {effect.expect for effect in peer.start(0.0) if isinstance(effect, Dial)} == {r.id for r in book}
    assert not peer.ready


def test_alone_is_said_when_everybody_is_gone_and_together_when_somebody_is_back():
    swarm = Swarm(4)
    nodes = swarm.swarm(3)
    swarm.until(swarm.agreed, 10.0)
    swarm.partition(lambda number: number == 0)
    swarm.until(lambda: nodes[0].kinds[-1] == "alone", 60.0)
    swarm.partition(None)
    swarm.until(lambda: nodes[0].kinds[-1] == "together", 120.0)
    assert nodes[0].kinds == ["started", "alone", "together", "alone", "together"]


# -- runs ------------------------------------------------------------------------------------------------------------
def test_more_samples_outrank_fewer_and_of_equals_the_larger_genesis():
    assert outranks(Run(200, G1), Run(100, G2))
    assert not outranks(Run(100, G2), Run(200, G1))
    assert outranks(Run(100, G2), Run(100, G1))
    assert outranks(Run(1000, G2), Run(1010, G1))  # nearly equal
    assert not outranks(Run(1010, G1), Run(1000, G2))
    assert outranks(Run(0, G2), Run(0, G1))


@pytest.mark.parametrize(("left", "right"), [(1, 1), (3, 1), (1, 3), (4, 2)])
def test_when_two_runs_meet_the_one_with_fewer_samples_takes_the_others_weights(left, right):
    swarm, lefts, rights = two_runs(left, left, right)
    swarm.until(lambda: all(node.peer.ready for node in lefts + rights), 30.0)
    assert lefts[0].genesis != rights[0].genesis
    swarm.cut = lambda a, b: False
    slower, faster = (rights, lefts) if left >= right else (lefts, rights)  # the left began 20 s earlier
    genesis = faster[0].genesis
    swarm.until(swarm.agreed, 120.0)
    assert {node.genesis for node in swarm.nodes} == {genesis}
    for node in slower:
        assert [kind for kind in node.kinds if kind in ("merging", "merged")] == ["merging", "merged"]
    assert all("merging" not in node.kinds for node in faster)
    before = [len(node.mixes) for node in swarm.nodes]
    swarm.run(20.0)
    assert all(len(node.mixes) > count for node, count in zip(swarm.nodes, before, strict=True))


@pytest.mark.parametrize("samples", [0, 1000])
def test_of_two_runs_with_equal_samples_the_larger_genesis_stays(samples):
    swarm = Swarm(1)
    one, two = swarm.start(genesis=G1, base_samples=samples), swarm.start(genesis=G2, base_samples=samples)
    for node in (one, two):
        node.stepping = False
    swarm.perform(one, [Dial(address_of(1))])
    swarm.run(1.0)
    one.stepping = two.stepping = True
    swarm.until(swarm.agreed, 10.0)
    assert one.genesis == G2
    assert "merging" not in two.kinds


def test_of_two_runs_that_each_want_the_others_weights_one_gives_way():
    """Else they swap, and swap again."""
    swarm = Swarm(1)
    one, two = swarm.start(genesis=G1), swarm.start(genesis=G2)
    for node in (one, two):
        node.peer.runs.earlier_samples = 10**9  # by its own reckoning each is far behind
    swarm.perform(one, [Dial(address_of(1))])
    swarm.run(0.025)
    served = [a.peer.runs.should_serve(b.peer.membership.me) for a, b in ((one, two), (two, one))]
    assert served == [False, True]
    swarm.until(swarm.agreed, 30.0)
    assert one.genesis == G2
    assert "merged" not in two.kinds


@pytest.mark.parametrize("seed", range(50))
def test_runs_that_meet_in_any_way_become_one_and_stay_one(seed):
    """Two or three runs, of like or unlike pace, cut off from each other and healed at random; killed links between."""
    rng = random.Random(seed)
    config = Config(mix_every_steps=16, chunk_elements=1024, join_timeout_s=4.0)
    swarm = Swarm(seed, config=config, latency_s=rng.choice([0.005, 0.05, 0.2]))
    swarm.chunk_s = rng.choice([0.001, 0.3])
    groups = rng.choice([2, 3])
    swarm.cut = lambda a, b: a % groups != b % groups
    for number in range(rng.randrange(groups, 8)):
        seeds = [n for n in range(number) if n % groups == number % groups][:1] if number >= groups else []
        swarm.start(*seeds, step_s=rng.choice([0.2, 0.2, 0.3]))
    swarm.run(rng.choice([5.0, 15.0]))
    for _ in range(rng.randrange(3)):
        swarm.partition(lambda number: rng.randrange(2) if number else 0)
        for _ in range(4):
            a, b = rng.sample(swarm.nodes, 2)
            swarm.perform(a, [Dial(address_of(b.number))])
            swarm.run(rng.random() * 3)
    swarm.partition(None)
    for node in swarm.nodes[1:]:
        swarm.perform(node, [Dial(address_of(0))])
    swarm.until(swarm.agreed, 200.0)
    genesis = swarm.nodes[0].genesis
    merges = [node.kinds.count("merged") for node in swarm.nodes]
    assert max(merges) <= 8
    swarm.run(20.0)
    assert {node.genesis for node in swarm.nodes} == {genesis}
    assert [node.kinds.count("merged") for node in swarm.nodes] == merges


def test_halves_of_one_run_mix_again_after_a_partition():
    swarm = Swarm(5)
    nodes = swarm.swarm(6)
    swarm.until(swarm.agreed, 10.0)
    swarm.partition(lambda number: number % 2)
    swarm.run(20.0)
    cut_at = swarm.now

    def across(since, until):
        return [1 for node in nodes for at, _, to in node.mixes
                if since < at <= until and (node.number + swarm.by_id[to].number) % 2]  # fmt: skip

    assert not across(cut_at - 19.0, cut_at)
    swarm.partition(None)
    swarm.until(lambda: bool(across(cut_at, swarm.now)), 90.0)
    assert all("merging" not in node.kinds for node in nodes)


def test_a_checkpoint_with_more_behind_it_goes_on_and_the_others_merge_into_it():
    swarm = Swarm(6)
    first = swarm.start()
    swarm.run(20.0)
    resumed = swarm.start(0)
    swarm.perform(resumed, resumed.peer.resume(G3, 1_000_000, 50.0, swarm.now))
    swarm.until(swarm.agreed, 30.0)
    assert first.genesis == G3
    assert resumed.kinds[0] == "started"
    assert "merged" in first.kinds
    swarm.run(5.0)
    assert first.peer.membership.me.base_samples == 1_000_000
    assert first.peer.membership.swarm_samples >= 1_000_000


def test_a_checkpoint_with_less_behind_it_gives_way():
    swarm = Swarm(6)
    first = swarm.start()
    swarm.run(60.0)
    resumed = swarm.start(0)
    swarm.perform(resumed, resumed.peer.resume(G3, 100, 5.0, swarm.now))
    swarm.until(swarm.agreed, 30.0)
    assert first.genesis == resumed.genesis != G3


def test_samples_of_an_earlier_life_are_not_behind_weights_that_began_afresh():
    """Else a node that lost its checkpoint, and began alone, would wipe out the run that it had fed most of."""
    swarm = Swarm(7)
    reborn = swarm.start(samples=1_000_000, steps=1_000_000)
    swarm.run(20.0)
    assert reborn.peer.membership.my_samples > 1_000_000
    assert 100 <= reborn.peer.runs.ours().samples <= 300


def test_a_peer_about_to_take_other_weights_is_busy():
    swarm, lefts, rights = two_runs(1, 1, 1)
    left, right = lefts[0], rights[0]
    swarm.until(lambda: right.peer.ready, 30.0)
    swarm.cut = lambda a, b: False
    swarm.until(lambda: right.peer.joining.phase is Phase.COLLECTING, 60.0)
    right.stepping = False
    swarm.until(lambda: right.peer.joining.phase is Phase.ADOPTING, 60.0)
    offer = Offer(5, "f", right.genesis, 0.0, 0.5, "fp32", ())
    assert right.peer.receive(left.id, offer, swarm.now) == [Send(left.id, Busy(5))]
    assert right.peer.receive(left.id, Fetch(6, (), 0, 0), swarm.now) == [Send(left.id, Refuse(6, "joining"))]
    assert right.peer.joining.phase is Phase.ADOPTING


# -- reach -----------------------------------------------------------------------------------------------------------
def test_a_node_that_nobody_can_dial_says_so_and_keeps_links_to_homes():
    swarm = Swarm(8)
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
    swarm = Swarm(8)
    nodes = swarm.swarm(5)
    hidden = swarm.start(0, dialable=False)
    swarm.run(60.0)
    home = swarm.by_id[hidden.peer.membership.me.homes[0]]
    swarm.kill(home)
    swarm.run(20.0)
    assert home.id not in hidden.peer.membership.me.homes
    assert hidden.peer.membership.me.homes
    assert len([node for node in nodes if node.running]) == 4


def test_a_member_has_us_dial_its_own_address_alone_and_not_often():
    swarm = Swarm(8)
    a, b = swarm.swarm(2)
    swarm.run(30.0)
    assert a.peer.receive(b.id, Reach(), swarm.now) == [TryDial(b.id, address_of(1))]
    assert a.peer.receive(b.id, Reach(), swarm.now + 1.0) == []
    assert a.peer.receive(b.id, Reach(), swarm.now + 10.0) == [TryDial(b.id, address_of(1))]


# -- mixing ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("every", [4, 8, 32])
def test_nodes_finish_about_one_exchange_per_interval(every):
    """Down to where an exchange, which takes two or three step boundaries, fills the interval."""
    swarm = Swarm(9, config=Config(mix_every_steps=every), latency_s=0.001)
    swarm.stream_s = 0.001
    nodes = swarm.swarm(8, step_s=0.1)
    swarm.run(10.0)
    before = [(node.steps, len(node.mixes)) for node in nodes]
    swarm.run(100.0)
    rates = [
        (len(node.mixes) - mixes) * every / (node.steps - steps)
        for node, (steps, mixes) in zip(nodes, before, strict=True)
    ]
    assert mean(rates) == pytest.approx(1.0, abs=0.1)
    assert min(rates) > 0.7


def test_mixing_by_the_clock_needs_no_steps_to_count():
    swarm = Swarm(9, config=Config(mix_every_steps=None, mix_every_s=2.0))
    nodes = swarm.swarm(6)
    swarm.run(110.0)
    assert mean(len(node.mixes) for node in nodes) == pytest.approx(53, abs=5)


def test_of_steps_and_seconds_what_comes_first_counts():
    swarm = Swarm(9, config=Config(mix_every_steps=10_000, mix_every_s=2.0))
    nodes = swarm.swarm(4)
    swarm.run(60.0)
    assert min(len(node.mixes) for node in nodes) > 10


def test_partners_are_many():
    swarm = Swarm(10)
    nodes = swarm.swarm(6)
    swarm.run(100.0)
    assert all(len({partner for *_, partner in node.mixes}) == 5 for node in nodes)


def test_settling_mixes_until_it_is_told_to_stop():
    swarm = Swarm(11, config=Config(mix_every_steps=10_000))
    nodes = swarm.swarm(4, step_s=0.02)
    swarm.until(swarm.agreed, 10.0)
    for node in nodes:
        node.value = Fraction(1 + node.number)
        assert node.mixes == []
        swarm.perform(node, node.peer.settle(True, swarm.now))
    swarm.run(5.0)
    assert min(len(node.mixes) for node in nodes) > 10
    spread = max(node.value for node in nodes) - min(node.value for node in nodes)
    assert spread < Fraction(1, 1000)
    assert nodes[0].peer.agreement() < 1e-3
    for node in nodes:
        swarm.perform(node, node.peer.settle(False, swarm.now))
    swarm.run(1.0)
    counts = [len(node.mixes) for node in nodes]
    swarm.run(10.0)
    assert [len(node.mixes) for node in nodes] == counts


def test_a_node_whose_loop_stands_still_is_busy_and_the_others_mix_on():
    swarm = Swarm(12)
    nodes = swarm.swarm(4)
    swarm.until(swarm.agreed, 10.0)
    swarm.run(5.0)
    nodes[3].stepping = False
    swarm.run(3.0)
    counts = [len(node.mixes) for node in nodes]
    swarm.run(30.0)
    assert len(nodes[3].mixes) == counts[3]
    assert min(len(node.mixes) - count for node, count in zip(nodes[:3], counts, strict=False)) > 20
    assert sent(nodes[3], Busy)
    assert nodes[0].peer.membership.state(nodes[3].id) is MemberState.ALIVE


def test_a_partner_that_dies_costs_one_exchange_and_no_pause():
    swarm = Swarm(13)
    nodes = swarm.swarm(5)
    swarm.until(swarm.agreed, 10.0)
    swarm.run(10.0)
    swarm.kill(nodes[0])
    killed_at = swarm.now
    swarm.run(30.0)
    for node in nodes[1:]:
        times = [killed_at, *(at for at, *_ in node.mixes if at > killed_at), swarm.now]
        assert max(b - a for a, b in pairwise(times)) < 4.0  # of intervals of 0.8 s
        assert node.peer.exchanges.failures <= 3


def test_a_refused_vector_tells_nothing_of_how_far_apart_the_swarm_is():
    swarm = Swarm(14, config=Config(mix_every_steps=3))
    nodes = swarm.swarm(4)
    swarm.until(swarm.agreed, 10.0)
    nodes[1].value = Fraction(10**30)
    swarm.run(20.0)
    honest = [node for node in nodes if node is not nodes[1]]
    assert sum(node.peer.exchanges.refusals.total for node in nodes) > 0
    assert all(node.value == 0 for node in honest)
    assert all(node.peer.consensus_distance == 0.0 for node in honest)


# -- numbers that are taken ------------------------------------------------------------------------------------------
def test_a_session_number_in_use_is_not_taken_by_anything_else():
    swarm = Swarm(15, config=Config(chunk_elements=1024))
    swarm.chunk_s = 1.0
    nodes = swarm.swarm(3)
    swarm.until(swarm.agreed, 60.0)
    newcomer = swarm.start(0)
    swarm.until(lambda: bool(newcomer.peer.joining.pieces), 10.0)
    session, piece = next(iter(newcomer.peer.joining.pieces.items()))
    donor = swarm.by_id[piece.donor]
    for message in (Offer(session, "f", donor.genesis, 0.0, 0.5, "fp32", ()), Fetch(session, (), 0, 10)):
        for one, other in ((newcomer, donor), (donor, newcomer)):
            assert one.peer.receive(other.id, message, swarm.now) == [Send(other.id, Busy(session))]
    assert session in newcomer.peer.joining.pieces
    assert session in donor.peer.donating.table
    assert nodes[0].peer.ready


# -- leaving ---------------------------------------------------------------------------------------------------------
def test_one_that_leaves_says_so_and_takes_part_in_nothing_more():
    swarm = Swarm(16)
    nodes = swarm.swarm(4)
    swarm.until(swarm.agreed, 10.0)
    swarm.run(10.0)
    leaver = nodes[2]
    swarm.perform(leaver, leaver.peer.leave(swarm.now))
    leaver.stepping = False
    swarm.run(2.0)
    assert {node.peer.membership.state(leaver.id) for node in nodes if node is not leaver} == {MemberState.LEFT}
    assert leaver.peer.deadline == float("inf")
    assert leaver.peer.tick(swarm.now) == []
    offer = Offer(5, "f", leaver.genesis, 0.0, 0.5, "fp32", ())
    assert leaver.peer.receive(nodes[0].id, offer, swarm.now) == [Send(nodes[0].id, Busy(5))]
    assert leaver.peer.receive(nodes[0].id, Fetch(6, (), 0, 10), swarm.now) == [Send(nodes[0].id, Busy(6))]
    left_at = swarm.now
    swarm.run(20.0)
    assert all(partner != leaver.id for node in nodes for at, _, partner in node.mixes if at > left_at)
    assert leaver.peer.leave(swarm.now) == []


def test_one_that_left_still_says_what_it_committed():
    swarm = Swarm(17)
    a, b = swarm.swarm(2)
    swarm.until(lambda: bool(a.mixes), 30.0)
    _, session, partner = a.mixes[0]
    a.peer.leave(swarm.now)
    assert a.peer.receive(partner, Outcome(session), swarm.now) == [Send(partner, Settled(session, True))]
    assert b.id == partner


def test_every_message_of_an_exchange_that_nobody_knows_is_harmless():
    swarm = Swarm(18)
    a, b = swarm.swarm(2)
    swarm.run(20.0)
    swarm.until(swarm.quiet, 10.0)
    for message in (Commit(99), Abort(99, "x"), Busy(99), Refuse(99, "x"), Settled(99, True)):
        assert a.peer.receive(b.id, message, swarm.now) == []
    assert a.peer.receive(b.id, Accept(99, 0.0, 0.5, (), "fp32"), swarm.now) == [Send(b.id, Abort(99, "late"))]
    assert a.peer.receive(b.id, Outcome(99), swarm.now) == [Send(b.id, Settled(99, False))]
    assert a.peer.snapshotted(99, swarm.now) == a.peer.streamed(99, 1.0, 1.0, swarm.now) == []
    assert a.peer.failed(99, "broken", swarm.now) == a.peer.collected(99, ELEMENTS, swarm.now) == []
    assert a.peer.dial_failed(None, swarm.now) == []


def test_settling_begins_with_a_snapshot_where_there_is_a_partner_and_with_nothing_where_not():
    swarm = Swarm(19)
    alone = swarm.start()
    swarm.run(1.0)
    assert alone.peer.settle(True, swarm.now) == []
    other = swarm.start(0)
    swarm.until(lambda: other.peer.ready, 10.0)
    swarm.until(swarm.quiet, 10.0)
    effects = other.peer.settle(True, swarm.now)
    assert [type(effect) for effect in effects] == [Snapshot]
    assert not any(isinstance(effect, Notice) for effect in effects)

"""Whole peers in a small swarm: two runs that meet become one, with the weights of the larger."""

import random
from collections import deque
from dataclasses import replace

import pytest

from gossip.effects import Dial, Send
from gossip.state_transfer.joining import Phase
from gossip.state_transfer.runs import Run, outranks
from gossip.wire.messages import Busy, Fetch, Gossip, Offer, Refuse
from tests.harness.configs import tuned
from tests.harness.marks import rest_is_slow
from tests.harness.world import World, address_of, peer_id

G1, G2, G3 = b"1" * 16, b"2" * 16, b"3" * 16


def test_more_samples_outrank_fewer_and_of_equals_the_larger_genesis():
    assert outranks(Run(200, G1), Run(100, G2))
    assert not outranks(Run(100, G2), Run(200, G1))
    assert outranks(Run(100, G2), Run(100, G1))
    assert outranks(Run(1000, G2), Run(1010, G1))  # nearly equal
    assert not outranks(Run(1010, G1), Run(1000, G2))
    assert outranks(Run(0, G2), Run(0, G1))


def wanting():
    """Return two linked peers with a run each, each of which wants the other's weights."""
    swarm = World(1)
    one, two = swarm.start(run_id=G1), swarm.start(run_id=G2)
    one.peer.joining.consented_run_id, two.peer.joining.consented_run_id = G2, G1
    one.perform([Dial(address_of(1))])
    swarm.run(0.025)
    return swarm, one, two


def test_of_two_runs_that_each_want_the_others_weights_one_gives_way():
    """Otherwise they swap, and swap again."""
    swarm, one, two = wanting()
    served = [a.peer.run_choice.should_serve(b.peer.membership.me, swarm.now) for a, b in ((one, two), (two, one))]
    assert served == [False, True]
    swarm.until(swarm.agreed, 30.0)
    assert one.run_id == G2
    assert "merged" not in two.kinds


def test_a_node_serves_a_run_whose_weights_it_found_worse_and_leaves_alone():
    """It wants that run and cannot have it; while it refuses, that run's members ask it in vain once a second."""
    swarm, one, two = wanting()
    assert not one.peer.run_choice.should_serve(two.peer.membership.me, swarm.now)
    one.peer.joining.run_id = G2
    seconds = one.peer.joining.avoid_after_trial(swarm.now)
    assert one.peer.run_choice.should_serve(two.peer.membership.me, swarm.now)
    assert not one.peer.run_choice.should_serve(two.peer.membership.me, swarm.now + seconds)


@pytest.mark.parametrize("seed", rest_is_slow(range(50), 10))
def test_runs_that_meet_in_any_way_become_one_and_stay_one(seed):
    """Two or three runs, of like or unlike pace, cut off from each other and healed at random; killed links between."""
    rng = random.Random(seed)
    config = tuned(mix_every_steps=16, chunk_elements=1024, join_timeout_s=4.0)
    swarm = World(seed, config=config, latency_s=rng.choice([0.005, 0.05, 0.2]))
    swarm.network.chunk_s = rng.choice([0.001, 0.3])
    groups = rng.choice([2, 3])
    swarm.network.sides = lambda number: number % groups
    for number in range(rng.randrange(groups, 8)):
        seeds = [n for n in range(number) if n % groups == number % groups][:1] if number >= groups else []
        swarm.start(*seeds, step_s=rng.choice([0.2, 0.2, 0.3]))
    swarm.run(rng.choice([5.0, 15.0]))
    for _ in range(rng.randrange(3)):
        swarm.network.partition([0, *(rng.randrange(2) for _ in swarm.hosts[1:])].__getitem__)
        for _ in range(4):
            a, b = rng.sample(swarm.hosts, 2)
            a.perform([Dial(address_of(b.number))])
            swarm.run(rng.random() * 3)
    swarm.network.partition(None)
    for node in swarm.hosts[1:]:
        node.perform([Dial(address_of(0))])
    swarm.until(swarm.agreed, 200.0)
    run_id = swarm.hosts[0].run_id
    merges = [node.kinds.count("merged") for node in swarm.hosts]
    assert max(merges) <= 8
    swarm.run(20.0)
    assert {node.run_id for node in swarm.hosts} == {run_id}
    assert [node.kinds.count("merged") for node in swarm.hosts] == merges


def test_halves_of_one_run_mix_again_after_a_partition():
    swarm = World(5)
    nodes = swarm.swarm(6)
    swarm.until(swarm.agreed, 10.0)
    swarm.network.partition(lambda number: number % 2)
    swarm.run(20.0)
    cut_at = swarm.now

    def across(since, until):
        return [1 for node in nodes for at, _, to in node.mixes
                if since < at <= until and (node.number + swarm.by_id[to].number) % 2]  # fmt: skip

    assert not across(cut_at - 19.0, cut_at)
    swarm.network.partition(None)
    swarm.until(lambda: bool(across(cut_at, swarm.now)), 90.0)
    assert all("merging" not in node.kinds for node in nodes)


def beside_a_checkpoint(seconds, samples, version):
    """Let a trained node meet one that continues a checkpoint of the run G3; return both once they agree."""
    swarm = World(6)
    first = swarm.start()
    swarm.run(seconds)
    resumed = swarm.start(0)
    resumed.perform(resumed.peer.resume(G3, samples, version, swarm.now))
    swarm.until(swarm.agreed, 30.0)
    return swarm, first, resumed


def test_a_checkpoint_with_more_behind_it_goes_on_and_the_others_merge_into_it():
    _, first, resumed = beside_a_checkpoint(20.0, 1_000_000, 50.0)
    assert first.run_id == G3
    assert resumed.kinds[0] == "started"
    assert "merged" in first.kinds
    assert resumed.peer.local.progress.samples >= 1_000_000
    assert first.peer.local.progress.samples < 1_000_000, "what another run states ends no training of ours"


def test_a_checkpoint_with_less_behind_it_gives_way():
    _, first, resumed = beside_a_checkpoint(60.0, 100, 5.0)
    assert first.run_id == resumed.run_id != G3


@pytest.mark.parametrize(("bases", "older"), [((1_000, 5_000, 3_000), 2), ((5_000, 1_000, 3_000), 0)], ids=str)
def test_of_checkpoints_of_different_age_the_first_goes_on_and_who_loaded_a_newer_one_is_told(bases, older):
    """A number in a record is no reason for a member to give up its weights: a liar would state the largest."""
    swarm = World(8)
    nodes = []
    for number, base in enumerate(bases):
        nodes.append(swarm.start(*([0] if number else [])))
        nodes[-1].perform(nodes[-1].peer.resume(G3, base, 1.0, swarm.now))
    swarm.run(30.0)
    assert (
        max(node.peer.local.progress.samples for node in nodes)
        - min(node.peer.local.progress.samples for node in nodes)
        < 200
    )
    assert bases[0] < nodes[0].peer.local.progress.samples < bases[0] + 3 * sum(node.steps for node in nodes)
    told = [text for node in nodes for _, kind, text in node.notices if kind == "joined" and "older than" in text]
    assert len(told) == older
    assert all("start the one that loads it first" in text for text in told)


def test_samples_of_an_earlier_life_are_not_behind_weights_that_began_afresh():
    """Otherwise a node that lost its checkpoint and began alone would replace the run that it had trained most."""
    swarm = World(7)
    reborn = swarm.start(samples=1_000_000, steps=1_000_000)
    swarm.run(20.0)
    assert reborn.peer.membership.my_samples > 1_000_000
    assert 100 <= reborn.peer.run_choice.our_run().samples <= 300


def test_a_peer_about_to_take_other_weights_is_busy():
    swarm = World(1)
    swarm.network.sides = lambda number: number < 1
    left, right = swarm.start(), swarm.start(0)
    swarm.run(40.0)
    swarm.until(lambda: right.peer.view.ready, 30.0)
    swarm.network.sides = None
    swarm.until(lambda: right.peer.joining.phase is Phase.COLLECTING, 60.0)
    right.stepping = False
    swarm.until(lambda: right.peer.joining.phase is Phase.ADOPTING, 60.0)
    offer = Offer(5, "f", right.run_id, 0.0, 0.5, "fp32")
    assert right.peer.receive(left.id, offer, swarm.now) == [Send(left.id, Busy(5))]
    assert right.peer.receive(left.id, Fetch(6, (), 0, 0), swarm.now) == [Send(left.id, Refuse(6, "joining"))]
    assert right.peer.joining.phase is Phase.ADOPTING


@pytest.mark.parametrize("must_join", [False, True])
def test_the_smallest_id_does_not_say_that_all_wait_beside_a_member_that_gives_no_piece(must_join):
    swarm = World(5)
    smallest, giver = swarm.start(1), swarm.start()
    swarm.network.fault = lambda sender, to, message: isinstance(message, Fetch) and message.start < message.stop
    if must_join:
        smallest.peer.run_choice.must_join = True
    assert smallest.id < giver.id
    swarm.run(100.0)
    assert giver.peer.view.ready
    assert smallest.peer.view.ready is not must_join
    said = [text for _, kind, text in smallest.notices if kind == "started"]
    assert [text.partition(":")[0] for text in said] == ([] if must_join else ["No member gave its weights"])


def test_of_members_that_must_join_and_find_no_run_none_begins_one():
    swarm = World(6)
    nodes = [swarm.start(1), swarm.start(0)]
    for node in nodes:
        node.peer.run_choice.must_join = True
    swarm.run(60.0)
    assert not any(node.peer.view.ready for node in nodes)


# -- liars that name runs ----------------------------------------------------------------------------------------------
CLAIMED_RUNS = 66  # Two more than a node remembers, once.


def remembered(peer, run_ids):
    """Return those of these runs that a peer or any of its parts still holds."""
    found, seen, left = set(), set(), [peer]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, bytes):
            found |= {one} & run_ids
        elif isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list | tuple | set | frozenset | deque):
            left += one
        elif type(one).__module__.startswith("gossip."):
            names = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
            left += [getattr(one, name, None) for name in names]
            left += vars(one).values() if hasattr(one, "__dict__") else ()
    return found


@pytest.mark.parametrize("claimant", ["told of", "linked"])
def test_a_member_of_one_huge_run_after_another_ends_nobody_and_fills_no_table(claimant):
    swarm, rng = World(3), random.Random(3)
    first, second, liar = swarm.swarm(3)
    honest = (first, second)
    swarm.until(swarm.agreed, 30.0)
    swarm.run(10.0)
    run_id, mine = first.run_id, liar.peer.membership.me
    if claimant == "told of":
        mine = replace(mine, id=peer_id(20), address=address_of(20))
    claimed, believed = set(), 0
    for _ in range(3):
        for _ in range(CLAIMED_RUNS):
            known = [node.peer.membership.record(mine.id) or mine for node in honest]
            newest = max(known, key=lambda record: (record.incarnation, record.sequence))
            claims = {"run_id": rng.randbytes(16), "samples": 2**50, "progress": 2**50, "ready": True}
            claim = replace(newest, sequence=newest.sequence + 1, **claims)
            claimed.add(claim.run_id)
            for node in honest:
                node.perform(node.peer.receive(liar.id, Gossip((claim,)), swarm.now))
                believed += node.peer.membership.record(mine.id) == claim
            swarm.run(0.05)
        for settles in (True, False):
            for node in honest:
                node.perform(node.peer.settle(settles, swarm.now))
            swarm.run(5.0)
    assert believed == 2 * len(claimed) == 2 * 3 * CLAIMED_RUNS
    assert all(len(remembered(node.peer, claimed)) < CLAIMED_RUNS for node in honest)
    assert {node.run_id for node in honest} == {run_id}
    assert all(node.peer.local.progress.samples < 2 * 3 * node.steps for node in honest)
    before = [len(node.mixes) for node in honest]
    swarm.run(20.0)
    assert all(len(node.mixes) > count for node, count in zip(honest, before, strict=True))

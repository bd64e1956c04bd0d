"""Whole peers in a small swarm: how often they mix, with which partners, and the cost of a silent one."""

from fractions import Fraction
from itertools import pairwise
from statistics import mean

import pytest

from gossip.config import Config
from gossip.effects import MemberState, Send
from gossip.wire.messages import Busy
from tests.harness.world import World


@pytest.mark.parametrize(("every", "by_steps"), [(4, True), (8, True), (32, True), (20, False)])
def test_nodes_finish_about_one_exchange_per_interval(every, by_steps):
    """An exchange takes two or three step boundaries, which nearly fill the shortest interval here."""
    schedule = {"mix_every_steps": every} if by_steps else {"mix_every_steps": None, "mix_every_s": 0.1 * every}
    swarm = World(9, config=Config(**schedule), latency_s=0.001)
    swarm.network.stream_s = 0.001
    nodes = swarm.swarm(8, step_s=0.1)
    swarm.run(10.0)
    before = [(node.steps, len(node.mixes)) for node in nodes]
    swarm.run(max(24.0, 3.2 * every))  # 60 or 32 intervals
    rates = [
        (len(node.mixes) - mixes) * every / (node.steps - steps)
        for node, (steps, mixes) in zip(nodes, before, strict=True)
    ]
    assert mean(rates) == pytest.approx(1.0, abs=0.1)
    assert min(rates) > 0.7


def test_no_snapshot_is_taken_along_where_there_was_nobody_to_mix_with():
    swarm = World(10)
    alone = swarm.start()
    swarm.run(20.0)
    assert alone.peer.view.ready
    assert alone.peer.initiator.mix_at == float("inf")
    swarm.start(0)
    swarm.until(lambda: alone.mixes, 20.0)
    swarm.until(lambda: alone.peer.initiator.mix_at < swarm.now + 100.0, 1.0)
    swarm.run(5.0)
    assert not alone.peer.initiator.is_lonely, "a partner that is busy with the mix under way is somebody"
    swarm.until(lambda: alone.peer.initiator.mix_at < swarm.now + 100.0, 1.0)


def test_settling_mixes_until_it_is_told_to_stop():
    swarm = World(11, config=Config(mix_every_steps=10_000))
    nodes = swarm.swarm(4, step_s=0.02)
    swarm.until(swarm.agreed, 10.0)
    for node in nodes:
        node.value = Fraction(1 + node.number)
        assert node.mixes == []
        node.perform(node.peer.settle(True, swarm.now))
    swarm.run(5.0)
    assert min(len(node.mixes) for node in nodes) > 10
    spread = max(node.value for node in nodes) - min(node.value for node in nodes)
    assert spread < Fraction(1, 1000)
    assert all(node.peer.exchanges.equal_since is not None for node in nodes)
    for node in nodes:
        node.perform(node.peer.settle(False, swarm.now))
    swarm.run(1.0)
    counts = [len(node.mixes) for node in nodes]
    swarm.run(10.0)
    assert [len(node.mixes) for node in nodes] == counts


def test_a_node_whose_loop_stands_still_is_busy_and_the_others_mix_on():
    swarm = World(12)
    nodes = swarm.swarm(4)
    swarm.until(swarm.agreed, 10.0)
    swarm.run(5.0)
    nodes[3].stepping = False
    swarm.run(3.0)
    counts = [len(node.mixes) for node in nodes]
    swarm.run(30.0)
    assert len(nodes[3].mixes) == counts[3]
    assert min(len(node.mixes) - count for node, count in zip(nodes[:3], counts, strict=False)) > 20
    assert any(isinstance(send.message, Busy) for _, send in nodes[3].said(Send))
    assert nodes[0].peer.membership.state(nodes[3].id) is MemberState.ALIVE


def test_a_partner_that_dies_costs_one_exchange_and_no_pause():
    swarm = World(13)
    nodes = swarm.swarm(5)
    swarm.until(swarm.agreed, 10.0)
    swarm.run(10.0)
    nodes[0].crash()
    killed_at = swarm.now
    swarm.run(30.0)
    for node in nodes[1:]:
        times = [killed_at, *(at for at, *_ in node.mixes if at > killed_at), swarm.now]
        assert max(b - a for a, b in pairwise(times)) < 4.0  # an interval takes 0.8 s
        assert node.peer.exchanges.failures <= 3


def test_a_refused_vector_tells_nothing_of_how_far_apart_the_swarm_is():
    swarm = World(14, config=Config(mix_every_steps=3))
    nodes = swarm.swarm(4)
    swarm.until(swarm.agreed, 10.0)
    nodes[1].value = Fraction(10**30)
    swarm.run(20.0)
    honest = [node for node in nodes if node is not nodes[1]]
    assert sum(node.peer.exchanges.refusals.total for node in nodes) > 0
    assert all(node.value == 0 for node in honest)
    assert all(node.peer.exchanges.consensus_distance == 0.0 for node in honest)


def test_a_second_snapshot_at_one_boundary_does_not_forget_how_far_the_steps_before_it_went():
    """The second snapshot reports no movement since the first; a donation's snapshot counts as any other."""
    swarm = World(9)
    [node] = swarm.swarm(1)
    peer, rule = node.peer, node.peer.exchanges.filter
    peer.update_counts(10, 40)
    peer.on_snapshotted(1, swarm.now, moved=3.0)
    peer.on_snapshotted(2, swarm.now, moved=0.0)
    assert rule.last_movement == 3.0
    peer.update_counts(11, 44)
    peer.on_snapshotted(3, swarm.now, moved=0.5)
    assert (rule.last_movement, rule.largest_movement) == (0.5, 3.0)

"""A peer whose weights are no longer finite, in virtual time."""

from itertools import pairwise

import pytest

from gossip.config import Config
from gossip.effects import Send
from gossip.state_transfer.runs import MEND_S
from gossip.wire.messages import Busy, Fetch, Offer, Refuse
from tests.harness.world import World


def spoil(swarm, node):
    """Report spoiled weights, as a driver does that saw them in the training loop."""
    node.perform(node.peer.on_spoiled(None, swarm.now))


@pytest.mark.parametrize("mixing", ["pair", "push-sum"])
def test_who_is_spoiled_offers_and_gives_nothing_until_it_has_the_swarms_weights(mixing):
    swarm = World(3, config=Config(mixing=mixing, mix_every_steps=4, filter="none"))
    first, other, node = swarm.swarm(3)
    swarm.run(20.0)
    swarm.until(lambda: not node.peer.exchanges.table, 10.0)  # earlier offers were of sound weights
    spoil(swarm, node)
    at = swarm.now
    assert not node.peer.view.ready
    offer = Offer(5, "f", node.run_id, node.peer.local.version, 0.5, "fp32")
    assert isinstance(node.peer.receive(first.id, offer, swarm.now)[0].message, Refuse)
    assert node.peer.receive(first.id, Fetch(6, (), 0, 0), swarm.now) == [Send(first.id, Refuse(6, "not-ready"))]
    swarm.run(0.9 * MEND_S)
    assert not [send for when, send in node.said(Send) if when > at and isinstance(send.message, Offer)]
    swarm.until(lambda: node.peer.view.ready, 10.0)
    assert node.kinds[-2:] == ["spoiled", "joined"]
    assert node.run_id == first.run_id
    done = node.peer.exchanges.done_count
    swarm.run(20.0)
    assert node.peer.exchanges.done_count > done
    assert other.peer.view.ready


def test_an_offer_whose_snapshot_is_spoiled_is_answered_busy_and_one_of_ours_is_not_made():
    swarm = World(1, config=Config(outer_momentum=0.0))
    first, node = swarm.swarm(2)
    swarm.until(lambda: node.peer.view.ready, 10.0)
    offer = Offer(5, "f", node.run_id, node.peer.local.version, 0.5, "fp32")
    [snapshot] = node.peer.receive(first.id, offer, swarm.now)
    effects = node.peer.on_spoiled(snapshot.session, swarm.now)
    assert Send(first.id, Busy(5)) in effects
    assert 5 not in node.peer.exchanges.table
    assert not node.peer.exchanges.failures, "nobody's fault is counted as a partner's"


def test_who_spoils_again_and_again_asks_for_weights_ever_more_rarely():
    swarm = World(2)
    first, node = swarm.swarm(2)
    swarm.until(lambda: node.peer.view.ready, 10.0)
    for _ in range(6):
        spoil(swarm, node)
        swarm.until(lambda: node.peer.view.ready, 400.0)
    spoiled = [when for when, kind, _ in node.notices if kind == "spoiled"]
    joined = [when for when, kind, _ in node.notices if kind == "joined"][1:]
    took = [b - a for a, b in zip(spoiled, joined, strict=True)]
    assert all(2 * a * 0.7 < b for a, b in pairwise(took[1:])), took
    assert took[-1] > 16 * MEND_S
    assert first.peer.view.ready


def test_who_is_spoiled_and_alone_begins_nothing_and_goes_on_once_its_loop_has_mended_it():
    swarm = World(4)
    [node] = swarm.swarm(1)
    swarm.run(1.0)
    spoil(swarm, node)
    swarm.run(120.0)
    assert not node.peer.view.ready
    assert node.kinds[-1] == "spoiled"
    node.perform(node.peer.on_mended(swarm.now))
    assert node.peer.view.ready
    assert node.kinds[-1] == "mended"
    assert node.peer.on_mended(swarm.now) == []

"""A node's state for checkpoints that the program writes, and a node without a with block."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from gossip.errors import CheckpointError, LocalError
from node import Node


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(4, 2)


def test_a_node_is_started_and_closed_without_a_block(quick):
    node = Node(linear(), config=quick)
    assert node.start() is node
    try:
        node.step(samples=4)
        assert node.swarm_samples == 4
    finally:
        node.close()
    node.close()  # A second call does no harm.
    with pytest.raises(LocalError, match="used already"):
        node.start()


def test_a_run_goes_on_from_the_state_that_another_checkpoint_holds(quick):
    data = torch.zeros(8, 4)
    with Node(linear(), config=quick) as node:
        for _ in range(2):
            for batch in node.shard(data, 4):
                node.step(samples=len(batch))
        written = json.dumps(node.state_dict(), allow_nan=False)
        run_id = node._training.network.peer.view.run_id
    kept = linear(5)  # The program restores the weights itself.
    before = [value.clone() for value in kept.parameters()]
    node = Node(kept, config=quick)
    node.load_state_dict(json.loads(written))
    with node:
        assert node._training.network.peer.view.run_id == run_id
        assert node.swarm_samples == 16
        assert node._training.samplers.make(data).begin().number == 2, "the next pass divides the data in another way"
        assert node.state_dict()["version"] == json.loads(written)["version"]
        node.step(samples=4)
        assert node.swarm_samples == 20
    assert all(map(torch.equal, before, kept.parameters()))


@pytest.mark.parametrize("ours", [True, False], ids=["its own run", "another run"])
def test_where_a_swarm_lives_its_weights_are_taken_and_nothing_counts_twice(train, quick, ours):
    donor = train(linear(1))
    donor.do(lambda node: node.load_state_dict({"run_id": "cd" * 16, "swarm_samples": 10**6}))
    state = donor.do(lambda node: node.state_dict())
    if not ours:
        state |= {"run_id": "ab" * 16, "swarm_samples": 10**7}
    model = linear(2)
    node = Node(model, seeds=[donor.node.address], config=quick)
    node.load_state_dict(state)
    with node:
        assert node.state_dict()["run_id"] == "cd" * 16
        assert 10**6 <= node.swarm_samples < 2 * 10**6
        assert torch.equal(model.weight, donor.model.weight)


def test_inside_the_block_the_weights_that_are_here_are_the_runs(quick):
    with Node(linear(), config=quick) as node:
        node.load_state_dict({"run_id": "ab" * 16, "swarm_samples": 1000, "version": 3.0})
        assert node.swarm_samples == 1000
        assert node.state_dict()["run_id"] == "ab" * 16


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"fingerprint": "00" * 16}, "belongs to another model"),
        ({"run_id": "no run"}, "names a run that cannot be"),
        ([], "is a mapping"),
    ],
)
def test_a_state_that_cannot_be_is_refused_in_a_sentence(quick, state, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        Node(linear(), config=quick).load_state_dict(state)


def test_numbers_that_cannot_be_are_brought_within_bounds(quick):
    node = Node(linear(), config=quick)
    node.load_state_dict({"run_id": "ab" * 16, "swarm_samples": 2**70, "version": float("nan")})
    with node:
        assert node.swarm_samples == 2**53 - 1

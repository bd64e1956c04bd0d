"""Group means of whole nodes over sockets."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from tests.node.trainees import filled

SLOW = {"late", "deadline", "stalled", "broken"}  # Failures of a group whose member takes too long.


def linear(value):
    return filled(nn.Linear(40, 30), value)


def mixed(nodes, times):
    """Return a check that each node completes more than ``times`` exchanges from now on."""
    before = [one.node.metrics().exchanges_done for one in nodes]
    return lambda: all(one.node.metrics().exchanges_done > b + times for one, b in zip(nodes, before, strict=True))


@pytest.mark.parametrize("changes", [{}, {"codec": "int8"}, {"group_size": 3, "filter": "trimmed"}])
def test_nodes_average_as_groups_over_sockets(train, until, quick, changes):
    config = dataclasses.replace(quick, mixing="group", **changes)
    models = [linear(0.0) for _ in range(4)]
    nodes = [train(models[0], config=config)]
    nodes += [train(model, config=config, seeds=[nodes[0].node.address]) for model in models[1:]]
    until(lambda: all(one.node.metrics().members_alive == 4 for one in nodes))
    for number, (one, model) in enumerate(zip(nodes, models, strict=True)):
        one.do(lambda _, model=model, number=number: [p.data.add_(float(number)) for p in model.parameters()])
    until(mixed(nodes, 8))
    both = zip(nodes, models, strict=True)
    flat = [one.do(lambda _, model=model: model.weight.detach().clone()) for one, model in both]
    spread = max(float((a - b).abs().max()) for a in flat for b in flat)
    assert spread < 0.05
    # Groups meet between two of the pushes, and what one alone was given a trimmed mean may leave out altogether.
    assert 0.0 <= float(flat[0].mean()) <= 3.0
    if changes == {}:
        assert float(flat[0].mean()) == pytest.approx(1.5, abs=0.1)
        assert spread < 1e-5
    # On a busy machine a node may stand for longer than the second that a group gives its streams. Any other reason
    # would be wrong.
    assert {reason for one in nodes for reason in one.side.network.peer.exchanges.failures_by_reason} <= SLOW


def test_a_group_goes_on_when_a_node_goes(train, until, quick):
    config = dataclasses.replace(quick, mixing="group", group_size=0)
    nodes = [train(linear(0.0), config=config)]
    nodes += [train(linear(0.0), config=config, seeds=[nodes[0].node.address]) for _ in range(2)]
    until(lambda: all(one.node.metrics().exchanges_done > 5 for one in nodes))
    nodes[0].stop()
    until(mixed(nodes[1:], 5))

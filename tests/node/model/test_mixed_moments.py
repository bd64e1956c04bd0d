"""Real nodes mix the moments of their optimizers after their weights, and none of SGD's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gossip import Config
from tests.node.loop.test_settling import sharing
from tests.node.storage.stores import notices

QUICK_MIXES = {"mix_every_steps": 2, "boundary_patience_s": 5.0, "stall_s": 5.0, "codec": "fp32"}


def worker(make, scale):
    """Return a model, its optimizer, and a step whose gradients are ``scale`` long in every element."""
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    optimizer = make(model.parameters())

    def work():
        optimizer.zero_grad()
        (scale * sum(parameter.sum() for parameter in model.parameters())).backward()
        optimizer.step()

    return model, optimizer, work


def both(train, until, make, scales, **options):
    """Start two nodes that train with gradients of these lengths, and return them once they have met."""
    config = Config(**QUICK_MIXES | options)
    first = train(*worker(make, scales[0]), config=config)
    second = train(*worker(make, scales[1]), config=config, seeds=[first.node.address])
    until(lambda: all(len(sharing(node)) == 1 for node in (first, second)))
    return first, second


def mixed_parts(node):
    return node.side.network.peer.moments.mixed_count


def largest_second(node):
    return max(float(state["exp_avg_sq"].max()) for state in node.optimizer.state.values())


def test_second_moments_of_two_nodes_meet_although_their_gradients_differ(train, until):
    nodes = both(train, until, lambda parameters: torch.optim.Adam(parameters, 1e-4, betas=(0.9, 0.9)), (1.0, 1.2))
    until(lambda: all(mixed_parts(node) >= 20 for node in nodes))
    # Without mixing they would tend to 1 and 1.44.
    assert all(1.0 < node.do(lambda _, node=node: largest_second(node)) < 1.44 for node in nodes)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda parameters: torch.optim.SGD(parameters, 1e-4, momentum=0.9), {}),
        (lambda parameters: torch.optim.Adam(parameters, 1e-4), {"mix_state": "off"}),
    ],
    ids=["SGD", "off"],
)
def test_nothing_is_fetched_where_nothing_is_to_be_mixed(train, until, make, options):
    nodes = both(train, until, make, (1.0, 1.2), **options)
    until(lambda: all(node.side.network.peer.exchanges.done_count >= 10 for node in nodes))
    assert [mixed_parts(node) for node in nodes] == [0, 0]
    assert not any(node.side.network.peer.moments.declined for node in nodes)


def test_nodes_with_other_optimizers_mix_their_weights_alone_and_are_told(train, until):
    config = Config(**QUICK_MIXES)
    first = train(*worker(lambda parameters: torch.optim.Adam(parameters, 1e-4), 1.0), config=config)
    second = train(
        *worker(lambda parameters: torch.optim.RMSprop(parameters, 1e-4), 1.0), config=config,
        seeds=[first.node.address],
    )  # fmt: skip
    nodes = first, second
    until(lambda: all(node.side.network.peer.exchanges.done_count >= 10 for node in nodes))
    until(lambda: all(notices(node.node, "moments") for node in nodes))
    assert len(notices(first.node, "moments")) == 1
    assert "exp_avg, exp_avg_sq" in notices(first.node, "moments")[0]
    assert [mixed_parts(node) for node in nodes] == [0, 0]
    assert [node.side.network.peer.exchanges.failures for node in nodes] == [0, 0]


def test_moments_that_are_spoiled_cost_the_exchange_of_moments_alone(train, until, monkeypatch):
    form = "gossip.arithmetic.moments.MomentForm"
    monkeypatch.setattr(f"{form}.decode", lambda self, vector: False)
    nodes = both(train, until, lambda parameters: torch.optim.Adam(parameters, 1e-4), (1.0, 1.2))
    until(lambda: all(node.side.network.peer.exchanges.done_count >= 20 for node in nodes))
    assert [mixed_parts(node) for node in nodes] == [0, 0]
    assert any(node.side.network.peer.misbehaviour.rows for node in nodes)

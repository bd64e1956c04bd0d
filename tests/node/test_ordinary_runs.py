"""Runs whose members are far apart: no honest member is said to misbehave, and all end with the same weights.

The zoo has other kinds of runs: BatchNorm, two adversaries, rewards, and models that are adapted.
"""

import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gossip import Config
from tests.harness.marks import slow
from tests.node.loop.test_settling import events, settle_all, sharing
from tests.node.trainees import step_of

NODES, FEATURES, CLASSES = 4, 16, 4
EXCHANGES = 60  # Of each node, so that usual distances are known and budgets fill.


def samples(count, generator):
    """Draw features and labels that a linear map gives them."""
    rows = torch.randn(count, FEATURES, generator=generator)
    return rows, rows[:, :CLASSES].argmax(dim=1)


def network():
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def classify(model, optimizer, rows, labels):
    return step_of(lambda: F.cross_entropy(model(rows), labels), optimizer)()


def uneven_data(node, generator):
    """Each node has one class of its own, and little of the others."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def work():
        rows, labels = samples(64, generator)
        kept = (labels == node % CLASSES) | (torch.rand(64, generator=generator) < 0.05)
        return classify(model, optimizer, rows[kept], labels[kept])

    return model, optimizer, work


def high_rate(node, generator):
    """A learning rate at the edge of stability."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    return model, optimizer, lambda: classify(model, optimizer, *samples(16, generator))


@pytest.mark.parametrize(
    ("kind", "lag_s"),
    [
        slow(uneven_data, 0.0, id="uneven data"),
        slow(high_rate, 0.0, id="a high rate"),
        slow(uneven_data, 2.0, id="uneven data and late joins"),
    ],
)
def test_no_honest_member_is_said_to_misbehave(kind, lag_s, train, until):
    nodes = []
    for number in range(NODES):
        torch.manual_seed(number)
        model, optimizer, work = kind(number, torch.Generator().manual_seed(number))
        seeds = [node.node.address for node in nodes[:1]]
        nodes.append(train(model, optimizer, work, config=Config(), seeds=seeds))
        time.sleep(lag_s)
    until(lambda: all(len(sharing(node)) == NODES - 1 for node in nodes), 60.0)
    until(lambda: all(node.node.metrics().exchanges_done >= EXCHANGES for node in nodes), 300.0)
    for node in nodes:
        node.work = None
    assert settle_all(nodes) == ([0.0] * NODES, 1)
    assert [str(event) for node in nodes for event in events(node, "suspicious")] == []

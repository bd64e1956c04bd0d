"""Ordinary runs of seven kinds: no honest member is said to misbehave, and all end with the same weights."""

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


def network(*between):
    return nn.Sequential(nn.Linear(FEATURES, 64), *between, nn.ReLU(), nn.Linear(64, CLASSES))


def classify(model, optimizer, rows, labels):
    return step_of(lambda: F.cross_entropy(model(rows), labels), optimizer)()


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def batch_norm(node, generator):
    """BatchNorm whose every tenth batch has two samples."""
    model, sizes = network(nn.BatchNorm1d(64)), iter([16, 16, 16, 16, 16, 16, 16, 16, 16, 2] * 10_000)
    optimizer = sgd(model)
    return model, optimizer, lambda: classify(model, optimizer, *samples(next(sizes), generator))


def adversarial(node, generator):
    """A generator and a discriminator in one model, each with its own optimizer."""
    model = nn.ModuleDict({
        "makes": nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, FEATURES)),
        "judges": nn.Sequential(nn.Linear(FEATURES, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)),
    })  # fmt: skip
    makes, judges = (torch.optim.Adam(model[name].parameters(), 1e-3, betas=(0.5, 0.9)) for name in model)

    def work():
        real, _ = samples(16, generator)
        for optimizer, label in ((judges, 0.0), (makes, 1.0)):
            made = model["makes"](torch.randn(16, 4, generator=generator))
            loss = F.binary_cross_entropy_with_logits(model["judges"](made), torch.full((16, 1), label))
            if optimizer is judges:
                loss = loss + F.binary_cross_entropy_with_logits(model["judges"](real), torch.ones(16, 1))
            model.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.detach()

    return model, [makes, judges], work


def reinforcement(node, generator):
    """A policy gradient with rewards of a heavy tail."""
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def loss_of():
        rows, labels = samples(8, generator)
        chances = model(rows).softmax(dim=1)
        actions = torch.multinomial(chances.detach(), 1, generator=generator)
        rewards = (actions[:, 0] == labels) * torch.randn(8, generator=generator).exp()
        return -((rewards - 0.3) * chances.gather(1, actions)[:, 0].log()).mean()

    return model, optimizer, step_of(loss_of, optimizer)


def fine_tuning(node, generator):
    """A trained model that small steps change by less than codecs round."""
    model = network()
    with torch.no_grad():
        for value in model.parameters():
            value *= 5.0
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    return model, optimizer, lambda: classify(model, optimizer, *samples(16, generator))


def uneven_data(node, generator):
    """Each node has one class of its own, and little of the others."""
    model = network()
    optimizer = sgd(model)

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


KINDS = [batch_norm, adversarial, reinforcement, fine_tuning, uneven_data, high_rate]


@pytest.mark.parametrize(
    ("kind", "lag_s"),
    [*[slow(kind, 0.0, id=kind.__name__) for kind in KINDS], slow(uneven_data, 2.0, id="uneven_data_and_late_joins")],
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

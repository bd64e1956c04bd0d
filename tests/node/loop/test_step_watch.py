"""A training loop that forgets `node.step` is told so while it runs; a loop that does not train is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gossip.errors import LocalError
from node import Node, running
from node.loop.step_watch import ENDED_UPDATES, FORGOTTEN, RUNNING_UPDATES, _watches

DATA = TensorDataset(torch.randn(64, 4))


@pytest.fixture(autouse=True)
def _nothing_noted(monkeypatch):
    monkeypatch.setattr(running, "_is_unstepped", False)
    monkeypatch.delenv(running.MADE, raising=False)


def told(node):
    return [str(event) for event in node.history()].count(FORGOTTEN)


def trained(model, optimizer, rows):
    loss = model(rows).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "for each": lambda weights, lr: torch.optim.SGD(weights, lr, foreach=True),
    "adam": torch.optim.Adam,
    "fused": lambda weights, lr: torch.optim.AdamW(weights, lr, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("way", ["shard", "loader"])
def test_a_loop_without_a_step_is_told_once_while_it_runs(quick, make, way):
    model = nn.Linear(4, 2)
    optimizer = make(model.parameters(), lr=0.1)
    with Node(model, optimizer, config=quick) as node:
        for turn in range(3):
            batches = node.shard(DATA, 8) if way == "shard" else node.loader(DataLoader(DATA, 8))
            for number, (rows,) in enumerate(batches):
                assert number or told(node) == (8 * turn >= RUNNING_UPDATES), "within two passes"
                trained(model, optimizer, rows)
            node._training.network.sync()
        assert not running.is_unstepped()
    assert told(node) == 1
    assert running.is_unstepped()


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_loop_with_a_loader_of_its_own_is_told_while_it_runs(quick, make, is_given):
    model = nn.Linear(4, 2)
    optimizer = make(model.parameters(), lr=0.1)
    with Node(model, optimizer if is_given else None, config=quick) as node:
        for _ in range(RUNNING_UPDATES):
            assert not told(node)
            trained(model, optimizer, DATA.tensors[0])
        node._training.network.sync()
        assert told(node) == 1
    assert running.is_unstepped()


def test_a_short_loop_with_a_loader_of_its_own_is_told_at_its_end(quick):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    with Node(model, optimizer, config=quick) as node:
        for (rows,) in DataLoader(DATA, 8):
            trained(model, optimizer, rows)
        assert not told(node)
        node.settle(0.1)
        node.finish(0)
    assert told(node) == 1
    assert running.is_unstepped()


def test_optimizers_of_other_models_and_of_loops_with_steps_are_left_alone(quick):
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    with Node(model, optimizers[0], config=quick) as node:
        for _ in range(2 * RUNNING_UPDATES):
            trained(other, optimizers[1], DATA.tensors[0])
        for _ in range(2 * RUNNING_UPDATES):
            trained(model, optimizers[0], DATA.tensors[0])
            node.step()
        assert node._training.step_watch not in _watches
    assert not told(node)
    assert not running.is_unstepped()


def test_epochs_without_a_step_end_in_a_sentence_and_not_never(quick):
    loader = DataLoader(DATA, 8)
    with Node(nn.Linear(4, 2), config=quick) as node:
        epochs = node.epochs(5, loader)
        for _ in range(3):
            next(epochs)
            assert len(list(node.loader(loader))) == 8
        with pytest.raises(LocalError, match="3 epochs have drawn batches without node"):
            next(epochs)


def test_an_evaluation_over_the_share_is_told_nothing(quick):
    model = nn.Linear(4, 2)
    with Node(model, torch.optim.SGD(model.parameters(), lr=0.1), config=quick) as node, torch.no_grad():
        model.load_state_dict(nn.Linear(4, 2).state_dict())
        for _ in range(5):
            for (rows,) in node.shard(DATA, 8):
                model(rows)
        node.settle(0.1)
    assert not told(node)
    assert not running.is_unstepped()


def test_a_model_that_is_trained_after_its_node_has_ended_is_no_matter_of_that_node(quick):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Node(model, optimizer, config=quick) as node:
        pass
    for (rows,) in DataLoader(DATA, 4):
        trained(model, optimizer, rows)
    node.close()
    assert not told(node)
    assert not running.is_unstepped()


def test_a_loop_with_accumulated_gradients_is_told_nothing(quick):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Node(model, optimizer, config=quick) as node:
        for _ in range(8):
            for (rows,) in node.shard(DATA, 8):
                model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            node.step()
    assert not told(node)
    assert not running.is_unstepped()


def test_weights_that_the_node_itself_writes_are_no_training(train, quick):
    """A node that only settles often takes the mean of the others, and never steps."""
    other = train(nn.Linear(4, 2))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Node(model, optimizer, seeds=[other.node.address], config=quick) as node:
        before = model.weight._version
        for _ in range(ENDED_UPDATES + 2):
            node.settle(0.3)
        assert model.weight._version > before, "it has mixed"
        node.finish(0)
    assert not told(node)
    assert not running.is_unstepped()

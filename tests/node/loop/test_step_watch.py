"""Programs that forget `node.step`, or train with another optimizer than that of their Node, are told so."""

import contextlib

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from gossip.errors import LocalError
from node import Node, running
from node.loop.step_watch import ENDED_UPDATES, FORGOTTEN, REPLACED_STEPS, RUNNING_UPDATES, _watches
from tests.node.conftest import until

DATA = TensorDataset(torch.randn(64, 4))
REPLACED = "has taken no step"


@pytest.fixture(autouse=True)
def _nothing_noted(monkeypatch):
    monkeypatch.setattr(running, "_is_unstepped", False)
    monkeypatch.delenv(running.MADE, raising=False)


@pytest.fixture
def model():
    return nn.Linear(4, 2)


@pytest.fixture
def optimizer(model):
    return SGD(model.parameters(), lr=0.1)


def told(node, text=FORGOTTEN):
    node._training.network.sync()
    return [str(event) for event in node.history() if text in str(event)]


def gradients(model, rows=DATA.tensors[0]):
    model.zero_grad()
    loss = model(rows).square().mean()
    loss.backward()
    return loss


def trained(model, optimizer, rows):
    gradients(model, rows)
    optimizer.step()


OPTIMIZERS = {
    "sgd": SGD,
    "for each": lambda weights, lr: SGD(weights, lr, foreach=True),
    "adam": Adam,
    "fused": lambda weights, lr: AdamW(weights, lr, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("way", ["shard", "loader", "a loader of its own", "a loader of its own, no optimizer given"])
def test_a_loop_without_a_step_is_told_once_while_it_runs(quick, model, make, way):
    optimizer = make(model.parameters(), lr=0.1)
    with Node(model, None if "no optimizer" in way else optimizer, config=quick) as node:
        loader, updates = DataLoader(DATA, 8), 0
        for _ in range(3):
            batches = {"shard": lambda: node.shard(DATA, 8), "loader": lambda: node.loader(loader)}
            for (rows,) in batches.get(way, lambda: loader)():
                assert len(told(node)) == (updates >= RUNNING_UPDATES)
                trained(model, optimizer, rows)
                updates += 1
        assert not running.is_unstepped()
    assert len(told(node)) == 1
    assert running.is_unstepped()


def test_a_short_loop_with_a_loader_of_its_own_is_told_at_its_end(quick, model):
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    with Node(model, optimizer, config=quick) as node:
        for (rows,) in DataLoader(DATA, 8):
            trained(model, optimizer, rows)
        assert not told(node)
        node.settle(0.1)
        node.finish(0)
    assert len(told(node)) == 1
    assert running.is_unstepped()


def write_through_data(model):
    for weight in model.parameters():
        weight.data.sub_(0.1)


def write_from_elsewhere(model):
    model.weight.detach().numpy()[:] -= 0.1


@pytest.mark.parametrize("write", [write_through_data, write_from_elsewhere])
@pytest.mark.parametrize("settles", [False, True])
def test_weights_that_change_where_torch_counts_no_writes_are_told_at_the_end(quick, model, optimizer, write, settles):
    with Node(model, optimizer, config=quick) as node:
        write(model)
        if settles:
            node.settle(0.1)
    assert len(told(node)) == 1
    assert running.is_unstepped()


@pytest.mark.parametrize("is_finished", [True, False])
def test_an_average_that_replaces_the_weights_of_a_run_that_is_over_is_no_forgotten_step(
    train, quick, model, is_finished
):
    other = train(nn.Linear(4, 2))
    until(lambda: other.node.swarm_samples > 64)
    if is_finished:
        other.do(lambda node: node.finish(0))
    with Node(model, seeds=[other.node.address], config=quick) as node:
        assert not list(node.epochs(1, DATA, settle=None))
        write_through_data(model)
    assert not told(node)
    assert not running.is_unstepped()


def test_an_error_before_the_first_step_is_no_forgotten_step(quick, model):
    node = Node(model, config=quick)
    with contextlib.suppress(ValueError), node:
        write_through_data(model)
        raise ValueError
    assert not told(node)


def test_epochs_without_a_step_end_in_a_sentence_and_not_never(quick, model):
    loader = DataLoader(DATA, 8)
    with Node(model, config=quick) as node:
        epochs = node.epochs(50, loader)
        for _ in range(32):  # Of 256 batches.
            next(epochs)
            assert len(list(node.loader(loader))) == 8
        with pytest.raises(LocalError, match="32 epochs have drawn batches without node"):
            next(epochs)


# Loops that forget nothing -------------------------------------------------------------------------------------------
def train_another_model_first(node, model, optimizer):
    other = nn.Linear(4, 2)
    second = SGD(other.parameters(), lr=0.1)
    for _ in range(2 * RUNNING_UPDATES):
        trained(other, second, DATA.tensors[0])
    for _ in range(2 * RUNNING_UPDATES):
        trained(model, optimizer, DATA.tensors[0])
        node.step()
    assert node._training.step_watch not in _watches


def evaluate_over_the_share(node, model, optimizer):
    model.load_state_dict(nn.Linear(4, 2).state_dict())
    with torch.no_grad():
        for _ in range(5):
            for (rows,) in node.shard(DATA, 8):
                model(rows)
    node.settle(0.1)


def evaluate_other_weights(node, model, optimizer):
    """The weights are not finite, and those of a copy stand in their places for an evaluation."""
    model.weight.data.fill_(float("nan"))
    node._training.step_watch.begin()
    kept = model.weight.detach().clone()
    model.weight.data.copy_(torch.ones(2, 4))
    model.weight.data.copy_(kept)


def initialise_and_settle(node, model, optimizer):
    write_through_data(model)
    node.settle(0.1)
    train_steps(node, model, optimizer, 1)


def accumulate_gradients(node, model, optimizer):
    for _ in range(8):
        for (rows,) in node.shard(DATA, 8):
            model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        node.step()


def train_after_the_node_has_ended(node, model, optimizer):
    node.close()
    for (rows,) in DataLoader(DATA, 4):
        trained(model, optimizer, rows)


@pytest.mark.parametrize(
    "loop",
    [
        train_another_model_first,
        evaluate_over_the_share,
        evaluate_other_weights,
        initialise_and_settle,
        accumulate_gradients,
        train_after_the_node_has_ended,
    ],
    ids=lambda loop: loop.__name__,
)
def test_a_loop_that_forgets_no_step_is_told_nothing(quick, model, optimizer, loop):
    with Node(model, optimizer, config=quick) as node:
        loop(node, model, optimizer)
    assert not told(node)
    assert not running.is_unstepped()


@pytest.mark.parametrize("writes", [True, False])
def test_weights_that_replace_those_of_the_swarm_before_the_first_step_are_told(train, quick, model, writes):
    optimizer = SGD(model.parameters(), lr=1.0)
    other = train(nn.Linear(4, 2))
    with Node(model, optimizer, seeds=[other.node.address], config=quick) as node:
        node.settle(0.1)
        if writes:
            model.load_state_dict(nn.Linear(4, 2).state_dict())
        train_steps(node, model, optimizer, 3)
    assert len(told(node, "were overwritten before its first step")) == writes


def test_weights_that_the_node_itself_writes_are_no_training(train, quick, model, optimizer):
    """A node that only settles often takes the mean of the others, and never steps."""
    other = train(nn.Linear(4, 2))
    with Node(model, optimizer, seeds=[other.node.address], config=quick) as node:
        before = model.weight._version
        for _ in range(ENDED_UPDATES + 2):
            node.settle(0.3)
        assert model.weight._version > before, "it has mixed"
        node.finish(0)
    assert not told(node)
    assert not running.is_unstepped()


# Optimizers that are made anew ---------------------------------------------------------------------------------------
def train_steps(node, model, optimizer, steps):
    for _ in range(steps):
        loss = gradients(model)
        optimizer.step()
        node.step(loss, samples=8)


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("given", ["one", "the last of two"])
def test_an_optimizer_that_is_made_anew_is_told_once(quick, model, before, given):
    first, other = Adam(model.parameters(), 0.01), Adam([model.bias], 0.01)
    with Node(model, first if given == "one" else [other, first], config=quick) as node:
        train_steps(node, model, first, before)
        second = SGD(model.parameters(), 0.01)
        for _ in range(REPLACED_STEPS):
            assert not told(node, REPLACED)
            if given != "one":
                other.step()
            train_steps(node, model, second, 1)
        train_steps(node, model, second, 2 * REPLACED_STEPS)
        (sentence,) = told(node, REPLACED)
        assert sentence.startswith("SGD trains the weights of this Node, which was not given it, and the Adam")
    assert node._training.optimizer_watch not in _watches


class Lookahead(Optimizer):
    """A wrapper with a state of its own that skips torch's constructor."""

    def __init__(self, inner):
        self.optimizer, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state, self.slow = {}, 0

    def step(self, closure=None):
        self.optimizer.step()
        self.slow += 1


class Hidden(Optimizer):
    """Two optimizers behind a name that no library uses."""

    def __init__(self, model):
        self.parts = [SGD([model.weight], 0.01), SGD([model.bias], 0.01)]
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self.state, self.defaults = {}, {}

    def step(self, closure=None):
        for part in self.parts:
            part.step()


@pytest.mark.parametrize("given", ["a wrapper", "what is wrapped later", "a hidden wrapper", "nothing"])
def test_wrappers_and_nodes_without_an_optimizer_are_told_nothing(quick, model, given):
    inner = SGD(model.parameters(), 0.01)
    outer = Hidden(model) if given == "a hidden wrapper" else Lookahead(inner)
    to_node = {"what is wrapped later": inner, "nothing": None}.get(given, outer)
    with Node(model, to_node, config=quick) as node:
        train_steps(node, model, outer, 3 * REPLACED_STEPS)
        assert not told(node, REPLACED)


def test_optimizers_that_alternate_or_train_another_model_are_told_nothing(quick, model):
    other = nn.Linear(4, 2)
    given, second = SGD(model.parameters(), 0.01), SGD(model.parameters(), 0.01)
    outside = SGD(other.parameters(), 0.01)
    with Node(model, given, config=quick) as node:
        for turn in range(4 * REPLACED_STEPS):
            gradients(other)
            outside.step()
            train_steps(node, model, second if turn % 10 else given, 1)
        for _ in range(3 * REPLACED_STEPS):  # The model is frozen, or a scaler skips all steps.
            outside.step()
            node.step(1.0, samples=8)
        assert not told(node, REPLACED)


def test_many_inner_steps_between_two_of_the_one_given_are_told_nothing(quick, model):
    given, inner = SGD(model.parameters(), 0.01), SGD(model.parameters(), 0.01)
    with Node(model, given, config=quick) as node:
        for _ in range(5):
            for _ in range(2 * REPLACED_STEPS):
                gradients(model)
                inner.step()
            train_steps(node, model, given, 1)
        assert not told(node, REPLACED)


def test_a_closure_is_told_nothing(quick, model):
    lbfgs = LBFGS(model.parameters(), 0.01, max_iter=2 * RUNNING_UPDATES, tolerance_change=0.0)
    with Node(model, lbfgs, config=quick) as node:
        for _ in range(2 * REPLACED_STEPS):
            lbfgs.step(lambda: gradients(model))
            node.step(1.0, samples=8)
        assert not told(node, REPLACED) + told(node)

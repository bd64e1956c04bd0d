"""A program that trains with another optimizer than the one given to its Node is told so."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, Optimizer

from node import Node
from node.loop.step_watch import REPLACED_STEPS, _watches

ROWS = torch.randn(8, 4)


def told(node):
    node._training.network.sync()
    return [str(event) for event in node.history() if "has taken no step" in str(event)]


def gradients(model):
    model.zero_grad()
    loss = model(ROWS).square().mean()
    loss.backward()
    return loss


def train(node, model, optimizer, steps):
    for _ in range(steps):
        loss = gradients(model)
        optimizer.step()
        node.step(loss, samples=8)


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("given", ["one", "the last of two"])
def test_an_optimizer_that_is_made_anew_is_told_once(quick, before, given):
    model = nn.Linear(4, 2)
    first, other = Adam(model.parameters(), 0.01), Adam([model.bias], 0.01)
    with Node(model, first if given == "one" else [other, first], config=quick) as node:
        train(node, model, first, before)
        second = SGD(model.parameters(), 0.01)
        for _ in range(REPLACED_STEPS):
            assert not told(node)
            if given != "one":
                other.step()
            train(node, model, second, 1)
        train(node, model, second, 2 * REPLACED_STEPS)
        (sentence,) = told(node)
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


@pytest.mark.parametrize("wraps", ["given", "later", "hidden"])
def test_wrappers_are_told_nothing(quick, wraps):
    model = nn.Linear(4, 2)
    inner = SGD(model.parameters(), 0.01)
    outer = Hidden(model) if wraps == "hidden" else Lookahead(inner)
    with Node(model, inner if wraps == "later" else outer, config=quick) as node:
        train(node, model, outer, 3 * REPLACED_STEPS)
        assert not told(node)


def test_optimizers_that_alternate_or_train_another_model_are_told_nothing(quick):
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    given, second = SGD(model.parameters(), 0.01), SGD(model.parameters(), 0.01)
    outside = SGD(other.parameters(), 0.01)
    with Node(model, given, config=quick) as node:
        for turn in range(4 * REPLACED_STEPS):
            gradients(other)
            outside.step()
            train(node, model, second if turn % 10 else given, 1)
        for _ in range(3 * REPLACED_STEPS):  # The model is frozen, or a scaler skips all steps.
            outside.step()
            node.step(1.0, samples=8)
        assert not told(node)


def test_many_inner_steps_between_two_of_the_one_given_are_told_nothing(quick):
    model = nn.Linear(4, 2)
    given, inner = SGD(model.parameters(), 0.01), SGD(model.parameters(), 0.01)
    with Node(model, given, config=quick) as node:
        for _ in range(5):
            for _ in range(2 * REPLACED_STEPS):
                gradients(model)
                inner.step()
            train(node, model, given, 1)
        assert not told(node)


def test_a_closure_and_a_node_without_optimizer_are_told_nothing(quick):
    model = nn.Linear(4, 2)
    lbfgs = LBFGS(model.parameters(), 0.01, max_iter=2)
    with Node(model, lbfgs, config=quick) as node:
        for _ in range(2 * REPLACED_STEPS):
            lbfgs.step(lambda: gradients(model))
            node.step(1.0, samples=8)
        assert not told(node)
    model = nn.Linear(4, 2)
    with Node(model, config=quick) as node:
        train(node, model, SGD(model.parameters(), 0.01), 2 * REPLACED_STEPS)
        assert not told(node)

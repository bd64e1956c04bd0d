"""Several optimizers, none, or wrapped ones: what a newcomer takes over, and what a checkpoint keeps."""

import numpy as np
import pytest
import torch

from gossip.errors import CheckpointError, ConfigError, LayoutError
from node.model.optimizer.loaded import fitting_state
from node.model.optimizers import Optimizers
from node.model.snapshot import ModelState
from tests.node.model.test_checkpoint import OPTIMIZERS, model_of
from tests.node.vectors import mlp, train, vector_of


class Wrapper(torch.optim.Optimizer):
    """A wrapper like accelerate's, whose state is that of the wrapped optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)


class Imitation:
    """A wrapper like Lightning's, which takes the class of the wrapped optimizer and none of its attributes."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Imitated", (self.__class__, type(optimizer)), {})

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, with state that the inner one lacks."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})


def halves(model, first=torch.optim.Adam, second=torch.optim.Adam):
    """An optimizer for each of two layers."""
    return [first(model[0].parameters(), lr=0.01), second(model[2].parameters(), lr=0.02)]


def test_each_optimizer_gives_newcomers_its_own_state_and_refuses_that_of_others():
    model = mlp()
    optimizers = halves(model, second=torch.optim.RMSprop)
    train(model, optimizers, 3, seed=1)
    state = ModelState(model, optimizers)
    assert state.optimizer_keys == ("exp_avg", "exp_avg_sq", "square_avg")
    assert state.trained_elements == state.layout.size
    joiner = mlp()
    fresh = halves(joiner, second=torch.optim.RMSprop)
    keys, scalars = state.optimizer_keys, state.optimizer_scalars()
    ModelState(joiner, tuple(fresh)).adopt(vector_of(state, full=True), keys, scalars)
    assert train(joiner, fresh, 3, seed=2) == train(model, optimizers, 3, seed=2)
    before = dict(optimizers[0].state[model[0].weight])
    given = np.ones(2 * state.layout.size, np.float32)
    state.adopt(given, ("exp_avg",), {"step": 1.0})  # The donor's optimizer keeps a part of it.
    assert "was given exp_avg, step: use the swarm's optimizer" in state.state_refusal
    assert np.all(vector_of(state) == 1)
    assert optimizers[0].state[model[0].weight] == before


def test_of_a_parameter_that_two_optimizers_hold_the_first_keeps_the_state():
    model = mlp()
    optimizers = [torch.optim.Adam(model.parameters()), torch.optim.Adam(model[2].parameters())]
    train(model, optimizers, 3, seed=1)
    state = ModelState(model, optimizers)
    full = vector_of(state, full=True)
    state.adopt(np.full_like(full, 0.5), state.optimizer_keys, state.optimizer_scalars())
    assert torch.all(optimizers[0].state[model[2].weight]["exp_avg"] == 0.5)
    assert not torch.any(optimizers[1].state[model[2].weight]["exp_avg"] == 0.5)


@pytest.mark.parametrize("wrap", [Wrapper, Imitation, lambda inner: Imitation(Wrapper(inner))])
def test_what_frameworks_wrap_is_the_optimizer_within(wrap):
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizers = Optimizers([wrap(inner)])
    assert optimizers.all == (inner,)
    assert Optimizers([inner, wrap(inner)]).all == (inner,)


def test_an_optimizer_around_another_is_not_looked_through():
    outer = Lookahead(torch.optim.SGD(mlp().parameters(), lr=0.1))
    assert Optimizers(outer).all == (outer,)


@pytest.mark.parametrize("given", ["sgd", {"a": 1}, [None], [[torch.optim.SGD(mlp().parameters())]]])
def test_what_is_no_optimizer_is_refused(given):
    with pytest.raises(ConfigError, match=r"give a torch.optim.Optimizer, a list of them, or leave it out"):
        Optimizers(given)


def test_one_of_several_that_is_of_another_model_is_refused():
    model = mlp()
    with pytest.raises(LayoutError, match=r"One of the optimizers \(Adam\) holds none of this model's tensors"):
        ModelState(model, [torch.optim.SGD(model.parameters()), torch.optim.Adam(mlp().parameters())])


def test_a_checkpoint_of_several_optimizers_goes_to_as_many():
    model = mlp()
    optimizers = Optimizers(halves(model))
    train(model, optimizers.all, 3, seed=1)
    saved = optimizers.state_dict()
    again = Optimizers(halves(model))
    again.load(again.split_state(saved))
    for one, its in zip(again.all, optimizers.all, strict=True):
        for parameter, kept in its.state.items():
            assert torch.equal(one.state[parameter]["exp_avg"], kept["exp_avg"])
    with pytest.raises(CheckpointError, match=r"the state of 2 optimizers and the node has 1: give Node the same"):
        Optimizers(torch.optim.Adam(model.parameters())).split_state(saved)
    assert Optimizers().split_state(saved) == again.split_state(None) == []


def test_a_checkpoint_of_one_optimizer_is_its_own_state_dict():
    optimizer = torch.optim.Adam(mlp().parameters())
    assert Optimizers(optimizer).state_dict() == Optimizers([optimizer]).state_dict() == optimizer.state_dict()
    assert Optimizers().state_dict() is None


# -- what a saved state fits ------------------------------------------------------------------------------------------
class Compressing(torch.optim.SGD):
    """An optimizer that keeps a further entry for its largest tensors, as 8-bit optimizers do."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            largest = max(parameter.numel() for parameter in group["params"])
            for parameter in group["params"]:
                self.state[parameter]["state1"] = torch.zeros_like(parameter, dtype=torch.uint8)
                if parameter.numel() == largest:
                    self.state[parameter]["absmax1"] = torch.ones(4)


MAKERS = OPTIMIZERS | {"compressing": lambda p: Compressing(p, lr=0.1, momentum=0.9)}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("has_stepped", [False, True])
def test_the_state_of_an_equal_optimizer_fits(make, has_stepped):
    model, other = model_of(0), model_of(1)
    saved, loading = make(model.parameters()), make(other.parameters())
    train(model, saved, 2, seed=1)
    if has_stepped:
        train(other, loading, 1, seed=2)
    loading.load_state_dict(fitting_state(loading, saved.state_dict()))
    train(other, loading, 1, seed=3)


def test_a_state_that_lacks_an_entry_of_one_parameter_is_refused():
    model = model_of(0)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2, seed=1)
    state = optimizer.state_dict()
    del state["state"][1]["exp_avg"]
    with pytest.raises(CheckpointError, match="is damaged, or of another kind of optimizer"):
        fitting_state(optimizer, state)

"""The correction on real nodes: the pull of a node's own data is learned from its mixes and taken out of its steps."""

import statistics
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from gossip.arithmetic.correction import Lesson
from gossip.config import Config
from node import Node
from node.loop.live import LiveModel, Trained
from node.model.optimizers import Optimizers
from node.model.snapshot import ModelState
from tests.harness.configs import tuned
from tests.node.conftest import QUICK
from tests.node.trainees import linear, mixed, spread
from tests.node.vectors import vector_of

CORRECTED = replace(QUICK, mix_every_steps=4, outer_momentum=0.0, outer_rate=1.0, correction=0.2)
PULL = 0.1  # The shift that a node's own data add in each step.


def pulled(model, by):
    """Return a step that moves the model by a constant, as data of one kind would."""

    def work():
        with torch.no_grad():
            model.weight += by

    return work


@pytest.mark.parametrize("corrected", [True, False])
def test_nodes_whose_data_pull_apart_stay_closer_once_they_are_corrected(train, until, corrected):
    # In lockstep, so that an interval has four steps on a busy machine, too.
    config = tuned(CORRECTED, correction=0.2 * corrected, max_version_gap=0.0, bench_s=0.2)
    a, b = linear(1), linear(2)
    for model in (a, b):
        model.weight.data.fill_(100.0)  # At this norm the limit of a correction does not matter.
    first = train(a, work=pulled(a, PULL), config=config)
    second = train(b, work=pulled(b, -PULL), config=config, seeds=[first.node.address])
    until(mixed(first, second, times=40))
    seen = []
    for _ in range(200):  # over many intervals
        seen.append(spread(a, b))
        time.sleep(0.003)
    apart = statistics.median(seen)  # A busy machine may hold up one of them for a while.
    assert (apart < 3 * PULL) == corrected, "two nodes are pulled apart by eight pulls in an interval"
    pull = first.side.live.outer.correction
    if corrected:  # The leak leaves a part of the pull of an interval's four steps.
        taken_out = pull.pull[: a.weight.numel()] / (-4 * PULL)
        assert np.all((taken_out > 0.3) & (taken_out < 0.8))
    else:
        assert pull is None


@pytest.mark.parametrize("is_single", [True, False])
def test_nodes_of_several_ranks_have_none(is_single):
    trained = Trained(linear(1), Optimizers(None))
    live = LiveModel(trained, Config().for_training(), is_single_rank=is_single)
    assert (live.outer.correction is not None) == is_single


@pytest.mark.parametrize(
    ("outer", "is_loaded"),
    [((0.0, 1.0), True), ((0.5, 0.7), True), ((0.0, 1.0), False)],
    ids=["a checkpoint", "a checkpoint, with the outer step", "those of another run"],
)
def test_a_node_that_takes_other_weights_forgets_what_it_learned(outer, is_loaded, tmp_path):
    config = replace(CORRECTED, outer_momentum=outer[0], outer_rate=outer[1])
    model = linear(1)
    with Node(linear(2), config=config) as node:
        node.save(tmp_path / "run")
    with Node(model, config=config) as node:
        correction = node._training.live.outer.correction
        correction.learn(np.ones(correction.size, np.float32), 0.5, Lesson(1.0, 1e6))
        assert correction.pull.any()
        if is_loaded:
            node.load(tmp_path / "run")
            assert spread(model, linear(2)) == 0
        else:
            node._training.on_replaced(np.zeros(correction.size, np.float32))
        assert not correction.pull.any()


def test_a_loop_without_an_optimizer_may_say_its_learning_rate(train, until):
    a, b = linear(1), linear(2)
    first = train(a, work=pulled(a, PULL), config=CORRECTED)
    second = train(b, work=pulled(b, -PULL), config=CORRECTED, seeds=[first.node.address])
    until(mixed(first, second, times=5))
    assert np.isnan(first.side.live.outer.correction.rate)
    first.do(lambda node: [node.step(lr=0.25) for _ in range(4)])
    until(lambda: first.side.live.outer.correction.rate == 0.25)  # A step during an exchange leaves it to a later one.


# -- the model's side --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_added_again_and_again_is_not_changed(dtype):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 300)).to(dtype)
    state = ModelState(model)
    before = vector_of(state)
    values = np.linspace(-1.0, 1.0, before.size, dtype=np.float32)
    given = values.copy()
    for _ in range(2):
        state.add_scaled(values, 0.25, version=1)
    np.testing.assert_array_equal(values, given)
    np.testing.assert_allclose(vector_of(state), before + 0.5 * given, atol=0.02 if dtype == torch.bfloat16 else 1e-6)


def test_a_parameter_that_is_frozen_meanwhile_takes_no_correction():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    state = ModelState(model)
    model[0].requires_grad_(False)
    before, values = vector_of(state), np.ones(13, np.float32)
    state.add_scaled(values, 0.5, version=1)
    np.testing.assert_allclose(vector_of(state) - before, [0.0] * 9 + [0.5] * 4, atol=1e-6)
    model.requires_grad_(False)
    state.add_scaled(values, 0.5, version=1)


def test_the_learning_rate_is_that_of_all_groups_and_optimizers():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    sgd = torch.optim.SGD([{"params": one.weight, "lr": 0.25}, {"params": one.bias, "lr": 0.5}], lr=0.1)
    adam = torch.optim.Adam(other.parameters(), lr=torch.tensor(0.125))
    assert Optimizers([sgd, adam]).learning_rate == 0.875
    sgd.param_groups[0]["lr"] = 0.0
    assert Optimizers([sgd, adam]).learning_rate == 0.625
    assert np.isnan(Optimizers(None).learning_rate)

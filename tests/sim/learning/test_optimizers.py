"""Quasi-global momentum for many peers at once equals the optimizer of a real node, peer by peer."""

import numpy as np
import pytest
import torch

from gossip.config import Config
from node.model.quasi_global import QuasiGlobal
from sim.learning.learners import Learners
from sim.scenario.scenario import Optimizer, Scenario, Task
from sim.simulation import Simulation
from tests.sim.learning.alone import NAMES, SEED, Alone, assert_equal_models, values_of
from tests.sim.scenarios import AVERAGING, QUASI_GLOBAL, small

LINEAR = Task(model="linear", samples_per_peer=40, batch_size=4, optimizer=QUASI_GLOBAL)


class AsANode(Alone):
    """A peer alone with a node's optimizer, and the calls that a node makes."""

    def make_optimizer(self) -> QuasiGlobal:
        spec = self.task.optimizer
        return QuasiGlobal(list(self.module.parameters()), spec.lr, spec.quasi_global, spec.weight_decay)

    @torch.no_grad()
    def add(self, number: float) -> None:
        for parameter in self.module.parameters():
            parameter += number


@pytest.mark.parametrize("model", ["linear", "mlp", "cnn"])
def test_stacked_models_move_as_a_nodes_optimizer_moves_one(model):
    task = Task(model=model, samples_per_peer=40, batch_size=4, optimizer=QUASI_GLOBAL)
    learners = Learners(task, NAMES, SEED)
    start = values_of(learners.module(learners.matrix[0]))
    alone = [AsANode(task, learners, row) for row in range(len(NAMES))]
    for rows, counts, mixed in (
        ([0, 1, 2, 3, 4], [3] * 5, [0, 2]),
        ([4, 0, 2], [2] * 3, [2, 2, 4]),  # peer 2 mixes twice without a step between
        ([3, 1, 4, 0], [1, 8, 3, 1], [3, 1]),
        ([1, 2], [4, 5], []),
    ):
        learners.train(np.array(rows), np.array(counts))
        for row, count in zip(rows, counts, strict=True):
            alone[row].train(count)
        for row in mixed:
            learners.matrix[row] += np.float32(0.01)
            learners.on_mixed(row)
            alone[row].add(0.01)
            alone[row].optimizer.mixed()
    for one in alone:
        assert_equal_models(learners, one, start)


@pytest.mark.parametrize("how", ["on_weights_replaced", "reset"])
def test_a_row_that_was_replaced_begins_without_momentum_and_the_others_keep_theirs(how):
    learners = Learners(LINEAR, NAMES, SEED)
    alone = [AsANode(LINEAR, learners, row) for row in (0, 1)]
    for again in (False, True):
        learners.train(np.array([0, 1]), np.array([6, 6]))
        for one in alone:
            one.train(6)
            one.optimizer.mixed()
            learners.on_mixed(one.row)
        if not again:
            getattr(learners, how)(1)
            learners.matrix[1] += np.float32(0.02)
            learners.on_mixed(1)  # no step yet, so nothing to count
            alone[1].add(0.02)
            alone[1].optimizer.joined()
            alone[1].optimizer.mixed()
    for one in alone:
        ours = learners.module(learners.matrix[one.row])
        for mine, theirs in zip(ours.parameters(), one.module.parameters(), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert not np.allclose(learners.matrix[0], learners.matrix[1], atol=1e-3)


def test_a_mix_moves_no_state_of_other_optimizers():
    for optimizer in (Optimizer(lr=0.05, momentum=0.9), Optimizer(name="adamw", lr=0.01)):
        task = Task(model="linear", samples_per_peer=40, batch_size=4, optimizer=optimizer)
        told, untold = Learners(task, NAMES, SEED), Learners(task, NAMES, SEED)
        for one in (told, untold):
            one.train(np.arange(5), np.full(5, 3))
            if one is told:
                one.on_mixed(1)
                one.on_weights_replaced(2)
            one.train(np.arange(5), np.full(5, 3))
        assert np.array_equal(told.matrix, untold.matrix)


def quasi_global(**changes) -> Scenario:
    task = Task(model="mlp", samples_per_peer=20, batch_size=4, optimizer=QUASI_GLOBAL)
    return small(**{"task": task} | changes)


def test_a_peer_is_told_of_each_mix_when_all_its_steps_and_the_addition_are_in_its_row(monkeypatch):
    run = Simulation(quasi_global())
    told = []
    inner = run.learners.on_mixed

    def mixed(row):
        host = run.swarm.hosts[row]
        assert host.computed_steps == host.steps == run.learners.steps_taken[row]
        assert not host.boundary.arrived_updates
        told.append(row)
        inner(row)

    monkeypatch.setattr(run.learners, "on_mixed", mixed)
    for _ in run.slices():
        pass
    waiting = sum(len(host.boundary.arrived_updates) for host in run.swarm.hosts)
    mixes = run.swarm.mixes - waiting
    assert 0.9 * mixes < len(told) <= mixes  # two that arrive at one boundary are reported as one
    assert set(told) == set(range(6))


def test_what_a_scenario_leaves_open_of_the_outer_step_is_decided_as_a_node_decides_it():
    assert small().config.measures_momentum
    assert quasi_global().config.plain, "one momentum over the mixes is enough"
    assert small(task=AVERAGING).config.plain, "nobody trains: the mean is wanted"
    assert small(gossip=Config(outer_momentum=0.0)).config.plain

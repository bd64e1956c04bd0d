"""Programs of the kinds that people run are as good on three nodes as synchronously; these agree and accuse nobody."""

from __future__ import annotations

import pytest

from tests.zoo.harness import play
from tests.zoo.registry import programs

NODES = 3
QUICK = ("metric_learning", "one_cycle", "weighted_sampler")
LARGEST_DIFFERENCE = 1e-6  # The largest relative difference of a tensor between two nodes after settle.


def check(name, **faults):
    """Play a program as one process with the batches of all nodes, and as a swarm, and compare them."""
    program = programs()[name]
    joint = play(program, workers=NODES) if program.gains else play(program, share=NODES)
    swarm = play(program, NODES, **faults)
    assert swarm.accusations == []
    expected = {*program.notices, *(["member", *program.late_notices] if faults else [])}
    assert set(swarm.notices) <= expected, swarm.notices
    assert swarm.difference < LARGEST_DIFFERENCE, swarm.tensor
    assert program.loss(swarm.mean, joint.mean) < program.spread, f"{swarm.metrics}, synchronously {joint.mean}"
    return swarm


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_program_is_as_good_on_three_nodes_as_synchronously(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(programs()) - set(QUICK)))
def test_a_program_is_as_good_on_three_nodes_as_synchronously(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", programs())
def test_a_program_survives_a_kill_and_a_late_join(name):
    swarm = check(name, kill=True, late=True)
    assert len(swarm.nodes) == NODES, "two of the first three and the late one"

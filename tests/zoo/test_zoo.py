"""Common kinds of programs do as well on three nodes as synchronously; the nodes agree, and accuse no member."""

import pytest

from tests.harness.marks import slow
from tests.zoo.harness import play
from tests.zoo.registry import programs

NODES = 3
QUICK = ("metric_learning", "one_cycle", "weighted_sampler")
LARGEST_DIFFERENCE = 1e-6  # The largest relative difference of a tensor between two nodes after settle.
# Most metrics are accuracies on 360 images, so two runs of one seed differ by 0.03 by chance once in twenty pairs. If
# the difference of the first seed is too large, the mean over so many seeds counts.
SEEDS = 3


def check(name, **faults):
    """Play a program as one process with the batches of all nodes, and as a swarm, and compare them."""
    program, losses = programs()[name], []
    for seed in range(SEEDS):
        swarm = play(program, NODES, seed=seed, **faults)
        assert swarm.accusations == []
        expected = {*program.notices, *(["member", *program.late_notices] if faults else [])}
        assert set(swarm.notices) <= expected, swarm.notices
        assert swarm.difference < LARGEST_DIFFERENCE, swarm.tensor
        joint = play(program, seed=seed, **({"workers": NODES} if program.gains else {"share": NODES}))
        losses.append(program.loss(swarm.mean, joint.mean))
        if sum(losses) / len(losses) < program.spread:
            return swarm
    raise AssertionError(f"behind synchronous training by {losses}, for the first {SEEDS} seeds")


@pytest.mark.parametrize("name", [*QUICK, *map(slow, sorted(set(programs()) - set(QUICK)))])
def test_a_program_is_as_good_on_three_nodes_as_synchronously(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", programs())
def test_a_program_survives_a_kill_and_a_late_join(name):
    swarm = check(name, kill=True, late=True)
    assert len(swarm.nodes) == NODES, "two of the first three and the late one"

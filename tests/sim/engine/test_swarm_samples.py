"""The members' sample count follows the samples trained: nodes average it in exchanges, like the weights."""

from __future__ import annotations

import numpy as np
import pytest

from gossip.config import Config
from sim.engine.swarm import Swarm
from sim.world.network import NetworkModel
from tests.harness.marks import slow
from tests.simulation.liars import Lying

STEP_S, SAMPLES, EVERY = 0.1, 8, 8


def swarm_of(count: int, *, step_s: float = STEP_S, fast_s: float = STEP_S, fast: int = 0) -> Swarm:
    swarm = Swarm(1, NetworkModel(), Config(mix_every_steps=EVERY))
    for index in range(count):
        swarm.add_peer(
            np.zeros(4, np.float32), step_s=fast_s if index < fast else step_s, samples_per_step=SAMPLES, founder=True
        )
    swarm.introduce()
    return swarm


def errors(swarm: Swarm, before: int = 0) -> list[float]:
    """Return each living peer's number of samples less the samples that all trained, as a share of these.

    Args:
        swarm: The swarm, whose peers all hold one run.
        before: Samples trained by peers that are gone.
    """
    for host in swarm.alive():
        swarm.training.report_steps(host)
    trained = before + sum(host.peer.local.samples for host in swarm.alive())
    return [host.peer.local.progress.samples / trained - 1 for host in swarm.alive()]


@pytest.mark.slow
def test_fifty_trainers_of_one_pace_count_within_two_percent_and_deaths_take_nothing_away():
    swarm = swarm_of(50)
    swarm.run_until(60.0)
    assert max(map(abs, errors(swarm))) < 0.02
    swarm.training.report_steps(swarm.hosts[7])
    lost = swarm.hosts[7].peer.local.samples
    swarm.kill(7)
    swarm.run_until(120.0)
    assert max(map(abs, errors(swarm, lost))) < 0.02


def test_a_node_eight_times_as_fast_as_the_others_counts_for_all_of_its_samples():
    swarm = swarm_of(8, fast=1, fast_s=STEP_S / 8)
    swarm.run_until(80.0)
    assert max(map(abs, errors(swarm))) < 0.05


def test_numbers_that_lie_apart_meet_and_keep_their_sum():
    swarm = swarm_of(6)
    swarm.run_until(30.0)
    for host in swarm.hosts[:3]:
        host.peer.local.progress.samples += 10_000
    swarm.run_until(90.0)
    for host in swarm.hosts:
        swarm.training.report_steps(host)
    numbers = [host.peer.local.progress.samples for host in swarm.hosts]
    trained = sum(host.peer.local.samples for host in swarm.hosts) + 5_000  # the mean of what was added
    assert max(numbers) - min(numbers) < 0.02 * trained
    assert numbers == pytest.approx([trained] * 6, rel=0.03)


@pytest.mark.parametrize(("honest", "liars"), [(3, 1), slow(8, 8)])
def test_liars_after_ten_silent_minutes_add_at_most_a_fifth_in_a_minute(honest, liars):
    """One liar of four adds 6 %, and 37 % if either limit (of one exchange, of one interval) is lifted."""
    swarm = swarm_of(honest + liars)
    swarm.run_until(600.0)
    for host in swarm.hosts[honest:]:
        host.peer.local.progress.__class__ = Lying
    swarm.run_until(660.0)
    for host in swarm.hosts:
        swarm.training.report_steps(host)
    trained = sum(host.peer.local.samples for host in swarm.hosts)
    assert max(host.peer.local.progress.samples for host in swarm.hosts[:honest]) < 1.2 * trained

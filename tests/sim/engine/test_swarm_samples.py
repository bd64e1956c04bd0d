"""Everybody counts what everybody trained, though nobody tells every step."""

from __future__ import annotations

import numpy as np

from gossip.config import Config
from sim.engine.swarm import Swarm
from sim.world.network import NetworkModel

PEERS, STEP_S, SAMPLES = 50, 0.1, 8


def worst(swarm: Swarm, killed_s: float | None = None) -> float:
    """The largest error of anybody's count: all train from the beginning on, and one until it was killed."""
    lost_s = 0.0 if killed_s is None else swarm.now - killed_s
    trained = SAMPLES / STEP_S * (PEERS * swarm.now - lost_s)
    return max(abs(host.peer.swarm_samples / trained - 1) for host in swarm.hosts if not host.gone)


def test_fifty_steady_trainers_count_within_two_in_a_hundred_after_a_minute_and_after_a_death():
    swarm = Swarm(1, NetworkModel(), Config(mix_every_steps=10**9))
    for _ in range(PEERS):
        swarm.add_peer(np.zeros(4, np.float32), step_s=STEP_S, samples_per_step=SAMPLES, founder=True)
    swarm.introduce()
    swarm.run_until(60.0)
    assert worst(swarm) < 0.02
    swarm.kill(7)
    swarm.run_until(90.0)
    assert all(swarm.hosts[7].id not in host.peer.membership.alive() for host in swarm.hosts if not host.gone)
    assert worst(swarm, 60.0) < 0.02
    swarm.run_until(240.0)
    assert worst(swarm, 60.0) < 0.005
    told = sum(host.peer.record.sequence for host in swarm.hosts) / PEERS
    assert told < 10, "steady trainers have nothing to correct"

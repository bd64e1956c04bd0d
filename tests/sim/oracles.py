"""Helpers for tests of closed forms: swarms that mix when they are told to, and the bound on measurements.

Every test says how many samples it draws, their standard error, and where that comes from; the bound is BOUND = 4
standard errors (wrong once in 16,000 seeds for a normal mean), and seeds are fixed. One scalar a node, V = sum of
``(x_i - mean)^2``; further elements of a vector are further copies that see the same pairs. From 256 elements on the
default filter sees enough of a vector to cut off differences, which no closed form covers.

A published round has no equal in an asynchronous swarm: peers mix in pairs and at their own times. So one exchange,
and not one round of a matching, is the unit here. The natural schedule is not memoryless (who has just mixed is not due
again soon), which no closed form covers beyond a run's first exchange. Where a series is wanted, :func:`exchange` has a
peer drawn at random mix now; whom it asks, and all that follows, is the peers' own doing.
"""

import math
from collections.abc import Callable

import numpy as np

from sim.engine.host import Host
from sim.engine.swarm import Swarm
from sim.world.network import NetworkModel
from tests.harness.configs import tuned

BOUND = 4.0  # standard errors
SEED = 1
STEP_S = 0.1
NEVER_S = 1e6
NO_DELAY = NetworkModel(latency_s=0.0, rate_bytes_s=math.inf)
Measured = tuple[float, float, float]  # the measured value, the expected one, and the standard error of the first


def holds(measured: Measured) -> bool:
    seen, expected, error = measured
    return abs(seen - expected) < BOUND * error


def batch_error(series: np.ndarray, batches: int) -> float:
    """Return the standard error of the mean of a correlated series.

    It comes from the means of so many batches, each many relaxation times long.
    """
    length = len(series) // batches
    means = series[: batches * length].reshape(batches, length).mean(1)
    return float(means.std(ddof=1) / math.sqrt(batches))


def disagreement(matrix: np.ndarray) -> np.ndarray:
    """Return V of each element; ``matrix`` is (peers, elements)."""
    return np.square(matrix - matrix.mean(0, dtype=np.float64)).sum(0)


def told_to_mix(
    matrix: np.ndarray, seed: int, network: NetworkModel = NO_DELAY,
    on_step: Callable[[int, np.ndarray, int], None] | None = None, **changes: object,
) -> Swarm:  # fmt: skip
    """Return a swarm whose peers hold the rows of this matrix and mix when told to, at full weight."""
    config = tuned(**{"mix_every_steps": None, "mix_every_s": NEVER_S, "staleness_exponent": 0.0, **changes})
    swarm = Swarm(seed, network, config, on_step, ideal=True)
    for row in matrix:
        swarm.add_peer(row, founder=True, step_s=STEP_S)
    swarm.introduce()
    for host in swarm.hosts:  # Told to mix, they do so again and again within one of these endless intervals.
        host.peer.partners.has_just_mixed = lambda sender, now: False
        host.peer.partners.is_crowding = lambda sender, now: False
        # Settling begins a mix at any time, here one of the configured kind.
        host.peer.exchanges.settlement_class = host.peer.exchanges.session_class
    return swarm


def exchange(swarm: Swarm, initiator: int) -> None:
    """Let this peer mix now, as after :meth:`gossip.peer.Peer.settle`, until it has no exchange in progress."""
    begin_mix(swarm, swarm.hosts[initiator])
    run_until_idle(swarm)


def begin_mix(swarm: Swarm, *hosts: Host) -> None:
    """Let these hosts ask for one mix at this instant."""
    for host in hosts:
        swarm.perform(host, host.peer.settle(True, swarm.now))
    for host in hosts:
        host.peer.settle(False, swarm.now)


def run_until_idle(swarm: Swarm) -> None:
    swarm.run_until(swarm.now + 3.5 * STEP_S)  # one boundary of each side, and one to add the result
    while any(host.boundary.has_requests or host.peer.exchanges.table for host in swarm.hosts):
        swarm.run_until(swarm.now + STEP_S)

"""The closed forms of gossip averaging, against swarms that average for real (see oracles for how)."""

import math

import numpy as np

from gossip.averaging.visit import Visit
from sim.scenario.scenario import Scenario
from sim.simulation import Simulation
from sim.world.network import NetworkModel
from tests.sim.oracles import SEED, Measured, disagreement, exchange, holds, told_to_mix


# -- one random pair averages: E V'/V = 1 - 1/(n-1) ------------------------------------------------------------------
def first_exchanges(seed: int) -> Measured:
    """40 scenarios of "averaging", each up to its first exchange, with 2,048 elements: up to 81,920 samples of V'/V.

    For normal x_i what a pair takes, ``(x_i - x_j)^2 / 2V``, is Beta(1/2, (n-2)/2) whichever pair it is, and so the
    standard error is known. A scenario is left out when its second exchange ended in the same slice of time: that
    depends on its schedule alone, and not on the vectors.
    """
    n, elements, ratios = 8, 2_048, list[np.ndarray]()
    for number in range(40):
        scenario = Scenario.from_mapping({
            "seed": seed * 1_000 + number, "peers": n, "duration_s": 10.0, "membership": {"mode": "ideal"},
            "task": {"dataset": "averaging", "elements": elements}, "gossip": {"staleness_exponent": 0},
            "network": {"latency": {"kind": "constant", "value_s": 0.0}, "rate_mbit_s": "unlimited"},
        })  # fmt: skip
        simulation = Simulation(scenario)
        swarm, before = simulation.swarm, disagreement(simulation.learners.matrix)
        while swarm.mixes == 0:
            swarm.run_until(swarm.now + 0.001)
        if swarm.mixes == 2:
            for host in swarm.hosts:  # updates that wait for the next boundary
                for update in host.boundary.arrived_updates:
                    host.boundary.apply_update(update, Visit())
            ratios.append(disagreement(simulation.learners.matrix) / before)
    taken = np.concatenate(ratios)
    deviation = math.sqrt(2 * (n - 2) / ((n - 1) ** 2 * (n + 1)))
    return float(taken.mean()), 1 - 1 / (n - 1), deviation / math.sqrt(len(taken))


def test_the_first_exchange_of_a_run_takes_its_share_of_the_disagreement() -> None:
    assert holds(first_exchanges(SEED))


# -- exchanges that fail: E V'/V = 1 - (1-q)/(n-1) -------------------------------------------------------------------
def begun_in_vain(failed_by: dict[str, int]) -> int:
    """Count the exchanges that failed, without the offers that got no answer."""
    return sum(count for code, count in failed_by.items() if code not in ("unanswered", "unreached"))


def failing(seed: int, loss: float) -> tuple[Measured, Measured]:
    """V'/V over exchanges whose streams began, and the share of these that failed; about 1,500 samples each.

    An exchange has a stream each way, and happens when both arrive: it fails with ``q = 1 - (1-loss)^2``. Lost Offers
    and Accepts begin none, and a lost Commit is asked after until it is known. Atomic: it happened on both sides, with
    the mean where it was to the last bit, or on neither; so V' is V with probability q, and the pair's otherwise.
    """
    n, count = 8, 1_500
    matrix, start = np.zeros((n, 1), np.float32), np.arange(n)
    network = NetworkModel(latency_s=0.0, rate_bytes_s=math.inf, loss=loss)
    swarm = told_to_mix(matrix, seed, network, bench_s=1e-3, stall_s=0.3, reply_timeout_s=0.3)
    rng, v, q = np.random.default_rng(seed), n * (n * n - 1) / 12, 1 - (1 - loss) ** 2
    ratios, failed = list[float](), 0
    for _ in range(count):
        matrix[:, 0] = start
        initiator = int(rng.integers(n))
        exchanges = swarm.hosts[initiator].peer.exchanges
        done, failures, mixes = exchanges.done_count, begun_in_vain(exchanges.failures_by_reason), swarm.mixes
        exchange(swarm, initiator)
        mixed, broken = exchanges.done_count - done, begun_in_vain(exchanges.failures_by_reason) - failures
        assert swarm.mixes - mixes == 2 * mixed, "on both sides or on neither"
        assert matrix.sum(dtype=np.float64) == start.sum()
        assert (matrix[:, 0] != start).sum() == 2 * mixed
        assert mixed + broken <= 1
        if mixed + broken:
            ratios.append(float(disagreement(matrix)[0]) / v)
            failed += broken
    begun, share = len(ratios), 1 - q
    taken = np.square(np.subtract.outer(start, start))[~np.eye(n, dtype=bool)] / (2 * v)  # mean 1/(n-1)
    deviation = math.sqrt(share * np.square(taken).mean() - (share * taken.mean()) ** 2)
    fall = float(np.mean(ratios)), 1 - share / (n - 1), deviation / math.sqrt(begun)
    return fall, (failed / begun, q, math.sqrt(q * share / begun))


def test_exchanges_that_fail_are_atomic_and_cost_their_share_of_the_contraction() -> None:
    fall, failures = failing(SEED, loss=0.1)
    assert holds(fall)
    assert holds(failures)

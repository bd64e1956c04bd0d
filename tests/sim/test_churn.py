"""Peers that come and go: runs end with a report, at either level, of fifty or two hundred."""

import pytest

from gossip.config import Config
from sim.scenario.scenario import ChurnSpec, Distribution, MembershipSpec, NetworkCut, NetworkSpec, Scenario, Task
from sim.simulation import simulate
from tests.harness.marks import slow


def churned(fidelity: str, peers: int, duration_s: float, mean_s: float, **changes) -> dict:
    times = {"up": Distribution.exponential(mean_s), "down": Distribution.exponential(mean_s / 4)}
    churn = ChurnSpec(**times, farewell=0.2 if fidelity == "whole" else 0.0)  # The fast level plays no last mixes.
    membership = MembershipSpec(mode="ideal" if fidelity == "exchange" else "protocol")
    scenario = Scenario(
        peers=peers, duration_s=duration_s, fidelity=fidelity, seed=1, churn=churn, membership=membership,
        task=Task(dataset="averaging", elements=8), gossip=Config(), **changes,
    )  # fmt: skip
    return simulate(scenario, progress=False).summary


@pytest.mark.slow
def test_two_hundred_peers_of_short_lives_mix_at_the_fast_level():
    summary = churned("exchange", 200, 300.0, 200.0)
    assert summary["exchanges_done"] > 200


@pytest.mark.parametrize(
    ("peers", "duration_s", "mean_s"), [(50, 5.0, 20.0), slow(200, 5.0, 20.0), slow(200, 300.0, 200.0)]
)
def test_peers_of_short_lives_mix_with_the_whole_protocol(peers, duration_s, mean_s):
    cut = NetworkSpec(partitions=(NetworkCut(at_s=duration_s / 3, until_s=duration_s / 2),))
    summary = churned("whole", peers, duration_s, mean_s, network=cut)
    assert summary["exchanges_done"] > peers

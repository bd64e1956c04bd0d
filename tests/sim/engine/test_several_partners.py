"""A mix with several partners is one mix; this tests how often its exchanges take place."""

import pytest

from sim import Scenario, simulate

STEP_S, STEPS, PEERS = 0.1, 120, 12


def mixes_a_step(**gossip):
    """Return the exchanges of a node for each of its steps, whether it began them or another did."""
    table = {
        "peers": PEERS, "duration_s": STEPS * STEP_S, "task": {"dataset": "averaging"},
        "membership": {"mode": "ideal"}, "compute": {"step_s": {"kind": "uniform", "low_s": 0.095, "high_s": 0.105}},
        "network": {"latency": {"kind": "constant", "value_ms": 5}}, "gossip": gossip,
    }  # fmt: skip
    summary = simulate(Scenario.from_mapping(table), progress=False).summary
    return summary["node_updates"] / summary["steps"]


@pytest.mark.parametrize(
    ("gossip", "expected"),
    [
        ({"selection": "ring", "partners": 0, "mix_every_steps": 1, "max_version_gap": 0.0}, 2),
        ({"mixing": "row-stochastic", "partners": 3, "mix_every_steps": 8, "max_version_gap": 0.0}, 3 / 8),
        ({"mix_every_steps": 8}, 1 / 8),
    ],
    ids=["every edge of a ring in lockstep", "pushes to three partners", "a pair, whoever asked"],
)
def test_a_mix_is_one_mix_an_interval_with_however_many_partners(gossip, expected):
    assert mixes_a_step(**gossip) == pytest.approx(expected, rel=0.1)

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


def test_in_lockstep_with_all_neighbours_every_edge_of_a_ring_is_mixed_at_every_step():
    assert mixes_a_step(selection="ring", partners=0, mix_every_steps=1, max_version_gap=0.0) == pytest.approx(
        2, rel=0.1
    )


def test_pushes_to_three_partners_are_one_mix_and_not_three():
    mixes = mixes_a_step(mixing="row-stochastic", partners=3, mix_every_steps=8, max_version_gap=0.0)
    assert mixes == pytest.approx(3 / 8, rel=0.1)


def test_a_pair_mixes_once_an_interval_whoever_asked():
    assert mixes_a_step(mix_every_steps=8) == pytest.approx(1 / 8, rel=0.1)

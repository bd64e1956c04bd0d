"""Simulated peers that choose how often they mix: by their links, their steps and the model that theirs stands for."""

from __future__ import annotations

import pytest

from gossip.config.internal import Internal
from sim import Scenario, simulate
from sim.scenario.fidelity import fidelity_of
from sim.simulation import Simulation

STEP_S, PEERS = 0.1, 8
FAST = {"rate_mbit_s": 10_000}
AUTO = {"mix_every_steps": "auto", "codec": "auto"}


def scenario(steps=120, task=None, network=None, internal=None, **gossip):
    gossip |= {"internal": internal} if internal else {}
    return Scenario.from_mapping({
        "peers": PEERS, "duration_s": steps * STEP_S, "membership": {"mode": "ideal"},
        "task": {"dataset": "digits", "model": "mlp", "optimizer": {"lr": 0.3}} | (task or {}),
        "compute": {"step_s": {"kind": "uniform", "low_s": 0.095, "high_s": 0.105}},
        "network": {"latency": {"kind": "constant", "value_ms": 5}} | (network or {}), "gossip": AUTO | gossip,
    })  # fmt: skip


def played(**changes):
    """The interval at the end, mixes of a peer for each of its steps, and bytes of a peer for each step."""
    summary = simulate(scenario(**changes), progress=False).summary
    steps = summary["steps"]
    return summary["interval_steps"], summary["node_updates"] / steps, summary["bytes_sent"] / steps


def test_peers_on_good_links_mix_every_2_steps_in_int8_and_send_what_fp32_every_8_sends():
    interval, mixes, sent = played()
    every_8 = simulate(scenario(codec="fp32", mix_every_steps=8), progress=False).summary
    assert interval == 2
    assert mixes == pytest.approx(1 / 2, rel=0.1)
    assert sent == pytest.approx(every_8["bytes_sent"] / every_8["steps"], rel=0.15)
    assert every_8["interval_steps"] == 8


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [
        ({"network": {"rate_mbit_s": 0.05}}, 6, 12),  # 5 KB of int8 take 0.77 s, both ways at once
        ({"task": {"model_mb": 40}, "network": FAST}, 20, 26),  # 10 million parameters at 0.1 s a step: 2 % are 2 ms
        ({"task": {"model_mb": 40}, "network": FAST, "internal": Internal(mixing_share=0.2)}, 2, 3),
    ],
    ids=["slow links", "a large model", "a large model that may cost more"],
)
def test_where_an_exchange_takes_long_or_costs_much_they_mix_more_rarely(changes, least, most):
    interval, mixes, _ = played(steps=200, **changes)
    assert least <= interval <= most
    assert mixes < 1 / (0.7 * least) + 0.1  # and what began before anything was measured


def test_a_correction_counts_in_the_interval_that_its_peer_has_chosen():
    simulation = Simulation(scenario(steps=200, network={"rate_mbit_s": 0.05}))
    for _ in simulation.slices():
        pass
    every = simulation.learners.corrections.every.tolist()
    chosen = [host.peer.schedule.every for host in simulation.swarm.hosts]
    assert all(6 <= each <= 12 for each in every)
    assert sum(one == other for one, other in zip(every, chosen, strict=True)) >= PEERS // 2  # others chose since


def test_a_number_that_is_given_stays_on_any_link():
    interval, _, _ = played(steps=60, network={"rate_mbit_s": 0.2}, mix_every_steps=2)
    assert interval == 2


def test_it_is_played_message_by_message_with_the_reason():
    fast = scenario(codec="fp32")
    assert fidelity_of(fast).level == "whole"
    assert "gossip.mix_every_steps" in fidelity_of(fast).reason

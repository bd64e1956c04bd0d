"""Simulated peers that choose their interval: by their links, their steps and the model theirs stands for."""

import functools

import numpy as np
import pytest

from gossip.config import Config
from gossip.config.internal import Internal
from sim import Scenario, simulate
from sim.exchanges.level import codec_of
from sim.simulation import ExchangeSimulation, Simulation

STEP_S, PEERS = 0.1, 8
FAST = {"rate_mbit_s": 10_000}
AUTO = {"mix_every_steps": "auto", "codec": "auto"}


def scenario(steps=120, task=None, network=None, internal=None, fidelity="auto", **gossip):
    gossip |= {"internal": internal} if internal else {}
    return Scenario.from_mapping({
        "peers": PEERS, "fidelity": fidelity, "duration_s": steps * STEP_S, "membership": {"mode": "ideal"},
        "task": {"dataset": "digits", "model": "mlp", "optimizer": {"lr": 0.3}} | (task or {}),
        "compute": {"step_s": {"kind": "uniform", "low_s": 0.095, "high_s": 0.105}},
        "network": {"latency": {"kind": "constant", "value_ms": 5}} | (network or {}), "gossip": AUTO | gossip,
    })  # fmt: skip


def played(**changes):
    """Return the interval at the end, and the mixes and the bytes of a peer for each of its steps."""
    summary = simulate(scenario(**changes), progress=False).summary
    steps = summary["steps"]
    return summary["interval_steps"], summary["node_updates"] / steps, summary["bytes_sent"] / steps


@functools.cache
def of_fp32_every_8():
    return simulate(scenario(codec="fp32", mix_every_steps=8), progress=False).summary


@pytest.mark.parametrize("fidelity", ["whole", "exchange"])
def test_peers_on_good_links_mix_every_2_steps_in_int8_and_send_what_fp32_every_8_sends(fidelity):
    interval, mixes, sent = played(steps=120, fidelity=fidelity)
    every_8 = of_fp32_every_8()
    assert interval == 2
    assert mixes == pytest.approx(1 / 2, rel=0.1)
    assert sent == pytest.approx(every_8["bytes_sent"] / every_8["steps"], rel=0.15)
    assert every_8["interval_steps"] == 8


@pytest.mark.parametrize("fidelity", ["whole", "exchange"])
@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [
        ({"network": {"rate_mbit_s": 0.05}}, 6, 12),  # 5 KB of int8 take 0.77 s, both ways at once
        ({"task": {"model_mb": 40}, "network": FAST}, 17, 23),  # 10 million parameters at 0.1 s a step: 2 % are 2 ms
        ({"task": {"model_mb": 40}, "network": FAST, "internal": Internal(mixing_share=0.2)}, 2, 3),
    ],
    ids=["slow links", "a large model", "a large model that may cost more"],
)
def test_where_an_exchange_takes_long_or_costs_much_they_mix_more_rarely(changes, least, most, fidelity):
    interval, mixes, _ = played(steps=120, fidelity=fidelity, **changes)
    assert least <= interval <= most
    assert mixes < 1 / (0.7 * least) + 0.1  # some exchanges began before anything was measured


def of_hosts(simulation):
    """Return the learners of the whole level, and the intervals that peers have chosen."""
    return simulation.learners, [host.peer.schedule.every for host in simulation.swarm.hosts]


def of_rows(simulation):
    """Return the same of the fast level."""
    level = simulation.level
    level.update_models()
    return level.learners, [level.decisions.interval_steps(peer) for peer in range(PEERS)]


@pytest.mark.parametrize(("kind", "of"), [(Simulation, of_hosts), (ExchangeSimulation, of_rows)], ids=["whole", "fast"])
def test_a_correction_counts_in_the_interval_that_its_peer_has_chosen(kind, of):
    simulation = kind(scenario(steps=200, network={"rate_mbit_s": 0.05}))
    for _ in simulation.slices():
        pass
    learners, chosen = of(simulation)
    steps = learners.corrections.interval_steps.tolist()
    assert 6 <= sorted(steps)[PEERS // 2] <= 12  # The first, shorter intervals made some peers wait for each other.
    assert sum(one == other for one, other in zip(steps, chosen, strict=True)) >= PEERS // 2  # some chose again


def test_both_levels_choose_the_same_intervals_and_learn_as_much():
    slow = {"rate_mbit_s": 0.1}
    # On slow links the intervals are about 6 steps. A peer at 5 in place of 6 mixes a fifth more often.
    for changes, within in (({}, 0.02), ({"network": slow}, 0.1)):
        whole, fast = (
            simulate(scenario(steps=200, fidelity=fidelity, **changes), progress=False).summary
            for fidelity in ("whole", "exchange")
        )
        for figure in ("node_updates", "bytes_sent"):
            assert fast[figure] == pytest.approx(whole[figure], rel=within), figure
        assert abs(fast["interval_steps"] - whole["interval_steps"]) <= 1
        assert fast["accuracy"]["mean"] == pytest.approx(whole["accuracy"]["mean"], abs=0.02)


def test_at_the_fast_level_the_codec_is_what_peers_come_to_choose():
    assert codec_of(Config(mix_every_steps="auto")).name == "int8"
    assert codec_of(Config(mix_every_steps="auto", codec="int4")).name == "int4"
    assert ExchangeSimulation(scenario()).level.models.codec.name == "int8"


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_at_the_fast_level_a_coarse_codec_leaves_the_mean_of_both_sides(codec):
    simulation = ExchangeSimulation(scenario(codec=codec, mix_every_steps=2, outer_momentum=0.0, outer_rate=1.0))
    models = simulation.level.models
    rows = np.arange(PEERS)
    ours = np.random.default_rng(1).normal(size=(PEERS, models.matrix.shape[1])).astype(np.float32)
    numbers = np.tile(np.arange(PEERS // 2), 2)
    difference, agreed = np.empty_like(ours), np.full(PEERS, 0.5)
    models.mix_pairs(rows, ours, numbers, agreed, np.zeros(PEERS), difference)
    half = PEERS // 2
    np.testing.assert_array_equal(difference[:half], -difference[half:])
    exact = 0.5 * (ours[half:] - ours[:half])
    error = np.abs(difference[:half] - exact).mean()
    assert 0 < error < {"int8": 0.02, "int4": 0.3}[codec], "it rounds, and not by more than the codec does"

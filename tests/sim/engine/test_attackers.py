"""Peers that send lies: what they send, whom it reaches, and that figures are of the honest ones alone."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.config import Config
from gossip.errors import ConfigError
from sim.engine.swarm import Swarm
from sim.report.describe import in_words
from sim.scenario.adversaries import AttackersSpec, Liar, liars, unguarded
from sim.scenario.scenario import (
    ChurnSpec,
    Distribution,
    Latency,
    MembershipSpec,
    NetworkSpec,
    Optimizer,
    Scenario,
    Task,
)
from sim.simulation import simulate
from sim.world.network import network_of
from tests.sim.scenarios import played, small

NAMES = [str(index) for index in range(40)]
HELD = np.linspace(-1, 1, 1000, dtype=np.float32)
IDEAL = {
    "membership": MembershipSpec(mode="ideal"),
    "network": NetworkSpec(latency=Latency.parse({"kind": "constant", "value_ms": 0})),
}


def averaging(config, kind="nan", share=0.25, **changes):
    """Eight peers that average vectors, two of them attackers."""
    task = Task(dataset="averaging", elements=512)
    spec = AttackersSpec(share=share, kind=kind)
    return Scenario(**{"peers": 8, "rounds": 6.0, "task": task, "gossip": config, "attackers": spec} | changes)


def honest_of(run):
    return [host for host in run.swarm.hosts if host.liar is None]


# -- what is sent ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "scale", "factor"),
    [("sign-flip", None, -1.0), ("sign-flip", 2.5, -2.5), ("scaled", None, 10.0), ("scaled", 0.5, 0.5)],
)
def test_a_multiple_of_the_model_is_sent_and_the_model_left_as_it_is(kind, scale, factor):
    before = HELD.copy()
    sent = Liar(AttackersSpec(share=0.1, kind=kind, scale=scale), 1, "0").sends(HELD, 7)
    np.testing.assert_array_equal(sent, np.float32(factor) * HELD)
    np.testing.assert_array_equal(HELD, before)


def test_noise_has_its_scale_and_is_another_for_each_session_peer_and_seed():
    spec = AttackersSpec(share=0.1, kind="random", scale=3.0)
    sent = Liar(spec, 1, "0").sends(HELD, 7)
    assert sent.dtype == np.float32
    assert sent.std() == pytest.approx(3.0, rel=0.1)
    np.testing.assert_array_equal(sent, Liar(spec, 1, "0").sends(HELD, 7))
    for other in (
        Liar(spec, 1, "0").sends(HELD, 8),
        Liar(spec, 1, "1").sends(HELD, 7),
        Liar(spec, 2, "0").sends(HELD, 7),
    ):
        assert not np.array_equal(sent, other)


def test_of_nan_nothing_is_a_number():
    assert np.isnan(Liar(AttackersSpec(share=0.1, kind="nan"), 1, "0").sends(HELD, 7)).all()


# -- who attacks -------------------------------------------------------------------------------------------------------
@given(st.floats(0, 0.99), st.floats(0, 0.99), st.integers(0, 9))
def test_a_larger_share_has_those_of_a_smaller_one_among_it(one, other, seed):
    few, many = (set(liars(AttackersSpec(share=share), NAMES, seed)) for share in sorted((one, other)))
    assert few <= many
    assert len(many) == math.floor(max(one, other) * 40 + 0.5)


def test_another_seed_draws_others():
    drawn = {tuple(sorted(liars(AttackersSpec(share=0.2), NAMES, seed))) for seed in range(5)}
    assert len(drawn) == 5


def test_without_attackers_nothing_is_drawn_and_nothing_changes():
    assert liars(None, NAMES, 1) == {}
    spec = AttackersSpec(share=0.0)
    plain, none = simulate(small(), progress=False), simulate(small(attackers=spec), progress=False)
    assert plain.summary["digest"] == none.summary["digest"]


@pytest.mark.parametrize("name", ["clip", "balance", "none"])
def test_an_attacker_refuses_nothing_and_honest_peers_keep_their_filter(name):
    config = Config(filter=name)
    run = played(averaging(config, "sign-flip"))
    assert {host.peer.config for host in run.swarm.hosts if host.liar is not None} == {unguarded(config)}
    assert {host.peer.config for host in honest_of(run)} == {config}
    assert unguarded(config).filter == "none"
    assert unguarded(config).norm_bound > 1e20


def test_an_attacker_that_comes_again_attacks_again():
    churn = ChurnSpec(up=Distribution.exponential(2), down=Distribution.exponential(1))
    spec = AttackersSpec(share=0.5, kind="nan")
    run = played(small(duration_s=12.0, churn=churn, attackers=spec, **IDEAL))
    again = [host for index, host in enumerate(run.swarm.hosts) if run.swarm.lives[index] and host.name in run.liars]
    assert again, "some came again"
    assert all(host.liar is run.liars[host.name] for host in again)
    assert all(host.peer.config == unguarded(run.swarm.config) for host in again)


# -- what it does ------------------------------------------------------------------------------------------------------
def test_the_honest_side_mixes_with_the_lie_and_the_attacker_with_the_truth():
    scenario = averaging(Config(), "sign-flip", share=0.5, peers=2, rounds=1.0)
    run = played(scenario)
    liar, honest = sorted(run.swarm.hosts, key=lambda host: host.liar is None)
    before = played(dataclasses.replace(scenario, rounds=None, duration_s=1e-3)).swarm
    held, truth = before.hosts[liar.index].vector, before.hosts[honest.index].vector
    assert run.swarm.sessions.mixes == 2
    np.testing.assert_allclose(honest.vector, truth + 0.5 * (-held - truth), atol=1e-6)
    np.testing.assert_allclose(liar.vector, held + 0.5 * (truth - held), atol=1e-6)


WAYS = [
    {}, {"codec": "bf16"}, {"codec": "int8"}, {"codec": "moniqua4"}, {"part": "mask 0.1"}, {"part": "fragments 4"},
    {"part": "fragments 4"}, {"outer_momentum": 0.5, "outer_rate": 0.7}, {"mixing": "push-sum"},
    {"mixing": "row-stochastic"}, {"filter": "clip"}, {"filter": "clip", "mixing": "row-stochastic"},
]  # fmt: skip


def refused(run) -> Counter[str]:
    """What the honest refused of others, and what they cut off, by reason."""
    counts: Counter[str] = Counter()
    for host in run.swarm.hosts:
        for (_, code), times in host.peer.refusals.items() if host.liar is None else ():
            counts[code] += times
    return counts


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_no_honest_peer_takes_what_is_not_a_number_however_it_is_sent(way):
    run = played(averaging(Config(bench_s=1.0, **way), **IDEAL))
    assert all(np.isfinite(host.vector).all() for host in run.swarm.hosts)
    assert refused(run)["not-finite"] > 0


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_of_mixing_carries_the_lie(way):
    """Noise of standard deviation 30 among vectors of 1 is seen by who accepts it, and where it is cut off, counted."""
    spec = AttackersSpec(share=0.25, kind="random", scale=5.0)
    config = Config(**way)
    run = played(averaging(config, **IDEAL | {"attackers": spec, "rounds": 12.0}))
    largest = max(float(np.abs(host.vector).max()) for host in honest_of(run))
    assert largest > 5.0 or refused(run).get("clipped", 0) > 0


def learning(rule, kind):
    task = Task(model="linear", optimizer=Optimizer(lr=0.1))
    spec = AttackersSpec(share=0.1, kind=kind)
    config = Config(mix_every_steps=8, filter=rule)
    scenario = Scenario(peers=20, rounds=18.0, task=task, gossip=config, attackers=spec, **IDEAL)
    return simulate(scenario, progress=False).summary


@pytest.mark.parametrize("kind", ["sign-flip", "scaled", "random", "nan"])
def test_clipping_keeps_honest_peers_learning_beside_a_tenth_of_attackers(kind):
    summary = learning("clip", kind)
    assert summary["accuracy"]["mean"] > 0.85
    assert summary["accuracy"]["min"] > 0.75
    assert summary["refused"]["not-finite" if kind == "nan" else "clipped"] > 0


def test_without_a_filter_a_tenth_of_flipped_signs_is_felt():
    assert learning("none", "random")["accuracy"]["mean"] < 0.8


# -- figures -----------------------------------------------------------------------------------------------------------
def test_figures_are_of_the_honest_alone():
    run = played(small(attackers=AttackersSpec(share=0.34, kind="scaled", scale=30.0)))
    row, honest = run.measures.row(), honest_of(run)
    vectors = np.stack([host.vector for host in honest])
    losses, accuracies, _ = run.learners.evaluate(vectors)
    assert len(honest) == 4
    assert row["ready"] == 6.0
    assert row["loss_mean"] == pytest.approx(float(losses.mean()))
    assert row["accuracy_min"] == pytest.approx(float(accuracies.min()))
    apart = math.sqrt(float(((vectors - vectors.mean(axis=0)) ** 2).sum()) / 4)
    assert row["consensus_distance"] == pytest.approx(apart, rel=1e-4)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"share": 1.0}, ["attackers.share = 1.0", "below 1", "somebody is honest"]),
        ({"share": -0.1}, ["attackers.share = -0.1", "from 0"]),
        ({"share": 0.01}, ["attackers.share = 0.01", "1 at least of 10 peers"]),
        ({"share": 0.96}, ["attackers.share = 0.96", "leaves 1"]),
        ({"kind": "nan"}, ["attackers.share", "missing"]),
        ({"share": 0.1, "kind": "flip"}, ["attackers.kind = 'flip'", "sign-flip, scaled, random, nan"]),
        ({"share": 0.1, "kind": "nan", "scale": 2}, ["attackers.scale = 2.0", "nan has none"]),
        ({"share": 0.1, "scale": 0}, ["attackers.scale = 0.0", "positive"]),
        ({"share": 0.1, "scale": math.inf}, ["attackers.scale = inf", "positive"]),
    ],
)
def test_attackers_that_cannot_be_are_refused_with_their_key_and_what_would_do(table, words):
    with pytest.raises(ConfigError) as caught:
        Scenario.from_mapping({"rounds": 1, "peers": 10, "attackers": table})
    for word in words:
        assert word in str(caught.value)


def test_attackers_survive_their_own_text():
    for spec in (AttackersSpec(share=0.1), AttackersSpec(share=0.2, kind="scaled", scale=3.0)):
        scenario = small(attackers=spec, peers=10)
        assert Scenario.from_mapping(scenario.to_mapping()) == scenario


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (AttackersSpec(share=0.2), "2 of the peers attack and send their models with the sign flipped;"),
        (AttackersSpec(share=0.1, kind="scaled"), "1 of the peers attacks and sends their models times 10;"),
        (AttackersSpec(share=0.1, kind="random", scale=2.0), "noise of standard deviation 2 in place"),
        (AttackersSpec(share=0.1, kind="nan"), "nothing is a number"),
    ],
)
def test_attackers_are_said_in_words(spec, said):
    assert said in in_words(small(attackers=spec, peers=10))
    assert "attack" not in in_words(small(peers=10))


# -- a newcomer --------------------------------------------------------------------------------------------------------
def moved_by_the_first_it_meets(kind, learning):
    """(how far a newcomer is moved that mixes with a liar before it mixes with anybody else, what the donors were
    apart), both as norms."""
    elements, rng = 4096, np.random.default_rng(3)
    network = network_of(NetworkSpec(latency=Latency.parse({"kind": "constant", "value_ms": 5})), 1)
    noise = np.random.default_rng(4)

    def on_step(index, vector, step):
        if index < 5:  # and the newcomer has taken no step yet
            vector += learning * noise.standard_normal(elements).astype(np.float32)

    swarm = Swarm(7, network, Config(mix_every_steps=4), on_step)  # with others a scaled model is refused for ever
    start = rng.standard_normal(elements).astype(np.float32)
    liar = Liar(AttackersSpec(share=0.1, kind=kind), 1, "0")
    for number in range(5):
        swarm.add_peer(start.copy(), founder=True, liar=liar if number == 0 else None)
    swarm.introduce()
    swarm.run_until(30.0)
    models = np.stack([host.vector for host in swarm.hosts[1:]]).astype(float)
    apart = max(float(np.linalg.norm(a - b)) for a in models for b in models)
    newcomer = swarm.hosts[swarm.add_peer(rng.standard_normal(elements).astype(np.float32), [1, 2])]
    while not newcomer.peer.ready:
        swarm.run_until(swarm.now + 0.01)
    for number in range(1, 5):
        swarm.kill(number)
    before = newcomer.vector.copy()
    while not newcomer.peer.exchanges.done or newcomer.boundary.updates:
        assert swarm.now < 90.0
        swarm.run_until(swarm.now + 0.01)
    assert newcomer.peer.exchanges.last_partner == swarm.hosts[0].id
    return float(np.linalg.norm(newcomer.vector - before)), apart


@pytest.mark.parametrize("kind", ["sign-flip", "scaled", "random"])
@pytest.mark.parametrize("learning", [0.01, 0.0])
def test_a_newcomer_is_moved_no_further_by_the_first_it_meets_than_its_donors_were_apart(kind, learning):
    """Before its first step, when it knows of no distance of its own."""
    moved, apart = moved_by_the_first_it_meets(kind, learning)
    assert moved <= 0.5 * Config().clip_factor * max(apart, 1e-3 * math.sqrt(4096)) * 1.1

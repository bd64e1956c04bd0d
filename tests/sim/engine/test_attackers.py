"""Attacking peers: the lies they send, the peers that get these, and figures of honest peers alone."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.config import Config
from gossip.filters.clip import Clip
from sim.engine.sessions import Sessions
from sim.engine.swarm import Swarm
from sim.scenario.adversaries import Attacker, AttackersSpec, Sight, draw_attackers, little_deviations, unguarded
from sim.scenario.scenario import NetworkSpec, Scenario
from sim.simulation import simulate
from sim.world.network import network_of
from tests.harness.configs import tuned
from tests.sim.scenarios import played, small

NAMES = [str(index) for index in range(40)]
HELD = np.linspace(-1, 1, 1000, dtype=np.float32)
IDEAL = {"membership": {"mode": "ideal"}, "network": {"latency": {"kind": "constant", "value_ms": 0}}}


def averaging(config, kind="nan", share=0.25, **changes):
    """Return a scenario of eight peers that average vectors, two of them attackers."""
    task = {"dataset": "averaging", "elements": 512}
    spec = {"share": share, "kind": kind}
    return Scenario(**{"peers": 8, "rounds": 6.0, "task": task, "gossip": config, "attackers": spec} | changes)


def lie_of(spec, *, seed=1, name="0", session=7):
    return Attacker(spec, seed, name, 40).false_values(HELD, session)


def honest_of(run):
    return [host for host in run.swarm.hosts if host.attacker is None]


# -- what is sent ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "scale", "factor"),
    [
        ("sign-flip", None, -1.0),
        ("sign-flip", 2.5, -2.5),
        ("scaled", None, 10.0),
        ("scaled", 0.5, 0.5),
        ("nan", None, np.nan),
    ],
)
def test_a_multiple_of_the_model_is_sent_and_the_model_left_as_it_is(kind, scale, factor):
    before = HELD.copy()
    sent = lie_of(AttackersSpec(share=0.1, kind=kind, scale=scale))
    np.testing.assert_array_equal(sent, np.float32(factor) * HELD)
    np.testing.assert_array_equal(HELD, before)


def test_noise_has_its_scale_and_is_another_for_each_session_peer_and_seed():
    spec = AttackersSpec(share=0.1, kind="random", scale=3.0)
    sent = lie_of(spec)
    assert sent.dtype == np.float32
    assert sent.std() == pytest.approx(3.0, rel=0.1)
    np.testing.assert_array_equal(sent, lie_of(spec))
    for other in ({"session": 8}, {"name": "1"}, {"seed": 2}):
        assert not np.array_equal(sent, lie_of(spec, **other))


# -- what colluding attackers send -------------------------------------------------------------------------------------
def seen(rng):
    """Return an attacker's view of 12 honest models of 50 elements about a mean; one is the receiver's."""
    honest = rng.normal(3.0, 0.5, (12, 50)).astype(np.float32)
    return Sight(honest[4].copy(), honest, 3)


def told(kind, scale=None, peers=15):
    sight = seen(np.random.default_rng(1))
    spec = AttackersSpec(share=0.2, kind=kind, scale=scale)
    return Attacker(spec, 1, "0", peers).false_values(np.zeros(50, np.float32), 7, lambda: sight), sight


def test_alie_is_a_few_deviations_below_the_honest_mean():
    lie, sight = told("alie", 1.5)
    plain = [np.mean(column) - 1.5 * np.std(column) for column in sight.honest.T.astype(float)]
    np.testing.assert_allclose(lie, plain, rtol=1e-5)
    usual, _ = told("alie")
    deviations = (sight.honest.mean(0) - usual) / sight.honest.std(0)
    np.testing.assert_allclose(deviations, little_deviations(15, 3), rtol=1e-3)


@pytest.mark.parametrize(
    ("peers", "attackers", "expected"), [(50, 24, 1.4261), (40, 4, 0.0697), (40, 8, 0.2372), (40, 1, 0.0), (2, 1, 0.0)]
)
def test_alie_takes_as_many_deviations_as_the_paper_gives(peers, attackers, expected):
    """The 24 attackers of 50 peers need 2 others for a majority, and 24 of the 26 honest ones lie below.

    A single attacker could gain nothing, and stays at the mean.
    """
    assert little_deviations(peers, attackers) == pytest.approx(expected, abs=1e-3)


def test_ipm_points_against_the_honest_mean():
    lie, sight = told("ipm")
    np.testing.assert_allclose(lie, -0.1 * sight.honest.astype(float).mean(0), rtol=1e-5)
    assert lie @ sight.honest.mean(0) < 0


def test_dissensus_takes_from_a_partner_what_all_honest_ones_bring_it():
    """If all 15 have equal weights, the partner stays where it is: honest pulls and lies add up to 0."""
    lie, sight = told("dissensus")
    pulls = [model - sight.partner for model in sight.honest.astype(float)]
    pulls += [lie.astype(float) - sight.partner] * sight.attackers
    np.testing.assert_allclose(np.sum(pulls, axis=0), 0.0, atol=1e-4)
    twice, _ = told("dissensus", 2.0)
    np.testing.assert_allclose(twice - sight.partner, 2 * (lie - sight.partner), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["alie", "ipm", "dissensus"])
@pytest.mark.parametrize("way", [{}, {"part": "mask 0.1"}, {"mixing": "row-stochastic"}, {"codec": "int8"}], ids=str)
def test_colluding_attackers_see_the_honest_models_of_a_swarm(kind, way, monkeypatch):
    """They see the part that is mixed. The receiver's snapshot is one of the models, as no peer trains here."""
    looks = []
    plain = Sessions.attackers_sight

    def sight(self, pair):
        looks.append((plain(self, pair), pair.elements))
        return looks[-1][0]

    monkeypatch.setattr(Sessions, "attackers_sight", sight)
    played(averaging(Config(filter="none", **way), kind, rounds=4.0, **IDEAL))
    assert len(looks) > 5
    for (partner, honest, attackers), elements in looks:
        assert partner.shape == (elements,)
        assert honest.shape == (6, elements)
        assert attackers == 2
        assert np.isfinite(honest).all()


# -- who attacks -------------------------------------------------------------------------------------------------------
@given(st.floats(0, 0.99), st.floats(0, 0.99), st.integers(0, 9))
def test_a_larger_share_has_those_of_a_smaller_one_among_it(one, other, seed):
    few, many = (set(draw_attackers(AttackersSpec(share=share), NAMES, seed)) for share in sorted((one, other)))
    assert few <= many
    assert len(many) == math.floor(max(one, other) * 40 + 0.5)


def test_another_seed_draws_others():
    drawn = {tuple(sorted(draw_attackers(AttackersSpec(share=0.2), NAMES, seed))) for seed in range(5)}
    assert len(drawn) == 5


def test_without_attackers_nothing_is_drawn_and_nothing_changes():
    assert draw_attackers(None, NAMES, 1) == {}
    spec = AttackersSpec(share=0.0)
    plain, none = simulate(small(), progress=False), simulate(small(attackers=spec), progress=False)
    assert plain.summary["digest"] == none.summary["digest"]


@pytest.mark.parametrize("name", ["clip", "balance", "none"])
def test_an_attacker_refuses_nothing_and_honest_peers_keep_their_filter(name):
    config = Config(filter=name)
    run = played(averaging(config, "sign-flip"))
    assert {host.peer.config for host in run.swarm.hosts if host.attacker is not None} == {unguarded(config)}
    assert {host.peer.config for host in honest_of(run)} == {config}
    assert unguarded(config).filter == "none"
    assert unguarded(config).internal.norm_bound > 1e20


def test_an_attacker_that_comes_again_attacks_again():
    churn = {"up": {"kind": "exponential", "mean": 2}, "down": {"kind": "exponential", "mean": 1}}
    spec = {"share": 0.5, "kind": "nan"}
    run = played(small(duration_s=12.0, churn=churn, attackers=spec, **IDEAL))
    again = [host for host in run.swarm.hosts if host.life and host.name in run.attackers]
    assert again, "some came again"
    assert all(host.attacker is run.attackers[host.name] for host in again)
    assert all(host.peer.config == unguarded(run.swarm.config) for host in again)


# -- what it does ------------------------------------------------------------------------------------------------------
def test_the_honest_side_mixes_with_the_lie_and_the_attacker_with_the_truth():
    scenario = averaging(Config(), "sign-flip", share=0.5, peers=2, rounds=1.0)
    run = played(scenario)
    liar, honest = sorted(run.swarm.hosts, key=lambda host: host.attacker is None)
    before = played(dataclasses.replace(scenario, rounds=None, duration_s=1e-3)).swarm
    held, truth = before.hosts[liar.index].vector, before.hosts[honest.index].vector
    assert run.swarm.mixes == 2
    np.testing.assert_allclose(honest.vector, truth + 0.5 * (-held - truth), atol=1e-6)
    np.testing.assert_allclose(liar.vector, held + 0.5 * (truth - held), atol=1e-6)


WAYS = [
    {}, {"codec": "bf16"}, {"codec": "int8"}, {"codec": "moniqua4"}, {"part": "mask 0.1"}, {"part": "fragments 4"},
    {"outer_momentum": 0.5, "outer_rate": 0.7}, {"mixing": "push-sum"}, {"mixing": "row-stochastic"},
    {"filter": "clip"}, {"filter": "clip", "mixing": "row-stochastic"},
]  # fmt: skip


def refused(run) -> Counter[str]:
    """Count what the honest peers refused of others, and what they cut off, by reason."""
    counts: Counter[str] = Counter()
    for host in run.swarm.hosts:
        for (_, code), times in host.peer.exchanges.refusals.counts.items() if host.attacker is None else ():
            counts[code] += times
    return counts


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_no_honest_peer_takes_what_is_not_a_number_however_it_is_sent(way):
    run = played(averaging(tuned(bench_s=1.0, **way), **IDEAL))
    assert all(np.isfinite(host.vector).all() for host in run.swarm.hosts)
    assert refused(run)["not-finite"] > 0


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_of_mixing_carries_the_lie(way):
    """Noise of standard deviation 30 among vectors of 1 shows if it is accepted, and is counted if it is cut off."""
    spec = {"share": 0.25, "kind": "random", "scale": 5.0}
    run = played(averaging(Config(**way), **IDEAL | {"attackers": spec, "rounds": 12.0}))
    largest = max(float(np.abs(host.vector).max()) for host in honest_of(run))
    assert largest > 5.0 or refused(run).get("clipped", 0) > 0


def learning(rule, kind):
    task, spec = {"model": "linear", "optimizer": {"lr": 0.1}}, {"share": 0.1, "kind": kind}
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
    row, honest = run.row(), honest_of(run)
    vectors = np.stack([host.vector for host in honest])
    losses, accuracies, _ = run.learners.evaluate(vectors)
    assert len(honest) == 4
    assert row["ready"] == 6.0
    assert row["loss_mean"] == pytest.approx(float(losses.mean()))
    assert row["accuracy_min"] == pytest.approx(float(accuracies.min()))
    apart = math.sqrt(float(((vectors - vectors.mean(axis=0)) ** 2).sum()) / 4)
    assert row["consensus_distance"] == pytest.approx(apart, rel=1e-4)


# -- a newcomer --------------------------------------------------------------------------------------------------------
def moved_by_the_first_it_meets(kind, learning):
    """Return how far the first mix of a newcomer, with a liar, moves it, and how far apart its donors were.

    Both are norms.
    """
    elements, rng = 4096, np.random.default_rng(3)
    network = network_of(NetworkSpec(latency={"kind": "constant", "value_ms": 5}), 1)
    noise = np.random.default_rng(4)

    def on_step(index, vector, step):
        if index < 5 and learning:  # the newcomer has taken no step yet
            vector += learning * noise.standard_normal(elements).astype(np.float32)

    swarm = Swarm(7, network, Config(mix_every_steps=4), on_step)  # other settings always refuse a scaled model
    start = rng.standard_normal(elements).astype(np.float32)
    liar = Attacker(AttackersSpec(share=0.1, kind=kind), 1, "0", 40)
    for number in range(5):
        swarm.add_peer(start.copy(), founder=True, attacker=liar if number == 0 else None)
    swarm.introduce()
    swarm.run_until(30.0)
    models = np.stack([host.vector for host in swarm.hosts[1:]]).astype(float)
    apart = max(float(np.linalg.norm(a - b)) for a in models for b in models)
    newcomer = swarm.hosts[swarm.add_peer(rng.standard_normal(elements).astype(np.float32), [1, 2])]
    while not newcomer.peer.view.ready:
        swarm.run_until(swarm.now + 0.01)
    for number in range(1, 5):
        swarm.kill(number)
    before = newcomer.vector.copy()
    counts = newcomer.peer.exchanges.refusals.counts
    while not newcomer.peer.exchanges.done_count or newcomer.boundary.arrived_updates:
        if (swarm.hosts[0].id, "norm") in counts:
            return 0.0, apart  # refused whole, now and for ever
        assert swarm.now < 90.0
        swarm.run_until(swarm.now + 0.01)
    assert newcomer.peer.exchanges.last_partner == swarm.hosts[0].id
    return float(np.linalg.norm(newcomer.vector - before)), apart


@pytest.mark.parametrize("kind", ["sign-flip", "scaled", "random"])
@pytest.mark.parametrize("learning", [0.01, 0.0])
def test_a_newcomer_is_moved_no_further_by_the_first_it_meets_than_its_donors_were_apart(kind, learning):
    """Before its first step the newcomer knows no distance of its own."""
    moved, apart = moved_by_the_first_it_meets(kind, learning)
    assert moved <= 0.5 * Clip.usual_distances * max(apart, 1e-3 * math.sqrt(4096)) * 1.1


def test_small_lies_do_not_keep_a_swarm_that_chooses_its_interval_from_learning():
    """A small model and its inner-product lie are nearer to each other than honest models after long intervals.

    Nodes that began with eight steps and came to mix every two took all lies whole, and went back to zero for good:
    their accuracy here was 0.27, and is 0.72. Of 20 or 32 peers such nodes learned all the same.
    """
    task = {"partition": {"kind": "dirichlet", "alpha": 1.0}, "optimizer": {"lr": 0.1}}
    fast = IDEAL["network"] | {"rate_mbit_s": 100.0}
    attackers = {"share": 0.2, "kind": "ipm"}
    run = Scenario(
        seed=2, peers=40, duration_s=14.0, fidelity="whole", task=task, gossip=Config(), attackers=attackers,
        **IDEAL | {"network": fast},
    )  # fmt: skip
    assert simulate(run, progress=False).summary["accuracy"]["mean"] > 0.6

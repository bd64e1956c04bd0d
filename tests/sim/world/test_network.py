"""A network's latencies match the measured ones, and a pair's latency depends on the pair alone."""

import itertools
import math
import random

import numpy as np
import pytest

from sim.scenario import worlds
from sim.scenario.conditions import Latency, NetworkSpec, Rate
from sim.scenario.scenario import Distribution
from sim.world.network import NetworkModel, network_of
from sim.world.tcp import Transport

INTERNET = Latency("quantiles", name="internet")
CLOUD = Latency("matrix", name="cloud")
PEERS = 400


def network(latency, *, seed=1, names=None, **changes):
    made = network_of(NetworkSpec(latency=latency, **changes), seed)
    for name in names or map(str, range(PEERS)):
        made.add(name)
    return made


def all_pairs(made):
    return np.array([made.latency(a, b) for a, b in itertools.combinations(range(PEERS), 2)])


LATENCIES = [INTERNET, CLOUD, Latency.of(Distribution.lognormal(0.05, 0.5)), Latency.of(Distribution.constant(0.03))]


@pytest.mark.parametrize("latency", LATENCIES, ids=str)
def test_a_pair_keeps_its_latency_both_ways_and_at_all_times(latency):
    made = network(latency)
    for a, b in itertools.combinations(range(30), 2):
        assert made.latency(a, b) == made.latency(b, a) == made.latency(a, b) > 0


@pytest.mark.parametrize("latency", [INTERNET, CLOUD], ids=str)
def test_another_peer_changes_nobodys_latency(latency):
    few = network(latency, names=["a", "b", "c"])
    many = network(latency, names=["new", "b", "c", "a"])
    assert few.latency(0, 1) == many.latency(3, 1)
    assert few.latency(1, 2) == many.latency(1, 2)


@pytest.mark.parametrize("latency", [INTERNET, CLOUD], ids=str)
def test_another_seed_gives_other_latencies(latency):
    one, other = all_pairs(network(latency)), all_pairs(network(latency, seed=2))
    assert (one != other).mean() > 0.9 * (1 - 1 / 7)  # a seventh of the pairs may keep its pair of regions


def test_the_internets_quantiles_are_those_measured():
    drawn = np.sort(all_pairs(network(INTERNET)))
    for name, measured_ms in worlds.world("quantiles_ms", "internet", "name").items():
        share = float(name[1:]) / 100
        # 79,800 pairs share 400 keys; were they independent, the share below would err by sqrt(p (1 - p) / n).
        error = 5 * math.sqrt(share * (1 - share) / drawn.size) + 1 / 4096  # 1 / 4096 is the table's own step
        low, high = np.quantile(drawn, [max(share - error, 0), min(share + error, 1)]) * 1e3
        assert low - 0.1 <= measured_ms <= high + 16, name  # the last step of the table ends 8 ms short of the maximum


def test_a_distribution_of_latencies_is_that_of_the_pairs():
    drawn = all_pairs(network(Latency.of(Distribution.lognormal(0.05, 0.5))))
    assert np.median(drawn) == pytest.approx(0.05, rel=0.02)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.02)


def test_a_peers_latencies_do_not_follow_another_peers():
    """The keys are combined by xor, in which a third pair is a function of two others: hashing must undo that."""
    made = network(INTERNET)
    rows = np.array([[made.latency(a, b) for b in range(2, PEERS)] for a in (0, 1)])
    correlation = np.corrcoef(rows)[0, 1]
    assert abs(correlation) < 4 / math.sqrt(PEERS)
    triples = np.array([
        (made.latency(a, b), made.latency(b, c), made.latency(a, c)) for a, b, c in np.arange(399).reshape(-1, 3)
    ])  # fmt: skip
    others = np.corrcoef(triples.T)[np.triu_indices(3, 1)]
    assert (abs(others) < 4 / math.sqrt(len(triples))).all()


def test_half_a_round_trip_lies_between_regions_and_a_few_milliseconds_within():
    made = network(CLOUD)
    rtt_ms = worlds.world("matrix", "cloud", "name")["rtt_ms"]
    halves = {rtt / 2e3 for row in rtt_ms for rtt in row if rtt}
    drawn = all_pairs(made)
    far = drawn[drawn > 0.0017]
    assert set(far.tolist()) <= halves
    near = drawn[drawn <= 0.0017]
    assert near.min() >= 0.000125
    assert np.unique(near).size > 1000
    # A seventh of the pairs shares a region, give or take how evenly 400 peers fall into seven.
    assert near.size / drawn.size == pytest.approx(1 / 7, rel=0.1)


def test_a_users_own_regions_are_taken_as_they_are():
    made = network(Latency("matrix", regions=("here", "there"), rtt_ms=((8, 90), (90, 0))))
    seen = np.unique(all_pairs(made))
    assert {0.004, 0.045} <= set(seen.tolist())
    assert seen[(seen != 0.004) & (seen != 0.045)].max() <= 0.0017  # the latencies of "there"


def test_rates_are_in_bytes_and_differ_by_direction():
    made = network(INTERNET, rate_mbit_s=Rate(8, math.inf))
    assert (made.up_bytes_s(0), made.down_bytes_s(0)) == (1e6, math.inf)
    alike = NetworkModel(rate_bytes_s=5.0)
    assert (alike.up_bytes_s(0), alike.down_bytes_s(0)) == (5.0, 5.0)


def test_without_tcp_the_stated_share_is_lost_for_good():
    """Such scenarios show how a method copes with failures."""
    made, rng = network(INTERNET, loss=0.2, congestion=None), random.Random(1)
    assert made.transport is None
    lost = sum(made.loses(rng) for _ in range(20_000)) / 20_000
    assert abs(lost - 0.2) < 5 * math.sqrt(0.2 * 0.8 / 20_000)
    assert not any(NetworkModel().loses(rng) for _ in range(100))


def test_a_scenarios_network_has_tcp_which_loses_nothing():
    made, rng = network(INTERNET, loss=0.2), random.Random(1)
    assert made.transport == Transport("cubic")
    assert network(INTERNET, congestion="bbr", tls=True).transport == Transport("bbr", tls=True)
    assert not any(made.loses(rng) for _ in range(100))
    assert made.loss_of(0, 1) == 0.2


def test_a_perfect_network_has_none_and_an_ideal_memberships_only_where_packets_are_lost():
    perfect = NetworkSpec(latency=Latency.of(Distribution.constant(0.0)), rate_mbit_s=Rate(math.inf, math.inf))
    assert network_of(perfect, 1).transport is None
    assert network_of(NetworkSpec(tls=True), 1, ideal=True).transport is None
    assert network_of(NetworkSpec(loss=0.1), 1, ideal=True).transport == Transport("cubic")

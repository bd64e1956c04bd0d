"""Comparisons of the simulator's two levels, and the scenarios that the fast one refuses."""

import math
import statistics
import tracemalloc

import numpy as np
import pytest

from gossip.arithmetic.correction import credit
from gossip.config import Config
from gossip.errors import ConfigError
from gossip.filters.clip import Clip
from sim.exchanges import level
from sim.exchanges.models import Models
from sim.exchanges.pair_exchange import BOTH
from sim.scenario.scenario import Distribution, Scenario, Task
from sim.seeds import Draws
from sim.simulation import ExchangeSimulation, simulate
from sim.world.churn import Uptime
from tests.harness.marks import rest_is_slow
from tests.sim.scenarios import digest

NO_TIME = {"latency": Distribution.constant(0.0), "rate_mbit_s": "unlimited"}
SEEDS = range(1, 9)
FIGURES = {
    "accuracy": lambda summary: summary["accuracy"]["mean"],
    "loss": lambda summary: summary["loss"],
    "consensus distance": lambda summary: summary["consensus_distance"],
    "failed": lambda summary: summary["exchanges_failed"],
    "bytes": lambda summary: summary["bytes_sent"],
}


def scenario(**changes) -> Scenario:
    """Forty peers, eight mixes each, without latency or filter."""
    return Scenario(**{
        "peers": 40, "duration_s": 3.2, "fidelity": "exchange", "network": NO_TIME,
        "task": Task(model="linear", samples_per_peer=16, batch_size=8),
        "gossip": Config(mix_every_steps=4, filter="none"), "membership": {"mode": "ideal"},
        "report": {"every_s": 3.2},
    } | changes)  # fmt: skip


def apart(one: list[float], other: list[float]) -> float:
    """Return how far apart two means are, in standard errors."""
    error = math.sqrt((statistics.variance(one) + statistics.variance(other)) / len(one))
    return abs(statistics.mean(one) - statistics.mean(other)) / error if error else 0.0


def both(**changes) -> dict[str, list[dict]]:
    """Return the summaries of some seeds at either level."""
    return {
        level: [simulate(scenario(seed=seed, fidelity=level, **changes), progress=False).summary for seed in SEEDS]
        for level in ("whole", "exchange")
    }


QUANTILES = {"kind": "quantiles", "name": "internet"}
INTERNET = {"latency": QUANTILES, "rate_mbit_s": 100}
CREDITED = {"whole": "gossip.exchange.pair.credit", "exchange": "sim.exchanges.models.credit"}
CASES = {
    "no latency": {},
    "internet": {"network": INTERNET, "duration_s": 12.0, "gossip": Config(mix_every_steps=12, filter="none")},
    "loss": {
        "network": {"latency": QUANTILES, "loss": 0.02},
        "duration_s": 12.0,
        "gossip": Config(mix_every_steps=12, filter="none"),
    },
    "churn": {"churn": {"up": Distribution.exponential(12), "down": Distribution.exponential(4)}, "duration_s": 9.6},
    "plain means that overlap": {
        "gossip": Config(mix_every_steps=2, filter="none", outer_momentum=0.0, outer_rate=1.0)
    },
    "clipped": {"gossip": Config(mix_every_steps=4)},
    "mlp": {"task": Task(model="mlp", samples_per_peer=16, batch_size=8), "peers": 30},
}
QUICK = ("no latency",)  # make test-slow plays the others


@pytest.mark.parametrize(
    "changes", [pytest.param(CASES[name], id=name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CASES]
)
def test_the_two_levels_agree(changes):
    found = both(**changes)
    for name, figure in FIGURES.items():
        whole, exchange = ([figure(summary) for summary in found[level]] for level in ("whole", "exchange"))
        assert apart(whole, exchange) < 3, (name, whole, exchange)
    mixes = [statistics.mean(summary["node_updates"] for summary in found[level]) for level in ("whole", "exchange")]
    assert mixes[1] == pytest.approx(mixes[0], rel=0.03 if "churn" in changes else 0.02)


def test_what_differs_is_seen():
    """The comparison can fail: with half of the mixes the two levels do not agree."""
    whole = simulate(scenario(fidelity="whole"), progress=False).summary
    rare = simulate(scenario(gossip=Config(mix_every_steps=8, filter="none")), progress=False).summary
    assert rare["node_updates"] < 0.7 * whole["node_updates"]
    assert rare["consensus_distance"] > 1.1 * whole["consensus_distance"]


def test_a_seed_gives_one_digest_however_often_somebody_looks():
    digests = [digest(scenario(report={"every_s": every_s})) for every_s in (3.2, 3.2, 0.4)]
    assert len(set(digests)) == 1
    assert digest(scenario(seed=2)) != digests[0]


@pytest.mark.parametrize("case", rest_is_slow(["churn", "plain means that overlap", "no latency", "internet"], 2))
def test_how_often_the_models_follow_changes_no_digest(case, monkeypatch):
    rarely = digest(scenario(**CASES[case]))
    follow_often(monkeypatch)
    assert digest(scenario(**CASES[case])) == rarely


def follow_often(monkeypatch):
    """Let the models follow the decisions after a few entries of the tape."""
    monkeypatch.setattr(level, "ENTRIES_PER_PEER", 4)
    monkeypatch.setattr(level, "MIN_ENTRIES", 4)


def test_what_is_under_way_is_not_held_while_nobody_looks(monkeypatch):
    follow_often(monkeypatch)
    replay, held = Models.replay, []

    def replayed(models, done, splits=True):
        replay(models, done, splits)
        if not splits:
            held.append(len(models.snapshots))

    monkeypatch.setattr(Models, "replay", replayed)
    simulate(scenario(), progress=False)
    assert held == [0] * len(held)
    assert len(held) > 1


def test_a_digest_copies_no_model():
    swarm = ExchangeSimulation(scenario(peers=200, task=Task(model="mlp", samples_per_peer=16, batch_size=8))).level
    swarm.digest()
    tracemalloc.start()
    swarm.digest()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < swarm.learners.matrix.nbytes / 10


def test_another_peer_changes_nobodys_draws():
    few, more = ExchangeSimulation(scenario(peers=12)).level, ExchangeSimulation(scenario(peers=13)).level
    for peer in range(12):
        assert few.decisions.draws[peer].state == more.decisions.draws[peer].state
        assert few.clocks.time_of(peer, 1) == more.clocks.time_of(peer, 1)
        assert few.decisions.schedules[peer].due_steps == more.decisions.schedules[peer].due_steps


def test_draws_are_uniform():
    draws = Draws(3, "7", "exchanges")
    drawn = np.array([draws.random() for _ in range(20_000)])
    assert abs(drawn.mean() - 0.5) < 4 * math.sqrt(1 / 12 / 20_000)
    assert np.abs(np.histogram(drawn, 16, (0, 1))[0] - 1250).max() < 5 * math.sqrt(1250)
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 4 / math.sqrt(20_000)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("membership.mode", {"membership": {"mode": "protocol"}}),
        ("membership.start", {"membership": {"mode": "ideal", "start": "seed"}}),
        ("churn.silent", {"churn": {"up": Distribution.exponential(6), "silent": 0.5}}),
        ("churn.farewell", {"churn": {"up": Distribution.exponential(6), "farewell": 0.5}}),
        ("network.congestion", {"network": {"loss": 0.1, "congestion": "none"}}),
        ("attackers", {"attackers": {"share": 0.1}}),
        ("gossip.mixing", {"gossip": Config(mixing="group")}),
        ("gossip.mixing", {"gossip": Config(mixing="push-sum")}),
        ("gossip.partners", {"gossip": Config(selection="ring", partners=0)}),
        ("gossip.selection", {"gossip": Config(selection="ring")}),
        ("gossip.part", {"gossip": Config(part="mask 0.1", filter="none")}),
        ("gossip.codec", {"gossip": Config(codec="moniqua4", filter="none")}),
        ("gossip.filter", {"gossip": Config(filter="balance")}),
        ("gossip.max_version_gap", {"gossip": Config(max_version_gap=1.0, filter="none")}),
        ("gossip.mix_every_s", {"gossip": Config(mix_every_s=1.0, filter="none")}),
        ("gossip.staleness_exponent", {"gossip": Config(staleness_exponent=0.5, filter="none")}),
    ],
)
def test_what_it_cannot_represent_is_refused_by_its_key(key, changes):
    with pytest.raises(ConfigError) as error:
        scenario(**changes)
    assert str(error.value).startswith(f"{key} is beyond fidelity = 'exchange'")
    scenario(fidelity="whole", **changes)


DRAWN = Distribution.lognormal(0.1, 0.3)


@pytest.mark.parametrize(
    ("compute", "fleet"),
    [
        ({"step_s": DRAWN}, ()),
        ({"step_s": DRAWN}, ({"number": 0, "step_s": 0.1},)),
        ({"step_s": 0.1}, ({"number": 0, "step_s": DRAWN},)),
        ({"step_s": DRAWN, "per": "peer"}, ()),
    ],
    ids=["of all", "of all but one", "of one", "once for each"],
)
def test_steps_that_are_drawn_train_as_often(compute, fleet):
    """A peer's steps end when they end at the whole level."""
    whole, exchange = (
        simulate(scenario(fidelity=level, compute=compute, fleet=fleet), progress=False).summary["steps"]
        for level in ("whole", "exchange")
    )
    assert whole == exchange


def test_a_diverging_swarm_refuses_what_is_no_number():
    task = Task(model="linear", samples_per_peer=16, batch_size=8, optimizer={"lr": 1e30})
    summary = simulate(scenario(task=task), progress=False).summary
    assert summary["refused"]
    assert summary["exchanges_failed"] > 0


def test_what_the_filter_cuts_off_is_counted(monkeypatch):
    monkeypatch.setattr(Clip, "usual_distances", 0.7)
    summary = simulate(scenario(gossip=Config(mix_every_steps=2)), progress=False).summary
    assert summary["refused"]["clipped"] > 0


def test_nothing_is_kept_of_exchanges_that_are_over():
    """Snapshots go with their exchange, even if one side died in it."""
    run = ExchangeSimulation(scenario(churn={"up": Distribution.exponential(30)}, duration_s=20.0, network=INTERNET))
    for _ in run.slices():
        pass
    level = run.level
    level.update_models()
    assert level.decisions.failures > 0
    assert level.counts().live_peers < 40
    under_way = {one.number for table in level.decisions.slots.exchanges for one in table}
    assert set(level.models.snapshots) <= under_way | {code >> 8 for code in level.tape.codes}


def test_a_retried_offer_goes_to_nobody_who_mixes_with_the_peer_already(monkeypatch):
    """Before, such an offer crossed the other exchange; the initiator gave up and the responder held it for ever."""
    monkeypatch.setattr(Models, "replay", lambda *_, **__: None)
    lan = {"latency": Distribution.constant(0.005), "rate_mbit_s": 100}
    every_step = Config(mix_every_steps=1, codec="int8")
    played = scenario(peers=4, duration_s=60.0, network=lan, gossip=every_step, report={"every_s": 60.0})
    level = ExchangeSimulation(played).level
    level.advance(60.0)
    decisions = level.decisions
    assert not [one for table in decisions.slots.exchanges for one in table if one.ended == BOTH]
    assert decisions.mixes > 0.9 * 4 * level.clocks.next_boundary(0, 60.0)


def test_a_newcomer_begins_among_its_donors():
    """A late newcomer holds pieces of others' weights, and none of its own."""
    churn = {"up": Distribution.exponential(1e9), "down": Distribution.exponential(1.0), "start": "steady"}
    task = {"dataset": "averaging", "elements": 700}
    run = ExchangeSimulation(
        scenario(task=task, peers=20, churn=churn, duration_s=4.0, gossip=Config(mix_every_steps=1000))
    )
    level, peer = run.level, 3
    level.presence.on_stop(peer, iter(()))
    before = level.learners.matrix.copy()
    level.presence.on_start(peer, Uptime(0.0, math.inf, False, False), iter(()))
    level.advance(3.0)
    level.update_models()
    model, others = level.learners.matrix[peer], np.delete(before, peer, 0)
    givers = [{int(row) for row in np.flatnonzero((others[:, start:stop] == model[start:stop]).all(1))}
              for start, stop in ((0, 256), (256, 512), (512, 700))]  # fmt: skip
    assert all(len(rows) == 1 for rows in givers)
    assert len(set.union(*givers)) == 3
    assert np.array_equal(np.delete(level.learners.matrix, peer, 0), others)


def test_a_donor_that_died_before_its_piece_and_once_more_since_gave_nothing():
    """Six peers that come and go, with vectors so large that a newcomer waits for its pieces for seconds."""
    scenario = Scenario.from_mapping({
        "peers": 6, "duration_s": 20.0, "seed": 4, "fidelity": "exchange", "membership": {"mode": "ideal"},
        "task": {"dataset": "averaging", "elements": 256_000},
        "churn": {"up": {"kind": "exponential", "mean": 20}, "down": {"kind": "exponential", "mean": 2}},
        "network": {"latency": {"kind": "constant", "value_ms": 25}, "rate_mbit_s": 20, "loss": 0.01},
    })  # fmt: skip
    result = simulate(scenario, progress=False)
    assert result.summary["exchanges_done"] > 0  # no weights are taken that were never given


def test_a_correction_learns_as_much_of_an_exchange_at_either_level(monkeypatch):
    """Many pairs meet less than an interval after another mix of either side, and count less."""
    counted: dict[str, list[float]] = {name: [] for name in CREDITED}
    for name, where in CREDITED.items():

        def recorded(*stated, name=name):
            counts = credit(*stated)
            counted[name].extend(np.atleast_1d(counts).tolist())
            return counts

        monkeypatch.setattr(where, recorded)
        for seed in (1, 2):
            simulate(scenario(seed=seed, fidelity=name), progress=False)
    whole, fast = (np.array(counted[name]) for name in CREDITED)
    assert len(fast) > 500
    assert len(fast) == pytest.approx(len(whole), rel=0.1)
    assert fast.mean() < 0.9, "a mean of intervals alone would count nearly all of them whole"
    assert fast.mean() == pytest.approx(whole.mean(), abs=0.03)
    for share in (0.1, 0.25, 0.5):
        assert np.quantile(fast, share) == pytest.approx(np.quantile(whole, share), abs=0.13)

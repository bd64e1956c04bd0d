"""Simulated scenarios: the same result each time, to the requested end, in the promised columns."""

import hashlib
import json
import math
import re

import numpy as np
import pytest

from gossip.config import Config
from gossip.effects import Merge, Mix
from gossip.errors import LocalError
from sim import simulation
from sim.learning.learners import Learners
from sim.report import pages
from sim.report.result import COLUMNS, Progress
from sim.scenario.scenario import Task
from sim.simulation import RunningSimulation, Simulation, simulate
from tests.harness.configs import tuned
from tests.harness.hashing import otherwise_hashed
from tests.sim.commands import KEYS
from tests.sim.scenarios import AVERAGING, digest, hostile, log_of, played, small


# -- deterministic ---------------------------------------------------------------------------------------------------
def digests():
    group = tuned(mix_every_steps=4, mixing="group", group_size=8, reply_timeout_s=0.3)
    vectors = Task(dataset="tests.sim.jobs:vectors")
    cut = ({"at_s": 3.0, "until_s": 6.0},)
    return [
        digest(hostile(task=vectors, gossip=Config(mix_every_steps=2))),
        digest(hostile(peers=16, task=vectors, gossip=group)),
        digest(hostile(task=AVERAGING, network={"loss": 0.02, "congestion": "none", "partitions": cut})),
    ]


def test_a_scenario_gives_one_digest_in_every_process():
    program = "from tests.sim.test_simulation import digests\nprint(digests())"
    assert otherwise_hashed(program) == str(digests())


@pytest.mark.parametrize("mode", ["protocol", "ideal"])
def test_another_seed_gives_another_digest_and_the_same_one_the_same(mode):
    scenario = small(membership={"mode": mode}, duration_s=4.0)
    assert digest(scenario) == digest(scenario)
    assert digest(scenario) != digest(scenario.replace(seed=2))


@pytest.mark.parametrize("mode", ["protocol", "ideal"])
def test_a_further_peer_that_nobody_meets_changes_nothing(mode, tmp_path):
    """The last two are never up. With a fixed number of samples the others' data stays the same."""
    trace = tmp_path / "trace.csv"
    trace.write_text("peer,from_s,until_s\n" + "".join(f"{peer},0,\n" for peer in range(4)))
    world = {"churn": {"trace": str(trace)}, "membership": {"mode": mode}}
    network = {"latency": {"kind": "quantiles", "name": "internet"}, "loss": 0.02}
    few, many = (played(small(peers=peers, network=network, **world)) for peers in (4, 6))
    assert few.swarm.mixes > 20
    assert log_of(few) == log_of(many)
    assert np.array_equal(few.learners.matrix, many.learners.matrix[:4])


def test_a_peer_that_comes_late_changes_nothing_before(tmp_path):
    runs = []
    for line in ("", "4,7.9,\n"):
        trace = tmp_path / "trace.csv"
        trace.write_text("peer,from_s,until_s\n" + "".join(f"{peer},0,\n" for peer in range(4)) + line)
        run = Simulation(small(peers=5, churn={"trace": str(trace)}))
        run.swarm.run_until(7.8)
        runs.append(run)
    few, many = runs
    assert log_of(few) == log_of(many)
    assert np.array_equal(few.learners.matrix, many.learners.matrix)


def test_rows_are_as_far_apart_as_asked():
    often = simulate(small(task=AVERAGING, duration_s=3.0, report={"every_s": 0.7}), progress=False)
    assert often.column("virtual_s") == pytest.approx([0.0, 0.7, 1.4, 2.1, 2.8, 3.0])


def test_looking_more_often_changes_nothing_where_peers_come_and_go():
    def living(every_s: float) -> tuple[str, dict[str, str]]:
        run = Simulation(hostile(report={"every_s": every_s}))
        due = every_s
        for _ in run.slices():
            if run.swarm.now >= due:
                run.swarm.run_until(run.swarm.now)
                due += every_s
        run.swarm.run_until(run.swarm.now)
        return log_of(run), {host.name: hashlib.sha256(host.vector).hexdigest() for host in run.swarm.alive()}

    assert living(6.0) == living(0.2)


# -- its end ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rounds", [0.5, 3, 10])
def test_rounds_end_when_the_peers_have_mixed_that_often(rounds):
    result = simulate(small(duration_s=None, rounds=rounds, peers=20, task=AVERAGING), progress=False)
    mixes = result.summary["node_updates"]
    # Peers look eight times an interval, and mixes that all fall due together add at most one each.
    assert rounds * 20 <= mixes <= (rounds + 1) * 20
    assert result.history[-1]["mixes"] == mixes / 20
    assert result.history[-2]["mixes"] <= rounds


def test_a_run_that_goes_on_mixing_may_take_longer_than_one_may_stand_still(monkeypatch):
    scenario = small(duration_s=None, rounds=20, task=AVERAGING, membership={"mode": "ideal"})
    monkeypatch.setattr(simulation, "MAX_IDLE_S", 6 * Simulation(scenario).interval_s())
    assert simulate(scenario, progress=False).summary["node_updates"] >= 20 * scenario.peers


def test_rounds_are_reached_where_mixes_come_more_rarely_than_a_run_may_stand_still(monkeypatch):
    scenario = small(duration_s=None, rounds=2, task=AVERAGING)
    interval_s = Simulation(scenario).interval_s()
    monkeypatch.setattr(simulation, "MAX_IDLE_S", interval_s / 100)
    result = simulate(scenario, progress=False)
    assert result.summary["virtual_s"] < 4 * interval_s
    monkeypatch.setattr(RunningSimulation, "interval_s", lambda _: 1e9)
    assert simulate(scenario, progress=False).summary["virtual_s"] <= result.summary["virtual_s"]


@pytest.mark.parametrize("mode", ["protocol", "ideal"])
def test_where_nobody_is_left_rounds_end_with_one_sentence(mode):
    churn = {"up": 5.0}
    scenario = small(duration_s=None, rounds=300, task=AVERAGING, churn=churn, membership={"mode": mode})
    with pytest.raises(LocalError, match=r"^After 60\d virtual seconds .*give duration_s, not rounds = 300\.$"):
        simulate(scenario, progress=False)


# -- what is told ----------------------------------------------------------------------------------------------------
def strictly(text: str):
    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_history_and_summary_have_what_was_promised():
    result = simulate(small(name="told", report={"every_s": 1.0}), progress=False)
    assert {tuple(row) for row in result.history} == {COLUMNS}
    assert all(isinstance(value, float) for row in result.history for value in row.values())
    assert [row["virtual_s"] for row in result.history] == pytest.approx(range(9), abs=8.0 / 400)
    for column in ("steps", "mixes", "exchanges_done", "bytes_sent", "events"):
        assert (np.diff(result.column(column)) >= 0).all()
        assert result.column(column)[-1] > 0
    for what in ("loss", "accuracy"):
        low, mean, high = (result.column(f"{what}_{which}") for which in ("min", "mean", "max"))
        assert (low <= mean + 1e-12).all()
        assert (mean <= high + 1e-12).all()

    summary, last = strictly(result.to_json()), result.history[-1]
    assert summary.keys() >= KEYS
    assert (summary["name"], summary["seed"], summary["peers"]) == ("told", 1, 6)
    assert summary["accuracy"].keys() == summary["metric"].keys() == {"mean", "min", "max", "average_model"}
    for key in ("virtual_s", "events", "consensus_distance", "exchanges_done", "exchanges_failed", "bytes_sent"):
        assert summary[key] == last[key]
    assert summary["loss"] == last["loss_mean"]
    assert summary["accuracy"]["average_model"] == last["accuracy_average_model"]
    assert summary["node_updates"] == round(6 * last["mixes"])
    assert summary["node_updates"] // 2 == summary["exchanges_done"]
    assert last["loss_mean"] < result.history[0]["loss_mean"]
    assert len(result.exchange_s) == summary["node_updates"]
    assert last["exchange_s_median"] == np.median(result.exchange_s)


@pytest.mark.parametrize(
    "mixing",
    [{}, {"mixing": "push-sum"}, {"mixing": "row-stochastic", "partners": 2}, {"mixing": "group", "group_size": 0},
     {"mixing": "group", "group_size": 3, "selection": "grid"}],
    ids=["pairs", "pushes", "pushes to two", "groups", "groups of three"],
)  # fmt: skip
def test_an_exchange_is_counted_once_however_many_sides_it_has(mixing):
    """A pair has two sides, a group one for each member, and a push one. Before, all were counted as pairs."""
    run = Simulation(small(task=AVERAGING, gossip=Config(mix_every_steps=4, **mixing)))
    mixed = set()
    for effect in (Mix, Merge):
        perform = run.swarm.performers[effect]

        def noted(host, effect, perform=perform):
            before = run.swarm.mixes
            perform(host, effect)
            if run.swarm.mixes > before:
                mixed.add(effect.session)

        run.swarm.performers[effect] = noted
    for _ in run.slices():
        pass
    under_way = sum(len(host.peer.exchanges.table) for host in run.swarm.hosts)
    assert len(mixed) > 10
    assert len(mixed) - under_way <= run.row()["exchanges_done"] <= len(mixed)


def test_what_nobody_is_there_to_say_is_null_in_strict_json():
    result = simulate(small(churn={"up": 3.0}), progress=False)
    summary = strictly(result.to_json())
    assert result.history[-1]["alive"] == 0
    assert summary["loss"] is None
    assert summary["accuracy"] == {"mean": None, "min": None, "max": None, "average_model": None}
    assert math.isnan(result.history[-1]["consensus_distance"])
    assert "nan" not in result.csv_text()


def test_the_digest_is_of_the_log_and_of_all_models():
    swarm = played(small()).swarm
    whole = swarm.events.digest()
    for host in swarm.hosts:
        whole.update(host.vector.tobytes())
    assert digest(small()) == swarm.digest() == whole.hexdigest()


def test_averaging_counts_consensus_and_trains_nothing():
    result = simulate(small(task=AVERAGING, duration_s=20.0), progress=False)
    start = Simulation(small(task=AVERAGING)).learners.matrix
    distance = math.sqrt(np.square(start - start.mean(0)).sum(1).mean())
    assert result.history[0]["consensus_distance"] == pytest.approx(distance, rel=1e-5)
    assert result.history[-1]["consensus_distance"] < 1e-5
    mean = start.mean(0)
    assert result.history[-1]["loss_average_model"] == pytest.approx(0.5 * np.square(mean).mean(), abs=1e-6)
    assert math.isnan(result.summary["accuracy"]["mean"])


@pytest.mark.parametrize(("changes", "reason"), [
    ({"task": Task(model="tests.sim.jobs:masked")}, "6 of 6 peers are not finite, .* an infinite constant"),
    ({"task": Task(model="tests.sim.jobs:masked_parameter")}, "6 of 6 peers are not finite"),
    ({"task": Task(model="tests.sim.jobs:masked_parameter"), "fidelity": "exchange"}, "6 of 6 peers are not finite"),
    ({"duration_s": 0.2}, "the first one was not over by then; play it for longer"),
    ({"network": {"loss": 0.99, "congestion": "none"}}, r"\d+ exchanges failed"),
    ({"churn": {"up": 0.1}}, "0 of 6 peers were up at the end"),
])  # fmt: skip
def test_a_run_without_an_exchange_says_so_with_the_reason(changes, reason):
    result = simulate(small(**changes), progress=False)
    sentence = result.summary["no_exchange"]
    assert re.fullmatch(rf"No exchange finished in \S+ m?s: (.* )?{reason}.*\.", sentence)
    assert str(result).endswith(sentence)
    assert "No exchange finished in" in pages.report(result)


@pytest.mark.parametrize("changes", [{}, {"peers": 1}])
def test_a_run_with_an_exchange_or_one_peer_says_nothing_of_that(changes):
    assert simulate(small(**changes), progress=False).summary["no_exchange"] == ""


def test_who_watches_is_told_how_far_it_is():
    seen: list[Progress] = []
    simulate(small(), progress=seen.append)
    assert seen[-1].done == 1.0
    assert seen[-1].virtual_s == pytest.approx(8.0)
    assert seen[-1].left_s == 0.0
    assert all(0 <= one.done <= 1 for one in seen)
    assert [one.events for one in seen] == sorted(one.events for one in seen)


def test_only_as_many_peers_are_evaluated_as_wanted(monkeypatch):
    counts = []

    class Counted(Learners):
        def evaluate(self, vectors):
            counts.append(len(vectors))
            return super().evaluate(vectors)

    monkeypatch.setattr(simulation, "Learners", Counted)
    simulate(small(peers=10, report={"evaluate_peers": 4}), progress=False)
    assert max(counts) <= 4
    assert max(counts) > 1

"""The figures of a simulated and of a real run, and the report that compares them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay.plan import Plan
from benchmarks.replay.predict import predict
from benchmarks.replay.report import Report, gap_table
from benchmarks.replay.seen import Change, Seen, Watch
from gossip.effects import MemberChanged, MemberState, Mix, Release, Rename, Snapshot, Transfer
from gossip.ids import PeerId
from sim import Scenario, simulate
from tests.replay.test_plan import plan

ROOT = Path(__file__).parents[2]
IDS = [PeerId(bytes([number]) * 16) for number in range(4)]


def test_an_exchange_lasts_from_the_wish_to_the_mix():
    watch = Watch(0)
    effects = (
        (1.0, Snapshot(7)), (1.5, Rename(7, 8)), (1.75, Transfer(8, IDS[1], "fp32")), (2.5, Mix(8, 0.5)),
        (3.0, Release(8)),
    )  # fmt: skip
    for at, effect in effects:
        watch.see(effect, at)
    assert watch.mixes == [(2.5, 1.5)]
    assert watch.streams == [0.75]
    assert watch.requested_at == watch.streams_at == {}
    watch.see(MemberChanged(IDS[1], MemberState.ALIVE, MemberState.DEAD), 4.0)
    assert watch.changes == [Change(4.0, 0, IDS[1], "dead")]


def test_the_prediction_is_the_simulators_own_run():
    played = plan(duration_s=12, **{"task.model": "linear"})
    seen, result = predict(played), simulate(played.scenario, progress=False)
    figures = seen.figures()
    assert len(seen.mixes) == len(seen.streams) == result.summary["node_updates"] > 0
    assert figures["exchange s, median"] == pytest.approx(result.column("exchange_s_median")[-1])
    assert figures["consensus distance at 12 s"] == pytest.approx(result.summary["consensus_distance"])
    assert len(seen.joins) == 3
    assert all(0 < seconds < 5 for seconds in seen.joins)


def test_a_node_that_was_killed_joins_again_when_it_returns(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("peer,from_s,until_s\n0,0,\n1,0,4\n1,6,\n2,0,\n3,0,\n")
    seen = predict(plan(duration_s=10, churn={"trace": str(trace)}, **{"task.model": "linear"}))
    assert len(seen.joins) == 4
    assert all(0.3 < seconds < 3 for seconds in seen.joins)


def killed(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("peer,from_s,until_s\n0,0,\n1,0,10\n1,20,\n2,0,\n3,0,\n")
    return Seen(plan(churn={"trace": str(trace)}), ids={each: number for number, each in enumerate(IDS)})


def test_a_death_counts_from_the_kill_for_every_node_that_stayed(tmp_path):
    seen = killed(tmp_path)
    seen.changes = [
        Change(5.0, 0, IDS[1], "dead"),  # Before the kill: a mistake, which does not count for this death.
        Change(12.0, 0, IDS[1], "dead"), Change(12.5, 2, IDS[1], "suspect"), Change(13.0, 2, IDS[1], "dead"),
        # The death of another node, and the death of this node's next life.
        Change(14.0, 2, IDS[3], "dead"), Change(22.0, 3, IDS[1], "dead"),
    ]  # fmt: skip
    assert sorted(seen.deaths()) == [2.0, 3.0]
    assert seen.figures()["kill to dead s, median"] == 2.5


def test_a_cut_is_healed_when_no_node_holds_another_to_be_dead_any_more():
    seen = Seen(plan(**{"network.partitions": [{"at_s": 5, "until_s": 15}]}))
    seen.ids = {each: number for number, each in enumerate(IDS)}
    seen.changes = [Change(9.0, 0, IDS[2], "dead"), Change(16.5, 0, IDS[2], "alive")]
    assert seen.figures()["healing s"] == 1.5
    seen.changes.append(Change(9.5, 1, IDS[3], "dead"))
    assert math.isnan(seen.figures()["healing s"])
    seen.changes.append(Change(17.0, 1, IDS[3], "alive"))
    assert seen.figures()["healing s"] == 2.0
    seen.changes = []
    assert seen.figures()["healing s"] == 0.0


def test_a_suspicion_after_a_cut_has_healed_is_counted_and_does_not_make_the_healing_longer():
    """A late suspicion may come from a link that survived the cut: TCP retransmits as late as the cut was long."""
    seen = Seen(plan(**{"network.partitions": [{"at_s": 5, "until_s": 15}, {"at_s": 25, "until_s": 28}]}))
    seen.ids = {each: number for number, each in enumerate(IDS)}
    seen.changes = [
        Change(9.0, 0, IDS[2], "dead"), Change(16.5, 0, IDS[2], "alive"), Change(20.0, 0, IDS[2], "suspect"),
        Change(20.0, 1, IDS[2], "suspect"), Change(21.0, 0, IDS[2], "alive"), Change(21.0, 1, IDS[2], "alive"),
        Change(26.0, 1, IDS[2], "suspect"), Change(28.5, 1, IDS[2], "alive"),
    ]  # fmt: skip
    figures = seen.figures()
    assert (figures["healing s of cut 1"], figures["suspicions after healing of cut 1"]) == (1.5, 2.0)
    assert (figures["healing s of cut 2"], figures["suspicions after healing of cut 2"]) == (0.5, 0.0)


def test_consensus_and_times_to_targets_come_of_the_rows():
    seen = Seen(plan())
    vectors = np.array([[1, 0], [-1, 0]], np.float32)
    seen.record_models(5.0, [0.7, 0.8], vectors)
    seen.record_models(7.5, [0.85, 0.97], 2 * vectors)
    figures = seen.figures()
    assert figures["consensus distance at 7.5 s"] == 2.0
    assert figures["s to 80%"] == figures["s to 90%"] == 7.5
    assert math.isnan(figures["s to 95%"])


@pytest.mark.parametrize(
    ("late_packets", "late_s", "said"),
    [(0.06, 0.0, "6% of packets came over 5 ms late"), (0.01, 1.5, "training fell behind by 1.5 s a minute")],
)
def test_a_disturbed_run_is_told_and_not_counted(late_packets, late_s, said):
    quiet = Seen(plan(), mixes=[(1.0, 0.2), (2.0, 0.2)])
    disturbed = Seen(plan(), mixes=[(1.0, 9.0)], late_packets=late_packets, late_s_minute=late_s)
    report = Report("example", predictions=[Seen(plan(), mixes=[(1.0, 0.1)]).figures()])
    assert report.add_run(quiet) == ""
    assert report.add_run(disturbed) == said
    row = report.rows()[0]
    assert (row.name, row.predicted, row.real) == ("exchange s, median", 0.1, 0.2)
    assert row.gap == pytest.approx(-0.5)
    shown = "\n".join(report.lines())
    assert "real (1 of 2 runs)" in shown
    assert f"Run 2: disturbed, not counted: {said}." in shown
    told = json.loads(report.to_json())
    assert told["rows"][0]["gap"] == pytest.approx(-0.5)
    assert [run["disturbed"] for run in told["runs"]] == ["", said]
    assert "| exchange s, median | 0.1 / 0.2 (-50%) |" in gap_table([report])


@pytest.mark.parametrize("seed", [3, 4])
def test_a_cut_is_predicted_to_heal_within_seconds_as_real_nodes_do(seed):
    """Real nodes took 0.4 to 3.2 s in nine of ten runs. Two faults once made the prediction 12 s. The end of a stream
    crossed the cut, so that no link was closed and dialled again. And the last retransmitted SYN came 10 ms before the
    end of the cut, whereas Linux sends it 2 % later."""
    cut = {"task.dataset": "averaging", "task.elements": 250_000, "task.hidden": None, "report.every_s": 44}
    scenario = Scenario.from_toml(ROOT / "benchmarks" / "replay" / "scenarios" / "cut-1MB.toml").replace(
        seed=seed, duration_s=44, **cut
    )
    assert predict(Plan.of(scenario)).figures()["healing s"] < 3.5

"""The calculations, pages and simulations of benchmarks/goodput.py, and the schedules and figures of storm.py."""

import importlib
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _beside_benchmarks():
    path = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path[:] = path


def imported(name):
    """Return a fixture that imports this module of benchmarks, once a test needs it."""
    return pytest.fixture(scope="module")(lambda: importlib.import_module(name))


model, page, pages, goodput, storm = map(imported, ("goodput_model", "goodput_page", "pages", "goodput", "storm"))


# -- the model -------------------------------------------------------------------------------------------------------
def test_availability_is_that_of_a_renewal_process(model):
    rng, up_s, pause_s = random.Random(1), model.failure_s(150_000), 22.5
    up = [rng.expovariate(1 / up_s) for _ in range(20_000)]
    played = sum(up) / (sum(up) + pause_s * len(up))
    assert model.availability(150_000, pause_s) == pytest.approx(played, abs=0.003)
    assert model.availability(150_000, up_s) == 0.5


@pytest.mark.parametrize(("learners", "round_s"), [(1, 24), (2, 500), (16, 24), (64, 500)])
def test_a_barrier_waits_for_the_learner_with_most_failures(model, learners, round_s):
    rng, pause_s, rounds = random.Random(learners), 22.5, 400
    mean_s = model.failure_s(model.CHIPS / learners)

    def failures():
        """Return a random number of failures of one learner in a round."""
        count, at = -1, 0.0
        while at < round_s:
            count, at = count + 1, at + rng.expovariate(1 / mean_s)
        return count

    spent_s = sum(round_s + pause_s * max(failures() for _ in range(learners)) for _ in range(rounds))
    calculated = model.barrier(learners, model.CHIPS, pause_s, round_s)
    assert calculated == pytest.approx(round_s * rounds / spent_s, abs=0.02)


def test_a_barrier_never_beats_learners_that_do_not_wait(model):
    for learners in (1, 2, 16, 256):
        alone = model.availability(model.CHIPS / learners, 22.5)
        assert model.barrier(learners, model.CHIPS, 22.5, 24) <= alone + 0.01


# -- the page --------------------------------------------------------------------------------------------------------
TEXT = "# Title\n\n<!-- table: one -->\n<!-- end -->\n\nProse.\n\n<!-- table: two -->\nold\n<!-- end -->\nLast.\n"


def test_a_table_is_replaced_and_the_prose_stays(pages, tmp_path):
    path = tmp_path / "page.md"
    path.write_text(TEXT)
    for _ in range(2):  # The second table replaces the first.
        pages.put(path, "two", [["a", "b"], ["1", "2"]])
    text = path.read_text()
    assert text.startswith("# Title\n\n<!-- table: one -->\n<!-- end -->\n\nProse.\n")
    assert text.endswith("<!-- table: two -->\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\n<!-- end -->\nLast.\n")


def test_a_table_without_a_place_is_refused_and_nothing_is_written(pages, tmp_path):
    path = tmp_path / "page.md"
    path.write_text(TEXT)
    with pytest.raises(ValueError, match="has no table 'three'"):
        pages.put(path, "three", [["a"]])
    with pytest.raises(ValueError, match="has not 2 cells"):
        pages.put(path, "two", [["a", "b"], ["1"]])
    assert path.read_text() == TEXT


def test_the_page_has_a_place_for_every_table(page):
    text = page.PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- table: {name} -->\n" in text for name in ("goodput", "worlds", "accuracy", "storm"))


def test_a_figure_that_was_not_played_is_a_dash_and_others_have_their_spread(page):
    figures = {"trained": 0.5, "kept": 0.4, "idle": 0.1, "accuracy": 0.9, "worst": 0.8, "average": 0.95}
    runs = {(8, "100 Gbit/s", "iid"): [figures, figures | {"trained": 0.6}], (16, "100 Gbit/s", "iid"): [figures]}
    runs[16, "with a notice", "iid"] = [figures | {"kept": 0.5}]
    one, two, eight, sixteen = page.goodput_rows((2, 8, 16), runs)[1:]
    assert one[3] == "58"
    assert two[-3:] == ["-", "-", "-"]
    assert eight[3] == "88"
    assert eight[-3:] == ["55.0 ± 7.1", "40.0 ± 0.0", "-"]
    assert sixteen[-3:] == ["50.0", "40.0", "50.0"]
    assert page.world_rows((16,), ["100 Gbit/s", "5 Gbit/s"], runs)[1] == ["16", "50.0 (40.0, 10.0)", "-"]
    rows = page.accuracy_rows((16,), {"100 Gbit/s": "fast", "5 Gbit/s": "slow"}, {"iid": "IID"}, runs)
    assert rows[0] == ["data", "learners", "fast", "slow"]
    assert rows[1] == ["IID", "16", "90.0 (80.0, 95.0)", "-"]


# -- the simulator ---------------------------------------------------------------------------------------------------
def test_learners_lose_the_time_they_are_away_and_the_steps_that_die_die_with_them(goodput, monkeypatch):
    monkeypatch.setattr(goodput, "STEPS", 80)
    calm = goodput.play((4, "no failures", "iid", 3))
    failing = goodput.play((4, "100 Gbit/s", "iid", 3))
    assert calm["kept"] == calm["trained"] == pytest.approx(1.0, abs=0.02)
    assert 0.0 < failing["kept"] < failing["trained"] < 0.95
    assert failing["virtual_s"] > calm["virtual_s"]


def test_a_finished_run_is_known_by_all_of_its_settings(pages, goodput, monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    played, other = (goodput.scenario((4, "100 Gbit/s", "iid", seed)) for seed in (1, 2))
    pages.Runs("goodput").add(played, {"trained": 0.5})
    again = pages.Runs("goodput")
    assert again.get(played) == {"trained": 0.5}
    assert again.get(other) is None
    assert pages.Runs("goodput", fresh=True).get(played) is None


# -- the storm -------------------------------------------------------------------------------------------------------
def test_a_storm_is_drawn_from_its_seed_and_ends_in_time(storm):
    drawn, again, other = (storm.schedule(storm.STORMS["n32"], 1_800, 1.0, seed) for seed in (7, 7, 8))
    assert drawn == again != other
    assert {fault.kind for fault in drawn} == {"kill", "stop", "cut"}
    assert all(fault.at + fault.lasts <= 1_800 for fault in drawn if fault.kind != "kill")
    fast = storm.schedule(storm.STORMS["n32"], 600, 3.0, 7)
    assert [(fault.at * 3, fault.kind, fault.node) for fault in fast] == [
        (pytest.approx(fault.at), fault.kind, fault.node) for fault in drawn
    ]


def test_kills_come_as_often_as_their_mean_says(storm):
    storms = [storm.schedule(storm.STORMS["n32"], 1_800, 1.0, seed) for seed in range(20)]
    kills = sum(fault.kind == "kill" for faults in storms for fault in faults)
    assert kills == pytest.approx(20 * 30, rel=0.12)


def life(*rows):
    looks = [
        {"t": t, "steps": steps, "accuracy": accuracy, "mixes": [[t, "x"]] if mixed else []}
        for t, steps, accuracy, mixed in rows
    ]
    return SimpleNamespace(looks=looks)


def test_steps_since_the_row_before_the_last_exchange_died_with_a_node(storm):
    one = life((0.0, 0, 0.1, False), (1.0, 10, 0.2, True), (2.0, 20, 0.3, True), (3.0, 33, 0.4, False))
    assert storm.lost(one) == 23
    assert storm.lost(life((0.0, 5, 0.1, False), (1.0, 12, 0.2, False))) == 7
    assert storm.lost(life()) == 0
    assert storm.taken([one, life((0.0, 5, 0.1, False), (1.0, 12, 0.2, False))], 0.5, 3.5) == 23


def test_accuracy_is_read_at_samples_and_not_at_times(storm):
    curve = storm.Curve([0.0, 100.0, 300.0], [0.1, 0.5, 0.7])
    assert curve.at(50) == pytest.approx(0.3)
    assert curve.at(200) == pytest.approx(0.6)
    assert curve.at(0) == 0.1
    assert math.isnan(curve.at(301))


def test_a_dead_nodes_samples_count_and_its_accuracy_does_not(storm):
    dead = life((0.0, 0, 0.1, False), (1.0, 10, 0.2, True))
    alive = life((0.0, 0, 0.3, False), (1.0, 10, 0.4, False), (2.0, 20, 0.5, False), (3.0, 30, 0.6, False))
    curve = storm.learned([dead, alive])
    assert curve.samples[-1] == 40 * storm.digits_node.BATCH
    assert curve.accuracies[-1] == 0.6


def test_the_pace_without_faults_says_what_was_possible(storm, page):
    calm = {"steps": 4_000, "seconds": 10.0, "kinds": {}, "lost": 0}
    stormy = {"steps": 7_000, "seconds": 20.0, "kinds": {"stopped": 4}, "lost": 80, "resume": [0.1, 0.3], "back": []}
    curves = storm.Curve([0.0, 1_000.0], [0.0, 1.0]), storm.Curve([0.0, 800.0], [0.0, 0.4])
    found = storm.beside(calm, stormy, *curves, speed=2.0)
    assert found["storm"]["trained"] == 0.875
    assert found["storm"]["kept"] == 0.865
    assert found["storm"]["faults an hour"] == 360
    assert found["accuracies"][-1] == (800.0, pytest.approx(0.4), pytest.approx(0.8))
    rows = page.storm_rows({**found, "cuts": "none"})
    assert ["steps trained, of possible", "87.5 %", "100 %"] in rows
    assert ["restart to the next exchange of the killed, median, 95 %", "none", "-"] in rows

"""`gossip sim sweep`: the runs it plays, the files it leaves, and the setting it recommends."""

import csv
import html
import json

import pytest

from sim import cli
from sim.sweep import Sweep
from tests.sim.commands import AVERAGING
from tests.sim.fake_results import fake_result


def test_a_sweep_plays_every_combination_with_every_seed(gossip, tiny, played):
    grid = ["gossip.mix_every_steps=2,8", "task.optimizer.lr=0.1,0.3"]
    gossip("sim", "sweep", tiny, *grid, "--seeds", "2", "--seed", "5")
    seen = [(each.gossip.mix_every_steps, each.task.optimizer.lr, each.seed) for each in played]
    assert seen == [(steps, lr, seed) for steps in (2, 8) for lr in (0.1, 0.3) for seed in (5, 6)]


def test_a_sweep_on_two_cores_gives_what_it_gives_on_one_in_the_order_of_the_grid(gossip, tiny, tmp_path):
    """The first run takes longest."""
    written = []
    for at_once in ("1", "2"):
        out = tmp_path / at_once
        grid = ["duration_s=8,0.5,1", "--seeds", "2", "--jobs", at_once, "--json", *AVERAGING]
        printed = gossip("sim", "sweep", tiny, *grid, "--out", out).out
        rows = list(csv.DictReader((out / "sweep.csv").read_text().splitlines()))
        written.append([{key: value for key, value in row.items() if key != "wall_s"} for row in rows])
        told = [json.loads(line)["values"]["duration_s"] for line in printed.splitlines()]
        assert told == [row["duration_s"] for row in rows] == ["8", "8", "0.5", "0.5", "1", "1"]
    assert written[0] == written[1]


def test_a_sweep_leaves_a_row_a_run_a_picture_and_a_report(gossip, tiny, tmp_path, played):
    out = tmp_path / "out"
    grid = ["gossip.mix_every_steps=2,8,32", "membership.mode=protocol,ideal"]
    printed = gossip("sim", "sweep", tiny, *grid, "--seeds", "2", "--out", out).out
    rows = list(csv.DictReader((out / "sweep.csv").read_text().splitlines()))
    assert len(rows) == len(played) == 12
    assert rows[0]["gossip.mix_every_steps"] == "2"
    assert float(rows[0]["accuracy_mean"]) == fake_result(played[0]).summary["accuracy"]["mean"]
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "membership.mode ideal" in (out / "report.html").read_text()
    assert max(map(len, printed.splitlines()[:-1])) <= 80


@pytest.mark.parametrize(
    ("key", "values", "line"),
    [("membership.mode", ["protocol", "ideal"], "None"), ("gossip.mix_every_steps", ["2", "8"], "-")],
    ids=["names", "numbers"],
)
def test_a_line_joins_numbers_and_never_names(key, values, line, tiny):
    from matplotlib.figure import Figure

    table = Sweep.from_file(tiny, {key: values})
    for point in table.points:
        table.add(point, fake_result(point.scenario))
    axes = Figure().subplots()
    table.draw(axes, "accuracy_mean")
    drawn = [each for each in axes.lines if len(each.get_xdata()) == 2]
    assert [(each.get_linestyle(), each.get_marker()) for each in drawn] == [(line, "o")]


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        (["gossip.mix_every_steps=32,2,3,4,64"], "mix_every_steps = 2 to 4."),  # the fake loses 0.45 points a step
        (["gossip.mix_every_steps=2,3"], "mix_every_steps = 2 to 3, the largest value tried."),
        (["membership.mode=protocol,ideal"], None),
        (["task.elements=2,4", *AVERAGING], None),
    ],
    ids=["numbers", "the largest of them", "names", "no accuracy"],
)
def test_a_sweep_says_how_far_a_number_may_go_and_nothing_where_there_is_no_size(grid, said, gossip, tiny, played):
    printed = " ".join(gossip("sim", "sweep", tiny, *grid).out.split())
    assert said in printed if said else "Within one point" not in printed


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("2,8", ["2", "8"]),
        ("{kind='iid'},{kind='dirichlet', alpha=0.1}", ["{kind='iid'}", "{kind='dirichlet', alpha=0.1}"]),
        ("[1, 2],[3]", ["[1, 2]", "[3]"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("", [""]),
    ],
)
def test_values_are_divided_at_commas_but_not_within_tables_lists_and_quotes(text, parts):
    assert cli.split_at_commas(text) == parts


def test_a_sweep_of_tables_is_drawn_without_numbers(tiny, tmp_path):
    axes = cli.grid_of(["task.partition=iid,{kind='dirichlet', alpha=0.1}"])
    table = Sweep.from_file(tiny, axes)
    for point in table.points:
        table.add(point, fake_result(point.scenario))
    table.save(tmp_path)
    assert "kind='dirichlet'" in html.unescape((tmp_path / "report.html").read_text())

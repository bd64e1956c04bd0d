"""The report of a simulation: figures with units, curves, and one page that needs no other file."""

import csv
import json
import math
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from gossip.errors import ConfigError, LocalError
from sim.report import charts, plots
from sim.report import describe as words
from sim.report.result import COLUMNS, compare, folder_names
from sim.scenario.scenario import Scenario
from sim.sweep import Sweep
from tests.sim.fake_results import fake_result

WAN_WITH_A_CUT = {"preset": "wan", "partitions": [{"at_s": 600, "until_s": 900, "groups": 2}]}
AVERAGING = {"dataset": "averaging"}


class Page(HTMLParser):
    """The links and ids of a page, and the elements that are not closed in order."""

    VOID = frozenset({"meta", "br", "link", "img", "hr", "input"})

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.ids, self.text = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "action", "data"):
                self.links.append(value)
            if name == "id":
                self.ids.append(value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def result_to_save():
    return fake_result(name="a <b> & c", network=WAN_WITH_A_CUT, churn={"preset": "spot_v100_2023_02"})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    result = result_to_save()
    assert result.save(folder / "new" / "deep") == folder / "new" / "deep" / "report.html"
    return result, folder / "new" / "deep"


@pytest.fixture(scope="module")
def page_text(saved):
    return (saved[1] / "report.html").read_text()


@pytest.fixture
def _page_alone(monkeypatch):
    """Draw the page, without saving each picture as a file too: :func:`saved` has those."""
    monkeypatch.setattr(plots, "save_all", lambda results, folder: None)


# -- files -------------------------------------------------------------------------------------------------------------
def test_save_writes_figures_scenario_report_and_a_picture_of_each_panel(saved):
    result, folder = saved
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "history.csv", "summary.json", "scenario.toml", "report.html", "curves.png",
        *(f"{panel.name}.png" for panel in plots.panels_of([result])),
    }  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))
    assert Scenario.from_toml(folder / "scenario.toml") == result.scenario


def test_the_csv_gives_the_history_back_with_nothing_for_what_is_unknown(saved):
    result, folder = saved
    result.history[0]["loss_mean"] = math.nan
    rows = list(csv.DictReader(result.csv_text().splitlines()))
    assert tuple(rows[0]) == COLUMNS
    assert rows[0]["loss_mean"] == ""
    assert [float(row["bytes_sent"]) for row in rows] == pytest.approx(list(result.column("bytes_sent")))
    assert (folder / "history.csv").read_text().count("\n") == len(result.history) + 1


def test_what_is_not_a_number_is_null_in_json_and_numpy_s_numbers_are_plain():
    result = fake_result(task=AVERAGING)
    result.summary["loss"] = np.float32(0.5)
    result.summary["events"] = np.int64(7)
    told = json.loads(result.to_json())
    assert told["accuracy"] == {"mean": None, "min": None, "max": None, "average_model": None}
    assert (told["loss"], told["events"]) == (0.5, 7)
    assert "\n" not in result.to_json()


def test_a_folder_that_cannot_be_made_gets_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match=r"cannot be written to .*file.*: name another folder\.$"):
        fake_result().save(tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("acuracy_mean", r"^'acuracy_mean' is not a column \(did you mean 'accuracy_mean'\?\)\.$"),
        ("zzz", r"^'zzz' is not a column; the columns are .*loss.*\.$"),
    ],
)
def test_a_column_that_is_none_is_refused_in_a_sentence_and_never_nan(name, sentence):
    result = fake_result()
    for column in (result.column, lambda key: Sweep.column(key, [result.summary])):
        with pytest.raises(ConfigError, match=sentence):
            column(name)


def test_a_picture_of_an_unknown_kind_gets_one_sentence(tmp_path):
    with pytest.raises(LocalError, match=r"curves\.xyz cannot be written: name a \.png or a \.svg file\.$"):
        fake_result().plot(tmp_path / "curves.xyz")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_writes_the_kind_that_the_suffix_names(tmp_path, suffix):
    fake_result(task=AVERAGING, peers=1).plot(tmp_path / f"curves.{suffix}")
    assert {"png": b"\x89PNG", "svg": b"<svg"}[suffix] in (tmp_path / f"curves.{suffix}").read_bytes()[:2000]


def test_names_that_would_share_a_folder_get_folders_of_their_own():
    names = ["lan", "Lan", "lan", "a/b", "..", "lan-2"]
    folders = folder_names(names)
    assert len({folder.lower() for folder in folders}) == len(names)
    assert folders[0] == "lan"
    assert not any("/" in folder or folder.startswith(".") for folder in folders)


# -- without matplotlib ------------------------------------------------------------------------------------------------
@pytest.fixture
def _no_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    find = charts.importlib.util.find_spec
    monkeypatch.setattr(charts.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))


@pytest.mark.usefixtures("_no_matplotlib")
def test_without_matplotlib_the_figures_are_saved_and_one_sentence_says_what_to_install(tmp_path):
    with pytest.raises(LocalError, match=r"pip install 'gossip-trainer\[sim\]'"):
        fake_result().save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"history.csv", "summary.json", "scenario.toml"}


@pytest.mark.usefixtures("_no_matplotlib")
def test_without_matplotlib_a_notebook_shows_the_figures_and_what_to_install():
    shown = fake_result()._repr_html_()
    assert "gossip-trainer[sim]" in shown
    assert "consensus distance" in shown
    assert "<svg" not in shown


# -- the page ----------------------------------------------------------------------------------------------------------
def test_the_page_needs_no_other_file_and_is_well_formed(page_text):
    page = Page(page_text)
    assert page.open == []
    assert all(link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert not re.search(r"url\((?!#)|@import|<script", page_text)
    for number in re.findall(r"url\(#([^)]+)\)", page_text):
        assert number in page.ids


def test_names_are_text_on_the_page_and_not_markup(page_text):
    assert "<b> &" not in page_text
    assert "a &lt;b&gt; &amp; c" in page_text


def test_every_colour_of_a_picture_on_the_page_is_one_that_the_page_defines_for_light_and_dark(page_text):
    pictures = "".join(re.findall(r"<svg.*?</svg>", page_text, re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", pictures)) == set()
    used = set(re.findall(r"var\(--(\w+)\)", pictures))
    light, dark = re.findall(r":root \{(.*?)\}", page_text, re.DOTALL)
    assert {"s0", "s1", "ink", "muted", "grid", "shade"} <= used
    assert all(f"--{name}:" in light and f"--{name}:" in dark for name in used)


def test_the_page_says_in_words_what_was_played_and_when_the_network_was_cut(saved, page_text):
    text = " ".join(Page(page_text).text).replace("\N{NO-BREAK SPACE}", " ")
    assert words.in_words(saved[0].scenario) in text
    assert "2 groups 600 to 900 s" in text
    assert "Shaded: while the network is cut." in text


def test_every_axis_says_its_unit():
    result = fake_result()
    for panel in plots.panels_of([result]):
        (axes,) = charts.draw([panel]).axes
        for label in (axes.get_xlabel(), axes.get_ylabel()):
            assert "(" in label or label == "peers", f"{panel.name}: {label!r}"


@pytest.mark.usefixtures("_page_alone")
def test_the_same_result_gives_the_same_page(saved, tmp_path):
    assert result_to_save().save(tmp_path).read_bytes() == (saved[1] / "report.html").read_bytes()


def test_drawing_leaves_the_user_s_own_settings_of_matplotlib_as_they_are():
    import matplotlib as mpl

    with mpl.rc_context({"lines.linewidth": 7.0}):
        fake_result(task=AVERAGING, peers=1)._repr_html_()
        assert mpl.rcParams["lines.linewidth"] == 7.0


# -- panels ------------------------------------------------------------------------------------------------------------
def names_of(results):
    return [panel.name for panel in plots.panels_of(results)]


def test_a_task_without_accuracy_has_no_panel_and_no_figure_of_it():
    result = fake_result(task=AVERAGING)
    assert "accuracy" not in names_of([result])
    assert not any("accuracy" in head for head in result.figures())
    assert "accuracy" not in str(result)
    assert "accuracy" in names_of([result, fake_result()])


@pytest.mark.usefixtures("_page_alone")
def test_a_run_without_exchanges_or_distance_still_has_a_report(tmp_path):
    result = fake_result(peers=1)
    result.exchange_s = np.zeros(0)
    for row in result.history:
        row["consensus_distance"] = 0.0
    assert names_of([result]) == ["loss", "accuracy", "members", "traffic"]
    assert result.save(tmp_path).exists()


@pytest.mark.usefixtures("_page_alone")
def test_a_run_of_one_row_and_one_that_diverged_still_have_a_report(tmp_path):
    short, diverged = fake_result(name="short"), fake_result(name="diverged")
    del short.history[1:]
    for row in diverged.history[3:]:
        row |= {key: math.inf for key in ("loss_mean", "loss_max", "consensus_distance")}
    assert compare([short, diverged], tmp_path).exists()
    with pytest.raises(ConfigError, match="two results or more"):
        compare([short], tmp_path)
    assert short.save(tmp_path / "short").exists()
    assert diverged.save(tmp_path / "diverged").exists()


def test_exchanges_that_all_take_the_same_time_are_drawn():
    result = fake_result()
    result.exchange_s = np.full(50, 0.25)
    (axes,) = charts.draw([panel for panel in plots.panels_of([result]) if panel.name == "durations"]).axes
    assert axes.get_lines()[0].get_ydata()[-1] == pytest.approx(100)


def test_what_rounding_makes_of_one_common_model_does_not_set_the_scale_of_the_distance():
    result = fake_result()
    result.history[0]["consensus_distance"] = 1e-7
    assert math.isnan(plots.distances(result)[0])
    assert np.isfinite(plots.distances(result)[1:]).all()


# -- several -----------------------------------------------------------------------------------------------------------
def test_a_comparison_shows_each_scenario_in_one_colour_and_where_they_differ(tmp_path, monkeypatch):
    results = [fake_result(name=f"every {steps}", mix_every_steps=steps) for steps in (2, 8, 32)]
    save, names = charts.save, []

    def saved(figure, path):
        names.append(path.name)
        if path.name == "curves.png":  # the page has the others
            save(figure, path)

    monkeypatch.setattr(charts, "save", saved)
    text = compare(results, tmp_path).read_text()
    assert names == ["curves.png", *(f"{panel.name}.png" for panel in plots.panels_of(results))]
    assert Page(text).open == []
    assert "gossip.mix_every_steps" in text
    assert "network.latency" not in text  # it is the same in all runs
    for panel in plots.panels_of(results):
        (axes,) = charts.draw([panel]).axes
        assert [line.get_color() for line in axes.get_lines()] == [pair[0] for pair in charts.COLOURS[:3]]


def test_where_scenarios_differ_is_spelled_out_although_one_names_a_preset():
    different = words.differences([fake_result().scenario, fake_result(network=WAN_WITH_A_CUT).scenario])
    assert different["network.loss"] == ["0", "0.01"]
    assert different["network.partitions"] == ["none", "2 groups 600 to 900 s"]
    assert set(different) == {"network.latency", "network.loss", "network.partitions"}


def test_more_scenarios_than_colours_are_told_apart_by_their_dashes():
    count = 2 * len(charts.COLOURS)
    lines = [charts.line_of(number, "") for number in range(count)]
    assert len({(line["color"], line["linestyle"]) for line in lines}) == count


def test_a_result_shows_itself_in_a_sentence_where_nothing_else_can_be_shown():
    result = fake_result()
    assert repr(result) == f"<Result: {result}>"
    assert len(repr(result)) < 500


# -- ticks -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("low", "high"), [(0.297, 0.85), (0.9, 1.1), (1, 1.5), (3, 60), (1e-3, 900.0)])
def test_a_logarithmic_axis_has_at_least_three_ticks(low, high):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    axes.set_yscale("log")
    charts.plain_ticks(axes, low, high)
    bottom, top = axes.get_ylim()
    assert 3 <= sum(bottom <= tick <= top for tick in axes.get_yticks()) <= 9


def test_peers_are_counted_in_whole_numbers():
    figure = charts.draw([panel for panel in plots.panels_of([fake_result(peers=20)]) if panel.name == "members"])
    assert all(tick == round(tick) for tick in figure.axes[0].get_yticks())

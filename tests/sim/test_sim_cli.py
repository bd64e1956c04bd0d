"""`gossip sim` and `gossip sim sweep`: what they refuse and print, the files they leave, and how they end."""

import contextlib
import csv
import json
import multiprocessing
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sim import cli, jobs
from sim.report import charts, plots
from sim.simulation import RunningSimulation
from tests.sim.commands import AVERAGING, KEYS, TINY, in_a_terminal


def interrupt(_number):
    raise KeyboardInterrupt


@pytest.fixture
def other(tmp_path):
    path = tmp_path / "other.toml"
    path.write_text(TINY.replace("tiny", "other"))
    return path


# -- the two commands --------------------------------------------------------------------------------------------------
def test_help_of_each_names_its_own_options_and_imports_nothing_heavy():
    probe = (
        "import sys\nfrom gossip.__main__ import main\ntry:\n    main()\nfinally:\n"
        "    print(*({'torch', 'numpy', 'rich', 'matplotlib', 'sim'} & set(sys.modules)), 'END')"
    )
    shown = {}
    for words in ("sim", "sim sweep"):
        command = [sys.executable, "-c", probe, *words.split(), "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.split("\n")[-2] == "END"
        shown[words] = done.stdout
    assert "SCENARIO.toml" in shown["sim"]
    assert "gossip sim sweep" in shown["sim"]
    assert "--seeds" not in shown["sim"]
    assert "Usage: gossip sim sweep [OPTIONS]" in shown["sim sweep"]
    assert "--seeds" in shown["sim sweep"]


def test_a_real_run_prints_one_json_object_with_every_key(gossip, tiny):
    out, err = gossip("sim", tiny, "--json", "--seed", "5", "--set", "peers=3")
    told = json.loads(out)
    assert out.count("\n") == 1
    assert err == ""
    assert set(told) >= KEYS
    assert (told["name"], told["seed"], told["peers"], told["virtual_s"]) == ("tiny", 5, 3, 4.0)
    assert set(told["accuracy"]) == {"mean", "min", "max", "average_model"}


def test_several_scenarios_give_an_object_or_a_column_each_and_are_compared(gossip, tiny, other, tmp_path, played):
    out = tmp_path / "out"
    printed = gossip("sim", tiny, other, tiny, "--json", "--out", out).out
    assert [json.loads(line)["name"] for line in printed.splitlines()] == ["tiny", "other", "tiny"]
    folders = [path for path in out.iterdir() if path.is_dir()]
    assert sorted(folder.name for folder in folders) == ["other", "tiny", "tiny-2"]
    assert all((folder / "report.html").exists() for folder in [out, *folders])
    heads = gossip("sim", tiny, other).out.splitlines()[1].split()
    assert {"tiny", "other"} <= set(heads), "the table has a column for each"


def test_the_terminal_says_that_no_exchange_finished(gossip, tiny):
    sentence = "No exchange finished in 10 ms: the first one was not over by then"
    words = [*AVERAGING, "--jobs", "1"]
    assert sentence in " ".join(gossip("sim", tiny, "--set", "duration_s=0.01", *words).out.split())
    words += ["--set", "gossip.max_version_gap=9"]  # The fast level cannot play it.
    told = " ".join(gossip("sim", "sweep", tiny, "duration_s=0.01,4", *words).out.split())
    assert f"duration_s=0.01 seed 1: {sentence}" in told
    assert told.count("No exchange finished") == told.count("It was played") == 1


# -- what is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["sim", "nowhere.toml"], "Cannot read the scenario nowhere.toml"),
        (["sim", "{tiny}", "--set", "peers"], "write key=value"),
        (["sim", "{tiny}", "--set", "peers=5", "--set", "peers=6"], "--set peers is given twice"),
        (["sim", "{tiny}", "--set", "gosip.mix_every_steps=5"], "did you mean 'gossip'"),
        (["sim", "sweep", "{tiny}", "peers"], "write key=v1,v2"),
        (["sim", "sweep", "{tiny}", "peers=4,"], "write key=v1,v2"),
        (["sim", "sweep", "{tiny}", "peers=4,4"], "names a value twice"),
        (["sim", "sweep", "{tiny}", "peers=4", "peers=5"], "peers is swept twice"),
        (["sim", "sweep", "{tiny}", "peers=4,5", "--set", "peers=6"], "both swept and set"),
        (["sim", "sweep", "{tiny}", "seed=1,2"], "--seeds"),
        (["sim", "sweep", "{tiny}", "peers=4,none"], "peers"),
        (["sim", "sweep", "{tiny}", "--seeds", "1000", "peers=1,2,3,4,5,6,7,8,9,10,11"], "11,000 runs"),
    ],
)
def test_what_cannot_work_gets_one_sentence_before_anything_is_played(gossip, tiny, played, args, said):
    out, err = gossip(*(arg.format(tiny=tiny) if arg == "{tiny}" else arg for arg in args), code=2)
    assert out == ""
    assert err.startswith("gossip: ")
    assert err.count("\n") == 1
    assert said in err
    assert played == []


def test_a_mistake_in_the_last_file_and_a_folder_that_cannot_be_made_cost_nothing(gossip, tiny, tmp_path, played):
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("peers = 0\nduration_s = 1")
    assert "wrong.toml" in gossip("sim", tiny, wrong, code=2).err
    assert "cannot be made" in gossip("sim", tiny, "--out", tiny / "below a file", code=3).err
    own = tiny.rename(tmp_path / "scenario.toml")
    assert "the scenario itself" in gossip("sim", own, "--out", tmp_path, "--set", "peers=3", code=2).err
    assert played == []


def test_without_matplotlib_a_report_is_refused_before_anything_is_played(gossip, monkeypatch, tiny, tmp_path, played):
    monkeypatch.setattr(charts.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'gossip-trainer[sim]'" in gossip("sim", tiny, "--out", tmp_path / "out", code=3).err
    assert played == []
    gossip("sim", tiny)  # figures need no pictures


# -- ^C ----------------------------------------------------------------------------------------------------------------
def test_stopped_in_the_first_run_it_says_that_nothing_was_saved(gossip, tiny, tmp_path, played):
    played.at = interrupt
    printed = gossip("sim", tiny, "--json", "--out", tmp_path / "out", code=130)
    assert printed == ("", "gossip: stopped; nothing was saved.\n")


def test_stopped_in_a_later_run_it_keeps_the_finished_ones_and_says_where(gossip, tiny, tmp_path, played):
    played.at = lambda number: interrupt(number) if number == 1 else None
    out = tmp_path / "out"
    _, err = gossip("sim", tiny, tiny, "--out", out, code=130)
    assert err == f"gossip: stopped; what was finished is in {out / 'tiny'}.\n"
    assert (out / "tiny" / "report.html").exists()


@pytest.mark.usefixtures("_pictures_not_rendered")
def test_stopped_half_way_it_keeps_what_was_seen_of_the_run_under_way(gossip, monkeypatch, tiny, tmp_path):
    slices = RunningSimulation.slices

    def half(self):
        for number, each in enumerate(slices(self)):
            if number == 199:
                raise KeyboardInterrupt
            yield each

    monkeypatch.setattr(RunningSimulation, "slices", half)
    out = tmp_path / "out"
    told, said = gossip("sim", tiny, "--json", "--out", out, *AVERAGING, code=130)
    assert said == f"gossip: stopped; what was seen of tiny until then is in {out}.\n"
    assert json.loads(told)["done"] == json.loads((out / "summary.json").read_text())["done"] == 0.5
    rows = list(csv.DictReader((out / "history.csv").read_text().splitlines()))
    assert 15 <= len(rows) <= 25  # a full run has 41
    assert float(rows[-1]["virtual_s"]) <= 2.0
    assert "stopped after 50" in (out / "report.html").read_text()


@pytest.mark.usefixtures("_pictures_not_rendered")
def test_rows_are_in_the_file_while_the_run_goes_on(gossip, monkeypatch, tiny, tmp_path):
    slices, seen = RunningSimulation.slices, []

    def watched(self):
        for each in slices(self):
            seen.append(len((tmp_path / "out" / "history.csv").read_text().splitlines()))
            yield each

    monkeypatch.setattr(RunningSimulation, "slices", watched)
    gossip("sim", tiny, "--json", "--out", tmp_path / "out", *AVERAGING)
    assert seen[0] == 2  # the heads, and the row of the beginning
    assert seen[200] >= 20
    assert seen == sorted(seen)


def test_a_sweep_that_is_stopped_while_it_writes_keeps_the_rows_of_the_finished_runs(
    gossip, tiny, tmp_path, played, monkeypatch
):
    writerow, calls = csv.DictWriter.writerow, []

    def stopped(writer, row):
        calls.append(row)
        if len(calls) == 5:  # Heads and a row, heads and the first of two rows.
            raise KeyboardInterrupt
        return writerow(writer, row)

    monkeypatch.setattr(csv.DictWriter, "writerow", stopped)
    out = tmp_path / "out"
    assert "the 2 finished runs are in" in gossip("sim", "sweep", tiny, "peers=4,5,6", "--out", out, code=130).err
    rows = csv.DictReader((out / "sweep.csv").read_text().splitlines())
    assert [row["peers"] for row in rows] == ["4", "5"]
    assert [file.name for file in out.iterdir()] == ["sweep.csv"]


# -- side by side ------------------------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def one_panel(monkeypatch):
    """Draw one picture in a report: drawing takes longer than these runs, and tests/sim/report draws them all."""
    panels_of = plots.panels_of
    monkeypatch.setattr(plots, "panels_of", lambda results: panels_of(results)[:1])


@pytest.fixture
def three(tmp_path):
    """Write three scenario files, the first of which takes longest."""
    paths = [tmp_path / f"{name}.toml" for name in ("long", "tiny", "short")]
    for path, duration_s in zip(paths, (8, 2, 0.5), strict=True):
        path.write_text(TINY.replace("tiny", path.stem).replace("duration_s = 4", f"duration_s = {duration_s}"))
    return paths


@pytest.mark.usefixtures("_pictures_not_rendered")
def test_several_scenarios_on_two_cores_give_what_they_give_on_one_in_the_order_of_the_files(gossip, three, tmp_path):
    told, histories = [], []
    for at_once in ("1", "2"):
        out = tmp_path / at_once
        printed = gossip("sim", *three, "--json", "--jobs", at_once, "--out", out, *AVERAGING).out
        lines = [json.loads(line) for line in printed.splitlines()]
        told.append([(line["name"], line["digest"], line["events"]) for line in lines])
        histories.append([(out / path.stem / "history.csv").read_text() for path in three])
    assert [name for name, *_ in told[0]] == ["long", "tiny", "short"]
    assert told[0] == told[1]
    assert histories[0] == histories[1]


@pytest.mark.parametrize("at_once", ["1", "2"])
def test_what_cannot_be_played_ends_it_with_its_sentence_after_those_before_it(gossip, three, tmp_path, at_once):
    cut = "\n[membership]\nmode = 'ideal'\n[network]\npartitions = [{ at_s = 0.1, until_s = 0.5 }]\n"
    three[1].write_text(three[1].read_text() + cut)
    (folder := tmp_path / "out" / "tiny").mkdir(parents=True)
    (folder / "history.csv").write_text("an earlier result")
    words = [*three, "--jobs", at_once, *AVERAGING]
    out, err = gossip("sim", *words, "--json", "--out", folder.parent, code=2)
    assert json.loads(out.splitlines()[0])["name"] == "long"
    assert err.startswith("gossip: network.partitions needs membership.mode")
    assert err.count("\n") == 1
    assert (folder / "history.csv").read_text() == "an earlier result"
    assert "long, seed 1" in gossip("sim", *words, code=2).out


def test_a_process_that_dies_is_one_sentence_that_names_its_scenario(gossip, three):
    three[1].write_text(three[1].read_text().replace("[task]", "[task]\ndataset = 'tests.sim.jobs:deadly'"))
    out, err = gossip("sim", *three, "--json", "--jobs", "2", code=3)
    assert [json.loads(line)["name"] for line in out.splitlines()] == ["long"]
    assert err == (
        "gossip: tiny: its process was ended by SIGKILL, most likely for want of memory: use fewer at once, "
        "as --jobs 1.\n"
    )
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("_pictures_not_rendered")
def test_stopped_side_by_side_it_keeps_what_was_seen_of_every_run_under_way(gossip, monkeypatch, three, tmp_path):
    for path in three[:2]:
        path.write_text(TINY.replace("tiny", path.stem).replace("duration_s = 4", "duration_s = 1e6"))

    def interrupt_once_both_have_begun(share, figures):
        if min(workers[0].shares[:2]) > 0:
            raise KeyboardInterrupt

    bar = SimpleNamespace(note=interrupt_once_both_have_begun)
    workers, made = [], jobs.Workers.__init__

    def noted(self, *arguments):
        workers.append(self)
        made(self, *arguments)

    monkeypatch.setattr(jobs.Workers, "__init__", noted)
    monkeypatch.setattr(cli, "progress_bar", lambda title, quiet: contextlib.nullcontext(bar))
    out = tmp_path / "out"
    told, said = gossip("sim", *three, "--json", "--jobs", "2", "--out", out, *AVERAGING, code=130)
    assert [0 < json.loads(line)["done"] < 1 for line in told.splitlines()] == [True, True]
    assert f"what was seen of long until then is in {out / 'long'}, and what was seen of tiny" in said
    assert json.loads((out / "tiny" / "summary.json").read_text())["done"] < 1
    assert not (out / "short").exists()
    assert multiprocessing.active_children() == []


def test_the_bar_of_runs_side_by_side_shows_all_of_them(gossip, monkeypatch, three):
    noted = []
    bar = SimpleNamespace(note=lambda share, figures: noted.append((share, figures)))
    monkeypatch.setattr(cli, "progress_bar", lambda title, quiet: contextlib.nullcontext(bar))
    gossip("sim", *three, "--json", "--jobs", "2", *AVERAGING)
    shares = [share for share, _ in noted]
    assert shares == sorted(shares)
    assert noted[-1] == (1.0, "3 done  0 s left")


# -- the bar -----------------------------------------------------------------------------------------------------------
def test_a_bar_is_shown_on_a_terminal_alone_and_never_on_stdout(tiny):
    done, seen = in_a_terminal("-m", "gossip", "sim", tiny, "--json", *AVERAGING)
    assert done.returncode == 0
    assert "events/s" in seen
    assert json.loads(done.stdout)["name"] == "tiny"

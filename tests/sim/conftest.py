"""Fixtures for all tests of the simulator."""

import math
import sys

import pytest

from gossip import __main__ as command
from sim import jobs
from sim.report import charts, plots, progress_bar
from sim.threads import one_thread
from tests.sim.commands import TINY
from tests.sim.fake_results import fake_result


@pytest.fixture(scope="session", autouse=True)
def in_one_thread():
    """Small models gain nothing from a second thread, and lose much where the cores are busy.

    Once for all tests, since a limit looks through all loaded libraries, which takes 3 ms.
    """
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _no_lines(monkeypatch):
    """Print no lines of progress, which a slow machine would mix with the lines that a test reads."""
    monkeypatch.setattr(progress_bar, "LINE_PERIOD_S", math.inf)


@pytest.fixture
def gossip(monkeypatch, capsys):
    """Return a function that runs the command, checks its exit code, and returns what it printed."""

    def run(*words, code=0):
        monkeypatch.setattr(sys, "argv", ["gossip", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            command.main()
        assert int(ended.value.code or 0) == code
        return capsys.readouterr()

    return run


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture
def played(monkeypatch, _pictures_not_rendered):
    """Return the list of scenarios played, in order. Each gives a fake result at once, after ``at(number)``."""
    from sim import simulation

    class Played(list):
        at = staticmethod(lambda number: None)

    scenarios = Played()

    def simulate(scenario, progress=True, rows=None, trace=None):
        scenarios.at(len(scenarios))
        scenarios.append(scenario)
        return fake_result(scenario)

    monkeypatch.setattr(simulation, "simulate", simulate)
    monkeypatch.setattr(jobs, "cores", lambda: 1)  # in this process, the only one that has the fake
    return scenarios


@pytest.fixture
def _pictures_not_rendered(monkeypatch):
    """Leave a report's pictures out, which take most of a second: test_report renders them."""
    monkeypatch.setattr(plots, "save_all", lambda results, folder: None)
    monkeypatch.setattr(charts, "svg_of", lambda figure, label, *, themed=True: "<svg></svg>")

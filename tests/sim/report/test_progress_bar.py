"""A progress bar in a terminal, which leaves nothing behind; and lines of progress elsewhere."""

import importlib.util
import re

import pytest

from sim.report import progress_bar
from sim.report.result import Progress
from tests.harness import warm
from tests.sim.commands import AVERAGING, in_a_terminal


def test_the_bar_writes_nothing_where_nobody_looks(capfd):
    with progress_bar.Bar("lan") as bar:
        bar.update(Progress(1.0, 0.5, 10, 100.0, 1.0))
    assert capfd.readouterr() == ("", "")


STOPPED = """
from sim.report.progress_bar import Bar
from sim.report.result import Progress
with Bar("a [red]name that is longer than there is room for") as bar:
    bar.update(Progress(125.0, 0.5, 1_000_000, 123_456.7, 90.0))
    raise KeyboardInterrupt
"""


def test_in_a_terminal_the_bar_is_drawn_and_at_ctrl_c_it_is_gone_and_the_cursor_is_back():
    done, shown = in_a_terminal("-c", STOPPED)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "a [red]name that is lon…" in shown
    assert "50 %  2 min 5 s virtual  123,457 events/s  1 min 30 s left" in shown
    hidden, gone, back = "\x1b[?25l", "\x1b[2K", "\x1b[?25h"
    assert shown.index(hidden) < shown.index("50 %") < shown.index(back) < shown.rindex(gone) < shown.index("Traceback")


def test_in_a_notebook_without_ipywidgets_there_is_no_bar_and_no_warning(monkeypatch, capfd):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with progress_bar.Bar("a <b>") as bar:
        bar.update(Progress(60.0, 0.5, 10, 100.0, 1.0))
    assert bar.drawn.disable
    assert capfd.readouterr() == ("", "")


def test_without_a_terminal_a_line_is_printed_every_ten_seconds(monkeypatch, capfd):
    at_s = [100.0]
    monkeypatch.setattr(progress_bar, "LINE_PERIOD_S", 10.0)
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: at_s[0])
    with progress_bar.Lines("lan") as lines:
        for at_s[0] in (100.1, 109.9, 110.0, 119.9, 125.0, 130.0):
            lines.update(Progress(60.0, (at_s[0] - 100) / 40, 10, 100.0, 1.0))
    out, err = capfd.readouterr()
    assert out == ""
    assert [line.split(" virtual")[0] for line in err.splitlines()] == ["lan  25 %  1 min", "lan  62 %  1 min"]


LOGGED = """
from gossip.__main__ import main
from sim.report import progress_bar
progress_bar.LINE_PERIOD_S = 0.0
main()
"""


@pytest.mark.parametrize(("files", "said"), [
    (1, r"tiny  \d+ %  .* virtual  .* events/s  .* left"), (2, r"2 runs, 2 at once  \d+ %  \d done  .* left"),
])  # fmt: skip
def test_the_command_prints_its_progress_into_a_log_unless_it_is_quiet(tiny, files, said):
    words = ["-c", LOGGED, "sim", *[tiny] * files, "--jobs", "2", *AVERAGING]
    done = warm.run(*words)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert lines
    assert [line for line in lines if not re.fullmatch(said, line)] == []
    assert " 100 %  " in lines[-1]
    assert warm.run(*words, "--quiet").stderr == ""

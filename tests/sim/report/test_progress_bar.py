"""A bar while a simulation runs, where somebody looks, and nothing of it left behind."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import types

from sim.report.result import Progress


def test_the_bar_says_virtual_time_events_a_second_and_what_is_left():
    from sim.report.progress_bar import figures_of

    shown = figures_of(Progress(125.0, 0.25, 1_000_000, 123_456.7, 90.0))
    assert shown == "2 min 5 s virtual  123,457 events/s  1 min 30 s left"


def test_the_bar_writes_nothing_where_nobody_looks(capfd):
    from sim.report.progress_bar import Bar

    with Bar("lan") as bar:
        bar.update(Progress(1.0, 0.5, 10, 100.0, 1.0))
    assert capfd.readouterr() == ("", "")


STOPPED = """
from sim.report.progress_bar import Bar
from sim.report.result import Progress
with Bar("a [red]name that is longer than there is room for") as bar:
    bar.update(Progress(60.0, 0.5, 10, 100.0, 1.0))
    raise KeyboardInterrupt
"""


def test_in_a_terminal_the_bar_is_drawn_and_at_ctrl_c_it_is_gone_and_the_cursor_is_back():
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", STOPPED],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment,
        timeout=60,
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode != 0
    assert done.stdout == b""
    assert "a [red]name that is lon…" in shown
    assert "50 %  1 min virtual  100 events/s  1 s left" in shown
    hidden, gone, back = "\x1b[?25l", "\x1b[2K", "\x1b[?25h"
    assert shown.index(hidden) < shown.index("50 %") < shown.index(back) < shown.rindex(gone) < shown.index("Traceback")


def test_in_a_notebook_the_bar_is_an_output_of_the_cell_that_is_replaced_and_emptied_at_the_end(monkeypatch):
    from sim.report.progress_bar import Bar

    shown = []

    class Output:
        def update(self, bundle, raw):
            shown.append(bundle)

    def display(bundle, raw, display_id):
        shown.append(bundle)
        return Output()

    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    with Bar("a <b>") as bar:
        bar.update(Progress(60.0, 0.5, 10, 100.0, 1.0))
    starts, half, end = shown
    assert "a &lt;b&gt;" in starts["text/html"]
    assert 'value="0.500"' in half["text/html"]
    assert half["text/plain"] == "a <b> 50 %  1 min virtual  100 events/s  1 s left"
    assert end == {"text/html": "", "text/plain": ""}

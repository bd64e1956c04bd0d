"""^C, SIGTERM or SIGHUP in the middle of an event: the partial result is that of the events up to this one."""

import json
import os
import signal
import subprocess
import threading
import time
from array import array

import pytest

from sim.engine.events import Events
from sim.exchanges.tape import Tape
from sim.interrupt import interrupt
from sim.simulation import Stopped, simulate
from tests.harness import warm
from tests.sim import commands
from tests.sim.scenarios import AVERAGING, small

NUMBER = 500  # The entry of the log or the tape that is interrupted.


@pytest.fixture(autouse=True)
def handlers():
    """Let ^C raise KeyboardInterrupt in a shell's background, which ignores it, and let SIGHUP end under ``nohup``."""
    usual = {
        signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL
    }  # fmt: skip
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def interrupted_tape(monkeypatch):
    """Interrupt an entry of the tape when two of its three numbers are written."""
    press, entries, append = [lambda: signal.raise_signal(signal.SIGINT)], [], Tape.append

    class Pressing(array):
        def append(self, code):
            press[0]()
            super().append(code)

    def noted(self, *entry):
        entries.append(entry)
        if len(entries) == NUMBER:
            self.codes = Pressing("q", self.codes)
        append(self, *entry)
        if len(entries) == NUMBER:
            self.codes = array("q", self.codes)

    monkeypatch.setattr(Tape, "append", noted)
    return press


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_result_interrupted_in_the_middle_of_an_entry_is_kept(interrupted_tape, number):
    interrupted_tape[0] = lambda: signal.raise_signal(number)
    signal.signal(number, signal.default_int_handler)
    with pytest.raises(Stopped) as stopped:
        simulate(small(task=AVERAGING, fidelity="exchange", duration_s=200.0))
    assert signal.getsignal(number) is signal.default_int_handler
    assert 0 < stopped.value.result.summary["done"] < 1
    assert not interrupt.is_pending


def test_a_whole_simulation_stops_between_two_events(monkeypatch):
    handled, log = [], Events.log

    def noted(self, *row):
        handled.append(self.handled_events)
        log(self, *row)
        if len(handled) == NUMBER:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Events, "log", noted)
    with pytest.raises(Stopped) as stopped:
        simulate(small(task=AVERAGING, duration_s=200.0))
    assert handled[-1] == handled[NUMBER - 1]  # No event after the one that was interrupted.
    summary = stopped.value.result.summary
    assert 0 < summary["done"] < 1
    assert summary["virtual_s"] == pytest.approx(200.0 * summary["done"], abs=0.02)  # Its last row is of that instant.


def test_a_second_interrupt_ends_the_run_at_once(interrupted_tape):
    interrupted_tape[0] = lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt) as stopped:
        simulate(small(task=AVERAGING, fidelity="exchange", duration_s=200.0))
    assert not isinstance(stopped.value, Stopped)
    assert not interrupt.is_pending


def test_a_thread_other_than_the_main_one_leaves_the_handlers_alone():
    results = []
    scenario = small(task=AVERAGING, fidelity="exchange")
    thread = threading.Thread(target=lambda: results.append(simulate(scenario)))
    thread.start()
    thread.join()
    assert results[0].summary["done"] == 1


@pytest.mark.parametrize(("number", "files"), [(signal.SIGTERM, 1), (signal.SIGHUP, 2)])
def test_a_signal_to_the_whole_group_ends_the_command_as_ctrl_c_does_with_its_report(tmp_path, number, files):
    """Service managers and closing terminals signal all processes of parallel runs as well."""
    path, out = tmp_path / "tiny.toml", tmp_path / "out"
    path.write_text(commands.TINY.replace("duration_s = 4", "duration_s = 4e5\nreport.every_s = 1e3"))
    folders = [out] if files == 1 else [out / "tiny", out / "tiny-2"]
    words = ["-m", "gossip", "sim", *[path] * files, "--jobs", files, "--out", out, *commands.AVERAGING]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with warm.Python(*words, process_group=0, text=True, **pipes) as process:
        try:
            until = time.monotonic() + 60
            while not all(rows_in(folder) > 2 for folder in folders):
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.05)
            os.killpg(process.pid, number)
            told, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    said = said.splitlines()[-1]  # After lines of progress.
    assert said.startswith("gossip: stopped; what was seen of tiny until then is in ")
    assert said.count("what was seen of tiny until then is in") == files
    assert "consensus distance" in told
    for folder in folders:
        assert 0 < json.loads((folder / "summary.json").read_text())["done"] < 1
        assert "stopped after" in (folder / "report.html").read_text()


def rows_in(folder):
    """Count the rows of a run's history, with its head."""
    path = folder / "history.csv"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_signal_that_is_ignored_stays_ignored():
    """``nohup`` relies on this."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interrupt.ending_on(signal.SIGHUP):
        signal.raise_signal(signal.SIGHUP)


def test_the_exit_code_is_that_of_the_last_signal():
    with interrupt.ending_on(signal.SIGTERM), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert interrupt.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with interrupt.ending_on(signal.SIGTERM):
        assert interrupt.exit_code == 130

"""^C in the middle of an event: the partial result is that of the events before and of this one."""

from __future__ import annotations

import signal
import threading
from array import array

import pytest

from sim.engine.events import Events
from sim.exchanges.tape import Tape
from sim.interrupt import interrupt
from sim.simulation import Stopped, simulate
from tests.sim.scenarios import AVERAGING, small

NUMBER = 500  # The entry of the log or the tape that is interrupted.


def press_twice():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handler():
    """Let ^C raise KeyboardInterrupt, also where the tests run in a shell's background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(Stopped) as stopped:
            simulate(small(task=AVERAGING, fidelity="exchange", duration_s=200.0))
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
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
    assert 0 < stopped.value.result.summary["done"] < 1


def test_a_second_interrupt_ends_the_run_at_once(interrupted_tape):
    interrupted_tape[0] = press_twice
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

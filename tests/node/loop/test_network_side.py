"""The training thread waits for the network thread, but not for one that is stuck, and not for a call that was lost."""

import threading

import pytest
import trio

from gossip.errors import FaultError
from node.loop import network_side
from node.loop.network_side import NetworkSide


class Loops:
    """A service whose first trio loop fails on command; its later loops run until they are left."""

    def __init__(self):
        self.fail, self.is_left, self.runtime = threading.Event(), threading.Event(), None
        self.resume = threading.Event()

    async def main(self, on_begun):
        on_begun()
        while not self.is_left.is_set():
            await trio.sleep(0.01)
            if self.fail.is_set():
                self.fail.clear()
                raise ZeroDivisionError

    def can_recover(self, error):
        return self.resume.wait(30)


@pytest.fixture
def side(monkeypatch):
    monkeypatch.setattr(network_side, "POLL_S", 0.05)
    side = NetworkSide(Loops())
    side.start()
    yield side
    side.service.resume.set()
    side.service.is_left.set()
    side.join(30)


def test_a_function_that_was_lost_between_two_loops_runs_once_in_the_next(side):
    calls = []
    side.service.fail.set()
    while side.call(list):  # The call succeeds until the loop has ended; the next loop waits.
        try:
            side.token.run_sync_soon(list)
        except trio.RunFinishedError:
            break
    threading.Timer(0.2, side.service.resume.set).start()
    side.run_to_end(lambda: calls.append(threading.current_thread()))
    assert calls == [side.thread]


def test_a_stuck_network_thread_ends_the_loop_in_a_sentence(side, monkeypatch):
    monkeypatch.setattr(network_side, "STUCK_POLLS", 4)
    goes_on = threading.Event()
    side.call(goes_on.wait, 30)
    try:
        with pytest.raises(FaultError, match=r"has done nothing for . s.*handler of logging"):
            side.run_to_end(lambda: None)
    finally:
        goes_on.set()


def test_a_slow_function_is_waited_for(side):
    ended = []
    side.run_to_end(lambda: (threading.Event().wait(0.3), ended.append(1)))
    assert ended


def test_an_ended_network_thread_is_not_waited_for(side):
    side.service.is_left.set()
    side.join(30)
    side.run_to_end(lambda: None)

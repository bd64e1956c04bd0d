"""WakeEvent: a set event wakes a waiting loop, and costs little while no loop waits."""

from __future__ import annotations

import threading
import time

from node.network.hints import WakeEvent

LONG_S = 20.0


def test_what_rang_before_it_waits_is_not_waited_for():
    bell = WakeEvent()
    bell.set()
    began = time.monotonic()
    bell.wait(LONG_S)
    bell.wait(LONG_S)  # The event stays set until clear().
    assert time.monotonic() - began < LONG_S / 2


def test_who_waits_is_woken_from_another_thread():
    bell, began = WakeEvent(), time.monotonic()

    def ring() -> None:
        while not bell.has_waiter:
            time.sleep(0.001)
        bell.set()

    other = threading.Thread(target=ring)
    other.start()
    bell.wait(LONG_S)
    other.join()
    assert time.monotonic() - began < LONG_S / 2


def test_what_was_forgotten_wakes_nobody():
    bell = WakeEvent()
    bell.set()
    bell.clear()
    bell.wait(0.001)
    assert not bell.is_set

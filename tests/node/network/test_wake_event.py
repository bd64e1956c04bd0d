"""WakeEvent: a set event wakes a waiting loop, and costs little while no loop waits."""

import threading
import time

from node.network.hints import WakeEvent

LONG_S = 20.0


def test_a_set_event_is_not_waited_for_until_it_is_cleared():
    event, began = WakeEvent(), time.monotonic()
    event.set()
    event.wait(LONG_S)
    event.wait(LONG_S)
    assert time.monotonic() - began < LONG_S / 2
    event.clear()
    began = time.monotonic()
    event.wait(0.05)
    assert time.monotonic() - began > 0.04


def test_a_waiting_thread_is_woken_from_another_one():
    event, began = WakeEvent(), time.monotonic()

    def wake():
        while not event.has_waiter:
            time.sleep(0.001)
        event.set()

    other = threading.Thread(target=wake)
    other.start()
    event.wait(LONG_S)
    other.join()
    assert time.monotonic() - began < LONG_S / 2

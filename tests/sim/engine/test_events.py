"""The events of a heap and a queue come in the order of a plain sorted list."""

import random

import pytest

from sim.engine.events import Events


class Plain:
    """The slow version: one list of all events, sorted anew for each."""

    def __init__(self):
        self.now, self.count, self.waiting = 0.0, 0, []

    def push(self, when, handler, *args, bulk=False):
        self.count += 1
        self.waiting.append((when, bulk, self.count, handler, args))

    def push_bulk(self, when, handler, *args):
        self.push(when, handler, *args, bulk=True)

    def run_until(self, when):
        while self.waiting and min(self.waiting, key=lambda event: event[:3])[0] <= when:
            event = min(self.waiting, key=lambda event: event[:3])
            self.waiting.remove(event)
            self.now = event[0]
            event[3](*event[4])
        self.now = max(self.now, when)


def played(events, seed):
    """Play events that each cause up to two more, half of these at once and some as bulk; return their order."""
    rng, seen = random.Random(seed), []

    def happen(number):
        seen.append((events.now, number))
        for _ in range(rng.choice((0, 1, 1, 2)) if len(seen) < 300 else 0):
            push = events.push_bulk if rng.random() < 0.3 else events.push
            push(events.now + rng.choice((0.0, 0.0, 0.5, 1.0)), happen, rng.getrandbits(32))

    for number in range(8):
        events.push(rng.choice((0.0, 0.5, 1.0)), happen, number)
    for when in range(1, 40):
        events.run_until(float(when))
        events.push(events.now, happen, -when)
    events.run_until(100.0)
    return seen


@pytest.mark.parametrize("seed", range(10))
def test_events_of_one_instant_come_in_the_order_in_which_they_were_caused_and_bulk_behind_them(seed):
    seen = played(Events(), seed)
    assert len(seen) > 100
    assert seen == played(Plain(), seed)

"""Rumours: what is sent, in which order and how often, against a version too simple to be wrong."""

import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.effects import Effect, Send
from gossip.ids import Address, PeerId
from gossip.membership.dissemination import MAX_RUMOURS, Rumours, first_passive_sends, retransmits
from gossip.wire.messages import Gossip, Hint
from gossip.wire.records import is_progress_only
from tests.gossip.membership.members import peer_id, record_of


class Plain:
    """Rumours as one list of [times told, when it came there, key, update, whether it asks for frames]."""

    def __init__(self):
        self.rows, self.count = [], 0

    def put(self, update, passive_sends):
        key = ("hint", update.peer) if isinstance(update, Hint) else ("record", update.id)
        told, asks = passive_sends or 0, passive_sends is None
        for row in [row for row in self.rows if row[2] == key]:
            told, asks = min(told, row[0]), asks or row[4]
            self.rows.remove(row)
        self.count += 1
        self.rows.append([told, self.count, key, update, asks])

    def take(self, count, copies, members):
        self.rows.sort(key=lambda row: (row[0], -row[1]))
        taken = self.rows[:count]
        for row in reversed(taken):
            self.count += 1
            row[0], row[1] = row[0] + copies, self.count
            row[4] = row[4] and row[0] < retransmits(members) // 2  # Pings tell the other half.
        self.rows = [row for row in self.rows if row not in taken or row[0] < retransmits(members)]
        return tuple([row[3] for row in taken])


@given(st.integers(0, 2**32), st.integers(2, 1_000))
def test_the_least_told_goes_out_first_of_those_the_newest_and_news_asks_for_frames_until_told_half_as_often(
    seed, members
):
    dice = random.Random(seed)
    rumours, plain = Rumours(0.5, 0.0), Plain()
    for sequence in range(60):
        if dice.random() < 0.6:
            who = dice.randrange(20)
            hint = dice.random() < 0.2
            update = Hint(record_of(who).id, sequence, False, record_of(99).id) if hint else record_of(who)
            told = first_passive_sends(members) if dice.random() < 0.5 else None
            rumours.put(update, 0.0, told)
            plain.put(update, told)
        else:
            count, copies = dice.choice([(8, 1), (32, 3), (3, 2)])
            assert rumours.take(count, copies, members) == plain.take(count, copies, members)
        assert len(rumours) == len(plain.rows)
        assert rumours.needs_frame == any(row[4] for row in plain.rows)


@pytest.mark.parametrize(("members", "sends"), [(2, 4), (100, 12), (9_000, 16)])
def test_news_is_told_4_ceil_log10_times_and_progress_four_times_however_large_the_swarm(members, sends):
    for passive_sends, times in ((None, sends), (first_passive_sends(members), 4)):
        rumours = Rumours(0.5, 0.0)
        rumours.put(record_of(1), 0.0, passive_sends)
        for _ in range(times):
            assert rumours.take(32, 1, members) == (record_of(1),)
        assert not rumours.take(32, 1, members)


def test_for_progress_alone_no_frame_goes_out():
    rumours = Rumours(0.5, 0.0)
    rumours.put(record_of(1), 0.0, first_passive_sends(100))
    assert (rumours.needs_frame, rumours.due_at) == (False, math.inf)
    rumours.resume(1.0)
    assert rumours.due_at == math.inf
    assert rumours.take(8, 1, 100) == (record_of(1),), "a ping takes it along"
    rumours.put(record_of(2), 2.0)
    assert (rumours.needs_frame, rumours.due_at) == (True, 2.0)
    frames: list[Effect] = []
    rumours.send_frame([peer_id(4), peer_id(5), peer_id(6)], 100, 2.0, frames)
    both = Gossip((record_of(2), record_of(1)))
    assert frames == [Send(peer_id(number), both) for number in (4, 5, 6)], "and so does a frame that news asked for"
    assert rumours.due_at == 2.5
    rumours.put(record_of(3), 2.0, first_passive_sends(100))
    while rumours.needs_frame:
        rumours.take(1, 3, 100)
    rumours.send_frame([peer_id(4)], 100, 2.5, frames)
    assert len(frames) == 3, "pings have taken everything along"
    assert rumours.due_at == math.inf


def test_rumours_are_bounded_and_those_sent_most_make_way():
    rumours = Rumours(0.5, 0.0)
    for n in range(3 * MAX_RUMOURS):
        rumours.put(record_of(n), 0.0)
    assert len(rumours) == MAX_RUMOURS == 1024
    assert rumours.take(1, 1, 3000)[0].id == peer_id(3 * MAX_RUMOURS - 1)


def test_counts_and_figures_alone_are_mere_progress():
    before = record_of(1, ready=False, run_id=b"g" * 16, extra=(b"figures", 1))
    counts = {"sequence": 1, "steps": 2, "samples": 3, "progress": 4, "loss": 0.5, "version": 1.0, "signature": b"s"}
    for figures in ((b"other", 1), (1,)):
        assert is_progress_only(dataclasses.replace(before, **counts, extra=figures), before)
    others = {
        "incarnation": 2, "left": True, "ready": True, "run_id": b"h" * 16, "address": Address("host", 1),
        "homes": (PeerId(b"i" * 16),), "finished": True, "extra": (b"figures", 2),
    }  # fmt: skip
    assert set(counts) | set(others) | {"id", "public_key"} == {field.name for field in dataclasses.fields(before)}
    for name, value in others.items():
        assert not is_progress_only(dataclasses.replace(before, **{name: value}), before)
    assert not is_progress_only(dataclasses.replace(before, extra=(b"figures",)), before)

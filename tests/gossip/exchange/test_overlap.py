"""Exchanges that overlap: when they may, how many, and with which partners."""

from dataclasses import replace

import pytest

from gossip.arithmetic.mixing import pair_cap
from gossip.effects import Release, Send, Snapshot
from gossip.exchange import exchanges
from gossip.exchange.exchanges import MAX_STREAM_RATIO
from gossip.wire.messages import Busy
from tests.gossip.exchange.sides import ELEMENTS, OUTER, B, C, D, E, Side, offer, used_to


def waiting(*partners):
    """Return a side whose exchanges mostly wait."""
    return used_to(Side(partners=partners or (B, C, D, E), config=OUTER), 0.1, 0.2)


@pytest.mark.parametrize(
    ("waits", "changes", "overlapping"),
    [
        ((0.1, 0.1 * MAX_STREAM_RATIO), {}, True),
        ((0.1, 0.11 * MAX_STREAM_RATIO), {}, False),
        ((0.001, 10.0), {}, False),
        ((10.0, 0.001), {}, True),
        ((), {}, False),  # No times are known yet.
        ((0.1, 0.2), {"outer_momentum": 0.0, "outer_rate": 1.0}, False),
        ((0.1, 0.2), {"part": "fragments 4"}, False),
    ],
    ids=str,
)
def test_exchanges_overlap_where_streams_are_short_beside_answers_and_outer_steps_are_of_the_whole_vector(
    waits, changes, overlapping
):
    side = Side(config=replace(OUTER, **changes))
    if waits:
        used_to(side, *waits)
    assert side.exchanges.is_overlapping is overlapping


def test_exchanges_of_large_vectors_do_not_overlap(monkeypatch):
    monkeypatch.setattr(exchanges, "MAX_OVERLAP_ELEMENTS", ELEMENTS - 1)
    assert not waiting().exchanges.is_overlapping


def test_own_mixes_begin_beside_each_other_with_different_partners_up_to_the_limit():
    side = waiting()
    x = side.exchanges
    for session, partner in ((1, B), (2, C), (3, D)):
        assert x.postponing_exchanges == session - 1, "each one under way puts off the next mix"
        assert x.begin_mix(0.0) == [Snapshot(session)]
        assert x.begin_mix(0.0) == [], "of a loop that stands one waits for its snapshot"
        [sent] = x.on_snapshotted(session, 0.0)
        assert sent.to == partner, "and none that one is under way with"
        assert sent.message.weight == pair_cap(session)
    assert x.begin_mix(0.0) == []
    assert x.on_offer(E, offer(9), 0.0) == [Send(E, Busy(9))]
    assert x.used_slots == x.max_overlaps == 3


def test_a_mix_beside_which_no_other_runs_excludes_nobody():
    """Only such a mix may ask a partner that is in back-off."""
    side = waiting(B)
    excluded, choose = [], side.choose
    side.choose = lambda asked, *others: excluded.append(set(asked)) or choose(asked, *others)
    [sent] = side.offer_mix()
    assert sent.to == B
    assert excluded == [set(), set()]


def test_where_everybody_mixes_with_us_already_nobody_is_asked():
    side = waiting(B)
    side.offer_mix()
    assert side.exchanges.begin_mix(0.0) == []


def streaming():
    """Return the exchanges of a side that streams with B and mostly waits."""
    side = waiting()
    side.stream_mix()
    return side.exchanges


def test_beside_a_stream_or_a_consent_its_partner_begins_no_other():
    x = streaming()
    assert x.on_offer(B, offer(9), 0.2) == [Send(B, Busy(9))]
    assert x.on_offer(C, offer(10), 0.2) == [Snapshot(10)]
    assert x.on_offer(C, offer(11), 0.2) == [Send(C, Busy(11))]


def test_a_mix_does_not_ask_a_partner_whose_own_mix_came_while_it_was_prepared():
    x = waiting(B, C).exchanges
    x.begin_mix(0.0)
    assert x.on_offer(C, offer(9), 0.0) == [Release(1), Snapshot(9)], "one of our mixes gives way"
    x.begin_mix(0.0)
    assert x.on_offer(B, offer(10), 0.0) == [Snapshot(10)], "and the next one does not"
    assert x.on_snapshotted(2, 0.1) == [Release(2)]


def test_nobody_agrees_ahead_where_exchanges_overlap():
    x = streaming()
    assert x.reserve_next(0.1) == []
    assert x.on_offer(C, offer(9, mixing="ahead"), 0.1) == [Send(C, Busy(9))]

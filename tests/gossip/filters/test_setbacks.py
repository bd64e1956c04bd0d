"""A node is told that its own vector is far away, and not for what others send."""

import itertools

import pytest

from gossip.config import Config
from gossip.effects import Notice
from gossip.filters.setbacks import ALLOWED_EXCESS, LASTING_S, WINDOW_S, Setbacks, is_cut_short
from tests.gossip.exchange.sides import B, C, D, E, Side

PARTNERS = [B, C, D, E]
LAST = ALLOWED_EXCESS + int(LASTING_S) + 1  # the first exchange, one in each second, of which the user is told


def told(setbacks, share, count=200, pause_s=0.1, start=0.0):
    """Return how often the user is told if this share of exchanges, with each partner in turn, achieves too little."""
    times = 0
    for number, partner in zip(range(count), itertools.cycle(PARTNERS), strict=False):
        turn = number // len(PARTNERS)
        times += setbacks.note(partner, int(share * (turn + 1)) > int(share * turn), start + number * pause_s)
    return times


@pytest.mark.parametrize(("share", "times"), [(0.0, 0), (0.05, 0), (0.2, 1), (1.0, 1)])
def test_more_than_a_tenth_of_a_minutes_exchanges_is_told_once(share, times):
    assert told(Setbacks(), share) == times


def test_a_few_setbacks_of_a_young_node_say_nothing():
    assert told(Setbacks(), 1.0, count=ALLOWED_EXCESS, pause_s=5.0) == 0


def test_a_node_that_catches_up_within_seconds_is_not_told():
    """A late node begins far behind a fast swarm, and its first exchanges of each second are all cut short."""
    setbacks = Setbacks()
    assert told(setbacks, 1.0, count=45, pause_s=LASTING_S / 50) == 0
    assert told(setbacks, 0.0, count=455, start=LASTING_S, pause_s=0.01) == 0
    assert told(setbacks, 0.05, start=2 * LASTING_S) == 0


def test_a_node_that_has_caught_up_is_not_told_of_a_later_setback():
    setbacks = Setbacks()
    assert told(setbacks, 1.0, count=8, pause_s=0.0) == 0
    assert told(setbacks, 0.0, count=30, start=1.0, pause_s=0.0) == 0
    assert not any(setbacks.note(partner, True, 20.0) for partner in PARTNERS[:2])


def test_a_busy_node_of_hundreds_of_exchanges_a_second_is_told():
    assert told(Setbacks(), 1.0, count=3_000, pause_s=0.002) == 1


def test_what_is_over_for_a_minute_is_forgotten_and_told_again_if_it_comes_back():
    setbacks = Setbacks()
    assert told(setbacks, 1.0, count=100) == 1
    assert told(setbacks, 0.0, count=20, start=2 * WINDOW_S) == 0
    assert told(setbacks, 1.0, count=100, start=4 * WINDOW_S) == 1


def test_one_partner_of_four_that_is_far_away_is_its_own_affair():
    setbacks = Setbacks()
    assert not any(setbacks.note(partner, partner == B, number) for number in range(50) for partner in PARTNERS)


def test_a_node_that_is_cut_short_or_refused_by_most_others_tells_its_user_with_the_session_at_hand():
    side = Side(config=Config(filter="clip", filter_limit=0.1))
    effects = []
    for number in range(LAST):
        effects += side.complete(B, side.stream_mix(number), number, difference_sq=100.0)
    [notice] = [effect for effect in effects if isinstance(effect, Notice)]
    assert notice.kind == "apart"
    assert notice.session == LAST
    assert "11 of the last 11 exchanges" in notice.sentence
    assert "{tensor}" in notice.sentence


def test_a_node_whose_vectors_others_refuse_is_told_too():
    side = Side()
    effects = []
    for number in range(LAST):
        effects += side.exchanges.on_abort(B, side.stream_mix(number), "balance", number)
    assert [effect.kind for effect in effects if isinstance(effect, Notice)] == ["apart"]


@pytest.mark.parametrize(("share", "distance", "is_so"), [(0.4, 0.1, True), (0.6, 0.1, False), (0.1, 0.04, False)])
def test_an_exchange_is_cut_short_if_less_than_half_is_taken_of_more_than_codecs_round(share, distance, is_so):
    assert is_cut_short(share, (distance * 7.0) ** 2, 7.0**2) is is_so

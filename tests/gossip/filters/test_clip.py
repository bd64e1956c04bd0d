"""The clipping filter: how much of a difference it takes, by which radius, and what it saves up."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.config import Config
from gossip.effects import Mix
from gossip.filters.clip import (
    MAX_PARTNERS,
    MAX_WHOLE_RADII,
    MIN_PARTNERS,
    MIN_RADII,
    OWN_SHARE,
    SAVED_PER_EXCHANGE,
    Clip,
    clip_factor,
    rounded_share,
    taper,
)
from gossip.filters.trimmed import Trimmed
from gossip.ids import PeerId
from tests.gossip.exchange.sides import A, B, C, Side
from tests.harness.configs import tuned

PEERS = [PeerId(number.to_bytes(16, "big")) for number in range(80)]


def clip(usual_distances=None, **config):
    """Return a filter whose radius is so many usual distances."""
    rule = Clip(tuned(filter="clip", **config))
    if usual_distances is not None:
        rule.usual_distances = usual_distances
    return rule


def saw(rule, difference_sq, size, *peers):
    """Record exchanges with these peers that moved nothing."""
    for peer in peers:
        rule.take_share(peer, 0.0, difference_sq, size, list, 0.0)


# -- clipping ----------------------------------------------------------------------------------------------------------
squares = st.floats(1e-12, 1e12)
radii = st.floats(1e-6, 1e6)


@given(squares, radii)
def test_no_more_than_the_radius_is_taken_and_little_less(square, radius):
    length = math.sqrt(square)
    taken = clip_factor(square, radius)
    assert 0 <= taken <= 1
    # Sides may add up in different orders, so a share this near to a step counts as one.
    nearly_a_step = 0.001 / 4096 * length
    assert taken * length <= radius * (1 + 1e-12) + nearly_a_step
    assert taken * length >= min(length, radius) - length / 4096 - 1e-9 * length
    assert taken * 4096 == int(taken * 4096)


@given(squares)
def test_without_a_radius_everything_is_taken(square):
    assert clip_factor(square, 0.0) == 1.0
    assert clip_factor(square, math.inf) == 1.0


@pytest.mark.parametrize("kept", [4096, 4095, 2048, 1])
def test_a_rounding_does_not_decide_what_share_is_taken(kept):
    """Two sides may add up the squares of one difference in different orders."""
    radius, distance = 3.0 * kept / 4096, 3.0
    nearby = [math.nextafter(distance, 0.0), distance, math.nextafter(distance, 4.0)]
    assert {clip_factor(value * value, radius) for value in nearby} == {kept / 4096}
    assert {rounded_share(radius, value) for value in nearby} == {kept / 4096}


@given(st.floats(1e-3, 1e3), st.floats(0.0, MAX_WHOLE_RADII - 1.0), st.floats(0.0, 1.0))
def test_what_is_unusually_far_counts_whole_to_a_point_and_ever_less_from_there(reach, spare, further):
    taken, most = taper(reach, spare), 1.0 + spare
    assert min(reach, MIN_RADII) <= taken <= min(reach, most)
    if reach <= most:
        assert taken == reach
    else:
        assert taken - further - 1e-9 <= taper(reach + further, spare) <= taken, "it falls, and not at once"
    assert taper(50.0, spare) == MIN_RADII


def known(radius=20.0):
    """Return a filter for which this radius is usual at 400 elements."""
    rule = clip(1.0)
    saw(rule, radius**2, 400, *PEERS[:MIN_PARTNERS])
    assert rule.radius(400) == pytest.approx(radius)
    return rule


def test_what_partners_take_beyond_the_radius_is_saved_up_by_all_exchanges_together():
    rule = known()
    saw(rule, 20.0**2, 400, *PEERS[:MIN_PARTNERS] * 10)
    assert rule.take_share(A, 0.5, (20.0 * MAX_WHOLE_RADII) ** 2, 400, list, 0.0) == (1.0, ())
    taken, why = rule.take_share(B, 0.5, (20.0 * 1.5) ** 2, 400, list, 0.0)
    assert taken == pytest.approx((1 + SAVED_PER_EXCHANGE) / 1.5, abs=1e-3), "nothing else was left"
    assert why == ("clipped",)
    saw(rule, 20.0**2, 400, *PEERS[:MIN_PARTNERS] * 4)
    assert rule.take_share(C, 0.5, (20.0 * 1.5) ** 2, 400, list, 0.0) == (1.0, ()), "16 exchanges save half a radius"


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=200))
def test_all_partners_together_exceed_the_radius_by_no_more_than_is_saved(reaches):
    rule, beyond = clip(), 0.0
    for reach in reaches:
        taken, seen = rule.clip_to_radius((20.0 * reach) ** 2, 20.0)
        assert seen == pytest.approx(reach)
        beyond += max(0.0, taken * reach - 1.0)
    assert beyond <= SAVED_PER_EXCHANGE * len(reaches) + 1e-9


def test_lies_tens_of_radii_away_use_up_nothing_that_is_saved():
    rule = known()
    for number in range(40):
        assert rule.clip_to_radius((20.0 * 30) ** 2, 20.0)[0] == pytest.approx(MIN_RADII / 30, abs=1 / 4096), number
    assert rule.longest_whole(400) == pytest.approx(20.0 * MAX_WHOLE_RADII)


def test_a_fixed_radius_cuts_off_as_published_from_the_first_exchange_on():
    rule = clip(filter_limit=0.7)
    assert rule.radius(10**6) == rule.longest_whole(400) == 0.7
    assert rule.clip_to_radius(2.8**2, 0.7)[0] == pytest.approx(0.25, abs=1 / 4096)
    assert rule.clip_to_radius(1.4**2, 0.7)[0] == pytest.approx(0.5, abs=1 / 4096)


def streaming_pair(a, b):
    """Let A and B stream an exchange that A offered."""
    [offered] = a.offer_mix()
    b.exchanges.on_offer(A, offered.message, 0.0)
    accepted, _ = b.exchanges.on_snapshotted(1, 0.0)
    a.exchanges.on_accept(B, accepted.message, 0.0)


def agree(initiator_radius, responder_radius, difference_sq):
    """Let two sides with filters of these radii (0: none) exchange a difference; return both Mix effects and sides."""
    sides = []
    for me, other, radius in ((A, B, initiator_radius), (B, A, responder_radius)):
        sides.append(Side(me, (other,), Config(filter="clip", filter_limit=radius) if radius else Config()))
    streaming_pair(*sides)
    ended = sides[0].complete(B, 1, 0.0, difference_sq, 1.0), sides[1].complete(A, 1, 0.0, difference_sq, 4.0)
    return [next(effect for effect in effects if isinstance(effect, Mix)) for effects in ended], sides


@given(st.sampled_from([0.0, 0.5, 2.0, 7.5]), st.sampled_from([0.0, 0.25, 2.0, 40.0]), st.floats(0.01, 1e4))
def test_each_side_cuts_off_by_its_own_radius_whatever_the_other_does(ours, theirs, square):
    mixes, sides = agree(ours, theirs, square)
    for mix, side, radius in zip(mixes, sides, (ours, theirs), strict=True):
        assert mix.weight == 0.5 * clip_factor(square, radius)
        assert side.exchanges.refusals.total == (0 < radius < math.sqrt(square))
    if ours == theirs:
        assert mixes[0] == mixes[1], "and the mean moves by nothing"


def test_a_far_one_whose_distances_were_long_takes_all_of_what_others_take_little_of():
    far, near = Side(A, (B,)), Side(B, (A,))
    for side, square in ((far, 400.0 * 9), (near, 400.0)):
        side.local.elements = 400
        saw(side.exchanges.filter, square, 400, *PEERS[:MIN_PARTNERS])
        side.exchanges.filter.saved_radii = 0.0
    streaming_pair(far, near)
    for side in (far, near):
        side.exchanges.on_streamed(1, 400.0 * 9, 400.0, 0.0)  # three times the usual length of one side
    assert far.table[1].weight == 0.5
    assert near.table[1].weight == 0.5 * rounded_share(taper(2.0, 0.0), 2.0)


# -- the usual distance ------------------------------------------------------------------------------------------------
def test_a_radius_follows_the_usual_distance_and_counts_by_the_elements_that_are_mixed():
    rule = clip(3.0)
    for number in range(MIN_PARTNERS):
        assert rule.radius(400) == 0.0, "too few are known"
        saw(rule, 100 * 4.0, 100, PEERS[number])  # two for each element
    assert rule.radius(400) == pytest.approx(3 * 2 * 20)
    assert rule.radius(10_000) == pytest.approx(3 * 2 * 100)
    assert rule.radius(100) == 0.0, "of few elements no distance is usual"
    saw(rule, 100 * 16.0, 100, *PEERS[MIN_PARTNERS : MIN_PARTNERS + MAX_PARTNERS])
    assert rule.radius(400) == pytest.approx(3 * 4 * 20), "the old ones are forgotten"


@given(
    st.lists(st.floats(1.0, 2.0), min_size=5, max_size=5),
    st.lists(st.floats(2.0, 1e6), min_size=11, max_size=11),  # long, so that each is further away than any honest one
    st.randoms(use_true_random=False),
)
def test_long_lies_short_of_three_quarters_leave_the_radius_an_honest_one(honest, lies, random):
    rule, told = clip(1.0, norm_bound=1e9), honest + lies
    random.shuffle(told)
    for peer, square in zip(PEERS, told, strict=False):
        saw(rule, 256 * square, 256, peer)
    assert min(honest) <= rule.radius(256) ** 2 / 256 * (1 + 1e-9)
    assert rule.radius(256) ** 2 / 256 <= max(honest) * (1 + 1e-9)


def test_before_enough_is_seen_the_nodes_own_steps_say_what_is_usual():
    rule = clip()
    for distance in (math.nan, 0.3, 0.2):
        rule.on_moved(distance)
    for number in range(MIN_PARTNERS):
        first = 1.5 * math.sqrt(4 * 0.3**2 + OWN_SHARE * 0.2**2)
        assert rule.radius(300) == pytest.approx(first)
        assert rule.radius(1000) == pytest.approx(first), "a part that is mixed rarely is as far apart as all"
        saw(rule, 10 * 4.0, 10, PEERS[number])
    assert rule.radius(300) == pytest.approx(1.5 * math.sqrt(300 * 4.0 + OWN_SHARE * 0.2**2)), "now it is known"


def test_what_its_own_steps_have_just_moved_it_widens_a_nodes_radius():
    rule = clip()
    saw(rule, 400 * 1.0, 400, *PEERS[:MIN_PARTNERS])
    assert rule.radius(400) == pytest.approx(1.5 * 20)
    for moved in (60.0, math.nan):  # the second is not measured
        rule.on_moved(moved)
        assert rule.radius(400) == pytest.approx(1.5 * math.sqrt(400 + OWN_SHARE * 3600))
    rule.on_moved(0.0)
    assert rule.radius(400) == pytest.approx(1.5 * 20), "that was long ago"


def test_one_partner_has_one_distance_however_often_it_is_met():
    """Before, the last 16 exchanges set the usual distance, and a node's only partner could set it alone."""
    rule, alone = clip(1.0), clip(1.0)
    saw(rule, 256 * 1.0, 256, *PEERS[:8])
    alone.on_moved(0.5)
    for each in (rule, alone):
        saw(each, 256 * 100.0, 256, *[A] * 200)
    assert rule.radius(256) == pytest.approx(16.0)
    assert alone.radius(256) == pytest.approx(math.sqrt(4 * 0.5**2 + OWN_SHARE * 0.5**2)), "its own steps say it, not A"


def test_what_the_budget_leaves_is_taken_and_then_nothing():
    side = Side(config=Config(filter="clip", filter_limit=24.0))
    side.local.elements = 400
    for peer in PEERS[:6]:
        side.exchanges.filter.budget.add(peer, 0.5, 0.0)  # three times the half, and two, come to 3.5 moves

    def weight_of(session):
        side.answer(B, session)
        effects = side.complete(B, session, 0.0, 24.0**2, 100.0)
        return next(effect.weight for effect in effects if isinstance(effect, Mix))

    assert [weight_of(session) for session in range(50, 56)] == [0.5, 0.5, 0.5, 0.25, 0.0, 0.0]
    assert side.exchanges.refusals.counts == {(B, "budget"): 3}
    side.local.steps = 8 * 64 * 20  # much later the budget has forgotten all of it, and has two moves again
    assert weight_of(60) == 0.5


def test_a_move_is_half_a_difference_as_long_as_the_radius():
    rule = clip(filter_limit=2.0)
    for peer, weight, length, moves in ((A, 0.5, 1.0, 0.5), (B, 0.25, 2.0, 0.5), (C, 0.5, 50.0, 1.0)):
        rule.take_share(peer, weight, length**2, 400, list, 3.0)
        assert rule.budget.movement_of(peer, 3.0) == pytest.approx(moves, rel=0.01)  # a share is a 4,096th of the whole
    rule.take_share(PEERS[0], 0.5, 1e30, 10, list, 3.0)
    assert rule.budget.movement_of(PEERS[0], 3.0) == 0.0, "of few elements no distance is usual"


# -- settling ----------------------------------------------------------------------------------------------------------
def settled_share(rule, partner, distance, elements=400):
    return rule.take_settling_share(partner, 0.5, distance**2, elements, list, 0.0)


def test_while_members_settle_the_radius_stays_and_what_shrinks_is_taken_whole():
    rule = known(radius=20.0)
    for distance in (20.0, 10.0, 5.0, 0.1, 0.0):
        assert settled_share(rule, PEERS[0], distance) == (1.0, ())
    assert rule.radius(400) == pytest.approx(20.0)
    share, why = settled_share(rule, PEERS[1], 200.0)
    assert share == pytest.approx(MIN_RADII / 10, abs=1e-3)
    assert why == ("clipped",)


def test_a_partner_has_no_larger_budget_while_members_settle():
    rule, taken = known(radius=20.0), 0.0
    for _ in range(100):
        for partner in PEERS[:3]:
            settled_share(rule, partner, 0.0)
        taken += settled_share(rule, PEERS[3], 20.0)[0]
    assert taken <= 4.0, "of a hundred moves"


def test_in_groups_pairs_that_settle_are_cut_by_the_distance_in_the_last_group():
    rule = Trimmed(Config(mixing="group", filter="trimmed", filter_limit=1))
    assert settled_share(rule, PEERS[0], 1e6) == (1.0, ()), "no distance is known"
    rule.on_group(20.0**2, 400)
    assert settled_share(rule, PEERS[0], 20.0) == (1.0, ())
    assert settled_share(rule, PEERS[0], 2e3)[0] < 0.01

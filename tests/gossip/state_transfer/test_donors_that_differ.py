"""A donor whose model differs from the others' is found, whichever it is, and its pieces are fetched again."""

import itertools
import math

import pytest

from gossip.state_transfer.witnesses import MAX_WITNESS_WAITS, WITNESS_WAIT_S
from tests.gossip.state_transfer.taker import CHUNK, CONFIG, DONORS, A, B, C, D, Taker, far, surveyed
from tests.harness.configs import tuned


def test_donors_that_agree_are_asked_for_two_chunks_each_more_and_two_that_differ_are_taken():
    taker = surveyed()
    taker.receive_all()
    assert taker.covered_once()
    assert len(taker.comparing) == 8, "with the next two of the ring"
    pair = surveyed([A, B])
    pair.receive_all()
    assert not pair.comparing
    assert pair.adopt is not None


def test_when_no_two_donors_are_near_each_other_nobody_is_odd():
    taker = surveyed([A, B, C], apart_sq=lambda owner, other: 1e4)
    taker.receive_all()
    assert taker.covered_once()
    assert taker.joining.donors == {A, B, C}


@pytest.mark.parametrize("odd", [A, B, C, D])
def test_how_far_donors_are_from_each_other_is_known_afterwards_whoever_lies(odd):
    taker = surveyed(apart_sq=lambda owner, other: 1e5 if odd in (owner, other) else 10.0 + DONORS.index(owner))
    taker.receive_all()
    assert 10.0 / CHUNK <= taker.joining.check.spread_sq <= 14.0 / CHUNK
    few = surveyed([A, B])
    few.receive_all()
    assert few.joining.check.spread_sq == 0.0, "of two nobody can say which lies"


def test_only_of_the_weights_is_it_known_how_far_donors_are_from_each_other():
    taker = surveyed(keys=("m", "v", "w"), elements=CHUNK, trained=CHUNK)
    taker.apart_sq = lambda owner, other: 16.0 if owner == A else 1.0  # A gives the weights, and others the rest
    taker.receive_all()
    owners = {one.owner for one in taker.joining.check.results if one.stop <= CHUNK}
    assert len(owners) == 1
    assert taker.joining.check.spread_sq == (16.0 if owners == {A} else 1.0) / CHUNK


def test_a_comparison_that_fails_holds_nobody_up():
    taker = surveyed()
    while not taker.comparing:
        taker.receive(next(iter(taker.fetches)), 1_000)
    joining = taker.joining
    first, second, third, fourth, *_ = list(joining.check.comparisons)
    taker.do(joining.on_refused(joining.check.comparisons[first].other, first, 1.0))
    taker.do(joining.on_failed(second, 1.0))
    taker.do(joining.on_unlinked(joining.check.comparisons[third].other, 1.0))
    assert joining.next_deadline == joining.check.comparisons[fourth].deadline
    taker.do(joining.tick(joining.next_deadline))
    assert not joining.check.comparisons
    taker.receive_all()
    assert taker.adopt is not None


@pytest.mark.parametrize("donors", [[A, B, C], [A, B, C, D]])
def test_a_donor_hides_nothing_by_refusing_to_be_compared(donors):
    taker = surveyed(donors, apart_sq=far(B))
    taker.receive_all(refusing={B})
    assert taker.joining.donors == set(donors) - {B}


def test_an_odd_donor_is_not_asked_again_when_all_others_are_busy_and_those_who_come_instead_are_compared():
    taker = surveyed([A, B, C], apart_sq=far(B))
    joining = taker.joining
    while not joining.is_starved:
        session = next(iter(taker.fetches), 0)
        if not session:
            taker.wait()
        elif joining.odd and session in joining.pieces:
            taker.do(joining.on_refused(taker.fetches[session][0], session, taker.now))
        else:
            taker.receive(session, 1_000)
    taker.do(joining.on_starved([B, D, A, C], taker.now))
    taker.receive_all()
    assert joining.donors == {A, C, D}
    assert D in {one.owner for one in joining.check.results}


def test_an_honest_donor_that_is_too_busy_to_be_compared_is_not_odd():
    taker = surveyed()
    taker.receive_all(refusing={B})
    assert taker.joining.donors == {A, B, C, D}
    assert taker.covered_once()


@pytest.mark.parametrize("odd", [A, B, C, D])
def test_what_a_donor_gave_before_it_gave_up_is_compared_too(odd):
    taker = surveyed(apart_sq=far(odd))
    session = taker.session_of(odd)
    taker.receive(session)
    given = taker.fetched[-1][:2]
    taker.do(taker.joining.on_refused(odd, session, taker.now))
    taker.receive_all()
    assert [donor for start, stop, donor in taker.fetched if (start, stop) == given] != [odd], "it is fetched again"
    assert taker.adopt is not None


def test_what_an_honest_donor_gave_before_it_died_is_kept():
    taker = surveyed()
    session = taker.session_of(B)
    taker.receive(session)
    taker.do(taker.joining.on_unlinked(B, taker.now))
    taker.receive_all()
    assert taker.covered_once()


def test_any_piece_of_a_donor_may_be_the_one_that_is_compared():
    looked_at = set()
    for seed in range(20):
        taker = Taker(elements=12 * CHUNK)
        for _ in range(seed):
            taker.joining.new_session()
        taker.survey([A, B, C])
        taker.joining.missing = [(start, start + CHUNK) for start in range(0, 12 * CHUNK, CHUNK)]
        taker.joining.pieces.clear()
        taker.fetches.clear()
        taker.do(taker.joining.request_missing(0.0))
        taker.receive_all()
        looked_at |= {one.start for one in taker.joining.check.results if one.owner == A}
    assert len(looked_at) > 1


def colluding(*liars):
    """Return distances for liars that give one other model together, equal to the last bit."""
    return lambda owner, other: 0.0 if {owner, other} <= set(liars) else far(*liars)(owner, other)


def without_number(*liars):
    """Return distances for liars whose models hold values that are not finite."""
    return lambda owner, other: math.nan if {owner, other} & set(liars) else 1.0


def test_two_colluding_donors_of_three_are_outvoted_by_members_that_are_met_late():
    """Weights may arrive before its seeds have told a newcomer of any other member."""
    taker = Taker(config=tuned(CONFIG, donors=3))
    taker.joining.find_donors = lambda run_id: DONORS[3 : 4 if taker.now < 2.5 * WITNESS_WAIT_S else None]
    taker.joining.has_unmet_members = lambda: True
    taker.survey([A, B, C])
    taker.apart_sq = colluding(B, C)
    taker.receive_all()
    assert 3 * WITNESS_WAIT_S <= taker.now < MAX_WITNESS_WAITS * WITNESS_WAIT_S
    assert A in taker.joining.donors
    assert not taker.joining.donors & {B, C}
    assert taker.adopt is not None


@pytest.mark.parametrize(("are_unmet", "waits"), [(True, MAX_WITNESS_WAITS), (False, 1)])
def test_two_colluding_donors_of_three_win_where_there_is_nobody_else(are_unmet, waits):
    taker = Taker()
    taker.joining.has_unmet_members = lambda: are_unmet
    taker.survey([A, B, C])
    taker.apart_sq = colluding(B, C)
    taker.receive_all()
    assert taker.joining.donors == {B, C}, "it is their word against one"
    assert taker.now == waits * WITNESS_WAIT_S, "in a small swarm all members are donors"


@pytest.mark.parametrize("lie", [colluding, far, without_number])
@pytest.mark.parametrize("count", range(3, 10))
def test_no_honest_majority_keeps_what_a_liar_gave_whoever_lies(lie, count):
    """All assignments of fewer liars than honest members to the places of donors and witnesses, in all orders.

    Only if all four donors lie, each in a way of its own, nothing tells them from honest ones.
    """
    members = DONORS[:count]
    for size in range(1, (count + 1) // 2):
        for liars in itertools.combinations(members, size):
            if lie is not colluding and set(liars) >= {A, B, C, D}:
                continue
            taker = surveyed(members, apart_sq=lie(*liars))
            taker.receive_all()
            given = {donor for *_, donor in taker.joining.received}
            assert not given & set(liars), liars
            assert taker.covered_again(), liars
            assert not taker.joining.donors & set(liars), liars
            assert taker.adopt is not None


@pytest.mark.parametrize(("donors", "count"), [(3, 7), (3, 8), (3, 9), (3, 10), (4, 9), (4, 10)])
def test_an_honest_majority_outvotes_liars_that_are_all_donors(donors, count):
    """The other liars are witnesses, which lie like the donors or each in a way of its own."""
    members = DONORS[:count]
    for size in range(donors, (count + 1) // 2):
        for others in itertools.combinations(members[donors:], size - donors):
            together = {*members[:donors], *others}
            for alike in (together, set(members[:donors])):
                taker = Taker(config=tuned(CONFIG, donors=donors))
                taker.apart_sq = lambda a, b, alike=alike, all_=together: 0.0 if {a, b} <= alike else far(*all_)(a, b)
                taker.survey(members)
                taker.receive_all()
                assert not {donor for *_, donor in taker.joining.received} & together
                assert taker.covered_again()
                assert taker.adopt is not None


def test_two_members_that_gave_nothing_are_asked_and_the_others_only_where_donors_differ():
    taker = surveyed(DONORS)
    taker.receive_all()
    assert {one.other for one in taker.joining.check.results} == {A, B, C, D, *DONORS[4:6]}, "two look out"


def test_witnesses_that_do_not_answer_hold_nobody_up_and_have_no_vote():
    taker = surveyed(DONORS, apart_sq=far(B))
    taker.receive_all(refusing=set(DONORS[4:]))
    assert taker.joining.donors == {A, C, D}
    assert taker.adopt is not None

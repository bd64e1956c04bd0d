"""A donor that gives another model than the others is found, whichever it is; what it gave is fetched again."""

from __future__ import annotations

import pytest

from tests.gossip.state_transfer.taker import CHUNK, DONORS, A, B, C, D, Taker, far


@pytest.mark.parametrize("odd", [A, B, C, D])
def test_what_the_odd_one_of_four_donors_gave_is_fetched_of_others(odd):
    taker = Taker()
    taker.survey()
    taker.apart_sq = far(odd)
    theirs = next((p.start, p.stop) for p in taker.joining.pieces.values() if p.donor == odd)
    taker.receive_all()
    again = [(start, stop, donor) for start, stop, donor in taker.fetched if theirs[0] <= start < theirs[1]]
    assert {donor for *_, donor in again} > {odd}
    assert [donor for *_, donor in again][-1] != odd
    assert taker.joining.donors == {A, B, C, D} - {odd}
    assert taker.adopt is not None


def test_donors_that_agree_are_asked_a_chunk_each_more_and_two_that_differ_are_taken():
    taker = Taker()
    taker.survey()
    taker.receive_all()
    assert taker.covered_once()
    assert len(taker.comparing) == 4
    pair = Taker()
    pair.survey([A, B])
    pair.receive_all()
    assert not pair.comparing
    assert pair.adopt is not None


def test_when_no_two_donors_are_near_each_other_nobody_is_odd():
    taker = Taker()
    taker.survey([A, B, C])
    taker.apart_sq = lambda owner, other: 1e4
    taker.receive_all()
    assert taker.covered_once()
    assert taker.joining.donors == {A, B, C}


@pytest.mark.parametrize("odd", [A, B, C, D])
def test_how_far_donors_are_from_each_other_is_known_afterwards_whoever_lies(odd):
    taker = Taker()
    taker.survey()
    taker.apart_sq = lambda owner, other: 1e5 if odd in (owner, other) else 10.0 + DONORS.index(owner)
    taker.receive_all()
    assert 10.0 / CHUNK <= taker.joining.spread_sq <= 14.0 / CHUNK
    few = Taker()
    few.survey([A, B])
    few.receive_all()
    assert few.joining.spread_sq == 0.0, "of two nobody can say which lies"


def test_only_of_the_weights_is_it_known_how_far_donors_are_from_each_other():
    taker = Taker(elements=CHUNK, trained=CHUNK)
    taker.survey(keys=("m", "v", "w"))
    taker.apart_sq = lambda owner, other: 16.0 if owner == A else 1.0  # A gives the weights, and others the rest
    taker.receive_all()
    owners = {one.owner for one in taker.joining.compared_all if one.stop <= CHUNK}
    assert len(owners) == 1
    assert taker.joining.spread_sq == (16.0 if owners == {A} else 1.0) / CHUNK


def test_a_comparison_that_fails_holds_nobody_up():
    taker = Taker()
    taker.survey()
    while not taker.comparing:
        taker.receive(next(iter(taker.fetches)), 1_000)
    joining = taker.joining
    first, second, third, fourth = list(joining.comparisons)
    taker.do(joining.on_refused(joining.comparisons[first].other, first, 1.0))
    taker.do(joining.give_back(second, 1.0))
    taker.do(joining.unlinked(joining.comparisons[third].other, 1.0))
    assert joining.next_deadline() == joining.comparisons[fourth].deadline
    taker.do(joining.tick(joining.next_deadline()))
    taker.receive_all()
    assert taker.adopt is not None

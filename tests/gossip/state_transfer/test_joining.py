"""A newcomer asks members for their terms, then takes weights and optimizer state from several of them."""

import dataclasses
import math
from itertools import pairwise

import pytest

from gossip.effects import Adopt, ReceivePiece, Release, Send
from gossip.state_transfer.donating import ASLEEP, max_piece_elements
from gossip.state_transfer.joining import RETRY_S, SURVEY_S, Phase
from gossip.state_transfer.survey import agree
from gossip.wire.messages import Abort, Fetch, Serving
from tests.gossip.state_transfer.taker import CHUNK, CONFIG, DONORS, RUN_ID, SIZE, A, B, C, D, Taker, pieces, surveyed
from tests.harness.configs import tuned


# -- the survey ------------------------------------------------------------------------------------------------------
def test_four_donors_are_asked_and_each_sends_a_quarter():
    taker = Taker()
    asked = taker.joining.begin(RUN_ID, DONORS, 0.0)
    assert [effect.to for effect in asked] == [A, B, C, D]
    assert all(effect.message.start == effect.message.stop == 0 for effect in asked)
    taker.survey()
    joining = taker.joining
    assert {piece.donor for piece in joining.pieces.values()} == {A, B, C, D}
    assert sorted((p.start, p.stop) for p in joining.pieces.values()) == [
        (0, 3072), (3072, 6144), (6144, 9216), (9216, SIZE)
    ]  # fmt: skip
    taker.receive_all()
    assert taker.covered_once()
    assert taker.adopt == Adopt((), ())
    assert joining.phase is Phase.ADOPTING
    assert joining.donors == {A, B, C, D}


def test_a_model_smaller_than_a_chunk_is_taken_of_several_donors_and_compared_too():
    taker = surveyed(elements=1000)
    assert sorted((p.start, p.stop) for p in taker.joining.pieces.values()) == [
        (0, 256), (256, 512), (512, 768), (768, 1000)
    ]  # fmt: skip
    taker.receive_all()
    assert taker.covered_once()
    assert len(taker.comparing) == 8
    tiny = surveyed(elements=100)
    assert [(p.start, p.stop) for p in tiny.joining.pieces.values()] == [(0, 100)]


@pytest.mark.parametrize("chunk", [CHUNK, 262_144, 1 << 20])
@pytest.mark.parametrize("frozen", [0, 3_000_000])
def test_of_a_large_model_everything_is_asked_for_in_pieces_that_a_donor_gives(chunk, frozen):
    elements = 70_000_001
    taker = Taker(elements, elements, tuned(CONFIG, chunk_elements=chunk), frozen=frozen)
    taker.local.optimizer_keys = ("m", "v")
    joining, most = taker.joining, max_piece_elements(elements + frozen)
    joining.optimizer_keys = ("m", "v")
    ends = (0, elements, elements + frozen, joining.size)
    cut = [piece for begin, end in pairwise(ends) for piece in joining.cut(begin, end, 2)]
    assert [start for start, _ in cut[1:]] == [stop for _, stop in cut[:-1]]
    assert (cut[0][0], cut[-1][1]) == (0, 3 * elements + frozen)
    assert max(stop - start for start, stop in cut) <= most
    assert len(cut) < 4 * joining.size / most


def test_each_piece_is_announced_to_the_driver_before_it_is_asked_for():
    taker = Taker()
    [session] = taker.ask(A)
    collect, send = taker.joining.on_serving(A, Serving(session, 1.0, RUN_ID, (), ()), 0.0)
    assert isinstance(collect, ReceivePiece)
    assert (collect.start, collect.stop, collect.size) == (0, SIZE, SIZE)
    assert send == Send(A, Fetch(collect.session, (), 0, SIZE))


def test_a_survey_without_answers_ends_and_may_begin_again():
    taker = Taker()
    taker.survey([])
    assert taker.joining.phase is Phase.SURVEY
    asked = taker.joining.begin(RUN_ID, [A, B], 0.0)
    deadline = taker.joining.next_deadline
    assert deadline == CONFIG.reply_timeout_s
    assert taker.joining.tick(deadline - 0.01) == []
    assert taker.joining.phase is Phase.SURVEY
    assert taker.joining.tick(deadline) == []
    assert taker.joining.phase is Phase.IDLE
    assert taker.joining.next_deadline == float("inf")
    assert taker.joining.on_serving(A, Serving(asked[0].message.session, 1.0, RUN_ID, (), ()), 9.0) == []
    assert len(taker.joining.begin(RUN_ID, [C], 10.0)) == 1


def test_a_second_after_the_first_answer_the_others_are_not_waited_for():
    taker = Taker()
    first, *_ = taker.ask(A, B, C)
    assert taker.joining.on_serving(A, Serving(first, 1.0, RUN_ID, (), ()), 0.3) == []
    assert taker.joining.next_deadline == 0.3 + SURVEY_S
    assert {donor for donor, *_ in pieces(taker.joining.tick(0.3 + SURVEY_S))} <= {A, B, C}
    assert taker.joining.phase is Phase.COLLECTING


def test_refusals_and_broken_links_end_the_waiting_early():
    taker = Taker()
    a, b, c = taker.ask(A, B, C)
    assert taker.joining.on_serving(A, Serving(a, 1.0, RUN_ID, (), ()), 0.1) == []
    assert taker.joining.on_refused(B, b, 0.1) == []
    assert taker.joining.on_refused(B, c, 0.1) == []  # not B's to refuse
    assert taker.joining.phase is Phase.SURVEY
    taker.joining.on_unlinked(C, 0.1)
    assert taker.joining.phase is Phase.COLLECTING


def test_a_donor_of_another_run_is_not_taken_from():
    taker = Taker()
    taker.survey([A, B], run_id=b"x" * 16)
    assert taker.joining.phase is Phase.IDLE


def test_an_answer_by_another_than_was_asked_changes_nothing():
    taker = Taker()
    a, _ = taker.ask(A, B)
    assert taker.joining.on_serving(C, Serving(a, 1.0, RUN_ID, (), ()), 0.1) == []
    assert taker.joining.answers == {}
    taker.joining.on_serving(A, Serving(a, 1.0, RUN_ID, (), ()), 0.1)
    assert set(taker.joining.answers) == {A}


# -- optimizer state -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "taken"),
    [([1e308], None), ([math.inf], None), ([-1.0], None), ([2.0**53], 640.0), ([641.0], 640.0), ([40.0], 40.0),
     ([40.0, 2.0**53], 40.0), ([1e308, 40.0], None), ([40.0, 50.0, 1e308], 40.0), ([2.0**53, 2.0**53, 40.0], 640.0)],
)  # fmt: skip
def test_no_count_of_an_optimizers_steps_is_more_than_the_samples_behind_the_run(stated, taken):
    """One donor alone is a majority."""
    answers = {
        donor: Serving(1, 1.0, RUN_ID, ("m",), (("step", step), ("rate", 0.5)), 640)
        for donor, step in zip(DONORS, stated, strict=False)
    }
    scalars = dict(agree(answers, ("m",), True).scalars)
    assert scalars.get("step") == taken
    assert scalars["rate"] == 0.5
    nothing_yet = {A: dataclasses.replace(answers[A], swarm_samples=0)}
    assert dict(agree(nothing_yet, ("m",), True).scalars).get("step", 0.0) <= 1.0


def test_without_an_optimizer_the_weights_of_all_donors_will_do():
    taker = Taker(trained=0)
    a, b = taker.ask(A, B)
    taker.joining.on_serving(A, Serving(a, 1.0, RUN_ID, ("m",), (("lr", 0.1),)), 0.0)
    effects = taker.joining.on_serving(B, Serving(b, 5.0, RUN_ID, ("m", "v"), ()), 0.0)
    assert {donor for donor, *_ in pieces(effects)} == {A, B}
    taker.fetches.clear()
    taker.do(effects)
    taker.receive_all()
    assert taker.adopt == Adopt((), ())


def test_a_donor_that_serves_something_else_than_it_said_loses_its_piece():
    taker = surveyed([A, B], keys=("m",), trained=500)
    session = taker.session_of(A)
    assert taker.joining.on_serving(A, Serving(session, 1.0, RUN_ID, ("m",), ()), 0.1) == []
    effects = taker.joining.on_serving(A, Serving(session, 1.0, b"x" * 16, ("m",), ()), 0.1)
    assert effects[:2] == [Release(session), Send(A, Abort(session, "moved"))]


def test_a_newcomer_waits_for_state_that_one_who_is_merely_busy_can_give():
    taker = surveyed([A, B], keys=("m",), trained=500)
    for code in (ASLEEP, ""):
        [session] = receive_weights(taker)
        taker.do(taker.joining.on_refused(taker.fetches.pop(session)[0], session, 6.0, code))
    assert taker.joining.is_starved
    taker.do(taker.joining.on_starved([A, B], 7.0))
    assert taker.adopt is None
    taker.receive_all()
    assert taker.covered_once()
    assert taker.adopt == Adopt(("m",), ())


def receive_weights(taker):
    """Receive everything but the optimizer's state, which the newcomer asks for next."""
    while weights := [session for session, (_, fetch) in taker.fetches.items() if fetch.start < SIZE]:
        taker.receive(weights[0], 1_000)
    return list(taker.fetches)


# -- what is frozen ----------------------------------------------------------------------------------------------------
def test_a_newcomer_takes_what_is_frozen_once_between_the_weights_and_the_optimizers_state():
    taker = surveyed(keys=("m",), scalars=(("step", 1.0),), elements=4 * CHUNK, trained=500, frozen=90 * CHUNK)
    assert taker.joining.size == 94 * CHUNK + 500
    taker.receive_all()
    assert taker.covered_once()
    assert taker.adopt == Adopt(("m",), (("step", 1.0),), trial=False)
    for edge in (4 * CHUNK, 94 * CHUNK):
        assert all(start >= edge or stop <= edge for start, stop, _ in taker.fetched), "who stands gives the weights"


def test_a_newcomer_does_without_the_optimizers_state_and_never_without_what_is_frozen():
    taker = surveyed([A], keys=("m",), elements=CHUNK, trained=500, frozen=CHUNK)
    taker.receive(next(iter(taker.fetches)))
    for _ in range(3):  # it has no boundary at which to copy the rest
        ((session, (donor, fetch)),) = taker.fetches.items()
        assert (fetch.start, fetch.stop) == (CHUNK, 2 * CHUNK)
        taker.do(taker.joining.on_refused(donor, session, taker.now, ASLEEP))
        assert taker.adopt is None
        taker.now += RETRY_S
        taker.do(taker.joining.on_starved([A], taker.now))
    taker.receive(next(iter(taker.fetches)))
    ((session, (donor, _)),) = taker.fetches.items()
    taker.do(taker.joining.on_refused(donor, session, taker.now, ASLEEP))
    taker.do(taker.joining.on_starved([A], taker.now + RETRY_S))
    taker.fetches.pop(session, None)
    taker.receive_all()
    assert taker.adopt == Adopt((), (), trial=False)


@pytest.mark.parametrize("odd", DONORS[:6])
def test_equal_frozen_weights_make_nobody_odd_and_other_ones_do(odd):
    def distances(taker, lies):
        def apart_sq(owner, other):
            one = next(c for c in taker.joining.check.comparisons.values() if (c.owner, c.other) == (owner, other))
            if one.start in taker.joining.check.frozen_range:
                return 1e4 if lies and odd in (owner, other) else 0.0
            return 10.0 * (one.stop - one.start)

        return apart_sq

    config = tuned(CONFIG, donors=6)
    for lies in (False, True):
        taker = Taker(elements=CHUNK, frozen=60 * CHUNK, config=config)
        taker.apart_sq = distances(taker, lies)
        taker.survey(DONORS[:6])
        taker.receive_all()
        assert taker.adopt is not None
        assert (odd in taker.joining.donors) is not lies
        assert taker.joining.check.spread_sq == 10.0, "of what is exchanged alone"

"""One exchange from offer to end without faults: partners, terms, crossing offers, and late messages."""

import pytest

from gossip.config import Config
from gossip.effects import Release, Rename, Send, Snapshot
from gossip.exchange.beginning import OFFERS_PER_PARTNER
from gossip.exchange.session import MAX_GAP_ROUNDS, MAX_VERSION, State
from gossip.wire.messages import Abort, Accept, Busy, Commit, Settled
from tests.gossip.exchange.sides import ELEMENTS, A, B, C, D, E, F, Side, accept, offer, streaming, verified

AGED = Config(staleness_exponent=0.5)


# -- asking another --------------------------------------------------------------------------------------------------
def test_a_busy_partner_is_followed_by_others_with_the_same_snapshot():
    side = Side(partners=(B, C, D, E, F))
    x = side.exchanges
    asked = side.offer_mix()
    for number, partner in enumerate((B, C, D, E), 1):
        renamed = [Rename(number - 1, number)] if number > 1 else []
        assert asked == [*renamed, Send(partner, offer(number))]
        asked = x.on_busy(partner, number, 0.1)
    assert OFFERS_PER_PARTNER == 4
    assert asked == [Release(4)]
    assert x.has_given_up
    assert side.benched == []
    assert x.table == {}


def test_a_refusal_and_silence_bench_the_partner_and_ask_the_next():
    side = Side(partners=(B, C, D))
    x = side.exchanges
    side.offer_mix()
    assert x.on_refuse(B, 1, 0.1) == [Rename(1, 2), Send(C, offer(2))]
    assert x.deadline == 0.1 + side.config.reply_timeout_s
    assert x.tick(x.deadline - 0.001) == []
    assert x.tick(x.deadline) == [Send(C, Abort(2, "late")), Rename(2, 3), Send(D, offer(3))]
    assert side.benched == [B, C]


def test_a_commit_before_anything_was_streamed_is_carried_to_nobody():
    """A third party sends COMMIT and then BUSY.

    If the COMMIT counted for the next partner, we would apply at once, whatever that partner answers.
    """
    side = Side(partners=(B, C))
    x = side.exchanges
    side.offer_mix()
    assert x.on_commit(B, 1, 0.1) == []
    x.on_busy(B, 1, 0.1)
    [transfer] = x.on_accept(C, accept(2), 0.2)
    assert transfer.session == 2, "C's stream is not mistaken for one of B's"
    assert x.on_streamed(2, 1.0, 1.0, 0.3) == [Send(C, Commit(2))], "and C's COMMIT is waited for"
    assert x.table[2].state is State.VERIFIED
    assert x.on_abort(C, 2, "norm", 0.4) == [Release(2)]
    assert x.done_count == 0


# -- terms -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("claim", "ours", "gap"), [(2.0**53 - 1, 10.0, MAX_GAP_ROUNDS), (0.0, 5_000.0, -MAX_GAP_ROUNDS)]
)
def test_a_version_is_a_claim_and_one_exchange_moves_ours_by_little(claim, ours, gap):
    side = Side(version=ours)
    side.answer(version=claim)
    side.complete(B, 7)
    assert side.local.version == ours + 0.5 * gap


def test_no_number_of_liars_takes_a_version_to_where_others_refuse_it():
    side = Side(version=MAX_VERSION / 2 - 1)
    for session in range(100):
        side.answer(B, session, version=2.0**53 - 1)
        side.complete(B, session)
    assert side.exchanges.done_count == 100
    assert side.local.version == MAX_VERSION / 2


@pytest.mark.parametrize("terms", [{"weight": 0.6}, {"weight": 0.0}, {"codec": "none"}], ids=str)
def test_terms_that_were_not_offered_end_the_exchange(terms):
    side = Side()
    side.offer_mix()
    assert side.exchanges.on_accept(B, accept(**terms), 0.1) == [Send(B, Abort(1, "terms")), Release(1)]
    assert side.benched == [B]


@pytest.mark.parametrize(
    ("ours", "theirs", "most", "weight"),
    [(0, 0, 0.5, 0.5), (0, 0.9, 0.5, 0.5), (8, 0, 0.5, 0.5 / 3), (0, 3, 0.25, 0.125)],
)
def test_the_weight_is_the_smaller_limit_of_both_and_falls_with_staleness(ours, theirs, most, weight):
    side = Side(version=float(ours), config=AGED)
    side.exchanges.on_offer(B, offer(version=theirs, weight=most), 0.0)
    assert side.table[7].weight == pytest.approx(weight)
    assert side.table[7].weight <= 0.5


# -- two who ask each other ------------------------------------------------------------------------------------------
def test_our_own_mix_makes_way_once_and_then_waits_for_nobody():
    side = Side(partners=(B, C))
    x = side.exchanges
    x.begin_mix(0.0)
    assert x.on_offer(C, offer(8), 0.0) == [Release(1), Snapshot(8)], "it is being prepared"
    assert not x.own_exchanges
    x.on_snapshotted(8, 0.0)
    side.complete(C, 8, 0.1)
    assert x.begin_mix(0.2) == [Snapshot(2)]
    assert x.on_offer(D, offer(9), 0.2) == [Snapshot(9)], "beside it, where there is room"
    assert [own.session for own in x.own_exchanges] == [2]
    x.on_failed(9, "broken", 0.2)
    x.on_snapshotted(2, 0.2)
    x.on_accept(B, accept(2), 0.3)
    side.complete(B, 2, 0.3)
    x.begin_mix(0.4)
    assert x.on_offer(C, offer(10), 0.4) == [Release(3), Snapshot(10)], "and again after one of ours"


@pytest.mark.parametrize("is_offered", [False, True], ids=["prepared", "offered to the one that asks"])
def test_a_busy_answer_leaves_our_own_offer_alone(is_offered):
    side = Side(B, partners=(A, C), boundary_at=-100.0)
    side.offer_mix() if is_offered else side.exchanges.begin_mix(0.0)
    assert side.exchanges.on_offer(A, offer(8), 0.0) == [Send(A, Busy(8))]
    assert side.exchanges.own_exchanges


@pytest.mark.parametrize("why", ["a part", "something was mixed since"])
def test_a_snapshot_that_would_not_do_is_taken_anew(why):
    config = Config(part="mask 0.5") if why == "a part" else Config(outer_momentum=0.0)
    side = Side(B, partners=(A,), config=config)
    [sent] = side.offer_mix()
    session = sent.message.session
    if why == "something was mixed since":
        side.answer(C, 8)
        side.complete(C, 8, 0.1)
    dropped, anew = side.exchanges.on_offer(A, offer(70, part=sent.message.part), 0.2)
    assert dropped == Release(session)
    assert (type(anew), anew.session) == (Snapshot, 70)


# -- late and twice --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [streaming, verified])
def test_an_accept_said_twice_is_not_answered_with_an_abort(make):
    side = make()
    state = side.table[1].state
    assert side.exchanges.on_accept(B, Accept(1, 9.0, 0.1, "fp32"), 1.0) == []
    assert (side.table[1].state, side.table[1].weight) == (state, 0.5)


@pytest.mark.parametrize("code", ["late", "replaced", "overflow"])
def test_an_innocent_reason_is_believed_once_for_each_finished_exchange(code):
    """Before, a partner that kept aborting with these codes was never left out: honest mixing fell to 40 %."""
    side = Side()

    def abort(session):
        side.answer(B, session)
        side.exchanges.on_abort(B, session, code, 0.1)
        assert side.table == {}

    abort(10)
    assert side.benched == []
    abort(11)
    assert side.benched == [B]
    side.answer(B, 12)
    side.complete(B, 12)
    abort(13)
    assert side.benched == [B], "a finished one buys another"


def test_nobody_but_the_partner_moves_an_exchange():
    side = verified()
    x = side.exchanges
    assert x.on_commit(C, 1, 1.0) == x.on_abort(C, 1, "norm", 1.0) == x.on_settled(C, Settled(1, True), 1.0) == []
    assert x.on_outcome(C, 1, 1.0) == [Send(C, Settled(1, False))]
    assert side.table[1].state is State.VERIFIED


# -- how long transfers may take -------------------------------------------------------------------------------------
def test_a_transfer_may_take_what_it_took_before_and_the_bytes_at_the_slowest_rate():
    side = streaming(Side(config=Config(slowest_rate_mb_s=1e-4)))
    bytes_s = 4 * ELEMENTS / 100
    least_s = side.config.stall_s  # a round trip, and the time in which a stalled stream is found out
    assert side.exchanges.deadline == pytest.approx(least_s + bytes_s)
    for took in (2.0, 3.0, 10.0):
        side.answer(B, 50)
        side.table[50].phase_began_at = -took
        side.complete(B, 50)
    side.answer(B, 51)
    # The median is 3, and the median deviation 1.
    assert side.table[51].final_deadline == pytest.approx(least_s + bytes_s + 3.0 + 6 * 1.0)


def test_what_an_answer_took_a_transfer_may_take_longer():
    side = Side()
    side.offer_mix(7.0)
    side.exchanges.on_accept(B, accept(), 9.5)
    assert side.exchanges.deadline == pytest.approx(9.5 + 2.5 + side.config.stall_s, abs=0.01)

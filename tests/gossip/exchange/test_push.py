"""A push goes one way with its mass: the partner merges it or the sender takes it back, never both or neither."""

import pytest

from gossip.config import Config
from gossip.effects import Merge, Release, Rename, Send, Snapshot
from gossip.exchange.session import State
from gossip.ids import Claim
from gossip.wire.messages import Abort, Busy, Commit, Outcome, Settled
from tests.gossip.exchange.sides import B, C, D, E, Side, accept, offer

SUM = Config(mixing="push-sum")
ROWS = Config(mixing="row-stochastic")


def push(session=7, mass=0.5, **changes):
    return offer(session, mixing="push", mass=mass, **changes)


def offered(config=SUM, partners=(B, C), mass=0.5):
    side = Side(partners=partners, config=config)
    side.exchanges.begin_mix(0.0)
    side.exchanges.on_snapshotted(1, 0.0, mass)
    return side


def pushing(config=SUM):
    """Return a side whose vector streams to B."""
    side = offered(config)
    side.exchanges.on_accept(B, accept(), 0.0)
    return side


def taking(config=SUM, mass=0.5):
    """Return a side to which B's vector streams."""
    side = Side(config=config)
    side.answer(mixing="push", mass=mass)
    return side


# -- nothing breaks ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("config", "mass"), [(SUM, 0.5), (ROWS, 1.0)])
def test_one_side_streams_and_is_done_when_the_other_commits(config, mass):
    side = Side(config=config)
    x = side.exchanges
    assert x.begin_mix(0.0) == [Snapshot(1, 1)]
    assert x.on_snapshotted(1, 0.0, mass) == [Send(B, push(1, mass))]
    [transfer] = x.on_accept(B, accept(), 0.1)
    assert (transfer.sends, transfer.receives) == (True, False)
    assert x.on_commit(B, 1, 0.2) == [Release(1)]
    assert (x.done_count, x.failures, x.table, x.mixed_partners) == (1, 0, {}, [B])


def test_both_sides_of_a_push_come_to_the_mean_of_their_progress():
    """If the receiver's count alone moved, the nodes that push most would lift the counts of all others."""
    low, high = Claim(1_000, 500, 2, 100), Claim(1_400, 500, 2, 100)
    giver, taker = offered(), Side(config=SUM)
    taker.answer(mixing="push", mass=0.5, progress=high)
    for side, claim in ((giver, high), (taker, low)):
        [exchange] = side.table.values()
        exchange.our_claim, side.local.progress.samples = claim, claim.samples
    giver.exchanges.on_accept(B, accept(progress=low), 0.0)
    giver.exchanges.on_commit(B, 1, 0.2)
    taker.exchanges.on_streamed(7, 1.0, 1.0, 0.2)
    assert [side.local.progress.samples for side in (giver, taker)] == [1_200, 1_200]


def test_a_mix_of_several_gives_each_an_equal_share_and_asks_nobody_twice():
    side = Side(partners=(B, C, D, E), config=Config(mixing="push-sum", partners=3))
    x = side.exchanges
    assert x.begin_mix(0.0) == [Snapshot(1, 3), Snapshot(2, 2), Snapshot(3, 1)]
    asked = [x.on_snapshotted(session, 0.0, 0.25)[0].to for session in (1, 2, 3)]
    assert asked == [B, C, D]
    assert x.on_busy(C, 2, 0.1) == [Rename(2, 4), Send(E, push(4, 0.25))]
    assert x.on_busy(B, 1, 0.1) == [Merge(1, 0.25), Release(1)], "with nobody left its share comes back"
    assert list(x.table) == [3, 4]


def test_what_others_push_keeps_nobody_from_pushing_and_two_that_cross_are_both_taken():
    assert taking().exchanges.begin_mix(0.0) == [Snapshot(1, 1)]
    crossing = offered(partners=(B,))
    assert crossing.exchanges.on_offer(B, push(9), 0.0) == [Snapshot(9)]
    assert crossing.table[1].state is State.OFFERED
    assert crossing.exchanges.begin_mix(0.0) == [], "one mix of one's own at a time"


def test_of_a_vector_that_is_cut_off_less_is_merged_and_it_is_counted():
    side = taking(Config(mixing="row-stochastic", filter="clip", filter_limit=1.0), mass=1.0)
    assert side.exchanges.on_streamed(7, 16.0, 1.0, 0.1) == [Send(B, Commit(7)), Merge(7, 0.25), Release(7)]
    assert side.exchanges.refusals.counts == {(B, "clipped"): 1}


# -- something breaks --------------------------------------------------------------------------------------------------
def test_a_vector_that_is_refused_is_taken_back():
    other = taking()
    assert other.exchanges.on_streamed(7, float("nan"), 1.0, 0.1) == [Send(B, Abort(7, "not-finite")), Release(7)]
    side = pushing()
    assert side.exchanges.on_abort(B, 1, "not-finite", 0.2) == [Merge(1, 0.5), Release(1)]
    assert (side.exchanges.failures, side.benched, side.exchanges.has_given_up) == (1, [B], True)


def doubting(code="broken"):
    """Return a side whose stream to B broke: all of it may have arrived."""
    side = pushing()
    assert side.exchanges.on_failed(1, code, 1.0) == [Send(B, Outcome(1))]
    assert side.table[1].state is State.IN_DOUBT
    return side


@pytest.mark.parametrize("code", ["broken", "stall", "checksum"])
def test_a_stream_that_breaks_leaves_a_doubt_that_keeps_nobody_from_pushing_to_others(code):
    assert doubting(code).exchanges.begin_mix(2.0) == [Snapshot(2, 1)]


def test_the_partner_says_what_it_did_and_having_said_no_never_merges():
    merged, waiting = taking(), taking()
    merged.exchanges.on_streamed(7, 1.0, 1.0, 0.1)
    assert merged.exchanges.on_outcome(B, 7, 1.0) == [Send(B, Settled(7, True))]
    assert merged.exchanges.on_outcome(C, 7, 1.0) == [Send(C, Settled(7, False))]
    assert waiting.exchanges.on_outcome(B, 7, 1.0) == [Release(7), Send(B, Settled(7, False))]
    assert waiting.exchanges.on_streamed(7, 1.0, 1.0, 2.0) == []
    assert waiting.exchanges.on_outcome(B, 7, 3.0) == [Send(B, Settled(7, False))]


def test_where_no_mass_is_conserved_nothing_is_asked_after_and_nothing_comes_back():
    assert pushing(ROWS).exchanges.on_failed(1, "stall", 1.0) == [Send(B, Abort(1, "stall")), Release(1)]
    assert offered(ROWS, partners=(B,)).exchanges.on_busy(B, 1, 0.1) == [Release(1)]


def test_weights_that_are_replaced_take_their_mass_with_them():
    assert pushing().exchanges.abandon() == [Send(B, Abort(1, "replaced")), Release(1)]
    prepared, asked = Side(config=SUM).exchanges, Side(config=SUM).exchanges
    prepared.begin_mix(0.0)
    assert prepared.abandon() == [Release(1)], "before the snapshot there is no mass"
    asked.on_offer(B, push(), 0.0)
    assert asked.abandon() == [Send(B, Busy(7)), Release(7)]


def test_what_comes_early_or_twice_or_from_another_changes_nothing():
    x = pushing().exchanges
    assert x.on_commit(C, 1, 0.1) == x.on_abort(C, 1, "norm", 0.1) == []
    assert x.on_commit(B, 1, 0.2) == [Release(1)]
    assert x.on_commit(B, 1, 0.3) == x.on_failed(1, "broken", 0.3) == []
    other = taking().exchanges
    other.on_streamed(7, 1.0, 1.0, 0.1)
    assert other.on_streamed(7, 1.0, 1.0, 0.2) == other.on_abort(B, 7, "late", 0.2) == []
    early = offered()
    assert early.exchanges.on_commit(B, 1, 0.1) == [], "nothing was sent that could have arrived"
    assert early.table[1].state is State.OFFERED

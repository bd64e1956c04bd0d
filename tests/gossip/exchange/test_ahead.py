"""The next exchange is agreed on while this one streams: both sides keep it, or it costs little."""

import dataclasses

import pytest

from gossip.effects import Mix, Release, Rename, Send, Snapshot, Transfer
from gossip.exchange.reservation import ReservedPair
from gossip.wire.messages import Abort, Accept, Busy, Joined, Offer, Refuse
from tests.gossip.exchange.sides import OUTER, A, B, C, D, Side, accept, offer, streaming
from tests.gossip.exchange.test_exchange_sieges import Siege, Silent


def ahead(session=7, **changes):
    return offer(session, mixing="ahead", **changes)


def busy_side(me=A, partners=(B, C, D)):
    """Return a side that streams with B, which it had asked."""
    return streaming(Side(me, partners, OUTER))


def promised():
    """Return a busy side that has reserved its next exchange with C, which asked."""
    side = busy_side()
    assert side.exchanges.on_offer(C, ahead(), 1.0) == [Send(C, Joined(7, 0.0, "fp32"))]
    return side


def finished(side, now=2.0):
    """Finish the exchange with B, and return the effects that follow."""
    assert [type(effect) for effect in side.complete(B, 1, now)[1:]] == [Mix, Release]
    return side.exchanges.begin_reserved(now)


def waiting(answer_s, stream_s):
    """Return a side that is ready for its promised exchange, and waits for C."""
    side = promised()
    for partner in (B, C, D, A):
        side.exchanges.answer_waits.add(partner, answer_s)
        side.exchanges.stream_waits.add(partner, stream_s)
    finished(side)
    side.exchanges.on_snapshotted(7, 2.0)
    return side


def test_what_is_promised_begins_when_the_exchange_before_it_is_over_and_takes_no_slot_until_then():
    side = promised()
    assert side.exchanges.used_slots == 1
    assert side.exchanges.begin_reserved(1.5) == [], "the exchange with B goes on"
    assert finished(side) == [Snapshot(7)]
    assert side.exchanges.used_slots == 1


def test_who_is_ready_last_streams_at_once_and_who_was_first_when_it_hears_of_that():
    first, last = promised(), busy_side(C, (B, A))
    last.sessions = iter([7])
    assert last.exchanges.reserve_next(1.0) == [Send(A, ahead())]
    last.exchanges.on_joined(A, Joined(7, 0.0, "fp32"), 1.1)
    finished(first)
    assert first.exchanges.on_snapshotted(7, 2.1) == [Send(C, accept(7))]
    assert last.exchanges.on_accept(A, accept(7), 2.2) == [], "its own exchange goes on"
    assert finished(last, 2.3) == [Snapshot(7)]
    effects = last.exchanges.on_snapshotted(7, 2.4)
    assert [type(effect) for effect in effects] == [Send, Transfer]
    assert [type(effect) for effect in first.exchanges.on_accept(C, effects[0].message, 2.5)] == [Transfer]


@pytest.mark.parametrize("versions", [(0.0, 0.0), (3.5, 9.25), (2.0**40, 1.0)])
def test_both_compute_one_weight_from_both_versions_and_the_smaller_of_what_each_allows(versions):
    weights = []
    for mine, theirs, allowed in ((*versions, 0.25), (*reversed(versions), 0.5)):
        side = promised()
        side.exchanges.config = dataclasses.replace(OUTER, staleness_exponent=0.5)
        finished(side)
        side.local.version, side.max_weight = mine, lambda partner, others, most=0.75 - allowed: most
        side.exchanges.on_snapshotted(7, 2.0)
        side.exchanges.on_accept(C, Accept(7, theirs, allowed, "fp32"), 2.1)
        weights.append(side.table[7].weight)
    assert weights[0] == weights[1] <= 0.25


@pytest.mark.parametrize(("changes", "code"), [({"run_id": b"h" * 16}, "run_id"), ({"codec": "none"}, "codec")])
def test_what_cannot_be_mixed_is_not_promised(changes, code):
    assert busy_side().exchanges.on_offer(C, ahead(**changes), 1.0) == [Send(C, Refuse(7, code))]


def test_nothing_is_promised_twice_nor_by_who_is_free_nor_to_the_partner_of_the_moment():
    assert Side(A, (B, C, D), OUTER).exchanges.on_offer(C, ahead(), 1.0) == [Send(C, Busy(7))]
    assert promised().exchanges.on_offer(D, ahead(8), 1.0) == [Send(D, Busy(8))]
    assert busy_side().exchanges.on_offer(B, ahead(8), 1.0) == [Send(B, Busy(8))]
    two = busy_side(partners=(B,))
    assert two.exchanges.on_offer(B, ahead(8), 1.0) == [Send(B, Joined(8, 0.0, "fp32"))], "there is nobody else"


def test_who_mixes_plainly_agrees_on_nothing_ahead():
    side = streaming(Side(A, (B, C)))
    assert side.exchanges.reserve_next(1.0) == []
    assert side.exchanges.on_offer(C, ahead(), 1.0) == [Send(C, Refuse(7, "mixing"))]


def test_who_does_not_come_is_backgrounded_and_promised_nothing_until_it_has_mixed():
    side = waiting(answer_s=0.001, stream_s=0.4)
    side.exchanges.tick(2.0 + 1.5 * 0.4 + 0.01)
    assert side.table[7].is_backgrounded
    assert side.exchanges.used_slots == 0, "others go first"
    side.exchanges.tick(8.0)
    assert 7 not in side.table
    side.stream_mix(8.0)
    assert side.exchanges.on_offer(C, ahead(9), 8.1) == [Send(C, Busy(9))]
    side.exchanges.unreliable_partners.pop(C)
    assert isinstance(side.exchanges.on_offer(C, ahead(9), 8.1)[0].message, Joined)


def test_while_we_wait_for_it_another_offer_goes_first():
    side = waiting(answer_s=0.1, stream_s=2.0)
    side.local.boundary_at = 2.0
    assert side.exchanges.on_offer(D, offer(11), 2.1) == [Send(D, Busy(11))], "it may come at any moment"
    assert side.exchanges.on_offer(D, offer(11), 2.3) == [Snapshot(11)]


def asked_for():
    """Return a busy side that asks C to reserve their next exchange, and the session of that."""
    side = busy_side(partners=(B, C))
    return side, side.exchanges.reserve_next(1.0)[-1].message.session


def test_with_the_snapshot_of_a_promise_that_is_taken_back_others_are_asked():
    side, session = asked_for()
    side.exchanges.on_joined(C, Joined(session, 0.0, "fp32"), 1.1)
    finished(side)
    side.exchanges.on_snapshotted(session, 2.0)
    effects = side.exchanges.on_abort(C, session, "late", 2.1)
    assert [type(effect) for effect in effects] == [Rename, Send]
    assert effects[1].to == B
    assert effects[1].message.mixing == "pair"


def test_a_promise_goes_with_the_weights_and_is_taken_back_in_words():
    side = promised()
    assert Send(C, Abort(7, "replaced")) in side.exchanges.abandon()
    assert side.table == {}


def test_a_consent_that_comes_too_late_is_told_so():
    side, session = asked_for()
    assert finished(side) == [Send(C, Abort(session, "late")), Release(session)]
    assert side.exchanges.on_joined(C, Joined(session, 0.0, "fp32"), 2.1) == [Send(C, Abort(session, "late"))]


class Promising(Silent):
    """A host that answers no offer, accepts every reservation and keeps none."""

    def received(self, link, sender, message):
        if isinstance(message, Offer) and message.mixing == "ahead":
            self.send(sender.id, Joined(message.session, message.version, message.codec))
        elif not isinstance(message, Accept):
            super().received(link, sender, message)


def test_one_that_promises_to_everybody_costs_no_more_than_one_that_answers_nobody():
    shares = []
    for kind in (Silent, Promising):
        siege = Siege(dataclasses.replace(OUTER, mix_every_steps=1), step_s=0.01)
        siege.run(5.0)
        assert any(isinstance(one, ReservedPair) for node in siege.honest for one in node.peer.exchanges.table.values())
        siege.attack(kind)
        shares.append(siege.mixes(15.0))
    assert shares[1] > 0.95 * shares[0]

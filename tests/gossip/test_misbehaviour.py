"""The misbehaviour log: what members are reported for, and which innocent behaviour they are not."""

import math

import pytest

from gossip.config import Config
from gossip.effects import Notice, Send
from gossip.ids import PeerId
from gossip.misbehaviour import AWAKE_S, KINDS, MAX_LEVELS, MAX_REPORTED, MisbehaviourLog
from gossip.wire.messages import Busy, Gossip, Hint
from tests.gossip.exchange.sides import A, B, Side, offer
from tests.gossip.membership.members import acquainted, peer_id, record_of


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_passes_the_threshold_is_named_once(kind):
    misbehaviour, threshold = MisbehaviourLog(), int(KINDS[kind][0])
    for number in range(threshold - 1):
        misbehaviour.note(A, kind, number * 1e-6)
    assert misbehaviour.take() == []
    for number in range(2 * threshold):
        misbehaviour.note(A, kind, 1e-3 + number * 1e-6)
    (notice,) = misbehaviour.take()
    if kind == "wasted":
        assert notice.kind == "overloaded"
        assert notice.sentence.startswith(f"Exchanges with member {A.hex()[:8]} come to nothing, again and again: ")
    else:
        assert notice == Notice("suspicious", f"Member {A.hex()[:8]} misbehaves: {KINDS[kind][2]}.")
    ((who, what, times),) = misbehaviour.rows()
    assert (who, what) == (A.hex(), kind)
    assert times == pytest.approx(3 * threshold - 1, abs=1)


@pytest.mark.parametrize(
    ("kind", "moments", "named"),
    [
        ("claims", [60.0 * minute for minute in range(1000)], False),
        ("refused", [0.0, 13.0, 36.0], True),  # A partner in back-off waits for longer each time.
        ("wasted", [0.0, 13.0, 36.0, 79.0, 162.0], True),  # Pauses of 10 s, 20 s, 40 s ..., and 3 s more each time.
        ("pestering", [number / 16 for number in range(600 * 16)], False),  # One with nobody else to ask.
        ("pestering", [number / 50 for number in range(400)], True),
    ],
    ids=["once a minute", "vectors that never pass", "wastes whenever it may", "offers often", "offers all the time"],
)
def test_a_member_is_named_for_what_it_repeats_at_a_pace_that_no_honest_one_has(kind, moments, named):
    misbehaviour = MisbehaviourLog()
    for now in moments:
        misbehaviour.note(A, kind, now)
    assert len(misbehaviour.take()) == named


def test_an_offer_of_one_that_is_to_wait_counts_as_pestering():
    side = Side()
    side.declined.append(B)
    for number in range(300):
        assert side.exchanges.on_offer(B, offer(number + 1), 1.0) == [Send(B, Busy(number + 1))]
    (notice,) = side.exchanges.misbehaviour.take()
    assert "offers all the time" in notice.sentence


def test_one_kind_of_one_member_says_nothing_of_others():
    misbehaviour = MisbehaviourLog()
    for number in range(1, 3):
        misbehaviour.note(A, "refused", number)
        misbehaviour.note(A, "fault", number)
        misbehaviour.note(B, "refused", number)
    assert misbehaviour.take() == []


@pytest.mark.parametrize(
    ("difference_sq", "why"), [(1e4, "clip"), (1e12, "norm"), (math.inf, "not-finite"), (1e4, "balance")]
)
def test_a_vector_that_is_far_away_is_no_misbehaviour_of_its_sender_nor_of_who_refuses_it(difference_sq, why):
    """An honest node sends such a vector if its data differ from the others' or if it has diverged."""
    config = Config(filter="balance") if why == "balance" else Config(filter="clip", filter_limit=1e-3)
    near, far = Side(config=config), Side(config=config)
    for now in range(40):
        near.complete(B, near.stream_mix(now), now, difference_sq)
        far.exchanges.on_abort(B, far.stream_mix(now), why, now)
    for side in (near, far):
        assert side.exchanges.misbehaviour.take() == []
        assert not side.exchanges.misbehaviour.levels


def test_a_vector_with_values_that_are_no_numbers_is_misbehaviour_since_nodes_check_their_own():
    side = Side()
    for now in range(3):
        side.exchanges.on_streamed(side.stream_mix(now), math.nan, 1.0, now)
    (notice,) = side.exchanges.misbehaviour.take()
    assert notice.sentence == f"Member {B.hex()[:8]} misbehaves: {KINDS['refused'][2]}."


@pytest.mark.parametrize(
    ("code", "named"), [("norm", False), ("balance", False), ("replaced", True), ("stalled", True)]
)
def test_a_partner_that_gives_up_again_and_again_is_named_unless_our_vector_is_why(code, named):
    """An innocent abort code is forgiven once in a row, as it is for back-off."""
    side = Side()
    for now in range(6):
        side.exchanges.on_abort(B, side.stream_mix(now), code, now)
    assert bool(side.exchanges.misbehaviour.take()) is named


def test_a_stranger_is_named_by_its_address():
    misbehaviour = MisbehaviourLog()
    for number in range(17):
        misbehaviour.note("192.0.2.7", "strangers", 1e-3 * number)
    assert "A peer at 192.0.2.7 misbehaves" in misbehaviour.take()[0].sentence


def test_a_flood_of_identities_costs_a_bounded_table():
    misbehaviour = MisbehaviourLog()
    for number in range(3 * MAX_LEVELS):
        who = PeerId(number.to_bytes(16, "big"))
        for _ in range(3):
            misbehaviour.note(who, "fault", 1.0)
    assert len(misbehaviour.levels) == MAX_LEVELS
    assert len(misbehaviour.counts) == len(misbehaviour.take()) == MAX_REPORTED


def test_a_partner_whose_exchanges_come_to_nothing_is_named_and_one_whose_are_mostly_finished_is_not():
    side = Side()

    def exchange(now, fails):
        session = side.stream_mix(now)
        side.exchanges.on_failed(session, "deadline", now) if fails else side.complete(B, session, now)

    for now in range(40):
        exchange(now, fails=bool(now % 2))
    assert side.exchanges.misbehaviour.take() == []
    for now in range(40, 46):
        exchange(now, fails=True)
    (notice,) = side.exchanges.misbehaviour.take()
    assert notice.sentence.startswith(f"Exchanges with member {B.hex()[:8]} come to nothing")


def test_after_a_stop_of_this_process_nobody_is_named_for_what_it_missed():
    me = acquainted(3)
    me.tick(1.0)
    me.tick(61.0)  # A minute late.
    for number in range(20):
        me.misbehaviour.note(B, "wasted", 61.0 + AWAKE_S * number / 20)
    assert me.misbehaviour.take() == []
    for number in range(4):
        me.misbehaviour.note(B, "wasted", 61.0 + AWAKE_S + number)
    assert len(me.misbehaviour.take()) == 1


def test_whoever_goes_on_accusing_us_although_we_answer_is_named():
    liar = peer_id(1)
    (notice,) = notices_of_accusations([(liar, second) for second in range(20)])
    assert notice.sentence.startswith(f"Member {liar.hex()[:8]} misbehaves: accusations")


def test_everybody_who_accuses_us_once_while_we_slept_is_innocent():
    assert notices_of_accusations([(peer_id(number), number) for number in range(2, 100)]) == []


def notices_of_accusations(accusations):
    """Return the notices of a node that is held dead by these members at these seconds."""
    me, told = acquainted(100), []
    for accuser, second in accusations:
        hint = Hint(me.me.id, me.me.incarnation, False, accuser)
        told += me.receive(peer_id(1), Gossip((hint,)), float(second))
    return [effect for effect in told if isinstance(effect, Notice)]


def test_whoever_signs_numbers_that_cannot_be_is_named_and_whoever_passes_them_on_is_not():
    me = acquainted(3)
    told = []
    for number in range(5):
        lie = record_of(2, incarnation=2 + number, samples=2**53 - 1)
        told += me.receive(peer_id(1), Gossip((lie,)), 1.0 + number)
        true = record_of(3, incarnation=2 + number, samples=10**12)
        told += me.receive(peer_id(1), Gossip((true,)), 1.0 + number)
    (notice,) = [effect for effect in told if isinstance(effect, Notice)]
    assert notice.sentence.startswith(f"Member {peer_id(2).hex()[:8]} misbehaves: numbers that cannot be")


def test_whoever_mixes_by_a_version_that_cannot_be_is_named():
    side = Side()
    for now in range(3):
        side.complete(B, side.stream_mix(now, version=2.0**52), now)
    (notice,) = side.exchanges.misbehaviour.take()
    assert notice.sentence.startswith(f"Member {B.hex()[:8]} misbehaves: numbers that cannot be")

"""Offers that are not accepted: Refuse answers an impossible one and says why, Busy one that comes at a bad time."""

import math

import pytest

from gossip.arithmetic.subsets import Subset
from gossip.config import Config
from gossip.effects import Release, Send, Snapshot
from gossip.wire.messages import Busy, Refuse
from tests.gossip.exchange.sides import OUTER, B, C, D, Side, offer, streaming

PUSH = {"mixing": "push", "mass": 1.0}


# -- Refuse ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("mixing", "changes", "code"),
    [
        ("pair", PUSH, "mixing"),
        ("pair", {"mixing": "group"}, "mixing"),
        ("pair", {"mixing": ""}, "mixing"),
        ("push-sum", {}, "mixing"),
        ("row-stochastic", {}, "mixing"),
        *[("push-sum", {**PUSH, "mass": mass}, "mass") for mass in (0.0, -1.0, 2.0**33, math.inf, math.nan)],
        ("row-stochastic", {**PUSH, "mass": -1.0}, "mass"),
        ("push-sum", {**PUSH, "part": "mask 0.5"}, "part"),  # One mass belongs to the whole vector.
        ("push-sum", {**PUSH, "part": "fragment 0/4"}, "part"),
        *[("pair", {"part": part}, "part") for part in ("", "fragments 4", "fragment 4/4", "mask 1.5", "top 0.5")],
        ("pair", {"codec": "int3"}, "codec"),
        *[("pair", {"weight": weight}, "weight") for weight in (0.0, -0.5, 0.51, 1e9)],
        ("pair", {"version": -1.0}, "version"),
        ("pair", {"fingerprint": "x"}, "layout"),
        ("pair", {"run_id": b"x" * 16}, "run_id"),
    ],
)
def test_an_impossible_offer_is_refused(mixing, changes, code):
    side = Side(config=Config(mixing=mixing))
    assert side.exchanges.on_offer(B, offer(**changes), 0.0) == [Send(B, Refuse(7, code))]
    assert not side.table


@pytest.mark.parametrize(
    ("mixing", "changes"),
    [("pair", {"part": "mask 0.5"}), ("pair", {"part": "fragment 3/4"}), ("push-sum", PUSH), ("row-stochastic", PUSH)],
)
def test_a_possible_offer_is_not_refused(mixing, changes):
    side = Side(config=Config(mixing=mixing))
    effects = side.exchanges.on_offer(B, offer(**changes), 0.0)
    assert effects == [Snapshot(7, part=Subset.parse(changes.get("part", "all")))]


# -- Busy ------------------------------------------------------------------------------------------------------------
def test_a_peer_whose_training_loop_is_paused_answers_busy():
    side = Side(boundary_at=0.0)
    patience = side.config.boundary_patience_s
    assert side.exchanges.on_offer(B, offer(), patience + 0.1) == [Send(B, Busy(7))]
    assert side.exchanges.on_offer(B, offer(), patience) == [Snapshot(7)]
    assert side.exchanges.tick(2 * patience) == [Send(B, Busy(7)), Release(7)]  # The loop stopped after the offer.
    assert side.table == {}


def test_a_third_incoming_exchange_is_answered_busy():
    side = Side()
    assert side.exchanges.on_offer(B, offer(7), 0.0) == [Snapshot(7)]
    assert side.exchanges.on_offer(C, offer(8), 0.0) == [Snapshot(8)]
    assert side.exchanges.on_offer(D, offer(9), 0.0) == [Send(D, Busy(9))]
    assert side.exchanges.on_offer(D, offer(8), 0.0) == [Send(D, Busy(8))]
    assert side.table[8].partner == C


def test_the_last_partner_cannot_take_the_last_slot():
    side = Side()
    x = side.exchanges
    side.answer(B, 7)
    side.complete(B, 7)
    assert x.last_partner == B
    assert x.on_offer(B, offer(8), 0.2) == [Snapshot(8)]
    assert x.on_offer(B, offer(9), 0.2) == [Send(B, Busy(9))]
    assert x.on_offer(C, offer(10), 0.2) == [Snapshot(10)]


def test_a_member_in_back_off_is_answered_busy_at_no_cost():
    side = Side(partners=(B, C))
    side.declined = [B]
    assert side.exchanges.on_offer(B, offer(), 0.0) == [Send(B, Busy(7))]
    assert side.table == {}


def test_our_own_offer_takes_no_incoming_slot():
    side = Side(config=Config(incoming_exchanges=1))
    side.offer_mix()
    assert side.exchanges.on_offer(C, offer(8), 0.0) == [Snapshot(8)]
    assert side.exchanges.on_offer(D, offer(9), 0.0) == [Send(D, Busy(9))]


def test_with_outer_momentum_only_one_exchange_runs_at_a_time():
    side = Side(config=OUTER)
    side.exchanges.on_offer(B, offer(7), 0.0)
    assert side.exchanges.on_offer(C, offer(8), 0.0) == [Send(C, Busy(8))]
    assert side.exchanges.begin_mix(0.0) == []
    other = streaming(Side(config=OUTER))
    assert other.exchanges.on_offer(C, offer(8), 0.0) == [Send(C, Busy(8))]

"""An offer that makes no sense is answered Refuse, with a code that says what is wrong, and costs nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gossip.arithmetic.subsets import Subset
from gossip.config import Config
from gossip.effects import Send, Snapshot
from gossip.wire.messages import Refuse
from tests.gossip.exchange.sides import B, Side, offer

PUSH = {"mixing": "push", "mass": 1.0}


@pytest.mark.parametrize(
    ("mixing", "changes", "code"),
    [
        ("pair", {"mixing": "push", "mass": 1.0}, "mixing"),
        ("pair", {"mixing": "group"}, "mixing"),
        ("pair", {"mixing": ""}, "mixing"),
        ("push-sum", {}, "mixing"),
        ("push-sum", {**PUSH, "mass": 0.0}, "mass"),
        ("push-sum", {**PUSH, "mass": -1.0}, "mass"),
        ("push-sum", {**PUSH, "mass": 2.0**33}, "mass"),
        ("row-stochastic", {**PUSH, "mass": -1.0}, "mass"),
        ("push-sum", {**PUSH, "part": "mask 0.5"}, "part"),  # one mass belongs to the whole vector
        ("push-sum", {**PUSH, "part": "fragment 0/4"}, "part"),
        ("pair", {"part": ""}, "part"),
        ("pair", {"part": "fragments 4"}, "part"),
        ("pair", {"part": "fragment 4/4"}, "part"),
        ("pair", {"part": "mask 1.5"}, "part"),
        ("pair", {"part": "top 0.5"}, "part"),
        ("pair", {"codec": "int3"}, "codec"),
        ("pair", {"weight": 0.6}, "weight"),
        ("pair", {"version": -1.0}, "version"),
    ],
)
def test_an_offer_that_makes_no_sense_is_refused(mixing, changes, code):
    side = Side(config=Config(mixing=mixing))
    assert side.exchanges.on_offer(B, replace(offer(), **changes), 0.0) == [Send(B, Refuse(7, code))]
    assert not side.table


@pytest.mark.parametrize(
    ("mixing", "changes"),
    [("pair", {"part": "mask 0.5"}), ("pair", {"part": "fragment 3/4"}), ("push-sum", PUSH), ("row-stochastic", PUSH)],
)
def test_one_that_makes_sense_is_not(mixing, changes):
    side = Side(config=Config(mixing=mixing))
    effects = side.exchanges.on_offer(B, replace(offer(), **changes), 0.0)
    assert effects == [Snapshot(7, part=Subset.parse(changes.get("part", "all")))]

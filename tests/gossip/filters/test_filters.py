"""What every filter refuses, the filter BALANCE, and the counts of refusals."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.arithmetic.group_mean import norm_refusal
from gossip.config import Config
from gossip.exchange.session_table import MAX_REFUSALS, Refusals
from gossip.filters.balance import Balance, balance_accepts
from gossip.filters.registry import filter_of
from gossip.ids import PeerId
from tests.gossip.exchange.sides import A, B, C, Side


@pytest.mark.parametrize(
    ("difference_sq", "own_sq", "bound", "code"),
    [
        (99.0, 0.0, 1.0, None),  # A model that starts at zero can take weights.
        (101.0, 0.0, 1.0, "norm"),
        (40.0**2, 100.0, 2.0, None),  # A larger model may move further: (10 + 10) * 2 = 40.
        (40.1**2, 100.0, 2.0, "norm"),
        (math.nan, 1.0, math.inf, "not-finite"),
        (math.inf, 1.0, math.inf, "not-finite"),
        (1.0, math.nan, math.inf, "not-finite"),
        (1.0, math.inf, math.inf, "not-finite"),
    ],
)
def test_a_difference_is_refused_if_it_is_not_finite_or_beyond_a_bound_that_grows_with_the_weights(
    difference_sq, own_sq, bound, code
):
    assert norm_refusal(difference_sq, own_sq, 100, bound) == code


@pytest.mark.parametrize("name", ["none", "clip", "balance"])
@pytest.mark.parametrize(("difference_sq", "code"), [(math.inf, "not-finite"), (1e9, "norm"), (0.01, None)])
def test_the_norm_is_judged_whatever_the_filter(name, difference_sq, code):
    assert filter_of(Config(filter=name)).refusal(A, difference_sq, 1.0, 10, 0.0) == code


@given(st.floats(0, 1e3), st.floats(1e-3, 1e3), st.floats(0.01, 2), st.floats(0.1, 5), st.floats(0, 1))
def test_balance_is_its_equation(theirs, own, gamma, kappa, progress):
    """|theirs - mine| <= gamma exp(-kappa t/T) |mine|"""
    bound = gamma * math.exp(-kappa * progress) * own
    if abs(theirs - bound) > 1e-9 * bound:
        assert balance_accepts(theirs**2, own**2, gamma, kappa, progress) == (theirs <= bound)


def test_balance_narrows_with_the_rounds_up_to_the_last_and_no_further():
    rule = Balance(Config(filter="balance", filter_limit=100.0))
    assert [rule.refusal(A, 0.29**2, 1.0, 10, version) for version in (0.0, 100.0)] == [None, "balance"]
    assert [rule.refusal(A, 0.12**2, 1.0, 10, version) for version in (0.0, 100.0, 1e9)] == [None, "balance", "balance"]
    assert [rule.refusal(A, 0.11**2, 1.0, 10, version) for version in (100.0, 1e9)] == [None, None]


@pytest.mark.parametrize(
    ("config", "sums", "code"),
    [({}, (math.nan, 1.0), "not-finite"), ({}, (1e9, 1.0), "norm"), ({"filter": "balance"}, (1.0, 1.0), "balance"),
     ({"filter": "clip", "filter_limit": 0.5}, (1.0, 1.0), "clipped")],
)  # fmt: skip
def test_a_refusal_is_counted_with_who_and_why(config, sums, code):
    side = Side(config=Config(**config))
    for partner, session in ((B, 7), (B, 8), (C, 9)):
        side.answer(partner, session)
        side.complete(partner, session, 0.0, *sums)
    assert side.exchanges.refusals.counts == {(B, code): 2, (C, code): 1}
    assert side.exchanges.refusals.total == 3


def test_the_counts_are_bounded_and_what_happened_last_is_kept():
    counts = Refusals()
    first = PeerId(bytes(16))
    counts.add(first, "norm")
    for number in range(MAX_REFUSALS + 20):
        counts.add(PeerId(number.to_bytes(16, "big")), "balance")
        counts.add(first, "norm")
    assert len(counts.counts) == MAX_REFUSALS
    assert counts.counts[first, "norm"] == MAX_REFUSALS + 21

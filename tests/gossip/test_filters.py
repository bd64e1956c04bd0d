from __future__ import annotations

import math

import pytest

from gossip.filters import norm_accepts


def test_a_model_that_starts_at_zero_can_take_weights():
    assert norm_accepts(difference_sq=99.0, own_sq=0.0, size=100, bound=1.0) is None
    assert norm_accepts(difference_sq=101.0, own_sq=0.0, size=100, bound=1.0) == "norm"


def test_a_larger_model_may_move_further():
    # (10 + 10) * 2 = 40
    assert norm_accepts(difference_sq=40.0**2, own_sq=100.0, size=100, bound=2.0) is None
    assert norm_accepts(difference_sq=40.1**2, own_sq=100.0, size=100, bound=2.0) == "norm"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_refused_whatever_the_bound(bad):
    assert norm_accepts(bad, 1.0, 10, math.inf) == "not-finite"
    assert norm_accepts(1.0, bad, 10, math.inf) == "not-finite"

"""The interval of a node that chooses it: by bytes, by the time of an exchange, and by its cost."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.codecs import CODECS, COMPILED, NUMPY, ExchangeCost, Machine, get_codec, mix_interval
from gossip.codecs.choice import BYTES_PER_ELEMENT_STEP, MAX_INTERVAL_STEPS, SLACK

SMALL, LARGE = 4_810, 25_000_000  # elements: digits, and a ResNet-50
FAST_S = 0.001  # seconds of an exchange


def taken(codec="int8", elements=SMALL, seconds=FAST_S):
    return ExchangeCost(elements, codec, get_codec(codec).encoded_bytes(elements), seconds)


@pytest.mark.parametrize(
    ("codec", "seconds", "steps"),
    [
        # On a fast link a small model sends what fp32 sends every 8 steps.
        *[(codec, FAST_S, steps) for codec, steps in
          (("fp32", 8), ("bf16", 4), ("fp16", 4), ("int8", 2), ("moniqua4", 1), ("int4", 1))],
        ("int8", 0.5, 5),  # A node does not begin an exchange before the last one is over.
        ("int8", 5.0, 48),  # 50, less what rounding may exceed
        ("int8", 50.0, MAX_INTERVAL_STEPS),
        ("int8", math.inf, MAX_INTERVAL_STEPS),
    ],
)  # fmt: skip
def test_an_interval_is_as_long_as_the_bytes_and_the_time_of_an_exchange_need(codec, seconds, steps):
    assert mix_interval(0.1, taken(codec, seconds=seconds), COMPILED, 0.02) == steps


def test_what_mixing_costs_a_step_is_a_share_of_it():
    quick, slow = (mix_interval(step_s, taken(elements=LARGE), COMPILED, 0.02) for step_s in (0.3, 1.0))
    assert (quick, slow) == (16, 5)
    assert mix_interval(0.3, taken(elements=LARGE), COMPILED, 0.2) == 2
    assert mix_interval(0.3, taken(elements=LARGE), NUMPY, 0.02) > quick, "numpy codes more slowly"
    many = Machine(COMPILED.coding_s_per_gb, cores=16)
    assert mix_interval(0.3, taken(elements=LARGE), many, 0.02) < quick, "other cores carry what stops nobody"
    slower = Machine(COMPILED.coding_s_per_gb, copy_s_per_gb=2 * COMPILED.copy_s_per_gb)
    assert 30 <= mix_interval(0.3, taken(elements=LARGE), slower, 0.02) <= 32, "slow memory costs twice as much"


def test_a_small_model_that_plays_a_large_one_costs_what_that_costs():
    weight = LARGE / SMALL
    stands = Machine(COMPILED.coding_s_per_gb, COMPILED.cores, element_weight=weight)
    assert mix_interval(0.3, taken(), stands, 0.02) == mix_interval(0.3, taken(elements=LARGE), COMPILED, 0.02)


@given(
    st.floats(-1.0, 1e3), st.sampled_from(sorted(CODECS)), st.integers(1, 10**9), st.floats(0.0, math.inf),
    st.floats(1e-6, 1.0),
)  # fmt: skip
def test_whatever_is_measured_the_interval_is_bounded_and_the_bytes_are(step_s, codec, elements, seconds, share):
    exchange = taken(codec, elements, seconds)
    steps = mix_interval(step_s, exchange, COMPILED, share)
    assert 1 <= steps <= MAX_INTERVAL_STEPS
    sent = exchange.sent_bytes / steps / elements
    assert sent <= BYTES_PER_ELEMENT_STEP / (1 - SLACK) * 1.001 or steps == MAX_INTERVAL_STEPS


@given(st.floats(1e-4, 10.0), st.floats(0.0, 100.0), st.floats(1.0, 10.0))
def test_longer_steps_and_shorter_exchanges_never_lengthen_it(step_s, seconds, more):
    before = mix_interval(step_s, taken(elements=LARGE, seconds=seconds), COMPILED, 0.02)
    assert mix_interval(more * step_s, taken(elements=LARGE, seconds=seconds), COMPILED, 0.02) <= before
    assert mix_interval(step_s, taken(elements=LARGE, seconds=seconds / more), COMPILED, 0.02) <= before

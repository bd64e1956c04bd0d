"""Moniqua: within its bound the receiver gets the sender's quantised value, beyond it an Overflow and nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.codecs import Overflow, Spread, get_codec
from gossip.codecs.base import Codec
from gossip.codecs.grid import SCALES
from tests.gossip.codecs.spreads import observe


@pytest.fixture(scope="module")
def codec() -> Codec:
    return get_codec("moniqua4")


def bound(codec: Codec, peak, elements) -> Codec:
    spread = Spread(elements)
    observe(spread, np.full(elements, peak, np.float32))
    return codec.with_bounds(spread)


def sent(codec, values, near, seed=0, start=0):
    data = bytearray(codec.encoded_bytes(values.size))
    codec.encode(values, data, seed, start)
    out = np.empty_like(values)
    type(codec)().decode(data, out, near, seed, start)  # a receiver knows no bounds: the body says them
    return out


def weights(size):
    return np.random.default_rng(0).standard_normal(size).astype(np.float32)


@given(
    size=st.sampled_from([1, 255, 256, 1000]),
    weights=st.sampled_from([0.0, 1e-6, 1.0, 300.0]),
    peak=st.floats(1e-9, 10),
    seed=st.integers(0, 2**63 - 1),
    start=st.integers(0, 300).map(lambda n: 256 * n),
    data=st.data(),
)
def test_within_half_the_bound_less_a_step_the_senders_own_value_arrives(codec, size, weights, peak, seed, start, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    x = (weights * rng.standard_normal(size)).astype(np.float32)
    codec = bound(codec, peak, start + size)
    steps = SCALES[codec.step_bytes(x, start)].astype(np.float64).repeat(256)[:size]
    room = (2**codec.bits - 1 / 8) * steps / 2 - steps  # bound / 2 - step
    assert np.all(room >= codec.margin * peak * (1 - 1e-5))  # the margin was kept
    far = room * rng.choice([-1.0, 1.0], size) * (1 - 1e-3)
    with np.errstate(over="ignore"):
        near = (x + far).astype(np.float32)
    near = np.where(np.abs(near.astype(np.float64) - x) < room, near, x)
    own = np.empty_like(x)
    codec.quantised(x, own, seed, start)
    np.testing.assert_array_equal(sent(codec, x, near, seed, start), own)
    assert np.all(np.abs(own.astype(np.float64) - x) <= codec.error_bound(x, start))
    assert np.all(codec.error_bound(x, start) <= 0.5626 * steps)


def test_of_indices_below_ten_thousand_the_error_is_half_a_step(codec):
    x, own = weights(20_000), np.empty(20_000, np.float32)
    codec = bound(codec, 0.05, x.size)
    codec.quantised(x, own)
    step = SCALES[codec.step_bytes(x, 0)].repeat(256)[: x.size]
    assert np.abs((own - x) / step).max() < 0.501
    assert np.abs(np.mean((own - x) / step)) < 4 / np.sqrt(12 * x.size)  # the errors are uniform in a step


@pytest.mark.parametrize("where", [0, 300, 40_000, 69_999])
@pytest.mark.parametrize("value", [None, np.nan, np.inf, 1e38, -1e38], ids=str)
def test_one_value_beyond_the_bound_is_an_overflow_and_never_a_wrong_value(codec, where, value):
    x = weights(70_000)
    codec = bound(codec, 1e-3, x.size)
    near = x.copy()
    near[where] = x[where] + 2**codec.bits * SCALES[codec.step_bytes(x, 0)[0]] if value is None else value
    with pytest.raises(Overflow, match=codec.name):
        sent(codec, x, near)


@given(body=st.binary(min_size=11, max_size=11))
def test_any_bytes_at_all_are_an_overflow_and_no_other_error(codec, body):
    body = (body + bytes(64))[: codec.encoded_bytes(7)]
    with pytest.raises(Overflow):
        codec.decode(body, np.empty(7, np.float32), np.ones(7, np.float32))


def test_the_error_follows_the_disagreement_and_not_the_weights(codec):
    x, own = weights(1 << 14), np.empty(1 << 14, np.float32)
    deviations = []
    for peak in (1e-1, 1e-3):
        bound(codec, peak, x.size).quantised(x, own)
        deviations.append(np.std(own - x))
    assert 80 < deviations[0] / deviations[1] < 125  # a quarter of an octave either way


def test_without_bounds_nothing_is_encoded(codec):
    assert codec.needs_spread
    with pytest.raises(AssertionError, match=r"with_bounds\(spread\) first"):
        codec.encode(np.ones(8, np.float32), bytearray(codec.encoded_bytes(8)))
    with pytest.raises(AssertionError, match="no exchange has shown"):
        codec.with_bounds(Spread(8))


def test_bounds_are_those_of_the_sessions_beginning(codec):
    x = np.ones(300, np.float32)
    spread = Spread(300)
    observe(spread, np.full(300, 0.1, np.float32))
    codec = codec.with_bounds(spread)
    before, after = np.empty_like(x), np.empty_like(x)
    codec.quantised(x, before, 3)
    observe(spread, np.full(300, 9.0, np.float32))
    codec.quantised(x, after, 3)
    np.testing.assert_array_equal(before, after)


def test_a_codec_that_needs_no_bounds_is_its_own():
    assert get_codec("int8").with_bounds(Spread(0)) is get_codec("int8")


def test_a_spread_is_known_once_every_block_was_seen():
    spread = Spread(600)
    assert not spread.is_known
    first, last = np.full(600, np.nan, np.float32), np.full(600, np.nan, np.float32)
    first[:512], last[512:] = 0.5, 0.25
    observe(spread, first)
    assert not spread.is_known
    observe(spread, last)
    assert spread.is_known
    np.testing.assert_allclose(spread.reach(), [0.5 * Spread.DECAY, 0.5 * Spread.DECAY, 0.25], rtol=1e-6)


def test_a_peak_is_remembered_and_slowly_forgotten():
    spread = Spread(256)
    observe(spread, np.full(256, 1.0, np.float32))
    for _ in range(10):
        observe(spread, np.full(256, 0.1, np.float32))
    np.testing.assert_allclose(spread.peaks, Spread.DECAY**10, rtol=1e-5)
    for _ in range(200):
        observe(spread, np.full(256, 0.1, np.float32))
    np.testing.assert_allclose(spread.peaks, 0.1, rtol=1e-5)


def test_a_block_that_stood_still_expects_half_of_what_the_others_show():
    spread = Spread(2560)
    difference = np.full(2560, 0.4, np.float32)
    difference[256:512] = 0.0
    observe(spread, difference)
    np.testing.assert_allclose(spread.reach()[1], 0.2, rtol=1e-6)
    np.testing.assert_allclose(spread.reach()[0], 0.4, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_teaches_nothing(value):
    spread = Spread(512)
    observe(spread, np.full(512, 1.0, np.float32))
    difference = np.full(512, 0.5, np.float32)
    difference[3] = value
    observe(spread, difference)
    np.testing.assert_allclose(spread.peaks, [Spread.DECAY, Spread.DECAY])


def test_a_spread_never_learns_from_the_codecs_own_noise(codec):
    """Two nodes drift by the same small step for ever: the bounds follow the drift, however coarse the codec."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal(2048).astype(np.float32)
    spreads = Spread(2048), Spread(2048)
    first = (1e-3 * rng.standard_normal(2048)).astype(np.float32)
    for spread in spreads:
        observe(spread, first)
    for session in range(100):
        both = a, a + (1e-3 * rng.standard_normal(2048)).astype(np.float32)
        codecs = [codec.with_bounds(spread) for spread in spreads]
        sent = [np.empty_like(a), np.empty_like(a)]
        for one, values, out in zip(codecs, both, sent, strict=True):
            one.quantised(values, out, session)
        observe(spreads[0], sent[1] - sent[0], codecs[0].block_errors(a))
        observe(spreads[1], sent[0] - sent[1], codecs[1].block_errors(both[1]))
    assert np.abs(first).max() > 3e-3
    for spread in spreads:
        assert spread.peaks.max() < 2 * np.abs(first).max()

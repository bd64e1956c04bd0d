"""Moments arrive as they were sent, up to the rounding of their codecs, and no member can send harmful ones."""

import numpy as np
import pytest

from gossip.arithmetic.moments import MAX_RATIO, MomentForm
from gossip.codecs import ALIGN

ADAM = MomentForm(("exp_avg", "exp_avg_sq"), ("first", "second"), 1_000)
MUON = MomentForm(("momentum_buffer",), ("plain",), 1_000)


def vector_of(form: MomentForm, *moments: np.ndarray) -> np.ndarray:
    """Return the vector that holds these moments, float32 (elements,) each."""
    vector = np.zeros(form.vector_elements(moments[0].size), np.float32)
    for row, moment in zip(form.split(vector)[0], moments, strict=True):
        row[: moment.size] = moment
    return vector


def adam_moments(elements: int = 1_000) -> tuple[np.ndarray, np.ndarray]:
    """Return first and second moments of gradients whose sizes differ by ten orders of magnitude."""
    draws = np.random.default_rng(1)
    second = np.exp2(draws.uniform(-40, -4, elements)).astype(np.float32)
    first = (draws.uniform(-1.0, 1.0, elements) * np.sqrt(second)).astype(np.float32)
    return first, second


def received(form: MomentForm, vector: np.ndarray, elements: int) -> np.ndarray:
    """Return the vector as a partner decodes it."""
    codec, out = form.codec(elements), np.empty_like(vector)
    body = bytearray(codec.encoded_bytes(vector.size))
    codec.encode(vector, body, 7)
    codec.decode(body, out, None, 7)
    return out


def test_adams_moments_arrive_with_their_ratio_and_their_order_of_magnitude():
    first, second = adam_moments()
    vector = vector_of(ADAM, first, second)
    assert ADAM.encode(vector)
    theirs = received(ADAM, vector, 1_000)
    assert ADAM.decode(theirs)
    firsts, seconds = (row[:1_000] for row in ADAM.split(theirs)[0])
    assert np.abs(firsts / np.sqrt(seconds) - first / np.sqrt(second)).max() < 0.1
    assert np.abs(np.log2(seconds / second)).max() < 0.5


def test_a_second_moment_of_zero_stays_zero_and_has_no_ratio():
    first, second = adam_moments()
    first[::3] = second[::3] = 0.0
    second[1] = 0.0  # Its first moment is not 0, as after a gradient whose square is too small for a float.
    vector = vector_of(ADAM, first, second)
    assert ADAM.encode(vector)
    theirs = received(ADAM, vector, 1_000)
    assert ADAM.decode(theirs)
    _, seconds = ADAM.split(theirs)[0]
    assert not seconds[:1_000:3].any()
    assert np.isfinite(theirs).all()


def test_moments_of_no_gradient_at_all_arrive_as_zeros():
    vector = vector_of(ADAM, np.zeros(1_000, np.float32), np.zeros(1_000, np.float32))
    assert ADAM.encode(vector)
    assert ADAM.decode(vector)
    assert not ADAM.split(vector)[0].any()


@pytest.mark.parametrize("spoiled", [np.nan, np.inf, -1.0])
def test_moments_that_are_not_finite_or_below_zero_are_not_sent(spoiled):
    first, second = adam_moments()
    second[5] = spoiled
    with np.errstate(invalid="ignore"):
        assert not ADAM.encode(vector_of(ADAM, first, second))


@pytest.mark.parametrize(
    ("place", "value"), [(0, np.nan), (ALIGN * 4, np.nan), (-1, np.nan), (-1, 200.0), (-1, -200.0), (-1, 3e38)]
)
def test_values_that_are_not_finite_and_largest_second_moments_that_no_float_holds_are_refused(place, value):
    vector = vector_of(ADAM, *adam_moments())
    assert ADAM.encode(vector)
    vector[place] = value
    assert not ADAM.decode(vector)


def test_whatever_arrives_first_moments_are_bounded_by_second_ones():
    vector = vector_of(ADAM, np.full(1_000, 1e30, np.float32), np.full(1_000, 1e30, np.float32))
    ADAM.split(vector)[1][1] = 127.0
    assert ADAM.decode(vector)
    firsts, seconds = ADAM.split(vector)[0]
    assert seconds.min() >= 0.0
    assert np.isfinite(vector).all()
    assert np.abs(firsts).max() <= MAX_RATIO * np.sqrt(seconds.max()) * 1.001


def test_plain_moments_arrive_within_the_rounding_of_four_bits():
    momentum = np.random.default_rng(2).standard_normal(1_000).astype(np.float32)
    vector = vector_of(MUON, momentum)
    assert MUON.encode(vector)
    theirs = received(MUON, vector, 1_000)
    assert MUON.decode(theirs)
    assert np.abs(MUON.split(theirs)[0][0, :1_000] - momentum).max() < 0.09 * np.abs(momentum).max()


@pytest.mark.parametrize("chunk", [ALIGN, 3 * ALIGN, 10_000])
def test_chunks_decode_as_the_whole_vector_does(chunk):
    vector = vector_of(ADAM, *adam_moments())
    ADAM.encode(vector)
    codec, out = ADAM.codec(1_000), np.empty_like(vector)
    for start in range(0, vector.size, chunk):
        part = vector[start : start + chunk]
        body = bytearray(codec.encoded_bytes(part.size, start))
        codec.encode(part, body, 7, start)
        codec.decode(body, out[start : start + chunk], None, 7, start)
    np.testing.assert_array_equal(out, received(ADAM, vector, 1_000))
    quantised = np.empty_like(vector)
    codec.quantised(vector, quantised, 7)
    np.testing.assert_array_equal(out, quantised)


def test_two_moments_of_adam_take_a_fifth_of_the_bytes_that_they_have_in_memory():
    rows = 2 * ADAM.row_elements(ADAM.elements)
    assert ADAM.codec(1_000).encoded_bytes(ADAM.vector_elements(1_000)) < 0.2 * 4 * rows

"""int8 and int4: unbiased, with noise that both sides share, and the same in every way to compute them."""

import numpy as np
import pytest

from gossip.codecs import ALIGN, BLOCK_ELEMENTS, get_codec
from gossip.codecs.base import block_peaks
from gossip.codecs.dither import TABLE_ELEMENTS, noise_segments, noise_table
from gossip.codecs.grid import INVERSES, LARGEST_SCALE, NOT_FINITE, SCALES, SMALLEST_SCALE, scale_bytes

blockwise = pytest.mark.parametrize("codec", [get_codec("int8"), get_codec("int4")], ids=lambda c: c.name)


def quantised(codec, values, seed=0, start=0):
    out = np.empty_like(values)
    codec.quantised(values, out, seed, start)
    return out


def slow(codec, values, seed, start):
    """Quantise value by value, in double precision, from the definition alone."""
    table, out = noise_table(0.0), np.empty_like(values)
    for first in range(0, values.size, codec.block):
        block = values[first : first + codec.block].astype(np.float64)
        need = np.abs(block).max() / (2 ** (codec.bits - 1) - 0.5 - 2**-8)
        scale = min(float(s) for s in SCALES[1:NOT_FINITE] if s >= need * (1 - 1e-7)) if need else 0.0
        for i, value in enumerate(block):
            position = start + first + i
            inside = position % BLOCK_ELEMENTS
            (_, noise), *_ = noise_segments(table, seed, position - position % ALIGN, ALIGN)
            u = float(noise[inside % ALIGN])
            half = 2 ** (codec.bits - 1) - 0.5
            code = round(value / scale + half + u) if scale else 0
            assert 0 <= code < 2**codec.bits
            out[first + i] = (code - half - u) * scale
    return out


@blockwise
def test_a_slow_obvious_version_agrees(codec):
    values = np.random.default_rng(3).standard_normal(956).astype(np.float32)
    values[256:512] *= 1e-6
    values[512:768] = -0.0
    expected = slow(codec, values, 77, 512)
    np.testing.assert_allclose(quantised(codec, values, 77, 512), expected, rtol=1e-4, atol=1e-12)
    assert not expected[512:768].any()


@blockwise
def test_over_many_sessions_the_mean_is_the_value(codec):
    values = np.random.default_rng(1).standard_normal(512).astype(np.float32)
    rounds = 2000
    mean = np.mean([quantised(codec, values, seed) for seed in range(rounds)], axis=0, dtype=np.float64)
    error = (mean - values) / (2 * codec.error_bound(values))  # in steps, at most
    # An error uniform in a step deviates by 1/sqrt(12) of it: 0.0065 for a mean of 2,000. 512 means stay within 5 of
    # those, and their own mean within 4 of 0.0065 / sqrt(512).
    standard_error = 1 / np.sqrt(12 * rounds)
    assert np.abs(error).max() < 5 * standard_error
    assert abs(error.mean()) < 4 * standard_error / np.sqrt(512)
    assert np.abs(error).std() > 0.2 * standard_error  # it did vary


@blockwise
def test_where_both_hold_the_same_the_noise_is_nothing(codec):
    p = np.random.default_rng(2).standard_normal(4096).astype(np.float32)
    s = p.copy()
    s[::64] *= 0.99
    s[block_peaks(p, 64).repeat(64) == np.abs(p)] = p[block_peaks(p, 64).repeat(64) == np.abs(p)]  # the scales stay
    d = quantised(codec, p, 5) - quantised(codec, s, 5)
    assert np.all(d[p == s] == 0.0)
    assert np.any(quantised(codec, p, 5) != quantised(codec, p, 6))


@blockwise
def test_the_nearer_two_vectors_are_the_smaller_is_the_noise_of_their_difference(codec):
    rng = np.random.default_rng(4)
    p = rng.standard_normal(1 << 16).astype(np.float32)
    errors = []
    for distance in (1.0, 1e-2, 1e-4):
        s = p + (distance * rng.standard_normal(p.size)).astype(np.float32)
        errors.append(np.std(quantised(codec, p) - quantised(codec, s) - (p - s)))
    # One fortieth and one half of the weights' size at first; then as the root of the distance, and no slower.
    assert errors[0] < {"int8": 0.02, "int4": 0.25}[codec.name]
    assert errors[2] < errors[1] / 5
    assert errors[1] < errors[0]


def test_what_a_value_costs():
    assert get_codec("int8").encoded_bytes(131_072) == 131_072 + 512
    assert get_codec("int4").encoded_bytes(131_072) == 65_536 + 2048
    assert get_codec("int4").encoded_bytes(65) == 33 + 2
    assert get_codec("moniqua4").encoded_bytes(131_072) == 65_536 + 512 + 8


def test_every_scale_is_its_own_byte_and_what_lies_between_is_rounded_up():
    np.testing.assert_array_equal(scale_bytes(SCALES[1:NOT_FINITE]), np.arange(1, NOT_FINITE))
    above = np.nextafter(SCALES[1 : NOT_FINITE - 1], np.float32(np.inf))
    np.testing.assert_array_equal(scale_bytes(above), np.arange(2, NOT_FINITE))
    assert SCALES[1] == SMALLEST_SCALE
    ends = np.array([0, 1e-45, 1.001 * LARGEST_SCALE, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(scale_bytes(ends), [1, 1, NOT_FINITE, NOT_FINITE, NOT_FINITE])
    np.testing.assert_allclose(SCALES[1:NOT_FINITE] * INVERSES[1:NOT_FINITE], 1, rtol=1e-7)


def test_the_noise_is_each_stratum_once_and_the_same_for_all_time():
    table = noise_table(0.0)
    strata = (np.arange(TABLE_ELEMENTS) + 0.5) / TABLE_ELEMENTS - 0.5
    np.testing.assert_array_equal(np.sort(table[:TABLE_ELEMENTS]), strata.astype(np.float32))
    np.testing.assert_array_equal(table[:TABLE_ELEMENTS], table[TABLE_ELEMENTS:])
    # Peers of other versions draw alike, or their noise is not shared: a change here is another wire format.
    assert [int(v * 65_536) for v in table[:4]] == [27873, -12643, -13689, 18687]
    neighbours = np.corrcoef(table[: TABLE_ELEMENTS - 1], table[1:TABLE_ELEMENTS])[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(TABLE_ELEMENTS)
    # 127.5 more leaves every stratum where it was.
    np.testing.assert_array_equal(noise_table(127.5) - np.float32(127.5), table)


def test_noise_belongs_to_positions_and_not_to_chunks():
    table, start, elements = noise_table(0.0), 3 * ALIGN, 2 * BLOCK_ELEMENTS + 777
    whole = np.concatenate([noise for _, noise in noise_segments(table, 8, start, elements)])
    assert whole.size == elements
    for first in range(0, elements, 5 * ALIGN):
        count = min(5 * ALIGN, elements - first)
        part = np.concatenate([noise for _, noise in noise_segments(table, 8, start + first, count)])
        np.testing.assert_array_equal(part, whole[first : first + count])
    other = np.concatenate([noise for _, noise in noise_segments(table, 9, start, elements)])
    assert abs(np.corrcoef(whole, other)[0, 1]) < 4 / np.sqrt(elements)
    assert abs(np.corrcoef(whole[:BLOCK_ELEMENTS], whole[-BLOCK_ELEMENTS:])[0, 1]) < 4 / np.sqrt(BLOCK_ELEMENTS)


def test_a_chunk_that_begins_inside_a_block_is_a_bug_of_ours():
    with pytest.raises(AssertionError, match="no multiple of 256"):
        quantised(get_codec("int8"), np.ones(8, np.float32), 0, 100)

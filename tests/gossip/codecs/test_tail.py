"""Statistics at the end of a vector (BatchNorm's running variances): every codec sends them unchanged."""

import numpy as np
import pytest

from gossip.codecs import CODECS, get_codec
from gossip.codecs.tail import RawTail, with_raw_tail

CODED = [name for name, codec in CODECS.items() if not codec.is_raw and not codec.needs_spread]


def values(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def encoded(codec, vector, seed, start=0):
    data = bytearray(codec.encoded_bytes(vector.size, start))
    codec.encode(vector, data, seed, start)
    return data


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("tail", [0, 256, 300, 1_000, 1_024])
def test_weights_are_coded_and_statistics_are_not(name, tail):
    codec, sent = RawTail(get_codec(name), tail), values(1_024)
    sent[tail:] = np.exp(10 * sent[tail:])
    received, quantised, expected = (np.empty_like(sent) for _ in range(3))
    data = encoded(codec, sent, 7)
    codec.decode(data, received, None, 7)
    get_codec(name).quantised(sent[:tail], expected[:tail], 7)
    np.testing.assert_array_equal(received[:tail], expected[:tail])
    np.testing.assert_array_equal(received[tail:], sent[tail:])
    codec.quantised(sent, quantised, 7)
    np.testing.assert_array_equal(quantised, received)


@pytest.mark.parametrize("name", CODED)
def test_chunks_of_a_vector_are_coded_as_the_whole(name):
    codec, sent, tail = RawTail(get_codec(name), 700), values(1_500), 700
    whole, received = np.empty_like(sent), np.empty_like(sent)
    codec.quantised(sent, whole, 3)
    for start in (0, 512, 768, 1_280):
        chunk = slice(start, start + 256)
        codec.decode(encoded(codec, sent[chunk], 3, start), received[chunk], None, 3, start)
        np.testing.assert_array_equal(received[chunk], whole[chunk])
    assert codec.encoded_bytes(256, 768) == 4 * 256
    assert codec.encoded_bytes(256, 0) == get_codec(name).encoded_bytes(256)
    assert codec.encoded_bytes(256, 512) == get_codec(name).encoded_bytes(tail - 512) + 4 * (768 - tail)


@pytest.mark.parametrize("name", CODED)
def test_a_subtraction_leaves_the_partners_statistics_and_counts_only_weights(name):
    plain, ours, theirs = get_codec(name), values(768), values(768, 1)
    codec = RawTail(plain, 512)
    out, own, plain_out, plain_own = (np.empty_like(ours) for _ in range(4))
    sums = codec.subtract(encoded(codec, theirs, 5), ours, out, own, 5)
    np.testing.assert_array_equal(out[512:], theirs[512:])
    assert sums == plain.subtract(encoded(plain, theirs[:512], 5), ours[:512], plain_out[:512], plain_own[:512], 5)
    np.testing.assert_array_equal(out[:512], plain_out[:512])


def test_a_vector_without_statistics_needs_no_tail():
    assert with_raw_tail(get_codec("int8"), 100, 100) is get_codec("int8")
    assert with_raw_tail(get_codec("fp32"), 50, 100).is_raw

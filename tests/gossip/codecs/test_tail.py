"""Statistics at the end of a vector (BatchNorm's running variances): every codec sends them unchanged."""

from __future__ import annotations

import numpy as np
import pytest

from gossip.codecs import CODECS, get_codec
from gossip.codecs.tail import RawTail, with_raw_tail

CODED = [name for name, codec in CODECS.items() if not codec.is_raw and not codec.needs_spread]


def values(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("tail", [0, 256, 300, 1_000, 1_024])
def test_weights_are_coded_and_statistics_are_not(name, tail):
    codec, sent = RawTail(get_codec(name), tail), values(1_024)
    sent[tail:] = np.exp(10 * sent[tail:])
    data = bytearray(codec.encoded_bytes(sent.size))
    codec.encode(sent, data, 7)
    received = np.empty_like(sent)
    codec.decode(data, received, None, 7)
    expected = np.empty_like(sent[:tail])
    get_codec(name).quantised(sent[:tail], expected, 7)
    np.testing.assert_array_equal(received[:tail], expected)
    np.testing.assert_array_equal(received[tail:], sent[tail:])
    quantised = np.empty_like(sent)
    codec.quantised(sent, quantised, 7)
    np.testing.assert_array_equal(quantised, received)


@pytest.mark.parametrize("name", CODED)
def test_chunks_of_a_vector_are_coded_as_the_whole(name):
    codec, sent, tail = RawTail(get_codec(name), 700), values(1_500), 700
    whole = np.empty_like(sent)
    codec.quantised(sent, whole, 3)
    for start in (0, 512, 768, 1_280):
        chunk = sent[start : start + 256]
        data = bytearray(codec.encoded_bytes(chunk.size, start))
        codec.encode(chunk, data, 3, start)
        received = np.empty_like(chunk)
        codec.decode(data, received, None, 3, start)
        np.testing.assert_array_equal(received, whole[start : start + chunk.size])
    assert codec.encoded_bytes(256, 768) == 4 * 256
    assert codec.encoded_bytes(256, 0) == get_codec(name).encoded_bytes(256)
    assert codec.encoded_bytes(256, 512) == get_codec(name).encoded_bytes(tail - 512) + 4 * (768 - tail)


@pytest.mark.parametrize("name", CODED)
def test_a_subtraction_leaves_the_partners_statistics_and_counts_only_weights(name):
    codec, ours, theirs = RawTail(get_codec(name), 512), values(768), values(768, 1)
    data = bytearray(codec.encoded_bytes(theirs.size))
    codec.encode(theirs, data, 5)
    out, own = np.empty_like(ours), np.empty_like(ours)
    sums = codec.subtract(data, ours, out, own, 5)
    np.testing.assert_array_equal(out[512:], theirs[512:])
    plain_out, plain_own = np.empty(512, np.float32), np.empty(512, np.float32)
    head = bytearray(get_codec(name).encoded_bytes(512))
    get_codec(name).encode(theirs[:512], head, 5)
    assert sums == get_codec(name).subtract(head, ours[:512], plain_out, plain_own, 5)
    np.testing.assert_array_equal(out[:512], plain_out)


def test_a_vector_without_statistics_needs_no_tail():
    assert with_raw_tail(get_codec("int8"), 100, 100) is get_codec("int8")
    assert with_raw_tail(get_codec("fp32"), 50, 100).is_raw

"""A vector as chunks and back: whatever arrives is the difference of the two quantised vectors, or nothing."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossip.codecs import CODECS, get_codec
from gossip.errors import ProtocolError
from gossip.frames import PREFIX_BYTES, decode
from node.transfer import DifferenceReceiver, Sender, SliceReceiver


def frames(sender):
    """(chunk, body) of everything a sender sends."""
    while (frame := sender.next_frame()) is not None:
        header, body = frame
        yield decode(header[PREFIX_BYTES:], len(body)), bytes(body)


def deliver(receiver, chunk, body):
    receiver.place(chunk, len(body))[:] = body
    return receiver.arrived(chunk)


def pair(size, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, size)).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20_000), st.integers(1024, 4000), st.integers(1024, 4000), st.sampled_from(sorted(CODECS)))
def test_both_sides_end_with_exact_negatives_whatever_chunks_they_choose(size, ours_chunk, theirs_chunk, name):
    codec = get_codec(name)
    a, b = pair(size)
    ends = []
    for mine, theirs, chunk in ((a, b, theirs_chunk), (b, a, ours_chunk)):
        receiver = DifferenceReceiver(1, mine, np.empty_like(mine), codec)
        assert all(deliver(receiver, *frame) for frame in frames(Sender(1, theirs, codec, chunk)))
        assert receiver.done
        ends.append(receiver)
    assert np.array_equal(ends[0].out, -ends[1].out)
    quantised = np.empty_like(a), np.empty_like(b)
    codec.quantised(a, quantised[0])
    codec.quantised(b, quantised[1])
    assert np.array_equal(ends[0].out, quantised[1] - quantised[0])
    assert ends[0].difference_sq == pytest.approx(float(np.sum(ends[0].out.astype(np.float64) ** 2)), rel=1e-4)
    assert ends[0].own_sq == pytest.approx(float(np.sum(quantised[0].astype(np.float64) ** 2)), rel=1e-4)


def test_a_flipped_bit_is_noticed_and_the_chunk_not_used():
    a, b = pair(3000)
    receiver = DifferenceReceiver(1, a, np.zeros_like(a), get_codec("bf16"))
    chunk, body = next(frames(Sender(1, b, get_codec("bf16"), 1500)))
    assert not deliver(receiver, chunk, body[:7] + bytes([body[7] ^ 4]) + body[8:])
    assert receiver.position == 0
    assert not receiver.out.any()


@pytest.mark.parametrize(
    "change",
    [{"start": 1500}, {"elements": 0}, {"elements": 1}, {"elements": 1023}, {"elements": 1501}, {"elements": 1 << 20}],
)
def test_a_chunk_that_does_not_fit_is_a_protocol_error(change):
    a, b = pair(3000)
    receiver = DifferenceReceiver(1, a, np.zeros_like(a), get_codec("fp32"))
    chunk, body = next(frames(Sender(1, b, get_codec("fp32"), 1500)))
    with pytest.raises(ProtocolError):
        receiver.place(dataclasses.replace(chunk, **change), len(body))


def test_a_chunk_said_twice_is_a_protocol_error():
    a, b = pair(3000)
    receiver = DifferenceReceiver(1, a, np.zeros_like(a), get_codec("fp32"))
    chunk, body = next(frames(Sender(1, b, get_codec("fp32"), 1500)))
    assert deliver(receiver, chunk, body)
    with pytest.raises(ProtocolError):
        receiver.place(chunk, len(body))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
def test_what_is_not_finite_shows_in_the_norm(value):
    a, b = pair(3000)
    b[37] = value
    b[38] = -value
    receiver = DifferenceReceiver(1, a, np.zeros_like(a), get_codec("fp32"))
    for frame in frames(Sender(1, b, get_codec("fp32"), 1024)):
        deliver(receiver, *frame)
    assert not np.isfinite(receiver.difference_sq) or receiver.difference_sq > 1e70


def test_a_slice_lands_in_its_place_and_reports_each_whole_chunk():
    (a, b), reports = pair(3000), []
    receiver = SliceReceiver(1, a, 200, 2900, reports.append)
    before = a.copy()
    for frame in frames(Sender(1, b[200:2900], get_codec("fp32"), 1024)):
        deliver(receiver, *frame)
    assert reports == [1224, 2248, 2900]
    assert np.array_equal(a[200:2900], b[200:2900])
    assert np.array_equal(a[:200], before[:200])
    assert np.array_equal(a[2900:], before[2900:])


def test_a_donor_with_infinite_weights_is_refused():
    a, b = pair(10)
    b[3] = np.inf
    receiver = SliceReceiver(1, a, 0, 10, lambda _: None)
    chunk, body = next(frames(Sender(1, b, get_codec("fp32"), 10)))
    with pytest.raises(ProtocolError):
        deliver(receiver, chunk, body)

"""Vectors as chunks and back: what arrives is the difference of the two quantised vectors, or nothing.

tests/gossip/averaging/test_coverage.py holds which chunks are refused, and what chunks in any order give.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.averaging.streams import ComparingReceiver, DifferenceReceiver, PieceReceiver, Sender
from gossip.codecs import ALIGN, CODECS, Spread, get_codec
from gossip.errors import ProtocolError
from gossip.wire.frames import PREFIX_BYTES, decode
from tests.gossip.codecs.spreads import observe


def frames(sender):
    """Yield the chunk and the body of each frame of a sender."""
    while (frame := sender.next_frame()) is not None:
        header, body = frame
        yield decode(header[PREFIX_BYTES:], len(body)), bytes(body)


def deliver(receiver, chunk, body):
    receiver.begin_chunk(chunk, len(body))[:] = body
    return receiver.finish_chunk(chunk)


def pair(size, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, size)).astype(np.float32)


def codecs(name, a, b):
    """One codec for each side, with bounds of its own where it needs them; both wide enough."""
    bounds = Spread(a.size), Spread(a.size)
    for spread, factor in zip(bounds, (1.0, 1.3), strict=True):
        observe(spread, (b - a) * np.float32(factor))
    return [get_codec(name).with_bounds(spread) for spread in bounds]


@given(st.integers(1, 20_000), st.integers(1024, 4000), st.integers(1024, 4000), st.sampled_from(sorted(CODECS)))
def test_both_sides_end_with_exact_negatives_whatever_chunks_they_choose(size, ours_chunk, theirs_chunk, name):
    a, b = pair(size)
    of_a, of_b = codecs(name, a, b)
    ends = []
    for mine, codec, theirs, partner, most in ((a, of_a, b, of_b, theirs_chunk), (b, of_b, a, of_a, ours_chunk)):
        receiver, sent = DifferenceReceiver(7, mine, np.empty_like(mine), codec), []
        for frame in frames(Sender(7, theirs, partner, most)):
            assert deliver(receiver, *frame)
            sent.append(frame[0])
        assert receiver.is_complete
        assert all(chunk.start % ALIGN == 0 and chunk.elements <= most for chunk in sent)
        ends.append(receiver)
    assert np.array_equal(ends[0].out, -ends[1].out)
    quantised = np.empty_like(a), np.empty_like(b)
    of_a.quantised(a, quantised[0], 7)
    of_b.quantised(b, quantised[1], 7)
    assert np.array_equal(ends[0].out, quantised[1] - quantised[0])
    assert ends[0].difference_sq == pytest.approx(float(np.sum(ends[0].out.astype(np.float64) ** 2)), rel=1e-4)
    assert ends[0].own_sq == pytest.approx(float(np.sum(quantised[0].astype(np.float64) ** 2)), rel=1e-4)


def test_a_bound_that_was_exceeded_is_the_fault_overflow_and_the_chunk_is_not_used():
    a, b = pair(3000)
    of_a, of_b = codecs("moniqua4", a, b)
    a[2000] = 1e4
    receiver = DifferenceReceiver(1, a, np.zeros_like(a), of_a)
    first, second = frames(Sender(1, b, of_b, 1536))
    assert deliver(receiver, *first)
    before = receiver.difference_sq, receiver.own_sq
    assert not deliver(receiver, *second)
    assert receiver.fault == "overflow"
    assert receiver.position == 1536
    assert not receiver.is_complete
    assert (receiver.difference_sq, receiver.own_sq) == before


@pytest.mark.parametrize("name", ["fp32", "int8", "moniqua4"])
def test_distances_are_learned_once_a_difference_is_accepted(name):
    a, b = pair(3000)
    of_a, of_b = codecs(name, a, b)
    spread, expected = Spread(3000), Spread(3000)
    receiver = DifferenceReceiver(1, a, np.empty_like(a), of_a, spread)
    with pytest.raises(AssertionError):
        receiver.learn_distance()
    assert all(deliver(receiver, *frame) for frame in frames(Sender(1, b, of_b, 1024)))
    assert not spread.is_known
    receiver.learn_distance()
    observe(expected, receiver.out, of_a.block_errors(a))
    assert np.array_equal(spread.peaks, expected.peaks)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("name", sorted(CODECS))
def test_values_that_are_not_finite_show_in_the_norm(value, name):
    a, b = pair(3000)
    of_a, of_b = codecs(name, a, b)
    b[37] = value
    b[38] = -value
    receiver = DifferenceReceiver(1, a, np.zeros_like(a), of_a)
    arrived = [deliver(receiver, *frame) for frame in frames(Sender(1, b, of_b, 1024))]
    assert not np.isfinite(receiver.difference_sq) or receiver.difference_sq > 1e70 or not all(arrived)


def test_a_piece_lands_in_its_place_chunk_by_chunk():
    (a, b), reports = pair(3000), []
    receiver = PieceReceiver(1, a, 200, 2900)
    before = a.copy()
    for frame in frames(Sender(1, b[200:2900], get_codec("fp32"), 1024)):
        deliver(receiver, *frame)
        reports.append(receiver.start + receiver.position)
    assert reports == [1224, 2248, 2900]
    assert np.array_equal(a[200:2900], b[200:2900])
    assert np.array_equal(a[:200], before[:200])
    assert np.array_equal(a[2900:], before[2900:])


@pytest.mark.parametrize("kind", [PieceReceiver, ComparingReceiver])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_donor_with_weights_that_are_no_numbers_is_refused(kind, value):
    a, b = pair(10)
    b[3] = value
    receiver = kind(1, a, 0, 10)
    chunk, body = next(frames(Sender(1, b, get_codec("fp32"), 10)))
    with pytest.raises(ProtocolError, match="not finite"):
        deliver(receiver, chunk, body)

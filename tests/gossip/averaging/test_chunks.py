"""Vectors as chunks and back: what arrives is the difference of the two quantised vectors, or nothing.

Chunks may come in any order: each element counts once, and the difference and the norms are those of chunks in order.
"""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.averaging.coverage import Coverage
from gossip.averaging.pair import PairAverage
from gossip.averaging.streams import ComparingReceiver, DifferenceReceiver, PieceReceiver, Sender
from gossip.averaging.vectors import Vector
from gossip.codecs import ALIGN, CODECS, Spread, get_codec
from gossip.effects import Transfer
from gossip.errors import ProtocolError
from gossip.wire.frames import PREFIX_BYTES, decode
from gossip.wire.messages import MIN_CHUNK_ELEMENTS
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from tests.gossip.codecs.spreads import observe
from tests.gossip.exchange.sides import B

SIZE, CHUNK = 50_000, 4_096


def cut(size, rng):
    """Yield (start, elements) of chunks of random allowed lengths, in order."""
    start = 0
    while start < size:
        elements = min(MIN_CHUNK_ELEMENTS + 256 * rng.randrange(12), size - start)
        yield start, elements
        start += elements


@pytest.mark.parametrize("seed", range(20))
def test_what_is_here_is_counted_once_in_whatever_order_it_comes(seed):
    rng = random.Random(seed)
    coverage, here, filling = Coverage(SIZE), np.zeros(SIZE, bool), []
    chunks = list(cut(SIZE, rng))
    rng.shuffle(chunks)
    while chunks or filling:
        if chunks and (not filling or rng.random() < 0.5):
            coverage.begin_chunk(*chunks[-1], anywhere=True)
            filling.append(chunks.pop())
        else:
            start, elements = filling.pop(rng.randrange(len(filling)))
            coverage.finish_chunk(start)
            here[start : start + elements] = True
        assert coverage.arrived_elements == here.sum()
        assert coverage.prefix == (SIZE if here.all() else int(here.argmin()))
        assert coverage.is_complete == here.all()
        assert len(coverage.gaps) <= SIZE // MIN_CHUNK_ELEMENTS
    assert coverage.gaps == []


@pytest.mark.parametrize(("start", "elements"), [
    (4_096, 1_024),  # received
    (3_072, 2_048), (3_072, 6_144), (7_168, 2_048),  # received in part
    (5_120, 1_024),  # inside a received one
    (8_192, 1_000), (8_292, 1_024),  # not whole blocks
    (8_192, 768),  # too short
    (49_152, 1_024), (SIZE, 1_024), (-1_024, 1_024), (2**48, 1_024), (0, 0),
])  # fmt: skip
def test_what_came_or_fits_nowhere_is_refused_and_changes_nothing(start, elements):
    coverage = Coverage(SIZE)
    coverage.begin_chunk(4_096, 4_096, anywhere=True)
    with pytest.raises(ProtocolError):
        coverage.begin_chunk(start, elements, anywhere=True)
    assert (coverage.gaps, coverage.frontier, coverage.arriving) == ([(0, 4_096)], 8_192, {4_096: 8_192})


def test_over_one_connection_only_the_next_may_come():
    coverage = Coverage(SIZE)
    with pytest.raises(ProtocolError, match="must begin at 0"):
        coverage.begin_chunk(4_096, 4_096)
    coverage.begin_chunk(0, 4_096)
    with pytest.raises(ProtocolError, match="must begin at 4096"):
        coverage.begin_chunk(0, 4_096)


def vectors():
    rng = np.random.default_rng(1)
    ours = rng.standard_normal(SIZE).astype(np.float32)
    return ours, ours + 1e-2 * rng.standard_normal(SIZE).astype(np.float32)


def frames(vector, codec, most=CHUNK):
    """Yield each chunk of a vector with its body, of at most so many elements."""
    sender = Sender(7, vector, codec, most)
    while (frame := sender.next_frame(True)) is not None:
        yield decode(frame[0][PREFIX_BYTES:], frame[1].nbytes), bytes(frame[1])


def take(receiver, chunk, body):
    receiver.begin_chunk(chunk, len(body))[:] = body
    return receiver.finish_chunk(chunk)


def deliver(receiver, chunks, rng=None):
    """Deliver chunks in order or, with ``rng``, in any order with up to eight being read at once."""
    waiting = list(chunks)
    if rng is not None:
        rng.shuffle(waiting)
    open_ = []
    while waiting or open_:
        if waiting and len(open_) < (8 if rng is not None else 1):
            chunk, body = waiting.pop(0)
            open_.append((chunk, body, receiver.begin_chunk(chunk, len(body), rng is not None)))
        else:
            chunk, body, place = open_.pop(0 if rng is None else rng.randrange(len(open_)))
            place[:] = body
            assert receiver.finish_chunk(chunk)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", [name for name in CODECS if not get_codec(name).needs_spread])
def test_a_difference_is_the_same_bit_for_bit(name, plain, seed):
    ours, theirs = vectors()
    codec, rng = get_codec(name), random.Random(seed)
    ends = [DifferenceReceiver(7, ours, np.empty_like(ours), codec, skips_codec=plain) for _ in range(2)]
    deliver(ends[0], frames(theirs, codec))
    deliver(ends[1], frames(theirs, codec), rng)
    assert all(end.is_complete and not end.is_filling and end.summed_elements == SIZE for end in ends)
    assert np.array_equal(ends[0].out, ends[1].out)
    assert (ends[0].difference_sq, ends[0].own_sq) == (ends[1].difference_sq, ends[1].own_sq)


def test_a_piece_and_a_comparison_take_chunks_in_any_order_too():
    ours, theirs = vectors()
    into = np.zeros(SIZE + 100, np.float32)
    deliver(PieceReceiver(7, into, 100, SIZE + 100), frames(theirs, get_codec("fp32")), random.Random(1))
    assert np.array_equal(into[100:], theirs)
    compared = ComparingReceiver(7, ours, 0, SIZE)
    deliver(compared, frames(theirs, get_codec("fp32")), random.Random(1))
    assert compared.difference_sq == pytest.approx(float(((theirs - ours).astype(np.float64) ** 2).sum()))


def test_bodies_that_are_read_at_once_have_room_of_their_own_and_give_it_back():
    ours, theirs = vectors()
    codec = get_codec("int8")
    receiver = DifferenceReceiver(7, ours, np.empty_like(ours), codec)
    chunks = list(frames(theirs, codec))
    places = [receiver.begin_chunk(chunk, len(body), True) for chunk, body in reversed(chunks)]
    assert len({id(place.obj) for place in places}) == len(chunks)
    for (chunk, body), place in zip(reversed(chunks), places, strict=True):
        place[:] = body
        assert receiver.finish_chunk(chunk)
    assert receiver.is_complete
    assert len(receiver.free_buffers) == len(chunks)
    assert not receiver.is_filling


def pair_of(ours, theirs, comes_whole):
    """A pair that has received a partner's vector, as a whole or in chunks."""
    pool = VectorPool(ModelState({"x": ours}))
    pair = PairAverage(Transfer(1, B, "fp32"), Vector(ours.copy()), get_codec("fp32"), None, pool)
    if comes_whole:
        pair.receive_whole(theirs)
    else:
        receiver = pair.create_receiver()
        receiver.session = 7
        deliver(receiver, frames(theirs, get_codec("fp32")))
        pair.on_received()
    return pair


@pytest.mark.parametrize("comes_whole", [False, True])
@pytest.mark.parametrize("difference", [1e-23, 1e-30, 1.5e-45, -1.5e-45])
def test_only_equal_vectors_have_a_squared_difference_of_0(difference, comes_whole):
    """The square of a difference below 1e-23 is no float32."""
    ours, _ = vectors()
    ours[4_321] = 1e-39
    theirs = ours.copy()
    theirs[4_321] += difference
    assert pair_of(ours, ours, comes_whole).difference_sq == 0.0
    assert 0.0 < pair_of(ours, theirs, comes_whole).difference_sq < 1e-40


# -- what arrives ------------------------------------------------------------------------------------------------------
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
        for frame in frames(theirs, partner, most):
            assert take(receiver, *frame)
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
    receiver = DifferenceReceiver(7, a, np.zeros_like(a), of_a)
    first, second = frames(b, of_b, 1536)
    assert take(receiver, *first)
    before = receiver.difference_sq, receiver.own_sq
    assert not take(receiver, *second)
    assert receiver.fault == "overflow"
    assert receiver.position == 1536
    assert not receiver.is_complete
    assert (receiver.difference_sq, receiver.own_sq) == before


@pytest.mark.parametrize("name", ["fp32", "int8", "moniqua4"])
def test_distances_are_learned_once_a_difference_is_accepted(name):
    a, b = pair(3000)
    of_a, of_b = codecs(name, a, b)
    spread, expected = Spread(3000), Spread(3000)
    receiver = DifferenceReceiver(7, a, np.empty_like(a), of_a, spread)
    with pytest.raises(AssertionError):
        receiver.learn_distance()
    assert all(take(receiver, *frame) for frame in frames(b, of_b, 1024))
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
    receiver = DifferenceReceiver(7, a, np.zeros_like(a), of_a)
    arrived = [take(receiver, *frame) for frame in frames(b, of_b, 1024)]
    assert not np.isfinite(receiver.difference_sq) or receiver.difference_sq > 1e70 or not all(arrived)


def test_a_piece_lands_in_its_place_chunk_by_chunk():
    (a, b), reports = pair(3000), []
    receiver = PieceReceiver(7, a, 200, 2900)
    before = a.copy()
    for frame in frames(b[200:2900], get_codec("fp32"), 1024):
        take(receiver, *frame)
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
    receiver = kind(7, a, 0, 10)
    chunk, body = next(frames(b, get_codec("fp32"), 10))
    with pytest.raises(ProtocolError, match="not finite"):
        take(receiver, chunk, body)

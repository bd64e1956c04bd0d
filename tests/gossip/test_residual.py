"""The elements that moved most: named exactly, and what is not sent today is sent some day."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gossip.residual import Residual, pack_positions, position_bytes, unpack_positions

vectors = hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-1e4, 1e4, width=32))


@given(vectors, st.data())
def test_the_top_is_that_of_a_sort(moved, data):
    last = data.draw(hnp.arrays(np.float32, moved.size, elements=st.floats(-10, 10, width=32)))
    elements = data.draw(st.integers(1, moved.size))
    places = Residual(last).top(last + moved, elements)
    assert np.all(np.diff(places) > 0)
    distance = np.abs((last + moved) - last)
    np.testing.assert_array_equal(np.sort(distance[places]), np.sort(distance)[moved.size - elements :])


def test_all_of_them_is_everybody_in_order():
    vector = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(Residual(vector).top(vector + 1, 5), np.arange(5))


@given(st.integers(2, 60), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_what_is_never_sent_is_sent_in_the_end(size, elements, seed):
    """Each element drifts at its own constant speed, however slow; so each gathers enough in a bounded time: while it
    waits, others must outdo it, and what is mixed begins at zero. With speeds from 1 to r nobody waits for more than
    (1 + r) ceil(size / elements) rounds."""
    elements = min(elements, size)
    slowest, fastest = 1.0, 5.0
    speed = np.random.default_rng(seed).uniform(slowest, fastest, size).astype(np.float32)
    model = np.zeros(size, np.float32)
    residual = Residual(model)
    waited = np.zeros(size, int)
    longest = int((1 + fastest / slowest) * -(-size // elements)) + 1
    for _ in range(4 * longest):
        model += speed
        waited += 1
        places = residual.top(model, elements)
        residual.mixed(places, model[places])
        waited[places] = 0
        assert waited.max() <= longest


def test_what_was_mixed_counts_from_the_value_that_it_has_then():
    residual = Residual(np.zeros(4, np.float32))
    snapshot = np.array([0, 3, -5, 1], np.float32)
    np.testing.assert_array_equal(residual.top(snapshot, 2), [1, 2])
    residual.mixed(np.array([1, 2]), np.array([2.5, -4.0], np.float32))  # the means
    np.testing.assert_array_equal(residual.top(snapshot, 2), [2, 3])  # moved since: 0, 0.5, 1, 1
    residual.reset(snapshot)
    assert residual.top(snapshot + np.array([0, 0, 0, 1], np.float32), 1).tolist() == [3]


def test_the_memory_is_its_own():
    vector = np.zeros(3, np.float32)
    residual = Residual(vector)
    vector[1] = 7.0
    assert residual.top(vector, 1).tolist() == [1]


def test_an_element_that_is_not_finite_is_among_those_sent_so_that_it_is_seen():
    snapshot = np.array([5, np.nan, 9, 1], np.float32)
    assert 1 in Residual(np.zeros(4, np.float32)).top(snapshot, 1)


# -- how positions travel ----------------------------------------------------------------------------------------------
positions = st.sets(st.integers(0, 100_000), max_size=200).map(lambda some: np.array(sorted(some), np.int64))


@given(positions)
def test_positions_come_back_as_they_were(places):
    data = pack_positions(places)
    assert data.nbytes == position_bytes(len(places))
    np.testing.assert_array_equal(unpack_positions(data, len(places), 100_001), places)


@given(st.lists(st.integers(0, 255), max_size=64), st.integers(0, 16), st.integers(1, 2**40))
def test_whatever_bytes_come_they_are_ascending_positions_within_the_vector_or_refused(data, elements, size):
    whole = np.array(data[: len(data) // 4 * 4], np.uint8)
    places = unpack_positions(whole, elements, size)
    if places is None:
        assert len(whole) != 4 * elements or int(whole.view("<u4").astype(object).sum()) + elements > size
        return
    assert len(places) == elements
    assert np.all(np.diff(places, prepend=-1) > 0)
    assert np.all(places < size)


@pytest.mark.parametrize(("place", "size"), [(10, 10), (2**32 - 1, 1000)])
def test_a_position_behind_the_end_is_refused(place, size):
    assert unpack_positions(pack_positions(np.array([0, place])), 2, size) is None

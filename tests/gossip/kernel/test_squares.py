"""Sums of squares have one documented order, compared with a loop over single squares."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip import codecs, kernel
from gossip.arithmetic.mixing import subtract
from gossip.averaging.streams import DifferenceReceiver, Sender
from gossip.codecs import get_codec
from gossip.errors import LocalError
from gossip.kernel.squares import BLOCK, LANES, PIECE, squares
from gossip.wire.frames import PREFIX_BYTES, decode
from tests.gossip.codecs.test_codecs_blockwise import quantised
from tests.gossip.kernel.building import both_ways, passes

COMPILED, NUMPY = "compiled", "numpy"
each = pytest.mark.parametrize("which", [COMPILED, NUMPY])
ENDS = [PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + BLOCK + 77]


@pytest.fixture
def using(monkeypatch):
    return lambda which: monkeypatch.setattr(kernel, "passes", passes() if which == COMPILED else None)


def as_written(values: np.ndarray, before: float = 0.0) -> float:
    """Add one square after another, each to its lane."""
    total = before
    with np.errstate(all="ignore"):
        for first in range(0, values.size, BLOCK):
            block = values[first : first + BLOCK]
            lanes = np.zeros(LANES, np.float32)
            for row in range(0, block.size, LANES):
                for lane, value in enumerate(block[row : row + LANES]):
                    lanes[lane] = np.float32(lanes[lane] + np.float32(value * value))
            for lane in lanes.tolist():
                total += lane
    return total


def weights(elements: int, seed: int, decades: float = 3.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-decades, decades, elements)
    return (rng.standard_normal(elements) * sizes).astype(np.float32)


def same(one: float, other: float) -> bool:
    return one == other or (np.isnan(one) and np.isnan(other))


@each
@pytest.mark.parametrize("elements", [0, 1, 63, 64, 65, 255, 256, 257, 4095, 4096, 4097, 5000, 12_388])
@pytest.mark.parametrize("decades", [0.0, 3.0])
def test_a_sum_is_added_up_in_the_order_that_is_written_down(which, elements, decades, using):
    using(which)
    values = weights(elements, elements, decades)
    assert squares(values, 0.125) == as_written(values, 0.125)


def test_both_agree_at_every_size_up_to_5000_and_at_the_ends_of_pieces():
    every = weights(max(ENDS), 1, 0.0)
    plain, compiled = both_ways(lambda: [squares(every[:elements]) for elements in [*range(5_001), *ENDS]])
    assert plain == compiled
    assert len(set(plain)) > 4_500  # some sums are equal, where the last square is too small to count


@each
@pytest.mark.parametrize("offset", [1, 2, 3, 4, 5, 7, 8, 15, 16, 31])
def test_where_a_vector_lies_changes_no_sum(which, offset, using):
    using(which)
    values = weights(9_001, 2)
    moved = np.empty(values.size + offset, np.float32)[offset:]
    moved[:] = values
    assert squares(moved) == squares(values)


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=40), st.integers(0, 4_200), st.integers(1, 700), st.booleans()
)
def test_both_make_the_same_of_any_float32(given_values, at, every, is_difference):
    """Test values that are not finite, subnormal, or whose squares exceed float32, anywhere among others."""
    values, other, out = weights(5_000, 3), weights(5_000, 4), np.empty(5_000, np.float32)
    places = (at + every * np.arange(len(given_values))) % values.size
    values[places] = given_values

    def summed() -> tuple[float, float, np.ndarray]:
        sums = subtract(values, other, out) if is_difference else (squares(values), 0.0)
        return *sums, out.copy() if is_difference else values

    (*plain, plain_out), (*compiled, compiled_out) = both_ways(summed)
    assert all(map(same, plain, compiled))
    np.testing.assert_array_equal(plain_out, compiled_out)


@each
@pytest.mark.parametrize(
    "value", [1e-45, -1e-45, 1e-40, 1.2e-38, 1e-23, 3e-23, 1e-19, 2e18, 1.8e19, 1.9e19, 3.4e38, np.inf, -np.inf, np.nan]
)
def test_the_smallest_and_the_largest_add_up_in_it_too(which, value, using):
    using(which)
    values = np.full(5_000, value, np.float32)
    assert same(squares(values), as_written(values))


@pytest.mark.parametrize("elements", [1, 700, 5_000, 65_535, 65_536, 140_001])
@pytest.mark.parametrize("shift", [0, 1, 5])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_difference_is_numpys_wherever_it_is_written(elements, shift, in_place):
    """A difference of 65,536 elements or more is written past the cache, if its alignment allows that."""
    theirs, ours = weights(elements, 5), weights(elements, 6)

    def subtracted() -> tuple[tuple[float, float], np.ndarray]:
        out = np.full(elements + shift + 8, 7.0, np.float32)
        place = out[shift : shift + elements]
        if in_place:
            place[:] = theirs
        return subtract(place if in_place else theirs, ours, place, (2.0, 3.0)), out

    (plain, plain_out), (compiled, compiled_out) = both_ways(subtracted)
    assert plain == compiled == (squares(theirs - ours, 2.0), squares(ours, 3.0))
    np.testing.assert_array_equal(plain_out, compiled_out)


@each
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_a_stream_has_the_same_sums_however_it_was_cut(which, codec, using):
    using(which)
    theirs, ours = weights(30_001, 7), weights(30_001, 8)
    found = set()
    for chunk in (BLOCK, 3 * BLOCK, 40 * BLOCK):
        sender = Sender(5, theirs, get_codec(codec), chunk)
        receiver = DifferenceReceiver(5, ours, np.empty_like(ours), get_codec(codec))
        while (frame := sender.next_frame()) is not None:
            message = decode(frame[0][PREFIX_BYTES:], len(frame[1]))
            receiver.begin_chunk(message, len(frame[1]))[:] = frame[1]
            assert receiver.finish_chunk(message)
        found.add((receiver.difference_sq, receiver.own_sq))
    assert len(found) == 1
    assert found == {
        (squares(receiver.out), squares(ours if codec == "fp32" else quantised(get_codec(codec), ours, 5)))
    }


@each
def test_where_another_order_came_out_no_node_starts(which, using, monkeypatch):
    using(which)
    codecs.self_test()
    monkeypatch.setattr(codecs, "squares", lambda values: float(values.dot(values)))
    with pytest.raises(LocalError, match="another order"):
        codecs.self_test()

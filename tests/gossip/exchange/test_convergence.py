"""Members that settle come to identical bits, near the mean, in a few exchanges each."""

import numpy as np
import pytest

from gossip.arithmetic.mixing import join_weight
from gossip.exchange.settling.convergence import LARGER, MAX_MEANS, NEAR_SHARE, Convergence
from tests.harness.marks import slow

ELEMENTS = 5_000


def as_float32(vector):
    return vector


def as_bfloat16(vector):
    """Round to the upper 16 bits, to the nearest and to even, as a model of such weights does when it adds."""
    bits = vector.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def as_float16(vector):
    return vector.astype(np.float16).astype(np.float32)


def exchanges_until_equal(vectors, rounded, rng, at_most, partner_of):
    """Let random pairs settle until all vectors are the same to the bit; return the exchanges of each member."""
    members = len(vectors)
    seen = [Convergence() for _ in vectors]
    for count in range(1, at_most * members):
        a = int(rng.integers(members))
        b = partner_of(rng, a, members)
        difference = vectors[b] - vectors[a]
        square = float(difference @ difference)
        for member, sign in ((a, 1), (b, -1)):
            own = np.float32(sign) * difference
            weight = join_weight(own, 0.5) if seen[member].is_near(square) else 0.5
            seen[member].note(square)
            vectors[member] = rounded(vectors[member] + np.float32(weight) * own)
        if count % members == 0 and len({vector.tobytes() for vector in vectors}) == 1:
            return 2 * count / members
    return None


def any_other(rng, member, members):
    return int((member + 1 + rng.integers(members - 1)) % members)


def next_on_ring(rng, member, members):
    return int((member + rng.choice([1, -1])) % members)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rounded", [as_float32, as_bfloat16, as_float16])
@pytest.mark.parametrize(
    ("partner_of", "members", "most"),
    [(any_other, 2, 8), (any_other, 3, 30), (any_other, 8, 50), slow(any_other, 50, 80), (next_on_ring, 8, 100)],
)
def test_all_hold_the_same_bits_after_a_few_exchanges_each(partner_of, members, most, rounded, seed):
    rng = np.random.default_rng(seed)
    common = rng.normal(size=ELEMENTS)
    common[::7] = 1e-39  # Halves of denormal numbers round.
    common[::11] = 0.0
    apart = 0.02 * rng.normal(size=(members, ELEMENTS))
    vectors = list(map(rounded, (common + apart * (common != 0)).astype(np.float32)))
    mean, spread = np.mean(vectors, axis=0, dtype=np.float64), np.std(np.array(vectors) - common, dtype=np.float64)
    assert exchanges_until_equal(vectors, rounded, rng, most, partner_of) is not None
    if rounded is as_float32 and partner_of is any_other:
        assert np.sqrt(np.mean((vectors[0] - mean) ** 2)) < 0.2 * spread, "what was joined is nearly the mean"


def test_whoever_comes_late_and_far_away_is_averaged_and_not_joined():
    convergence = Convergence()
    convergence.note(1.0)
    assert convergence.is_near(NEAR_SHARE**2)
    assert not convergence.is_near(1.01 * NEAR_SHARE**2)
    for _ in range(MAX_MEANS):
        convergence.note(0.5)
    assert convergence.is_near(0.9)
    assert not convergence.is_near(9.0)
    convergence.note(9.0)
    assert not convergence.is_near(0.9), "means come first again"
    assert convergence.is_near(9.0 * NEAR_SHARE**2)


def test_a_difference_that_two_drivers_add_up_in_other_orders_is_the_largest_to_both_or_to_none():
    convergence = Convergence()
    convergence.note(1.0)
    for _ in range(MAX_MEANS):
        convergence.note(0.5)
    for same in (1.0 - 1e-6, 1.0, 1.0 + 1e-6):
        assert convergence.is_near(same)
        convergence.note(same)
        assert convergence.count >= MAX_MEANS
    assert not convergence.is_near(2 * LARGER)


def test_the_larger_vector_in_the_first_unequal_element_is_taken_by_both_sides():
    one, other = np.zeros(100_000, np.float32), np.zeros(100_000, np.float32)
    other[70_000], one[70_001] = 1.0, 5.0
    assert join_weight(other - one, 0.5) == 1.0
    assert join_weight(one - other, 0.5) == 0.0
    assert join_weight(one - one, 0.5) == 0.5

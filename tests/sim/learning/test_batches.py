"""Each peer goes through its own samples without replacement, in an order that no other peer changes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.learning.batches import Batches

SEED = 9


def made(sizes, batch_size, names=None, seed=SEED):
    """Make batches in which peer p holds the samples 1000 p .. 1000 p + size - 1."""
    parts = [np.arange(size) + 1000 * peer for peer, size in enumerate(sizes)]
    return Batches(parts, names or [f"peer {peer}" for peer in range(len(sizes))], seed, batch_size)


def epoch(batches, peer, number):
    """Return the batches of one epoch of one peer, (batches, batch)."""
    count = int(batches.batches_per_epoch[peer])
    return np.concatenate([batches.draw(np.array([peer]), np.array([number * count + at])) for at in range(count)])


@settings(deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=12), st.integers(1, 9), st.integers(0, 50))
def test_an_epoch_takes_no_sample_twice_and_only_ones_own(sizes, batch_size, number):
    batches = made(sizes, batch_size)
    for peer, size in enumerate(sizes):
        seen = epoch(batches, peer, number)
        assert seen.shape == (max(size // batch_size, 1), batch_size)
        assert ((seen >= 1000 * peer) & (seen < 1000 * peer + size)).all()
        times = np.unique(seen, return_counts=True)[1]
        assert times.max() <= -(-batch_size // size)  # more than once only if the part is smaller than a batch
        if size % batch_size == 0:
            assert len(times) == size


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=8), st.integers(1, 6), st.randoms())
def test_peers_drawn_together_get_what_each_gets_alone(sizes, batch_size, random):
    together, alone = made(sizes, batch_size), made(sizes, batch_size)
    peers = random.sample(range(len(sizes)), random.randint(1, len(sizes)))
    for _ in range(3):
        steps = [random.randrange(30) for _ in peers]
        drawn = together.draw(np.array(peers), np.array(steps))
        for peer, step, batch in zip(peers, steps, drawn, strict=True):
            assert np.array_equal(alone.draw(np.array([peer]), np.array([step]))[0], batch)


def test_every_epoch_peer_and_seed_has_an_order_of_its_own():
    parts = [np.arange(64)] * 2
    orders = {epoch(Batches(parts, ["a", "b"], SEED, 8), peer, at).tobytes() for peer in (0, 1) for at in range(50)}
    assert len(orders) == 100
    assert epoch(Batches(parts, ["a", "b"], SEED + 1, 8), 0, 0).tobytes() not in orders


def test_an_order_depends_on_the_peers_name_and_not_on_its_number():
    alone = Batches([np.arange(50)], ["b"], SEED, 8)
    behind = Batches([np.arange(20), np.arange(50)], ["a", "b"], SEED, 8)
    assert np.array_equal(epoch(alone, 0, 3), epoch(behind, 1, 3))


@pytest.mark.parametrize("size", [16, 20])  # a power of two is shuffled on another path
def test_every_sample_is_as_likely_at_every_place(size):
    batches = made([size] * 2000, size)
    drawn = batches.draw(np.arange(2000), np.zeros(2000, np.int64)) % 1000  # (peers, places)
    counts = np.stack([np.bincount(column, minlength=size) for column in drawn.T])  # (places, samples)
    expected = 2000 / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5  # five standard deviations


def test_many_large_parts_are_shuffled_piece_by_piece(monkeypatch):
    whole = made([100] * 9, 10).draw(np.arange(9), np.arange(9))
    monkeypatch.setattr("sim.learning.batches.KEYS_AT_ONCE", 256)  # two parts of 128
    assert np.array_equal(made([100] * 9, 10).draw(np.arange(9), np.arange(9)), whole)

"""Vectors that come and go leave the pool no larger than it was."""

from __future__ import annotations

import numpy as np

from node.model.pool import VectorPool
from node.model.snapshot import ModelState

SIZE = 2_000


def test_parts_of_many_sizes_leave_the_pool_no_larger_than_eight_vectors():
    state = ModelState({"x": np.zeros(SIZE, np.float32)})
    pool = VectorPool(state)
    pool.give(pool.take())
    for size in range(1, SIZE):
        pool.give(pool.take(size))
        assert (
            sum(size * len(kept) for size, kept in pool.free_arrays.items())
            == pool.free_elements
            <= pool.MAX_FREE * SIZE
        )


def test_a_vector_given_back_is_the_next_one_taken():
    pool = VectorPool(ModelState({"x": np.zeros(SIZE, np.float32)}))
    first = pool.take()
    pool.give(first)
    assert pool.take().array is first.array
    assert pool.free_elements == 0

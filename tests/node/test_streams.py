"""What a partner names, or says that it will send, is held to what is ours."""

from __future__ import annotations

import numpy as np
import pytest

from gossip.config import Config
from gossip.errors import ProtocolError
from gossip.messages import Chunk
from node import streams
from node.boundary import VectorPool
from node.snapshot import ModelState
from node.transfer import ByteReceiver

SIZE = 2_000
TOP = Config(mix_every_steps=1, part="top 0.05", progress_period_s=0.1, bench_s=0.2)


def beyond(positions):
    """Gaps that lead far beyond any vector."""
    return np.full(4 * positions.size, 255, np.uint8)


def one_too_far(positions):
    positions = positions.copy()
    positions[-1] = SIZE
    return honest(positions)


honest = streams.pack_positions


@pytest.mark.parametrize("lie", [beyond, one_too_far])
def test_elements_that_there_are_not_are_refused_and_nothing_is_mixed(lie, train, until, monkeypatch):
    monkeypatch.setattr(streams, "pack_positions", lie)
    vectors = [np.zeros(SIZE, np.float32) for _ in range(2)]
    trainees = [train({"x": vectors[0]}, config=TOP)]
    trainees.append(train({"x": vectors[1]}, config=TOP, seeds=[trainees[0].node.address]))
    trainees[0].do(lambda node: vectors[0].__iadd__(1.0))
    until(lambda: all(trainee.node.metrics().exchanges_failed > 2 for trainee in trainees))
    assert all(trainee.node.metrics().exchanges_done == 0 for trainee in trainees)
    assert (vectors[0] == 1.0).all()
    assert (vectors[1] == 0.0).all()
    monkeypatch.setattr(streams, "pack_positions", honest)  # they are linked still, and mix as soon as it makes sense
    until(lambda: (vectors[1] == 0.5).any())


def test_positions_take_no_more_memory_than_our_own_vector_has_elements():
    receiver = ByteReceiver(1, 1_100)
    assert receiver.array.nbytes == 4 * 1_100
    with pytest.raises(ProtocolError):
        receiver.place(Chunk(1, 0, 1_280, 0), 4 * 1_280)
    with pytest.raises(ProtocolError):
        receiver.place(Chunk(1, 0, 1_024, 0), 8 * 1_024)


def test_parts_of_many_sizes_leave_the_pool_no_larger_than_eight_vectors():
    state = ModelState({"x": np.zeros(SIZE, np.float32)})
    pool = VectorPool(state)
    pool.give(pool.take("weights"))
    for size in range(1, SIZE):
        pool.give(pool.take("weights", size))
        assert sum(size * len(kept) for size, kept in pool.free.items()) == pool.held <= pool.KEPT * SIZE


def test_a_vector_given_back_is_the_next_one_taken():
    pool = VectorPool(ModelState({"x": np.zeros(SIZE, np.float32)}))
    first = pool.take("weights")
    pool.give(first)
    assert pool.take("weights").array is first.array
    assert pool.held == 0

"""A pair's squared difference, by which members that settle know that they have the same vector."""

from __future__ import annotations

import pytest

from gossip.averaging.pair import PairAverage
from gossip.averaging.vectors import Vector
from gossip.codecs import get_codec
from gossip.effects import Transfer
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from tests.gossip.averaging.test_coverage import deliver, frames, vectors
from tests.gossip.exchange.sides import B

FP32 = get_codec("fp32")


def pair_of(ours, theirs, comes_whole):
    """A pair that has received a partner's vector, as a whole or in chunks."""
    pool = VectorPool(ModelState({"x": ours}))
    pair = PairAverage(Transfer(1, B, "fp32"), Vector(ours.copy()), FP32, None, pool)
    if comes_whole:
        pair.receive_whole(theirs)
    else:
        receiver = pair.create_receiver()
        receiver.session = 7
        deliver(receiver, frames(theirs, FP32))
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

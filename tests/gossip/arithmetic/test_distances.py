"""Which tensor is furthest, and which carries most of a difference."""

import numpy as np

from gossip.arithmetic.distances import furthest_tensor, largest_share
from gossip.arithmetic.layout import Layout, Segment

LAYOUT = Layout([
    Segment("large", (2, 2), "float32", "parameter"), Segment("small", (2,), "float32", "parameter"),
    Segment("zero", (1,), "float32", "buffer"), Segment("base", (3,), "float32", "frozen"),
])  # fmt: skip
OWN = np.array([30, 0, 0, 40, 0.3, 0.4, 0], np.float32)


def test_the_furthest_tensor_is_so_relative_to_its_own_norm():
    difference = np.array([5, 0, 0, 0, 0.1, 0, 0.05], np.float32)
    distance, name = furthest_tensor(LAYOUT, OWN, difference)
    assert name == "small"
    assert distance == np.float32(0.1) / np.float32(0.5)
    assert furthest_tensor(LAYOUT, OWN, difference * (np.arange(7) == 6)) == (np.float32(0.05), "zero")
    assert furthest_tensor(LAYOUT, OWN, np.zeros(7, np.float32)) == (0.0, "")


def test_the_largest_share_is_that_of_the_squared_difference():
    assert largest_share(LAYOUT, np.array([5, 0, 0, 0, 0, 0, 5], np.float32)) == (
        "tensor 'large' (50% of the squared difference)"
    )
    assert largest_share(LAYOUT, np.array([0, 0, 0, 0, 0, np.inf, 0], np.float32)) == "tensor 'small'"

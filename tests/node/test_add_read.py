"""An addition and a copy of what comes of it, in one pass over memory; and pieces of the weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from node.model.snapshot import ModelState
from tests.node.vectors import vector_of


def uneven():
    """Large and small tensors, one that does not lie as its elements follow each other, a scalar and an empty one."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Linear(300, 700), nn.Linear(1, 1))
    model[0].to(memory_format=torch.channels_last)
    wide = nn.Parameter(torch.randn(400, 500).t())
    return ModelState({"wide": wide, "empty": torch.zeros(0), "flat": torch.randn(70_000)}), ModelState(model)


@pytest.mark.parametrize("which", [0, 1])
def test_the_sum_and_its_copy_are_what_an_addition_and_a_read_give(which):
    one, other = uneven()[which], uneven()[which]
    shift = np.random.default_rng(1).normal(size=one.layout.size).astype(np.float32)
    both, read = shift.copy(), np.empty_like(shift)
    assert one.add_read(both)
    other.add(shift).wait()
    other.read(read)
    np.testing.assert_array_equal(both, read)
    np.testing.assert_array_equal(vector_of(one), read)


def test_half_precision_is_added_and_read_one_after_the_other():
    state = ModelState({"x": torch.zeros(100_000), "half": torch.zeros(8, dtype=torch.bfloat16)})
    shift = np.ones(state.layout.size, np.float32)
    assert not state.add_read(shift)
    assert (shift == 1.0).all()
    assert not vector_of(state).any()


def test_any_piece_of_the_weights_is_what_lies_there():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    state = ModelState(model)
    full = vector_of(state)
    for start in range(0, full.size, 7):
        for stop in (start + 1, start + 50, full.size):
            out = np.full(min(stop, full.size) - start, np.nan, np.float32)
            state.begin_read_piece(out, start).wait()
            np.testing.assert_array_equal(out, full[start : start + out.size])

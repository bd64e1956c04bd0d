"""Statistics of a model move towards a partner's, and never beyond both sides' values."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gossip.averaging.vectors import Statistics, Vector
from node.model.inventory.statistics import StatisticsMixer
from node.model.snapshot import ModelState
from sim.engine.vector_model import VectorModel


def said(values, weight, start=0, **options):
    statistics = Statistics(Vector(np.asarray(values, np.float32)), weight, start, **options)
    return statistics, torch.from_numpy(statistics.values)


VALUES = st.lists(st.floats(2**-10, 1e4, width=32), min_size=6, max_size=6)


def trained(values):
    """Return a live vector, and a mixer that has seen local steps change every element."""
    live, mixer = [torch.tensor(values[:2]), torch.tensor(values[2:])], StatisticsMixer()
    mixer.begin(live)
    for tensor in live:
        tensor.add_(1.0)
    return live, mixer


def flat(live):
    return torch.cat([tensor.flatten() for tensor in live]).numpy()


@given(VALUES, VALUES, st.floats(0.0, 1.0))
def test_a_result_lies_between_both_sides(ours, theirs, weight):
    live, mixer = trained(ours)
    before, partner = flat(live), np.array(theirs, np.float32)
    mixer.mix(live, *said(partner, weight, 0))
    low, high = np.minimum(before, partner), np.maximum(before, partner)
    assert np.all(flat(live) >= low * (1 - 1e-6))
    assert np.all(flat(live) <= high * (1 + 1e-6))


@given(VALUES, VALUES)
def test_both_sides_of_a_pair_end_with_the_same_bits_where_they_are_near(ours, offsets):
    theirs = np.array(ours) * (1 + 1e-5 * np.array(offsets))
    sides = [trained(ours), trained(theirs.tolist())]
    values = [flat(live) for live, _ in sides]
    for (live, mixer), partner in zip(sides, values[::-1], strict=True):
        mixer.mix(live, *said(partner, 0.5, 0))
    np.testing.assert_array_equal(flat(sides[0][0]), flat(sides[1][0]))


def test_partners_move_a_statistic_by_at_most_its_reach_until_the_next_local_step():
    live, mixer = trained([0.0, 99.0, 1.0, 2.0, 3.0, 4.0])  # 1, 100 and 2 to 5 after the local step.
    anchor, reach = flat(live), np.array([200, 200, 10, 10, 10, 10])
    for _ in range(50):
        mixer.mix(live, *said(np.full(6, 1e30, np.float32), 0.5, 0))
    np.testing.assert_allclose(flat(live), anchor + reach, rtol=1e-5)
    live[0].fill_(0.5)
    mixer.mix(live, *said(np.full(6, -1e30, np.float32), 1.0, 0))
    np.testing.assert_allclose(flat(live)[:2], [-0.5, -0.5])


def test_constants_stay_while_the_node_trains_and_agree_when_it_settles():
    live, mixer = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])], StatisticsMixer()
    partner = np.array([1.5, 2.5, 3.5], np.float32)
    mixer.begin(live)
    live[1].add_(0.5)  # A local step changes the last one alone.
    mixer.mix(live, *said(partner + 1, 0.5, 0))
    assert flat(live).tolist() == [1.0, 2.0, 4.0]
    mixer.mix(live, *said(partner, 0.5, 0, moves_all=True))
    assert flat(live).tolist() == [1.25, 2.25, 3.75]


@pytest.mark.parametrize(("length", "mixed"), [(1.0, 1.0), (2.0, 2**0.5)])
def test_the_mean_of_vectors_of_length_one_has_that_length(length, mixed):
    """As those of spectral normalisation, by which weights are divided."""
    live, mixer = [torch.tensor([length, 0.0, 0.0])], StatisticsMixer()
    mixer.begin(live)
    live[0].copy_(torch.tensor([0.0, length, 0.0]))
    mixer.mix(live, *said([length, 0.0, 0.0], 0.5))
    np.testing.assert_allclose(flat(live), [mixed / 2**0.5, mixed / 2**0.5, 0.0], rtol=1e-6)


def test_a_constant_of_float64_keeps_what_float32_cannot_hold():
    model = nn.Module()
    model.register_buffer("since", torch.tensor([1_700_000_503.25], dtype=torch.float64))
    model.register_buffer("mean", torch.tensor([0.0], dtype=torch.float64))
    state = ModelState(model)
    for moves_all in (False, True):
        model.mean += 0.1
        state.mix_statistics(said([1_700_000_503.25, 0.2], 0.5, moves_all=moves_all)[0])
    vector = np.array([1_700_000_503.25, float(model.mean)], np.float32)
    state.adopt_exchanged(vector, (), {})
    assert model.since.tolist() == [1_700_000_503.25]
    assert model.mean == model.mean.float(), "nodes agree on what varies in float32"
    state.write(vector + 512)
    assert model.since.tolist() == [1_700_001_024.0]


def test_a_part_of_the_statistics_moves_alone():
    live, mixer = trained([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    mixer.mix(live, *said([np.nan, 4.0, np.nan, np.nan, 8.0, np.nan], 0.5))
    assert flat(live).tolist() == [2.0, 3.5, 4.0, 5.0, 7.0, 7.0]


def test_a_simulated_model_moves_as_a_real_one():
    theirs = np.array([1.5, 3.0, 2.5], np.float32)
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2))
    model.register_buffer("mean", torch.tensor([1.0, 2.0, 3.0]))
    state = ModelState(model)
    simulated = VectorModel(np.array([0, 0, 1, 2, 3], np.float32))
    for one in (state, simulated):
        one.mix_statistics(said(theirs, 0.25, 2, moves_all=True)[0])
    np.testing.assert_array_equal(model.mean.numpy(), simulated.vector[2:])

"""Vectors that hold buffers, as BatchNorm's running variances, which must stay positive."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from torch import nn

from gossip.codecs import COMPILED, NUMPY, fastest_codec, get_codec
from sim import Scenario
from sim.simulation import Simulation


def negative_variances(codec: str) -> int:
    """Return how many of 192 variances are negative after a mix of two models whose variances differ by a third."""
    random, negative = np.random.default_rng(0), 0
    for session in range(20):
        ours = np.exp(random.normal(-2.0, 2.0, 192)).astype(np.float32)
        theirs = ours * np.exp(random.normal(0.0, 0.3, 192)).astype(np.float32)
        decoded = np.empty_like(ours), np.empty_like(ours)
        for values, out in zip((ours, theirs), decoded, strict=True):
            get_codec(codec).quantised(values, out, session)
        negative += int((ours + 0.5 * (decoded[1] - decoded[0]) < 0).sum())
    return negative


def test_a_scale_for_a_block_makes_variances_negative_and_rounding_each_element_does_not():
    assert negative_variances("int8") > 20
    assert negative_variances("bf16") == negative_variances("fp32") == 0


@pytest.mark.parametrize("machine", [COMPILED, NUMPY])
@pytest.mark.parametrize("rate", [None, 0.1, 10.0, 1e4])
def test_where_vectors_hold_buffers_no_codec_with_blocks_is_chosen(machine, rate):
    chosen = fastest_codec(rate, dataclasses.replace(machine, has_buffers=True))
    assert get_codec(chosen).block == 1


def normalised():
    return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


@pytest.mark.parametrize(
    ("model", "has_buffers"), [("mlp", False), ("tests.gossip.codecs.test_buffers:normalised", True)]
)
def test_simulated_peers_know_whether_their_models_have_buffers(model, has_buffers):
    task = {"dataset": "digits", "model": model}
    scenario = Scenario.from_mapping({"peers": 4, "rounds": 1, "task": task, "membership": {"mode": "ideal"}})
    assert Simulation(scenario).swarm.machine.has_buffers == has_buffers

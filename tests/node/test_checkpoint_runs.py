"""A checkpoint of any run loads, whatever numbers somebody lied into the run; and into a compiled model."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gossip.errors import CheckpointError
from gossip.wire.records import check, trusting
from node import Node
from node.model import checkpoint

MOST = 2**53 - 1
GENESIS = "ab" * 16


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(4, 2)


def saved(path, **meta):
    weights = linear(5).state_dict()
    checkpoint.save(path, weights, None, meta)
    return weights


@pytest.mark.parametrize(
    ("meta", "samples", "version"),
    [
        ({"swarm_samples": 2**70, "version": 1e300}, MOST, MOST),
        ({"swarm_samples": 2**53, "version": 2.0**53}, MOST, MOST),
        ({"swarm_samples": -5, "version": -1.0}, 0, 0.0),
        ({"swarm_samples": math.nan, "version": math.nan}, 0, 0.0),
        ({"swarm_samples": math.inf, "version": math.inf}, MOST, MOST),
        ({"swarm_samples": "many", "version": None}, 0, 0.0),
        ({"swarm_samples": [1], "version": {"a": 1}}, 0, 0.0),
        ({}, 0, 0.0),
    ],
    ids=["beyond 64 bits", "one too many", "negative", "nan", "infinite", "text", "nested", "none"],
)
def test_a_checkpoint_with_numbers_that_cannot_be_loads_and_its_node_is_not_refused(
    meta, samples, version, quick, tmp_path
):
    weights = saved(tmp_path / "run", genesis=GENESIS, **meta)
    model = linear()
    with Node(model, config=quick) as node:
        node.load(tmp_path / "run")
        node.step(samples=4)
        peer = node._training.peer
        record = peer.membership.me
        check(record, trusting)
        assert record.genesis.hex() == GENESIS
        assert record.progress == samples
        assert min(version, 2**52) <= peer.local.version <= version + 1  # a node keeps to half of what others read
    assert torch.equal(model.weight, weights["weight"])


@pytest.mark.parametrize("genesis", ["zz" * 16, "ab", "", 5, ["ab"], "ab" * 17, "\u00fc" * 32])
def test_a_run_that_cannot_be_is_refused_in_a_sentence_and_the_model_is_left_alone(genesis, quick, tmp_path):
    saved(tmp_path / "run", genesis=genesis)
    model = linear()
    before = model.weight.detach().clone()
    with Node(model, config=quick) as node:
        with pytest.raises(CheckpointError, match="run that cannot be"):
            node.load(tmp_path / "run")
        node.step()
    assert torch.equal(model.weight, before)


class Compiled(nn.Module):
    """As torch.compile wraps a module, without the minutes that a compiler may take."""

    def __init__(self, inner):
        super().__init__()
        self._orig_mod = inner


@pytest.mark.parametrize("by", ["plain", "compiled"])
@pytest.mark.parametrize("into", ["plain", "compiled"])
def test_compiled_or_not_a_checkpoint_has_the_models_own_names(by, into, quick, tmp_path):
    source, target = linear(1), linear(2)
    with Node(Compiled(source) if by == "compiled" else source, config=quick) as node:
        node.step(samples=4)
        node.save(tmp_path / "run")
    assert set(checkpoint.load(tmp_path / "run").tensors) == {"weight", "bias"}
    with Node(Compiled(target) if into == "compiled" else target, config=quick) as node:
        node.load(tmp_path / "run")
    assert torch.equal(source.weight, target.weight)


def test_weights_of_no_run_begin_one_and_what_is_not_loaded_is_said(quick, tmp_path, caplog):
    weights = {name: torch.full_like(value, 7.0) for name, value in linear().state_dict().items()}
    save_file(weights, tmp_path / "pretrained.safetensors")
    model = linear()
    with Node(model, config=quick) as node:
        assert node.load(tmp_path / "pretrained.safetensors") == {}
        assert torch.equal(model.weight, weights["weight"])
        assert node.swarm_samples == 0
        node.step(samples=4)
        assert node.swarm_samples == 4
        with torch.no_grad():
            model.weight.fill_(1.0)
        node.load(tmp_path / "pretrained.safetensors")  # what is trained already is worth more than any file
        assert model.weight.unique().tolist() == [1.0]
        node.save(tmp_path / "ours")
        node.load(tmp_path / "ours.safetensors")
        node._training.heard()
    told = [record.getMessage().split(": ", 1)[1] for record in caplog.records if getattr(record, "kind", "") == "load"]
    assert told == [
        f"{tmp_path / name} is not loaded: the run that this node holds has 4 samples behind it, and stays."
        for name in ("pretrained.safetensors", "ours.safetensors")
    ]

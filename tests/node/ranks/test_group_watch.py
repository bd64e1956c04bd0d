"""Rank 0 of a node of several ranks watches its loop as a node of one process does."""

import json

import pytest

from gossip.config import Config
from node.model.inventory.watch import UNCHANGED_STEPS
from tests.node.conftest import until
from tests.node.model.test_watch import HiddenMasters
from tests.node.ranks.rank_loops import model_of, no_errors, results, trained, trained_by
from tests.node.ranks.rank_threads import MemoryGroup, RankThread, play
from tests.node.trainees import linear, step_towards

pytestmark = pytest.mark.usefixtures("memory_groups")

MIXES = 40  # Of which the first 8 suffice for a verdict.
WAYS = {"at any step": {}, "in lockstep": {"max_version_gap": 2.0}}


def told_to(node):
    return " ".join(str(event) for event in node._training.listeners.history())


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_that_trains_no_weight_of_the_node_is_told_so(way):
    def loop(node, rank):
        for _ in range(UNCHANGED_STEPS + 2):
            node.step(1.0, 4)
        if rank == 0:
            until(lambda: "No weight of this Node has changed in 32 steps" in told_to(node))
        return told_to(node)

    assert not results(loop, config=Config(join_timeout_s=3.0, mix_every_steps=2, **WAYS[way]))[1]


def test_a_loop_that_trains_is_told_nothing():
    def loop(node, rank):
        for step in range(UNCHANGED_STEPS + 2):
            node.step(trained(model_of(node), trained_by(node).optimizers.all[0], step), 4)
        return told_to(node)

    assert "has changed" not in results(loop)[0]


def test_an_optimizer_that_undoes_every_mix_is_named(train):
    config = Config(mix_every_steps=2, join_timeout_s=3.0)
    models = [linear(seed, width=64) for seed in (0, 1, 1)]
    partner, *pair = [(model, HiddenMasters(model.parameters())) for model in models]
    other = train(*partner, step_towards(partner[0], [partner[1]], -1.0), config=config)

    def loop(node, rank):
        step = step_towards(model_of(node), trained_by(node).optimizers.all, 1.0)
        while node.metrics().exchanges_done < MIXES:  # All ranks read the same at the same step.
            node.step(step(), 4)
        if rank == 0:
            until(lambda: "HiddenMasters, or the program, keeps a copy" in told_to(node))

    options = {"config": config, "seeds": [other.node.address]}
    channels = MemoryGroup(2).channels
    played = [RankThread(channel, *made, loop, options) for channel, made in zip(channels, pair, strict=True)]
    no_errors(play(played))


def test_the_timeline_of_rank_0_has_its_steps(tmp_path):
    path = tmp_path / "loop.trace.json"

    def loop(node, rank):
        for _ in range(5):
            node.step(1.0, 4)

    results(loop, trace=path)
    events = json.loads(path.read_text())
    assert [event["args"]["step"] for event in events if event["name"] == "train"] == [1, 2, 3, 4, 5]

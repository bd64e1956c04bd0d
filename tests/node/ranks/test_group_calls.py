"""Calls that all ranks of a node make together: the run goes on and ends on all, and all learn of an error."""

from __future__ import annotations

import json
import socket

import pytest
import torch
from torch import nn

from gossip.errors import CheckpointError, LocalError
from node import running
from tests.node.ranks.rank_loops import flat, model_of, no_errors, ranks, run
from tests.node.ranks.rank_threads import play


@pytest.fixture(autouse=True)
def _channels_are_groups(monkeypatch):
    monkeypatch.setattr("node.node.GroupChannel", lambda group: group)


def test_all_ranks_go_on_with_the_run_of_a_state(quick):
    def save(node, rank):
        run(node, 5)
        return node.state_dict()

    no_errors(play(before := ranks(save)[1]))
    states = [json.loads(json.dumps(rank.result)) for rank in before]

    def go_on(node, rank):
        with pytest.raises(CheckpointError, match="is a mapping"):
            node.load_state_dict([])
        node.load_state_dict(states[rank])
        return node.swarm_samples, node.state_dict()

    no_errors(play(after := ranks(go_on)[1]))
    assert after[0].result[0] == after[1].result[0] == 40
    assert after[0].result[1]["run_id"] == after[1].result[1]["run_id"] == states[1]["run_id"]


def test_all_ranks_return_to_the_weights_of_a_finished_run(tmp_path):
    def finish(node, rank):
        run(node, 3)
        node.finish(0.1)
        return flat(model_of(node)), node.state_dict()["run_id"], node.swarm_samples

    def again(node, rank):
        assert node.finished
        return flat(model_of(node)), node.state_dict()["run_id"], node.swarm_samples

    no_errors(play(before := ranks(finish, state_dir=tmp_path)[1]))
    no_errors(play(after := ranks(again, state_dir=tmp_path)[1]))
    for rank in after:
        assert torch.equal(rank.result[0], before[0].result[0])
        assert rank.result[1:] == before[0].result[1:]


def test_an_error_in_a_call_that_all_make_is_everybodys_and_they_go_on():
    def loop(node, rank):
        with pytest.raises(CheckpointError, match="There is no checkpoint") as caught:
            node.load("nowhere")
        with pytest.raises(LocalError, match="names no run"):
            node.merge("what")
        run(node, 5)
        return str(caught.value)

    _, pair = ranks(loop)
    no_errors(play(pair))
    assert pair[0].result == pair[1].result


def test_a_node_that_cannot_join_says_so_on_all_ranks():
    _, pair = ranks(lambda node, rank: None, seeds=["127.0.0.1:9"], join_or_fail_s=0.5)
    play(pair)
    assert {str(rank.error) for rank in pair} == {str(pair[0].error)}
    assert "Could not join within 0.5 s" in str(pair[0].error)


def test_a_node_that_cannot_listen_says_so_on_all_ranks():
    """Rank 0 then has nothing to tell the other ranks about a swarm."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        _, pair = ranks(lambda node, rank: None, listen=f"127.0.0.1:{taken.getsockname()[1]}")
        play(pair)
    assert {str(rank.error) for rank in pair} == {str(pair[0].error)}
    assert all(isinstance(rank.error, LocalError) for rank in pair)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_raises_ends_the_others_with_a_sentence_that_names_it(failing):
    def loop(node, rank):
        run(node, 5)
        if rank == failing:
            raise KeyError("a fault of the loop")
        run(node, 10**6)

    _, pair = ranks(loop, size=3)
    play(pair)
    assert isinstance(pair[failing].error, KeyError)
    others = [rank.error for rank in pair if rank is not pair[failing]]
    sentence = f"Rank {failing} of this node's group has failed (KeyError: 'a fault of the loop'), and the others end"
    assert all(isinstance(error, LocalError) and sentence in str(error) for error in others)


def test_ranks_in_different_calls_are_told_which():
    def loop(node, rank):
        run(node, 3)
        if rank == 0:
            node.settle(1.0)
        else:
            run(node, 10**6)

    _, pair = ranks(loop)
    play(pair)
    assert "this one in settle: every rank must call" in str(pair[0].error)
    assert "this one in step: every rank must call" in str(pair[1].error)


def test_what_ends_in_another_ranks_death_is_told_in_a_sentence_from_what_torch_raised():
    def loop(node, rank):
        run(node, 3)
        if rank == 1:
            node._training.ranks.channel.close()  # The kernel closes the sockets of a killed process, without a reason.
            node._training.ranks.is_open = False
            raise SystemExit
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:10979: Connection reset by peer.")

    _, pair = ranks(loop)
    play(pair)
    assert "Rank 1 of this node's group has ended, was killed, or left" in str(pair[0].error)
    assert isinstance(pair[0].error.__cause__, RuntimeError)


def test_ranks_with_other_models_or_optimizers_are_refused():
    before = list(running._running)
    _, pair = ranks(lambda node, rank: None)
    pair[1].optimizer = torch.optim.Adam(pair[1].model.parameters())
    play(pair)
    assert "['Adam'] and rank 0 of its group ['SGD']" in str(pair[1].error)
    _, pair = ranks(lambda node, rank: None)
    pair[1].model, pair[1].optimizer = nn.Linear(2, 2), None
    play(pair)
    assert "Rank 1 holds another model than rank 0" in str(pair[1].error)
    assert isinstance(pair[0].error, LocalError)
    assert running._running == before, "a node whose group was refused goes on without its loop"


def test_an_optimizer_that_is_sharded_over_the_ranks_is_refused():
    class Sharded(torch.optim.SGD):
        def consolidate_state_dict(self, to=0):
            """Stand for the method of torch.distributed.optim.ZeroRedundancyOptimizer."""

    _, pair = ranks(lambda node, rank: None, make=lambda p: Sharded(p, lr=0.1))
    play(pair)
    assert all("Sharded keeps another part of its state on each rank" in str(rank.error) for rank in pair)


def test_a_closed_node_says_so_on_every_rank():
    def loop(node, rank):
        run(node, 3)
        node.close()
        node.close()  # A second call does no harm.
        with pytest.raises(LocalError, match="This Node is closed"):
            run(node, 20)
        with pytest.raises(LocalError, match="used already"):
            node.start()

    no_errors(play(ranks(loop)[1]))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_divide_a_nodes_share_in_as_many_batches_of_as_many(size):
    def loop(node, rank):
        shards = [batch.tolist() for batch in node.shard(torch.arange(50), 4, shuffle=False)]
        sampler = node.sampler(50, 4)
        return shards, len(sampler), [batch for batch in sampler], [one for one in node.sampler(50)]

    _, found = ranks(loop, size=size)
    no_errors(play(found))
    for way in (0, 2):
        batches = list(zip(*[rank.result[way] for rank in found], strict=True))
        assert all(len({len(one) for one in row}) == 1 for row in batches), "a step has as many on every rank"
        given = [index for row in batches for batch in row for index in batch]
        assert sorted(set(given)) == list(range(50))
        assert len(given) - 50 < size, "what comes twice fills the last step up"
    assert all(rank.result[1] == len(rank.result[2]) for rank in found)
    indices = [index for rank in found for index in rank.result[3]]
    assert len(indices) == -(-50 // size) * size
    assert sorted(set(indices)) == list(range(50))


def test_drop_last_leaves_out_what_is_no_whole_batch_on_every_rank():
    def loop(node, rank):
        sampler = node.sampler(15, 4, drop_last=True)
        return len(sampler), len(list(sampler))

    _, pair = ranks(loop)
    no_errors(play(pair))
    assert [rank.result for rank in pair] == [(1, 1), (1, 1)]

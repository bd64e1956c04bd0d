"""Calls that all ranks of a node make together: the run goes on and ends on all, and all learn of an error."""

import json
import socket

import pytest
import torch
from torch import nn

from gossip.errors import CheckpointError, LocalError
from node import running
from tests.node.ranks.rank_loops import errors, flat, model_of, ranks, results, run
from tests.node.ranks.rank_threads import play

pytestmark = pytest.mark.usefixtures("memory_groups")


def test_all_ranks_go_on_with_the_run_of_a_state():
    def save(node, rank):
        run(node, 5)
        return node.state_dict()

    states = [json.loads(json.dumps(state)) for state in results(save)]

    def go_on(node, rank):
        with pytest.raises(CheckpointError, match="is a mapping"):
            node.load_state_dict([])
        node.load_state_dict(states[rank])
        return node.swarm_samples, node.state_dict()["run_id"]

    assert results(go_on) == [(40, states[1]["run_id"])] * 2


def test_all_ranks_return_to_the_weights_of_a_finished_run(tmp_path):
    def held(node):
        return flat(model_of(node)).tolist(), node.state_dict()["run_id"], node.swarm_samples

    def finish(node, rank):
        run(node, 3)
        node.finish(0.1)
        return held(node)

    def again(node, rank):
        assert node.finished
        return held(node)

    before = results(finish, state_dir=tmp_path)
    assert results(again, state_dir=tmp_path) == [before[0]] * 2


def test_an_error_in_a_call_of_all_ranks_is_raised_on_all_and_they_go_on():
    def loop(node, rank):
        with pytest.raises(CheckpointError, match="There is no checkpoint") as caught:
            node.load("nowhere")
        with pytest.raises(LocalError, match="names no run"):
            node.merge("what")
        run(node, 5)
        return str(caught.value)

    one, other = results(loop)
    assert one == other


@pytest.mark.parametrize("cannot", ["join", "listen"])
def test_a_node_that_cannot_start_says_so_on_all_ranks(cannot):
    """If it cannot listen, rank 0 has nothing to tell the other ranks about a swarm."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options, sentence = {
            "join": ({"seeds": ["127.0.0.1:9"], "join_or_fail_s": 0.5}, "Could not join within 0.5 s"),
            "listen": ({"listen": f"127.0.0.1:{port}"}, f"Cannot listen on 127.0.0.1:{port}"),
        }[cannot]
        one, other = errors(lambda node, rank: None, **options)
    assert isinstance(one, LocalError)
    assert isinstance(other, LocalError)
    assert str(one) == str(other)
    assert sentence in str(one)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_raises_ends_the_others_with_a_sentence_that_names_it(failing):
    def loop(node, rank):
        run(node, 5)
        if rank == failing:
            raise KeyError("a fault of the loop")
        run(node, 10**6)

    ended = errors(loop, size=3)
    assert isinstance(ended.pop(failing), KeyError)
    sentence = f"Rank {failing} of this node's group has failed (KeyError: 'a fault of the loop'), and the others end"
    assert all(isinstance(error, LocalError) and sentence in str(error) for error in ended)


def test_ranks_in_different_calls_are_told_which():
    def loop(node, rank):
        run(node, 3)
        if rank == 0:
            node.settle(1.0)
        else:
            run(node, 10**6)

    one, other = errors(loop)
    assert "this one in settle: every rank must call" in str(one)
    assert "this one in step: every rank must call" in str(other)


def test_an_error_of_torch_at_the_death_of_another_rank_becomes_a_sentence():
    def loop(node, rank):
        run(node, 3)
        if rank == 1:
            node._training.ranks.channel.close()  # The kernel closes the sockets of a killed process, without a reason.
            node._training.ranks.is_open = False
            raise SystemExit
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:10979: Connection reset by peer.")

    error, _ = errors(loop)
    assert "Rank 1 of this node's group has ended, was killed, or left" in str(error)
    assert isinstance(error.__cause__, RuntimeError)


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

    ended = errors(lambda node, rank: None, make=lambda p: Sharded(p, lr=0.1))
    assert all("Sharded keeps another part of its state on each rank" in str(error) for error in ended)


def test_a_closed_node_says_so_on_every_rank():
    def loop(node, rank):
        run(node, 3)
        node.close()
        node.close()  # A second call does no harm.
        with pytest.raises(LocalError, match="This Node is closed"):
            run(node, 20)
        with pytest.raises(LocalError, match="used already"):
            node.start()

    results(loop)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_divide_a_nodes_share_in_as_many_batches_of_as_many(size):
    def loop(node, rank):
        shards = [batch.tolist() for batch in node.shard(torch.arange(50), 4, shuffle=False)]
        sampler = node.sampler(50, 4)
        batches = [*sampler]
        assert len(sampler) == len(batches)
        return shards, batches, [*node.sampler(50)]

    *both_ways, single = zip(*results(loop, size=size), strict=True)
    for of_ranks in both_ways:
        steps = list(zip(*of_ranks, strict=True))
        assert all(len({len(batch) for batch in step}) == 1 for step in steps), "a step has as many on every rank"
        given = [index for step in steps for batch in step for index in batch]
        assert sorted(set(given)) == list(range(50))
        assert len(given) - 50 < size, "what comes twice fills the last step up"
    indices = [index for of_rank in single for index in of_rank]
    assert len(indices) == -(-50 // size) * size
    assert sorted(set(indices)) == list(range(50))


def test_drop_last_leaves_out_on_every_rank_what_is_no_whole_batch():
    def loop(node, rank):
        sampler = node.sampler(15, 4, drop_last=True)
        return len(sampler), len(list(sampler))

    assert results(loop) == [(1, 1), (1, 1)]

"""A node that leaves mixes with the remaining members, which keep what it learned since its last mix."""

import threading

import pytest
import torch

from gossip import Config
from gossip.config.internal import Internal
from tests.node.loop.test_settling import settling, sharing
from tests.node.storage.stores import notices

STEPS, STEP = 50, 0.2
RARELY = {"mix_every_steps": 100_000, "boundary_patience_s": 5.0, "stall_s": 5.0, "codec": "fp32", "filter": "none"}


def counter(index):
    """Return a model that adds STEP to an element of its own in each step, and that step."""
    model = {"w": torch.full((64,), 100.0)}

    def work():
        model["w"][index] += STEP

    return model, None, work


def swarm_of(train, until, count, **internal):
    config = Config(**RARELY, internal=Internal(**internal))
    nodes = [train(*counter(0), config=config)]
    nodes += [train(*counter(index), config=config, seeds=[nodes[0].node.address]) for index in range(1, count)]
    until(lambda: all(len(sharing(node)) == count - 1 for node in nodes))
    until(lambda: all(node.node.metrics().steps >= STEPS for node in nodes))
    return nodes


def learned_of(node, index):
    """Return what a node holds of the steps of the node with this index."""
    return node.do(lambda _: float(node.model["w"][index]) - 100.0)


@pytest.mark.parametrize("count", [2, 4])
def test_those_that_stay_keep_what_a_node_that_leaves_has_learned(train, until, count):
    *others, last = swarm_of(train, until, count)
    assert [learned_of(node, count - 1) for node in others] == [0.0] * (count - 1)
    last.stop()
    kept, learned = sum(learned_of(node, count - 1) for node in others), STEP * last.node.metrics().steps
    # Each mix halves what the leaving node alone has, and the others' correction moves it a little. That node may end
    # before it has added its own half of the last mix.
    assert kept / learned == pytest.approx(1 - 0.5 ** (count - 1), abs=0.03)
    assert not notices(last.node, "unshared")


def test_with_no_grace_it_leaves_at_once(train, until):
    other, last = swarm_of(train, until, 2, grace_s=0.0)
    last.stop()
    assert learned_of(other, 1) == 0.0


def test_weights_that_an_error_may_have_ruined_are_given_to_nobody(train, until):
    other, last = swarm_of(train, until, 2)

    def fail():
        raise ValueError("in the loop")

    last.work = fail
    last.join(10)
    assert isinstance(last.error, ValueError)
    last.error = None
    assert learned_of(other, 1) == 0.0


def test_a_node_is_told_if_no_member_takes_its_last_steps(train, until):
    other, last = swarm_of(train, until, 2, grace_s=0.5)
    stands, may_go_on = threading.Event(), threading.Event()
    other.work = lambda: (stands.set(), may_go_on.wait())[1]
    assert stands.wait(20)
    last.stop()
    may_go_on.set()
    (text,) = notices(last.node, "unshared")
    assert "within 0.5 s (--grace)" in text


def test_after_settling_there_is_nothing_left_to_mix(train, until):
    other, last = nodes = swarm_of(train, until, 2)
    for node in nodes:
        node.work = None
    answers = [settling(node, 5.0, 20.0) for node in nodes]
    assert [answer.get(timeout=30) for answer in answers] == [0.0, 0.0]
    mixes = other.side.network.peer.exchanges.done_count
    other.leave.set()
    last.stopping = True
    last.leave.set()
    last.join(10)
    assert other.side.network.peer.exchanges.done_count == mixes

"""Settling as a meeting point: who comes first waits for the others, and for nobody who is gone."""

from __future__ import annotations

import queue
import threading
import time

from node.loop.settling import SETTLED
from node.observe.reduced import is_settling
from tests.node.trainees import linear, mixed, spread


def settling(trainee, seconds=20.0, wait_s=60.0):
    """Ask its loop to settle, and wait for no answer."""
    answer = queue.SimpleQueue()

    def settle(node):
        answer.put(node.settle(seconds, wait_s=wait_s))
        trainee.leave.wait(60)  # as at a run's end, where it evaluates and saves

    trainee.leave = threading.Event()
    trainee.tasks.put((settle, queue.SimpleQueue()))
    return answer


def sharing(trainee):
    """The records of the others that hold its run."""
    peer = trainee.side.network.peer
    return peer.membership.run_members(peer.view.run_id)


def test_whoever_settles_waits_for_a_slower_node_and_both_end_with_the_same_weights(train, until):
    a, b = linear(1), linear(2)
    first = train(a)
    second = train(b, seeds=[first.node.address])
    until(lambda: sharing(first))  # it has heard that the other holds the weights
    early = settling(first, 4.0)
    until(lambda: first.side.settling.settled_at is not None)
    until(mixed(first, times=5))
    until(lambda: first.side.network.peer.exchanges.largest_distance() < SETTLED)  # another may bring more
    second.do(lambda node: b.weight.data.add_(1.0))
    assert early.empty()
    late = settling(second)
    early.get(timeout=60)
    first.leave.set()  # it steps on, training nothing, so that the other can end with it however busy the machine is
    late.get(timeout=60)
    assert spread(a, b) < 1e-3
    second.leave.set()
    # They train on, and so nobody need be waited for at what was: the word is taken back.
    until(lambda: first.side.settling.settled_at is None and second.side.settling.settled_at is None)
    until(lambda: sharing(second) and not any(is_settling(one) for one in sharing(second)))


def test_whoever_waits_to_settle_waits_for_nobody_that_leaves_or_has_finished(train, until):
    a, b = linear(1), linear(2)
    first = train(a)
    second = train(b, seeds=[first.node.address])
    until(lambda: sharing(first))  # it has heard that the other holds the weights
    early = settling(first, 0.2)
    until(lambda: first.side.settling.settled_at is not None)
    second.do(lambda node: node.finish(0.1))
    assert isinstance(early.get(timeout=30), float | None)
    first.leave.set()


def test_whoever_never_comes_to_settle_costs_the_time_that_was_given_and_is_told(train, until, caplog):
    a, b = linear(1), linear(2)
    first = train(a)
    train(b, seeds=[first.node.address])
    until(lambda: sharing(first))  # it has heard that the other holds the weights
    began = time.monotonic()
    early = settling(first, 0.1, wait_s=0.7)
    first.leave.set()
    early.get(timeout=30)
    assert time.monotonic() - began >= 0.7
    until(lambda: [record for record in caplog.records if getattr(record, "kind", "") == "waited"])
    assert "Waited 0.7 s to settle with 1 member that has not come" in caplog.text


def test_nodes_that_begin_together_show_what_they_trained_once_they_have_settled(launch, until, tmp_path):
    file = tmp_path / "seeds"
    first = launch(linear(1), wait_for=3, wait_s=60.0)
    file.write_text(first.made.address)
    nodes = [first, *(launch(linear(n), seeds=[f"@{file}"], wait_for=3, wait_s=60.0) for n in (2, 3))]
    assert all(node.running.wait(30) for node in nodes)
    until(lambda: all(node.side.swarm_samples > 1_000 for node in nodes))
    answers = [settling(node, 4.0) for node in nodes]
    for answer in answers:
        answer.get(timeout=60)
    trained = sum(node.side.run.samples for node in nodes)
    for node in nodes:
        assert abs(node.side.swarm_samples / trained - 1) < 0.01
        node.leave.set()


def test_a_node_without_other_members_settles_at_once(train):
    alone = train(linear(1))
    began = time.monotonic()
    assert alone.do(lambda node: node.settle(20.0, wait_s=20.0)) is None
    assert time.monotonic() - began < 10.0

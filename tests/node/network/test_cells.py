"""Nodes in the cells of a notebook: closed, made anew over the same model, and forgotten; and what they remember."""

import contextlib
import os
import subprocess
import sys
import threading

import pytest
from torch import nn

from gossip.errors import LocalError
from node import Node, running
from node.identity.statedir import StateDir
from tests.node.conftest import QUICK
from tests.node.trainees import state_of


@pytest.mark.parametrize("call", ["step", "settle", "finish"])
def test_a_closed_node_says_that_it_trains_with_nobody(call):
    one = Node(nn.Linear(2, 2), config=QUICK).start()
    one.step()
    one.close()
    with pytest.raises(LocalError, match="This Node is closed, and what is trained reaches no member: make a new Node"):
        getattr(one, call)()


def test_of_two_nodes_over_one_model_the_second_goes_on_and_the_user_is_told(train, until, caplog):
    partner, model = train(nn.Linear(2, 2)), nn.Linear(2, 2)
    first = Node(model, config=QUICK, seeds=[partner.node.address]).start()
    with Node(model, config=QUICK, seeds=[partner.node.address]) as second:
        with pytest.raises(LocalError, match="closed"):
            first.step()
        second.step()
        until(lambda: state_of(partner.node, first.id) == "left")
    assert running._running == [partner.side]
    told = "Another Node over this model was still running in this process, and is closed now."
    assert sum(record.message.endswith(told) for record in caplog.records) == 1


def test_a_node_that_its_program_lets_go_of_leaves(train, until):
    partner = train(nn.Linear(2, 2))
    forgotten = Node(nn.Linear(2, 2), config=QUICK, seeds=[partner.node.address]).start()
    name = forgotten.id
    del forgotten  # Freed at once, without a collection of garbage, which runs in whatever thread.
    until(lambda: state_of(partner.node, name) == "left")
    assert running._running == [partner.side]


def test_a_forked_child_that_steps_its_parents_node_is_told(until):
    def stepped():
        with pytest.raises(LocalError, match=r"runs in process \d+, and this one was forked from it: step it there"):
            until(lambda: one.step(), 5.0)

    one = Node(nn.Linear(2, 2), config=QUICK).start()
    child = os.fork()
    if not child:
        ended = 1
        with contextlib.suppress(BaseException):
            stepped()
            ended = 0
        os._exit(ended)
    assert os.waitpid(child, 0)[1] == 0
    one.step()
    one.close()


def test_a_node_may_be_closed_from_another_thread(until):
    one = Node(nn.Linear(2, 2), config=QUICK).start()
    failed = []
    threading.excepthook, before = failed.append, threading.excepthook
    try:
        closing = threading.Thread(target=one.close)
        closing.start()
        closing.join(10)
    finally:
        threading.excepthook = before
        one.close()
    assert not failed


def test_a_partner_that_came_late_is_remembered_at_once(train, until, tmp_path):
    ours = train(nn.Linear(2, 2), state_dir=tmp_path)
    book, writes = ours.side.service.book, []
    remember = book.save
    book.save = lambda peer: (writes.append(peer.view.alive_count), remember(peer))
    until(lambda: len(writes) == 2)  # They come after one second and three; the next would come after seven.
    assert set(writes) == {1}
    book.pause_s = 3600.0
    theirs = train(nn.Linear(2, 2), seeds=[ours.node.address])
    until(lambda: [record.id.hex() for record in StateDir(tmp_path).read().book] == [theirs.node.id])
    assert writes == [1, 1, 2]


@pytest.mark.slow
def test_a_process_that_ends_without_closing_says_so(train, until):
    partner = train(nn.Linear(2, 2))
    script = "import sys; from torch import nn; from node import Node\n"
    script += "node = Node(nn.Linear(2, 2), seeds=[sys.argv[1]]).start(); print(node.id); raise ValueError"
    done = subprocess.run(
        [sys.executable, "-c", script, partner.node.address], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "ValueError" in done.stderr
    until(lambda: state_of(partner.node, done.stdout.strip()) == "left", 1.0)

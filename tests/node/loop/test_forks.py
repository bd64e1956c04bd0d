"""Forked children of a training process keep neither its port nor its links, and do not change its node."""

import os
import signal
import socket
import subprocess
import time

import pytest
from torch import nn

from tests.harness import warm

PARENT = """
import multiprocessing, os, sys, time, torch
from torch import nn
from gossip.config import Config
from node import Node
torch.set_num_threads(1)
with Node(nn.Linear(4, 2), seeds=sys.argv[1:], config=Config(mix_every_steps=2)) as node:
    while node.metrics().exchanges_done < 2:
        node.step()
        time.sleep(0.005)
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    child = context.Process(target=lambda: (begun.set(), time.sleep(120)), daemon=True)
    child.start()
    begun.wait()
    print(node.address, child.pid, flush=True)
    while True:
        node.step()
        time.sleep(0.005)
"""


def test_a_worker_that_outlives_its_killed_parent_keeps_neither_its_port_nor_its_links(train, until):
    here = train(nn.Linear(4, 2))
    with warm.Python("-c", PARENT, here.node.address, stdout=subprocess.PIPE, text=True) as parent:
        address, child = parent.stdout.readline().split()
        host, _, port = address.rpartition(":")
        try:
            until(lambda: here.node.metrics().exchanges_done >= 2, 30)
            with socket.create_connection((host, int(port)), 5):
                pass
            parent.kill()
            parent.wait(10)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host, int(port)), 5)
            died = time.monotonic()
            until(lambda: not len(here.side.network.runtime.links), 10)
            assert time.monotonic() - died < 5, "the end of a link comes with the process, and is not waited for"
            assert warm.is_running(int(child))
        finally:
            parent.kill()
            os.kill(int(child), signal.SIGKILL)


FORKING = """
import os, sys, time
from torch import nn
from gossip.config import Config
from node import Node
from node.loop import training
early = Node(nn.Linear(4, 2), seeds=[sys.argv[1]])
with Node(nn.Linear(4, 2), seeds=[sys.argv[1]], config=Config(mix_every_steps=2), state_dir=sys.argv[2]) as node:
    while node.metrics().exchanges_done < 2:
        node.step()
        time.sleep(0.005)
    links = [*node._training.network.runtime.links.all()]
    began = time.monotonic()
    if not (child := os.fork()):
        training.LEAVE_S = 20.0  # The end of the with block would wait twice as long for a network thread.
        sys.exit(0)
    while not os.waitpid(child, os.WNOHANG)[0]:
        node.step()
        time.sleep(0.005)
    print("the child took", "long" if time.monotonic() - began > 20.0 else "no time", flush=True)
    for start in (early.start, lambda: Node(nn.Linear(4, 2), state_dir=sys.argv[2]).start()):
        if not (child := os.fork()):
            try:
                start()
            except Exception as error:
                print(error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    done = node.metrics().exchanges_done
    while node.metrics().exchanges_done < done + 2:
        node.step()
        time.sleep(0.005)
    print(links == [*node._training.network.runtime.links.all()], flush=True)
"""


def test_a_child_forked_by_a_script_ends_at_once_and_changes_nothing_of_its_parents_node(train, tmp_path):
    here = train(nn.Linear(4, 2))
    done = warm.run("-c", FORKING, here.node.address, tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    quick, early, held, same = done.stdout.splitlines()
    assert quick == "the child took no time"
    assert "this one was forked from it: step it there, or make a Node here" in early
    assert f"The state directory {tmp_path} is in use by process " in held
    assert same == "True"
    assert len(here.node.members) == 2, "nobody but the parent was ever on the wire"

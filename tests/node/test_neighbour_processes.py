"""Two real processes of one host: they mix by its memory, and one that is stopped or killed while it reads costs the
other an exchange and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from node.model import host_memory
from tests.harness.configs import tuned

SIZE = 1 << 20  # 4 MiB: eight chunks, and a thread reads them
CONFIG = tuned(mix_every_steps=2, stall_s=0.5, bench_s=0.5, join_timeout_s=3.0)

CHILD = """
import os, signal, sys, threading, time
import numpy as np
from gossip.averaging.streams import DifferenceReceiver
from gossip.config import Config
from node import Node
from tests.harness.configs import tuned

take, asked = DifferenceReceiver.take, []

def taken(self, values):
    if asked and self.position:
        os.kill(os.getpid(), asked.pop())
    return take(self, values)

def listen():
    for line in sys.stdin:
        asked.append(int(line))

DifferenceReceiver.take = taken
threading.Thread(target=listen, daemon=True).start()
vector = np.zeros(int(sys.argv[2]), np.float32)
config = tuned(mix_every_steps=2, stall_s=0.5, bench_s=0.5)
with Node({"x": vector}, seeds=[sys.argv[1]], config=config) as node:
    vector += 1.0
    print("here", flush=True)
    while True:
        node.step(samples=4)
        time.sleep(0.002)
"""


@pytest.fixture
def neighbour():
    """Another process with a node; it sends itself a signal in the middle of a vector when it is told which."""
    started = []

    def start(address):
        command = [sys.executable, "-c", CHILD, address, str(SIZE)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "here\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()


def tell(process, number):
    process.stdin.write(f"{int(number)}\n")
    process.stdin.flush()


def stopped(process):
    with open(f"/proc/{process.pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a host is shared on Linux")
def test_processes_mix_by_memory_and_one_that_stops_or_dies_in_the_middle_costs_an_exchange(train, until, neighbour):
    weights, others = np.zeros(SIZE, np.float32), set(host_memory._all)  # of tests before this one
    here = train({"x": weights}, config=CONFIG)
    runtime = here.side.runtime
    child = neighbour(here.node.address)

    def done():
        return here.node.metrics().exchanges_done

    def lent():
        return [loan for link in runtime.links.all() if link.channel is not None for loan in link.channel.lent.values()]

    def mixes_by_memory(count):
        until(lambda: here.node.metrics().shared_links >= 1, 30)  # 2 where both dialled
        begun = done()
        until(lambda: done() >= begun + 3, 30)  # by then snapshots lie in shared memory
        before, sent, received = done(), runtime.links.bytes_sent, runtime.links.bytes_received
        until(lambda: done() >= before + count, 30)
        assert runtime.links.bytes_sent - sent < SIZE, "a quarter of one vector"
        assert runtime.links.bytes_received - received < SIZE

    mixes_by_memory(5)
    assert np.ptp(here.do(lambda node: weights.copy())) == 0.0
    until(lambda: abs(float(weights[0]) - 0.5) < 0.25, 30)

    tell(child, signal.SIGSTOP)
    until(lambda: stopped(child), 30)
    until(lambda: not lent() and not runtime.averager.snapshots, 30)  # with its link or after it, all is taken back
    mixed = done()
    os.kill(child.pid, signal.SIGCONT)  # it reads on, and must not use what it reads
    until(lambda: done() > mixed, 30)
    mixes_by_memory(2)
    assert np.ptp(here.do(lambda node: weights.copy())) == 0.0
    assert 0.0 < weights[0] < 1.0

    tell(child, signal.SIGKILL)
    child.wait(30)
    until(lambda: not len(runtime.links), 30)
    assert not runtime.streams.neighbours.near
    until(lambda: not runtime.averager.snapshots, 30)
    assert len(set(host_memory._all) - others) <= here.side.pool.KEPT
    assert np.ptp(here.do(lambda node: weights.copy())) == 0.0
    assert here.node.metrics().shared_links == 0

"""Fixtures that run nodes in this process, each with a training loop in its own thread."""

import os
import queue
import subprocess
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip.config import Config
from gossip.errors import LocalError
from node import Node, running
from tests.harness import warm
from tests.node.commands import secret_of
from tests.node.trainees import filled

NEVER_RAN = LocalError("The test ended before this node trained.")
QUICK = Config(mix_every_steps=2, join_timeout_s=3.0)
STEP_S = 0.005  # No test needs more steps a second. Each costs the loop and the network thread 0.4 ms of CPU.


class Trainee(threading.Thread):
    """A thread that trains with a Node until it is stopped; ``do`` runs a function between two steps."""

    def __init__(self, model, optimizer=None, work=None, **options):
        super().__init__(daemon=True)
        self.model, self.optimizer, self.work = model, optimizer, work
        self.options = {"config": QUICK} | options
        self.made = self.node = None  # ``made`` is set at construction, ``node`` at entry.
        self.at_entry = {}
        self.error = None
        self.left_in_s = None
        self.running = threading.Event()
        self.stopping = False
        self.tasks = queue.SimpleQueue()

    @property
    def side(self):
        return self.made._training

    def run(self):
        try:
            self.made = Node(self.model, self.optimizer, **self.options)
            with self.made as node:
                self.node = node
                if isinstance(self.model, nn.Module):
                    self.at_entry = {name: value.clone() for name, value in self.model.state_dict().items()}
                self.running.set()
                while not self.stopping:
                    while not self.tasks.empty():
                        function, answer = self.tasks.get()
                        try:
                            answer.put(function(node))
                        except Exception as error:  # The caller of do() raises it.
                            answer.put(error)
                    loss = self.work() if self.work is not None else None
                    node.step(loss=loss, samples=4)
                    time.sleep(STEP_S)
                leaving = time.monotonic()
            self.left_in_s = time.monotonic() - leaving
        except BaseException as error:
            self.error = error
        finally:
            self.running.set()

    def do(self, function):
        answer = queue.SimpleQueue()
        self.tasks.put((function, answer))
        result = answer.get(timeout=30)
        if isinstance(result, Exception):
            raise result
        return result

    def stop(self):
        self.stopping = True
        if not self.running.is_set() and self.made is not None:
            self.side.network.failure = NEVER_RAN  # Otherwise it waits for members during later tests.
        self.join(10)
        assert not self.is_alive()


def until(what, seconds=20.0):
    """Wait until ``what()`` is true; fail after ``seconds``."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"waited {seconds:g} s in vain"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    torch.set_num_threads(1)
    running.trained_runs().clear()
    for name in list(os.environ):
        if name.startswith("GOSSIP_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _quick_joins(monkeypatch):
    """Shorten the wait for the first table of members, which arrives within milliseconds over loopback."""
    monkeypatch.setattr("gossip.state_transfer.runs.FIRST_TABLE_S", 0.1)


@pytest.fixture
def train():
    """``train(model, optimizer, work, **node_options)`` starts a Trainee, and returns it once it trains."""
    started = []

    def start(*args, **options):
        trainee = Trainee(*args, **options)
        trainee.start()
        started.append(trainee)
        assert trainee.running.wait(30)
        if trainee.error is not None:
            raise trainee.error
        return trainee

    yield start
    end(started)


@pytest.fixture
def launch():
    """``launch(model, **node_options)`` starts a Trainee whose network runs, and waits for nothing more."""
    started = []

    def start(*args, **options):
        trainee = Trainee(*args, **options)
        started.append(trainee)
        trainee.start()
        until(lambda: trainee.error or (trainee.made is not None and trainee.side.service.runtime is not None))
        return trainee

    yield start
    end(started)


def end(trainees):
    errors = []
    for trainee in trainees:
        trainee.stop()
        if trainee.error is not NEVER_RAN:
            errors.append(trainee.error)
    assert not any(errors), errors


@pytest.fixture
def warm_nodes(monkeypatch):
    """Fork the nodes of a LocalSwarm from a process that has imported everything that they need."""

    def start(command, **options):
        assert command[0] == sys.executable
        return warm.Python(*command[1:], **options)

    monkeypatch.setattr("node.local.subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start}))


@pytest.fixture(name="until")
def _until():
    return until


@pytest.fixture
def quick():
    return QUICK


@pytest.fixture
def node(quick):
    """A node that is alone, whose weights are 0."""
    with Node(filled(nn.Linear(4, 2), 0.0), config=quick) as made:
        yield made


@pytest.fixture
def secret(tmp_path):
    return secret_of(tmp_path)


@pytest.fixture
def world():
    """Yield a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def store(monkeypatch):
    """Yield the faulty store, empty and without faults, and retry failed transfers at once."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    from node.storage import copies, uploads
    from tests.node.storage.stores import Faulty

    fsspec.register_implementation("faulty", Faulty, clobber=True)
    for name, value in {"store": {}, "pseudo_dirs": [""], "errors": [], "half": False, "calls": []}.items():
        monkeypatch.setattr(Faulty, name, value)
    monkeypatch.setattr(MemoryFileSystem, "store", {})  # Examples of the documents save here as well.
    Faulty.goes_on.set()
    monkeypatch.setattr(copies, "FIRST_WAIT_S", 0.001)
    for module in (copies, uploads):
        monkeypatch.setattr(module, "CHECK_PERIOD_S", 0.01)
    yield Faulty
    Faulty.goes_on.set()
    MemoryFileSystem.store.clear()

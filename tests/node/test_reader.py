"""A reader takes a live swarm's weights, and nobody counts it as a member."""

import os
import queue
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import trio
from safetensors.torch import load_file
from torch import nn
from trio.testing import MockClock

from gossip import Reader
from gossip.averaging.vectors import Vector
from gossip.errors import LayoutError, LocalError
from gossip.state_transfer.joining import Phase
from node.network.transfers.streams import Streams
from node.reader import GIVE_UP_S, Reading
from tests.harness import warm
from tests.node.commands import gossip
from tests.node.trainees import alive, linear, spread

WIDTH = 4_000  # Enough weights for a piece of each donor.


@pytest.fixture
def swarm(train, until):
    """``swarm(count, **options)`` returns nodes that all know each other."""

    def start(count, **options):
        first = train(linear(1, WIDTH), **options)
        others = [train(linear(seed, WIDTH), seeds=[first.node.address], **options) for seed in range(2, count + 1)]
        nodes = [first, *others]
        until(lambda: all(alive(one) == count for one in nodes))
        return nodes

    return start


def settle(nodes):
    """Have all nodes agree."""
    answers = [queue.SimpleQueue() for _ in nodes]
    for one, answer in zip(nodes, answers, strict=True):
        one.tasks.put((lambda node: node.settle(10.0), answer))
    assert [answer.get(timeout=30) for answer in answers] == [0.0] * len(nodes)


def distance(weights, model):
    return max(float((weights[name] - value).abs().max()) for name, value in model.state_dict().items())


def test_the_file_holds_what_the_nodes_agree_on_and_no_node_has_listed_the_reader(swarm, tmp_path):
    nodes = swarm(2)
    settle(nodes)
    file = tmp_path / "out.safetensors"
    done = gossip("fetch", nodes[0].node.address, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{file}: run ")
    assert distance(load_file(file), nodes[1].model) < 1e-5
    ids = {one.node.id for one in nodes}
    for one in nodes:
        assert {member.id for member in one.node.members} == ids
        assert {event.id for event in one.node.history() if event.kind == "member"} <= ids
    model = linear(9, WIDTH)
    weights = Reader([nodes[1].node.address]).read()
    weights.load_into(nn.ModuleDict({"_orig_mod": model}))  # As torch.compile wraps it.
    assert spread(model, nodes[0].model) < 1e-5
    assert weights.bytes_received > 4 * 2 * WIDTH
    assert 0 < weights.staleness_s < 10
    with pytest.raises(LayoutError, match="does not fit this module"):
        weights.load_into(nn.Linear(3, 2))


def test_tensors_keep_their_types_and_a_node_loads_the_file(train, until, tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16), nn.BatchNorm1d(32))
    model[0].bias.requires_grad_(False)
    model[1].num_batches_tracked.fill_(70_000)
    node = train(model).node
    weights = Reader(node.address).read()
    weights.load_into(linear_like(model))
    for name, value in model.state_dict().items():
        assert weights.tensors[name].dtype == value.dtype
        assert torch.equal(weights.tensors[name], value), name
    weights.save(tmp_path / "run")
    until(lambda: weights.samples)
    later = train(linear_like(model))
    later.do(lambda node: node.load(tmp_path / "run"))
    until(lambda: later.node.swarm_samples >= weights.samples)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr("node.reader.MEMORY_SHARE", 10_000 / memory)  # For the vector, but not for its copies too.
    with pytest.raises(LocalError, match="more than half of this machine's memory"):
        Reader(node.address).read()


def linear_like(model):
    other = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16), nn.BatchNorm1d(32))
    other[0].bias.requires_grad_(False)
    return other


def test_a_reader_waits_while_data_flows_though_the_join_begins_anew():
    joining = SimpleNamespace(phase=Phase.COLLECTING, missing_elements=0)

    async def main(task_status):
        task_status.started()
        for joining.missing_elements in (3, 1, 3, 2, 1):
            await trio.sleep(0.75 * GIVE_UP_S)
        joining.phase = Phase.ADOPTING
        await trio.sleep_forever()

    reading, averager = object.__new__(Reading), SimpleNamespace(joining_vector=SimpleNamespace(array="whole"))
    reading.runtime = SimpleNamespace(main=main, peer=SimpleNamespace(joining=joining), averager=averager)
    assert trio.run(reading.wait, clock=MockClock(autojump_threshold=0)) == "whole"


def test_with_a_secret_a_reader_needs_it(swarm, secret):
    nodes = swarm(2, secret=secret)
    assert Reader(nodes[0].node.address, secret).read().samples > 0
    with pytest.raises(LocalError, match="do both or neither use a secret"):
        Reader(nodes[0].node.address).read()


def test_what_cannot_be_read_is_one_sentence(launch, tmp_path, monkeypatch, called):
    done = called("fetch", "127.0.0.1:9", tmp_path / "out")
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "No node answers at 127.0.0.1:9" in done.stderr
    monkeypatch.setattr("node.reader.NOT_READY_S", 1.0)
    waiting = launch(linear(), seeds=["127.0.0.1:9"], join_or_fail_s=30.0)
    address = str(waiting.side.service.bound)
    done = called("fetch", address, tmp_path / "out")
    assert done.returncode == 3
    assert done.stderr == "gossip: The swarm has no weights yet: try again once a node trains there.\n"


def test_every_replaces_the_file_as_a_whole_and_outlives_the_nodes(swarm, until, tmp_path):
    nodes, file = swarm(1), tmp_path / "out.safetensors"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GOSSIP_")}
    command = "-m", "gossip", "fetch", nodes[0].node.address, file, "--every", "0.2"
    process = warm.Python(*command, env=inherited, stdout=-1, stderr=-1, text=True)
    try:
        until(file.exists)
        first = file.stat().st_ino
        until(lambda: file.stat().st_ino != first)
        for _ in range(100):
            load_file(file)
        nodes[0].stop()
        assert "answer" in process.stderr.readline()
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.safetensors"]


def test_a_liar_among_three_donors_gives_nothing_that_a_reader_keeps(swarm, monkeypatch):
    nodes = swarm(4)
    settle(nodes)
    liar, send_copy = nodes[1].side.network.runtime.streams, Streams.send_copy

    def lie(self, effect, copy, codec):
        if self is liar and copy is not None:
            copy = Vector(copy.array + 5.0, start=copy.start, is_transient=True)
        send_copy(self, effect, copy, codec)

    monkeypatch.setattr(Streams, "send_copy", lie)
    for _ in range(3):
        assert distance(Reader(nodes[0].node.address).read().tensors, nodes[0].model) < 1e-3


def test_a_reader_that_is_killed_and_many_at_once_cost_a_newcomer_nothing(swarm, train, until, monkeypatch):
    nodes = swarm(2)
    child = "import sys; from gossip import Reader\nwhile True: Reader(sys.argv[1]).read()"
    readers = [warm.Python("-c", child, nodes[0].node.address) for _ in range(4)]
    try:
        until(lambda: nodes[0].side.network.peer.donating.table, 60)
        readers[0].kill()
        began = time.monotonic()
        newcomer = train(linear(7, WIDTH), seeds=[nodes[0].node.address])
        until(lambda: alive(newcomer) == 3)
        assert time.monotonic() - began < 10
        assert [event for event in newcomer.node.history() if event.kind == "joined"]
    finally:
        for process in readers:
            process.kill()
            process.wait()
    until(lambda: not nodes[0].side.network.peer.donating.table)
    for one in nodes:
        assert {event.after for event in one.node.history() if event.kind == "member"} == {"alive"}
        assert not [event for event in one.node.history() if event.kind in ("transfer", "suspicious", "overloaded")]

"""The lives of nodes and of their data: departures, checkpoints, signals and restarts."""

from __future__ import annotations

import signal
import time

import pytest
import torch

from gossip.config import Config
from gossip.errors import LocalError
from node import Node
from tests.node.trainees import alive, alone_at, children, linear, mixed, spread, state_of, towards


@pytest.fixture
def child():
    yield from children()


def test_two_nodes_cover_a_dataset_without_overlap(train, until):
    first = train(linear())
    second = train(linear(), seeds=[first.node.address])
    until(lambda: len(first.side.view.owners) == len(second.side.view.owners) == 2)
    for trainee in (first, second):
        trainee.side.samplers.make(400).next_number = 100  # Let both divide the same pass.
    parts = [t.do(lambda node: torch.cat(list(node.shard(torch.arange(400), 16))).tolist()) for t in (first, second)]
    assert sorted(parts[0] + parts[1]) == list(range(400))
    assert min(map(len, parts)) > 100


def test_samples_of_a_departed_node_still_count(train, until):
    """Members learn within a gossip period that the newcomer holds the run.

    Until then a step counts for one member less.
    """
    config = Config(mix_every_steps=10, join_timeout_s=3.0)
    first = train(linear(), config=config)
    second = train(linear(), config=config, seeds=[first.node.address])
    began = time.monotonic()
    until(lambda: second.node.metrics().samples >= 200 and time.monotonic() - began > 4.0)
    seconds = time.monotonic() - began
    second.stop()
    trained = second.node.metrics().samples
    until(lambda: state_of(first.node, second.node.id) == "left")
    first.stop()
    both = first.node.metrics().samples + trained
    assert abs(first.node.swarm_samples - both) <= 0.75 * both / seconds
    assert abs(first.node.swarm_samples - both) < 0.6 * trained, "they are not lost"


def test_a_checkpoint_resumes_into_a_swarm_of_another_size(train, until, tmp_path):
    a = linear(1)
    one = train(a, torch.optim.SGD(a.parameters(), lr=0.1), towards(a, 1.0))
    until(lambda: one.node.metrics().steps > 30)
    one.do(lambda node: node.save(tmp_path / "run"))
    one.stop()
    saved = {name: value.clone() for name, value in a.state_dict().items()}
    b, c, d = linear(2), linear(3), linear(4)
    first = train(b, torch.optim.SGD(b.parameters(), lr=0.1))
    meta = first.do(lambda node: node.load(tmp_path / "run"))
    assert meta["steps"] > 30
    for model in (c, d):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), seeds=[first.node.address])
    until(lambda: alive(first) == 3)
    assert first.node.swarm_samples >= meta["swarm_samples"]
    for model in (b, c, d):
        assert spread(model, a) < 0.05, saved


def test_a_checkpoint_does_not_push_a_living_swarm_back(train, until, tmp_path):
    a, b = linear(1), linear(2)
    first = train(a, work=towards(a, 1.0))
    first.do(lambda node: node.save(tmp_path / "early"))
    until(lambda: first.node.metrics().steps > 100)
    second = train(b, seeds=[first.node.address])
    second.do(lambda node: node.load(tmp_path / "early"))
    assert spread(b, alone_at(1.0)) < 0.1


def test_sigterm_leaves_and_the_others_know_at_once(train, until, child):
    first = train(linear())
    process, peer = child(first.node.address)
    until(lambda: state_of(first.node, peer) == "alive")
    began = time.monotonic()
    process.terminate()
    until(lambda: state_of(first.node, peer) == "left")
    assert process.wait(60) == 128 + signal.SIGTERM  # Most of it is for torch, which is unloaded after the node left.
    print(f"ended in {time.monotonic() - began:.2f} s")


def test_steps_go_on_while_the_partner_is_stopped(train, until, child):
    width = 100_000
    first = train(linear(width=width))
    process, _ = child(first.node.address, width)
    until(mixed(first))
    process.send_signal(signal.SIGSTOP)
    began, slowest = time.monotonic(), 0.0
    steps = first.node.metrics().steps
    while time.monotonic() < began + 2.0:
        slowest = max(slowest, first.do(one_step))
    assert first.node.metrics().steps > steps
    assert slowest < 1.0  # A wait for a stopped partner takes at least the 3 s of a stall.


def one_step(node):
    start = time.perf_counter()
    node.step()
    return time.perf_counter() - start


def test_a_node_that_listens_nowhere_takes_part_by_dialling_out(train, until):
    first = train(linear())
    second = train(linear(), seeds=[first.node.address], listen="none")
    third = train(linear(), seeds=[first.node.address])
    assert second.node.address == "none"
    until(lambda: alive(first) == alive(second) == alive(third) == 3)
    until(mixed(second, times=10))


def test_a_restart_finds_its_swarm_again_without_any_seed(train, until, tmp_path):
    first = train(linear(1))
    second = train(linear(2), seeds=[first.node.address], state_dir=tmp_path)
    who = second.node.id
    until(lambda: second.node.metrics().samples > 100)
    second.stop()
    trained = second.node.metrics().samples
    until(lambda: state_of(first.node, who) == "left")
    again = train(linear(3), state_dir=tmp_path)
    assert again.node.id == who
    until(lambda: alive(first) == alive(again) == 2)
    assert again.node.swarm_samples >= trained
    until(mixed(first, again))


def test_a_node_killed_in_its_first_seconds_finds_its_swarm_again_without_any_seed(train, until, child, tmp_path):
    first = train(linear())
    process, peer = child(first.node.address, 4, tmp_path)
    until(lambda: b"127.0.0.1" in (tmp_path / "members.bin").read_bytes())
    process.kill()
    process.wait()
    until(lambda: state_of(first.node, peer) in ("suspect", "dead"))
    again, same = child("", 4, tmp_path)
    assert same == peer
    until(lambda: state_of(first.node, peer) == "alive" and alive(first) == 2)
    until(mixed(first))
    again.terminate()


def test_a_node_is_used_once(quick):
    node = Node(linear(), config=quick)
    with node:
        node.step()
    with pytest.raises(LocalError, match="used already"):
        node.__enter__()

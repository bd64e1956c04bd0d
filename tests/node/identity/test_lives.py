"""The lives of nodes and of their data: departures, checkpoints, signals and restarts."""

import signal
import time

import pytest

from tests.node.trainees import alive, children, linear, mixed, state_of

child = pytest.fixture(children)


def test_sigterm_leaves_and_the_others_know_at_once(train, until, child):
    first = train(linear())
    process, peer = child(first.node.address)
    until(lambda: state_of(first.node, peer) == "alive")
    process.terminate()
    until(lambda: state_of(first.node, peer) == "left")
    assert process.wait(60) == 128 + signal.SIGTERM  # Most of it is for torch, which is unloaded after the node left.


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
    assert slowest < 2.5  # A wait for a stopped partner takes at least the 3 s of a stall.


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

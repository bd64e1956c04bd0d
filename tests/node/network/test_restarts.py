"""Repeated faults of the network side, faults at the start, and faults that a user asked to see."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import urllib.request

import numpy as np
import pytest

from gossip.averaging.boundary import Boundary
from gossip.errors import ConfigError, FaultError, LocalError
from gossip.peer import Peer
from node import Node, faults
from node.faults import LATER_S, SOON_S, Faults
from node.network import service
from node.transport import tcp
from tests.node.conftest import QUICK, Trainee, end, until
from tests.node.faulty import ELEMENTS, Pair, raises


@pytest.fixture(scope="module")
def pair():
    made = Pair()
    yield made
    end(made.trainees)


def test_after_three_restarts_within_ten_minutes_it_is_tried_once_a_minute():
    found = Faults(lambda kind, sentence: None)
    assert [found.count_restart(at) for at in (0.0, 100.0, 200.0)] == [SOON_S] * 3
    assert [found.count_restart(at) for at in (300.0, 360.0, 700.0)] == [LATER_S] * 3
    assert found.count_restart(1_400.0) == SOON_S
    assert found.restarts == 7


@pytest.fixture
def resting(monkeypatch):
    """Yield a pair whose first node had so many faults that it restarts its network side once a minute."""
    made = Pair()
    made.service.faults._restarted_at.extend([time.monotonic()] * 3)
    made.call(raises)
    until(lambda: made.service.is_backing_off)
    yield made
    end(made.trainees)


def test_a_loop_whose_network_side_rests_trains_on_alone_and_each_call_returns(resting, tmp_path):
    steps = resting.side.run.steps
    until(lambda: resting.side.run.steps > steps + 20)
    trainee, began = resting.trainees[0], time.monotonic()
    trainee.do(lambda node: node.settle(0.2, wait_s=0.2))
    trainee.do(lambda node: node.save(tmp_path / "one.safetensors"))
    trainee.do(lambda node: node.load(tmp_path / "one.safetensors"))
    trainee.do(lambda node: node.reduce({"accuracy": 0.5}))
    assert trainee.do(lambda node: node.members)[0].id == resting.node.id
    assert trainee.do(lambda node: node.metrics().network_restarts) == 1
    assert time.monotonic() - began < 5.0
    assert resting.service.is_backing_off
    trainee.do(lambda node: node.finish(0.2))
    assert resting.node.finished
    trainee.stop()
    assert trainee.left_in_s < 2.0


def told_by(stream, word):
    """Return the first sentence with this word in an open stream of the page's events."""
    for line in stream:
        if line.startswith(b"event: sentences"):
            told = json.loads(stream.readline().removeprefix(b"data: "))
            for sentence in told:
                if word in sentence["text"]:
                    return sentence["text"]
    return ""


def test_the_page_is_served_while_the_network_side_rests():
    made = Pair(page="127.0.0.1:0")
    try:
        port = made.service.page.server.sock.getsockname()[1]

        def ask(path):
            return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10)

        def answer(path):
            with ask(path) as opened:
                return opened.read().decode()

        made.service.faults._restarted_at.extend([time.monotonic()] * 3)
        with ask("/events") as stream:
            assert told_by(stream, "page of this node")
            made.call(raises)
            told = told_by(stream, "A fault of this library (ZeroDivisionError in faulty.py:")
        assert "ended the network side, which is tried again every 60 s while the loop trains on alone" in told
        assert "Report the traceback" in told
        until(lambda: made.service.is_backing_off)
        with ask("/events") as stream:
            assert told_by(stream, "A fault of this library") == told, "who opens the page later reads it too"
        assert answer("/healthz").startswith("Steps advance, alone")
        assert "gossip_network_restarts_total 1.0" in answer("/metrics")
    finally:
        end(made.trainees)


def test_what_is_trained_while_the_network_side_rests_counts_when_it_is_back(pair, monkeypatch):
    monkeypatch.setattr(faults, "LATER_S", 1.0)
    monkeypatch.setattr(service, "LATER_S", 1.0)
    pair.service.faults._restarted_at.extend([time.monotonic()] * 3)
    old, progress, trained = (
        pair.side.network.runtime,
        pair.side.network.peer.local.progress.samples,
        pair.side.run.samples,
    )
    pair.call(raises)
    until(lambda: pair.service.is_backing_off)
    until(lambda: pair.side.network.runtime is not old and pair.mixes())
    assert not pair.service.is_backing_off
    assert pair.side.network.peer.local.progress.samples >= progress + pair.side.network.peer.local.samples - trained


def test_the_next_network_side_goes_on_from_the_same_outer_step(monkeypatch):
    made = Pair(config=dataclasses.replace(QUICK, outer_momentum=0.5))
    live, seen, held, released = made.side.live, [], threading.Event(), threading.Event()
    try:
        made.trainees[1].do(lambda node: made.trainees[1].model["x"].fill(5.0))
        until(lambda: live.outer._momentum.any())

        def hold(node):  # At no boundary, so that no exchange moves the outer step.
            held.set()
            released.wait(20)

        def restart(self):  # No task of the old network side runs by then.
            plain(self)
            seen.append((live.outer._phi.copy(), live.outer._momentum.copy()))

        plain = Boundary.restart
        monkeypatch.setattr(Boundary, "restart", restart)
        old, holding = made.side.network.runtime, threading.Thread(target=made.trainees[0].do, args=(hold,))
        holding.start()
        assert held.wait(20)
        made.call(raises)
        until(lambda: made.side.network.runtime is not old and len(made.side.network.runtime.links))
        ((phi, momentum),) = seen
        assert momentum.any()
        assert np.array_equal(live.outer._phi, phi)
        assert np.array_equal(live.outer._momentum, momentum)
        released.set()
        holding.join()
        until(made.mixes)
    finally:
        released.set()
        end(made.trainees)


def test_a_port_that_another_has_taken_meanwhile_ends_no_node(pair, monkeypatch):
    """The node tries again: the error of a port in use is for the start, not for a training user."""
    listening, left = tcp.listening, [1]

    async def taken(address, backlog):
        if left[0]:
            left[0] -= 1
            raise OSError(98, "Address already in use")
        return await listening(address, backlog)

    monkeypatch.setattr(tcp, "listening", taken)
    restarts = pair.service.faults.restarts
    pair.forgive()
    old = pair.side.network.runtime
    pair.call(raises)
    until(lambda: pair.side.network.runtime is not old and pair.mixes())
    assert pair.service.faults.restarts == restarts + 2


def test_a_user_who_asks_for_faults_hears_of_them(train, until):
    trainee = train({"x": np.zeros(8, np.float32)}, on_fault="raise")
    trainee.side.network.call(raises)
    until(lambda: trainee.error is not None)
    error, trainee.error = trainee.error, None
    assert isinstance(error, FaultError)
    assert "ZeroDivisionError in faulty.py" in str(error)
    assert "Report the traceback" in str(error)


def test_what_is_the_users_to_mend_still_reaches_the_user(train, until):
    def refuses():
        raise LocalError("The disk is gone.")

    trainee = train({"x": np.zeros(8, np.float32)})
    trainee.side.network.call(refuses)
    until(lambda: trainee.error is not None)
    error, trainee.error = trainee.error, None
    assert str(error) == "The disk is gone."
    assert trainee.side.service.faults.restarts == 0


def test_only_two_things_can_be_asked_for():
    with pytest.raises(ConfigError, match="'restart' or 'raise'"):
        Node({"x": np.zeros(8, np.float32)}, on_fault="ignore")


def test_a_fault_of_the_very_start_is_raised(monkeypatch):
    monkeypatch.setattr("gossip.peer.Peer.start", lambda self, now: raises())
    with pytest.raises(ZeroDivisionError):
        Node({"x": np.zeros(8, np.float32)}).start()


def test_a_node_that_cannot_join_for_faults_says_so(monkeypatch):
    """The node has no weights to train alone, and its caller waits."""
    seed = Pair.__new__(Pair)
    seed.trainees = [Trainee({"x": np.zeros(8, np.float32)})]
    Pair.begin(seed.trainees[0])
    monkeypatch.setattr("gossip.peer.Peer.on_linked", lambda self, *_: raises())
    try:
        with pytest.raises(FaultError, match="Could not join: faults of this library"):
            Node({"x": np.zeros(8, np.float32)}, seeds=[seed.node.address], config=QUICK).start()
    finally:
        monkeypatch.undo()
        end(seed.trainees)


@pytest.mark.parametrize("report", ["on_collected", "on_adopted", "on_linked"])
def test_a_fault_while_it_joins_begins_the_joining_anew(report, monkeypatch):
    seed = Trainee({"x": np.full(ELEMENTS, 7.0, np.float32)})
    Pair.begin(seed)
    plain, own = getattr(Peer, report), seed.side.network.peer
    left = [1]

    def faulty(self, *arguments):
        if self is not own and left[0]:
            left[0] -= 1
            raises()
        return plain(self, *arguments)

    monkeypatch.setattr(Peer, report, faulty)
    newcomer = Trainee({"x": np.zeros(ELEMENTS, np.float32)}, seeds=[seed.node.address])
    try:
        Pair.begin(newcomer)
        assert newcomer.side.service.faults.restarts == 1
        assert newcomer.side.network.peer.view.run_id == own.view.run_id
        until(lambda: newcomer.side.network.peer.exchanges.done_count > 0)
        assert newcomer.model["x"][0] == pytest.approx(7.0)
    finally:
        end([seed, newcomer])


def test_a_loop_in_lockstep_is_let_go_on(monkeypatch):
    """The loop waits at a boundary for a mix that no node will finish."""
    config = dataclasses.replace(QUICK, max_version_gap=0)
    made = Pair(config=config)
    try:
        made.service.faults._restarted_at.extend([time.monotonic()] * 3)
        made.call(raises)
        until(lambda: made.service.is_backing_off)
        steps = made.side.run.steps
        until(lambda: made.side.run.steps > steps + 20)
    finally:
        end(made.trainees)

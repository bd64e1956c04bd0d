"""Repeated faults of the network side, faults at the start, and faults that a user asked to see."""

import dataclasses
import json
import math
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
from tests.node.conftest import QUICK, end, until
from tests.node.faulty import ELEMENTS, Pair, raises


@pytest.fixture
def make_pair():
    """``make_pair(**options)`` starts two nodes that mix, the first with these options."""
    made = []

    def make(**options):
        made.append(Pair(**options))
        return made[-1]

    yield make
    end([trainee for pair in made for trainee in pair.trainees])


@pytest.fixture(scope="module")
def pair():
    made = Pair()
    yield made
    end(made.trainees)


def zeros(elements=8):
    return {"x": np.zeros(elements, np.float32)}


def fail_too_often(pair):
    """Cause a fault in the first node after so many that its network side is tried again once a minute."""
    pair.service.faults._restarted_at.extend([time.monotonic()] * 3)
    pair.call(raises)


def back_off(pair):
    fail_too_often(pair)
    until(lambda: pair.service.is_backing_off)


def error_of(trainee):
    """Wait until the node ends with an error, which ``train`` then does not raise again. Return the error."""
    until(lambda: trainee.error is not None)
    error, trainee.error = trainee.error, None
    return error


# -- many faults -------------------------------------------------------------------------------------------------------
def test_after_three_restarts_within_ten_minutes_it_is_tried_once_a_minute():
    found = Faults(lambda kind, sentence: None)
    assert [found.count_restart(at) for at in (0.0, 100.0, 200.0)] == [SOON_S] * 3
    assert [found.count_restart(at) for at in (300.0, 360.0, 700.0)] == [LATER_S] * 3
    assert found.count_restart(1_400.0) == SOON_S
    assert found.restarts == 7


def test_a_loop_trains_on_alone_while_its_network_side_backs_off_and_each_call_returns(make_pair, tmp_path):
    pair = make_pair()
    back_off(pair)
    steps = pair.side.run.steps
    until(lambda: pair.side.run.steps > steps + 20)
    trainee, began = pair.trainees[0], time.monotonic()
    trainee.do(lambda node: node.settle(0.2, wait_s=0.2))
    trainee.do(lambda node: node.save(tmp_path / "one.safetensors"))
    trainee.do(lambda node: node.load(tmp_path / "one.safetensors"))
    trainee.do(lambda node: node.reduce({"accuracy": 0.5}))
    assert trainee.do(lambda node: node.members)[0].id == pair.node.id
    assert trainee.do(lambda node: node.metrics().network_restarts) == 1
    assert time.monotonic() - began < 30.0, "nothing waits for the pause of 60 s"
    assert pair.service.is_backing_off
    trainee.do(lambda node: node.finish(0.2))
    assert pair.node.finished
    trainee.stop()
    assert trainee.left_in_s < 10.0


def test_a_loop_in_lockstep_does_not_wait_for_a_network_side_that_backs_off(make_pair):
    """The loop waits at a boundary for a mix that no node will finish."""
    pair = make_pair(config=dataclasses.replace(QUICK, max_version_gap=0))
    back_off(pair)
    steps = pair.side.run.steps
    until(lambda: pair.side.run.steps > steps + 20)


def told_by(stream, word):
    """Return the first sentence with this word in an open stream of the page's events."""
    for line in stream:
        if line.startswith(b"event: sentences"):
            told = json.loads(stream.readline().removeprefix(b"data: "))
            for sentence in told:
                if word in sentence["text"]:
                    return sentence["text"]
    return ""


def test_the_page_is_served_while_the_network_side_backs_off(make_pair):
    pair = make_pair(page="127.0.0.1:0")
    port = pair.service.page.server.sock.getsockname()[1]

    def ask(path):
        return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10)

    def answer(path):
        with ask(path) as opened:
            return opened.read().decode()

    with ask("/events") as stream:
        assert told_by(stream, "page of this node")
        fail_too_often(pair)
        told = told_by(stream, "A fault of this library (ZeroDivisionError in faulty.py:")
    assert "ended the network side, which is tried again every 60 s while the loop trains on alone" in told
    assert "Report the traceback" in told
    until(lambda: pair.service.is_backing_off)
    with ask("/events") as stream:
        assert told_by(stream, "A fault of this library") == told, "who opens the page later reads it too"
    assert answer("/healthz").startswith("Steps advance, alone")
    assert "gossip_network_restarts_total 1.0" in answer("/metrics")


def test_samples_trained_while_the_network_side_backs_off_count_when_it_is_back(pair, monkeypatch):
    for module in (faults, service):
        monkeypatch.setattr(module, "LATER_S", 1.0)
    old, both = pair.side.network.runtime, lambda: [one.side.network.peer.local for one in pair.trainees]
    progress, trained = sum(one.progress.samples for one in both()), sum(one.samples for one in both())
    back_off(pair)
    until(lambda: pair.side.network.runtime is not old and pair.mixes() and not pair.side.network.peer.exchanges.table)
    assert not pair.service.is_backing_off
    now = sum(one.samples for one in both())  # A mix keeps the sum of both nodes' progress, which only grows.
    assert sum(one.progress.samples for one in both()) >= progress + now - trained


# -- the next network side ---------------------------------------------------------------------------------------------
def test_the_next_network_side_goes_on_from_the_same_outer_step(make_pair, monkeypatch):
    pair = make_pair(config=dataclasses.replace(QUICK, outer_momentum=0.5))
    live, seen, held, released = pair.side.live, [], threading.Event(), threading.Event()

    def work():
        pair.trainees[1].model["x"] += 1.0

    pair.trainees[1].work = work  # Without progress the momentum would be 0 again after some mixes.
    until(lambda: live.outer._momentum.any())

    def hold(node):  # At no boundary, so that no exchange moves the outer step.
        pair.trainees[1].work = None  # It would move too far away meanwhile for the two to mix again.
        held.set()
        released.wait(20)

    def restart(self):  # No task of the old network side runs by then.
        plain(self)
        seen.append((live.outer._phi.copy(), live.outer._momentum.copy()))

    plain = Boundary.restart
    monkeypatch.setattr(Boundary, "restart", restart)
    old, holding = pair.side.network.runtime, threading.Thread(target=pair.trainees[0].do, args=(hold,))
    holding.start()
    try:
        assert held.wait(20)
        pair.call(raises)
        until(lambda: pair.side.network.runtime is not old and len(pair.side.network.runtime.links))
        ((phi, momentum),) = seen
        assert momentum.any()
        assert np.array_equal(live.outer._phi, phi)
        assert np.array_equal(live.outer._momentum, momentum)
    finally:
        released.set()
    holding.join()
    until(pair.mixes)


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


# -- errors that reach the user ----------------------------------------------------------------------------------------
def test_a_user_who_asks_for_faults_hears_of_them(train):
    trainee = train(zeros(), on_fault="raise")
    trainee.side.network.call(raises)
    error = error_of(trainee)
    assert isinstance(error, FaultError)
    assert "ZeroDivisionError in faulty.py" in str(error)
    assert "Report the traceback" in str(error)


def test_an_error_that_the_user_must_fix_reaches_the_user(train):
    def refuses():
        raise LocalError("The disk is gone.")

    trainee = train(zeros())
    trainee.side.network.call(refuses)
    assert str(error_of(trainee)) == "The disk is gone."
    assert trainee.side.service.faults.restarts == 0


def test_a_choice_other_than_restart_or_raise_is_refused():
    with pytest.raises(ConfigError, match="'restart' or 'raise'"):
        Node(zeros(), on_fault="ignore")


def test_a_fault_of_the_very_start_is_raised(monkeypatch):
    monkeypatch.setattr("gossip.peer.Peer.start", lambda self, now: raises())
    with pytest.raises(ZeroDivisionError):
        Node(zeros()).start()


def raise_in_others(monkeypatch, report, own, times):
    """Make this report raise in all peers but ``own``, so many times."""
    plain, left = getattr(Peer, report), [times]

    def faulty(self, *arguments):
        if self is not own and left[0]:
            left[0] -= 1
            raises()
        return plain(self, *arguments)

    monkeypatch.setattr(Peer, report, faulty)


def test_a_node_that_cannot_join_for_faults_says_so(train, monkeypatch):
    """The node has no weights to train alone, and its caller waits."""
    seed = train(zeros())
    raise_in_others(monkeypatch, "on_linked", seed.side.network.peer, math.inf)
    with pytest.raises(FaultError, match="Could not join: faults of this library"):
        Node(zeros(), seeds=[seed.node.address], config=QUICK).start()


@pytest.mark.parametrize("report", ["on_collected", "on_adopted", "on_linked"])
def test_a_fault_while_it_joins_begins_the_joining_anew(report, train, monkeypatch):
    seed = train({"x": np.full(ELEMENTS, 7.0, np.float32)})
    own = seed.side.network.peer
    raise_in_others(monkeypatch, report, own, 1)
    newcomer = train(zeros(ELEMENTS), seeds=[seed.node.address])
    assert newcomer.side.service.faults.restarts == 1
    assert newcomer.side.network.peer.view.run_id == own.view.run_id
    until(lambda: newcomer.side.network.peer.exchanges.done_count > 0)
    assert newcomer.model["x"][0] == pytest.approx(7.0)

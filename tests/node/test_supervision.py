"""A fault of the network side costs a node a moment of its swarm, while the loop trains on."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
import trio

from gossip.averaging.boundary import Adoption, Boundary, Update
from gossip.averaging.vectors import Vector
from gossip.effects import (
    Adopt,
    Collect,
    Confirm,
    CopyFrozen,
    CopyPiece,
    Dial,
    Effect,
    Gather,
    LookUp,
    MemberChanged,
    MemberState,
    Merge,
    Mix,
    Notice,
    Recall,
    Release,
    Rename,
    Restore,
    Send,
    Serve,
    Snapshot,
    Transfer,
    TryDial,
)
from gossip.errors import ConfigError, FaultError, LocalError, RemoteError
from gossip.handlers import HANDLERS
from gossip.ids import Address
from gossip.peer import Peer
from gossip.wire.messages import (
    Abort,
    Accept,
    Begin,
    Busy,
    Commit,
    Fetch,
    Invite,
    Joined,
    Offer,
    Outcome,
    Reach,
    Reached,
    Refuse,
    Serving,
    Settled,
)
from node import Node, faults, service
from node.faults import LATER_S, SOON_S, Faults, first_cause, trace
from node.model.kept import KeptWeights
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.network.runtime import REPORTS, Runtime
from node.page.exposition import Exposition
from node.ranks.boundary import RanksBoundary
from node.transport import tcp
from tests.node.conftest import QUICK, Trainee, end, until

AGAIN_S = 2.0  # within which another network side is there
ELEMENTS = 512
NOBODY = b"\x07" * 16
MESSAGES = [
    Offer(1, "", b"", 0.0, 0.5, "fp32"), Accept(1, 0.0, 0.5, "fp32"), Commit(1), Outcome(1), Settled(1, True),
    Invite(1, "", b"", 0.0, "fp32"), Joined(1, 0.0, "fp32"), Begin(1, (), 0.0, "fp32"), Busy(1), Refuse(1, "layout"),
    Abort(1, "late"), Fetch(1, (), 0, 0), Serving(1, 0.0, b"", (), ()), Reach(), Reached(True),
]  # fmt: skip
EFFECTS = [
    Send(NOBODY, Reach()), Dial(Address("127.0.0.1", 1)), LookUp(), TryDial(NOBODY, Address("127.0.0.1", 1)),
    Snapshot(1), CopyPiece(1, 0, 1), Recall(1), CopyFrozen(1, 0, 1), Transfer(1, NOBODY, "fp32"),
    Gather(1, (), 0, "fp32"), Mix(1, 0.5), Merge(1, 0.5), Rename(1, 2), Release(1), Serve(1, NOBODY, 0, 1),
    Collect(1, NOBODY, 0, 1, 1), Adopt((), ()), Confirm(), Restore(),
    MemberChanged(NOBODY, None, MemberState.ALIVE), Notice("fault", ""),
]  # fmt: skip


def named(one):
    return type(one).__name__


class Pair:
    """Two nodes that mix; faults are made in the first."""

    def __init__(self, **options):
        model = {"x": np.zeros(ELEMENTS, np.float32)}
        self.trainees = [Trainee(model, **options)]
        self.begin(self.trainees[0])
        self.trainees.append(Trainee({"x": np.ones(ELEMENTS, np.float32)}, seeds=[self.node.address]))
        self.begin(self.trainees[1])
        until(self.mixes)
        self.known_as = self.node.id

    @staticmethod
    def begin(trainee):
        trainee.start()
        assert trainee.running.wait(30)
        assert trainee.error is None, trainee.error

    @property
    def node(self):
        return self.trainees[0].node

    @property
    def side(self):
        return self.trainees[0].side

    @property
    def service(self):
        return self.side.service

    def mixes(self):
        return self.side.peer.counts.done > 0

    def call(self, function):
        self.side.thread.call(function)

    def forgive(self):
        """No restart was lately."""
        self.service.faults._restarted.clear()

    def begins_anew(self, fault, soon=True):
        """``fault`` makes one in the network side. Another comes in time, is linked and mixes, while the loop goes
        on."""
        self.forgive()
        old, restarts = self.side.runtime, self.service.faults.restarts
        steps, samples, run = self.side.steps, self.node.swarm_samples, self.side.peer.genesis
        began = time.monotonic()
        fault()
        until(lambda: self.side.runtime is not old, AGAIN_S if soon else 20.0)
        until(lambda: self.mixes() and len(self.side.runtime.links))
        assert time.monotonic() - began < 10.0
        assert self.service.faults.restarts == restarts + 1
        until(lambda: self.side.steps > steps + 5)
        assert self.side.peer.id.hex() == self.node.id == self.known_as
        assert self.side.peer.genesis == run
        assert self.node.swarm_samples >= samples
        assert self.trainees[0].error is None


@pytest.fixture(scope="module")
def pair():
    made = Pair()
    yield made
    end(made.trainees)


def test_every_handler_effect_and_report_is_tried():
    assert {type(message) for message in MESSAGES} == set(HANDLERS)
    assert {type(effect) for effect in EFFECTS} == set(Effect.__args__)
    assert all(callable(getattr(Peer, report)) for report in REPORTS)


@pytest.mark.parametrize("message", MESSAGES, ids=named)
def test_a_fault_at_a_message_ends_its_link_alone(pair, message, monkeypatch):
    peer, found = pair.side.peer, pair.service.faults
    restarts, count, left = found.restarts, found.count, [1]
    plain = HANDLERS[type(message)]

    def handler(who, *rest):
        if who is peer and left[0]:
            left[0] -= 1
            raise ZeroDivisionError
        return plain(who, *rest)

    monkeypatch.setitem(HANDLERS, type(message), handler)
    other = pair.trainees[1].side
    until(lambda: other.runtime.links.newest(peer.id) is not None)
    other.thread.call(lambda: other.runtime.links.newest(peer.id).send(message))
    other.thread.call(lambda: other.runtime.links.flush())
    until(lambda: found.count == count + 1)
    before = peer.counts.done
    until(lambda: peer.counts.done > before)
    assert pair.side.peer is peer, "the network side stays"
    assert found.restarts == restarts


@pytest.mark.parametrize("effect", EFFECTS, ids=named)
def test_a_fault_in_performing_an_effect_begins_the_network_side_anew(pair, effect, monkeypatch):
    runtime, plain = pair.side.runtime, Runtime.perform_one

    def perform_one(self, one):
        if self is runtime and type(one) is type(effect):
            raise ZeroDivisionError
        plain(self, one)

    def fault():
        monkeypatch.setattr(Runtime, "perform_one", perform_one)
        if not isinstance(effect, Send | Snapshot | Transfer | Mix | Release):  # these come by themselves
            pair.call(lambda: runtime.perform([effect]))

    pair.begins_anew(fault)


@pytest.mark.parametrize("report", REPORTS)
def test_a_fault_in_a_report_to_the_peer_begins_the_network_side_anew(pair, report):
    runtime = pair.side.runtime

    def faulty(*_, **__):
        raise ZeroDivisionError

    def fault():
        setattr(runtime.peer, report, runtime.guarded(faulty))
        if report not in ("tick", "stepped", "counted", "snapshotted", "streamed"):  # these come by themselves
            pair.call(getattr(runtime.peer, report))

    pair.begins_anew(fault)


def raises():
    raise ZeroDivisionError


def crash():
    """Of trio's loop itself."""

    async def task():
        raises()

    trio.lowlevel.spawn_system_task(task)


async def dies():
    raises()


@pytest.mark.parametrize("where", ["a call", "a task", "a link's end", "the loop", "the deadline"])
def test_a_fault_anywhere_in_the_network_thread_begins_the_network_side_anew(pair, where, monkeypatch):
    runtime = pair.side.runtime

    def fault():
        match where:
            case "a call":
                pair.call(raises)
            case "a task":
                pair.call(lambda: runtime.spawn(dies))
            case "a link's end":
                monkeypatch.setattr(runtime.links, "flush", raises)
            case "the loop":
                pair.call(crash)
            case "the deadline":
                monkeypatch.setattr(runtime, "after_perform", raises)

    pair.begins_anew(fault)


def test_a_fault_is_told_with_its_traceback_and_counted(pair, caplog):
    caplog.clear()
    pair.begins_anew(lambda: pair.call(raises))
    restarts = pair.service.faults.restarts
    assert re.search(r"A fault of this library \(ZeroDivisionError in test_supervision.py:\d+\)", caplog.text)
    assert "Report the traceback" in caplog.text
    assert "in raises" in caplog.text
    assert pair.node.metrics().network_restarts == restarts > 0
    assert f"gossip_network_restarts_total {restarts}.0" in Exposition().text(pair.side.source()).decode()
    assert "restarted" in [event.kind for event in pair.node.history()]


def test_the_next_network_side_is_a_later_life_of_the_same_node(pair):
    """Members believe a record of a higher incarnation, and dial the address that they know."""
    record = pair.side.peer.record
    pair.begins_anew(lambda: pair.call(raises))
    again = pair.side.peer.record
    assert (again.id, again.address) == (record.id, record.address)
    assert again.incarnation > record.incarnation
    assert again.steps >= record.steps
    other = pair.trainees[1]
    assert [one.id for one in other.do(lambda node: node.members)][1:] == [pair.known_as]
    until(lambda: other.side.peer.member(again.id).incarnation >= again.incarnation)


def test_nothing_is_left_behind_by_many_faults(pair):
    def left():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    pair.begins_anew(lambda: pair.call(raises))
    descriptors, threads = left()
    for _ in range(12):
        pair.begins_anew(lambda: pair.call(raises))
    until(lambda: left()[0] <= descriptors + 4)  # a link may be on its way twice
    assert left()[1] <= threads + 2


# -- faults that come again -----------------------------------------------------------------------------------------
def test_after_three_restarts_within_ten_minutes_it_is_tried_once_a_minute():
    found = Faults(lambda kind, sentence: None)
    assert [found.restart(at) for at in (0.0, 100.0, 200.0)] == [SOON_S] * 3
    assert [found.restart(at) for at in (300.0, 360.0, 700.0)] == [LATER_S] * 3
    assert found.restart(1_400.0) == SOON_S
    assert found.restarts == 7


@pytest.fixture
def resting(monkeypatch):
    """A pair whose first node met faults so often that its network side is tried once a minute."""
    made = Pair()
    made.service.faults._restarted.extend([time.monotonic()] * 3)
    made.call(raises)
    until(lambda: made.service.resting)
    yield made
    end(made.trainees)


def test_a_loop_whose_network_side_rests_trains_on_alone_and_each_call_returns(resting, tmp_path):
    steps = resting.side.steps
    until(lambda: resting.side.steps > steps + 20)
    trainee, began = resting.trainees[0], time.monotonic()
    trainee.do(lambda node: node.settle(0.2, wait_s=0.2))
    trainee.do(lambda node: node.save(tmp_path / "one.safetensors"))
    trainee.do(lambda node: node.load(tmp_path / "one.safetensors"))
    trainee.do(lambda node: node.reduce({"accuracy": 0.5}))
    assert trainee.do(lambda node: node.members)[0].id == resting.node.id
    assert trainee.do(lambda node: node.metrics().network_restarts) == 1
    assert time.monotonic() - began < 5.0
    assert resting.service.resting
    trainee.do(lambda node: node.finish(0.2))
    assert resting.node.finished
    trainee.stop()
    assert trainee.left_in_s < 2.0


def test_the_page_is_served_while_the_network_side_rests():
    made = Pair(page="127.0.0.1:0")
    try:
        made.service.faults._restarted.extend([time.monotonic()] * 3)
        made.call(raises)
        until(lambda: made.service.resting)
        port = made.service.page.server.sock.getsockname()[1]

        def answer(path):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as opened:
                return opened.read().decode()

        assert answer("/healthz").startswith("Steps advance, alone")
        assert "gossip_network_restarts_total 1.0" in answer("/metrics")
    finally:
        end(made.trainees)


def test_what_is_trained_while_the_network_side_rests_counts_when_it_is_back(pair, monkeypatch):
    monkeypatch.setattr(faults, "LATER_S", 1.0)
    monkeypatch.setattr(service, "LATER_S", 1.0)
    pair.service.faults._restarted.extend([time.monotonic()] * 3)
    old, progress, trained = pair.side.runtime, pair.side.peer.swarm_samples, pair.side.samples
    pair.call(raises)
    until(lambda: pair.service.resting)
    until(lambda: pair.side.runtime is not old and pair.mixes())
    assert not pair.service.resting
    assert pair.side.peer.swarm_samples >= progress + pair.side.peer.samples - trained


def test_a_port_that_another_has_taken_meanwhile_ends_no_node(pair, monkeypatch):
    """It is tried again: a user who trains is not to hear of it as of a port in use at the start."""
    listening, left = tcp.listening, [1]

    async def taken(address, backlog):
        if left[0]:
            left[0] -= 1
            raise OSError(98, "Address already in use")
        return await listening(address, backlog)

    monkeypatch.setattr(tcp, "listening", taken)
    restarts = pair.service.faults.restarts
    pair.forgive()
    old = pair.side.runtime
    pair.call(raises)
    until(lambda: pair.side.runtime is not old and pair.mixes())
    assert pair.service.faults.restarts == restarts + 2


# -- what the user asked for ----------------------------------------------------------------------------------------
def test_a_user_who_asks_for_faults_hears_of_them(train, until):
    trainee = train({"x": np.zeros(8, np.float32)}, on_fault="raise")
    trainee.side.thread.call(raises)
    until(lambda: trainee.error is not None)
    error, trainee.error = trainee.error, None
    assert isinstance(error, FaultError)
    assert "ZeroDivisionError in test_supervision.py" in str(error)
    assert "Report the traceback" in str(error)


def test_what_is_the_users_to_mend_still_reaches_the_user(train, until):
    def refuses():
        raise LocalError("The disk is gone.")

    trainee = train({"x": np.zeros(8, np.float32)})
    trainee.side.thread.call(refuses)
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
    """It has no weights to train alone, and its caller waits."""
    seed = Pair.__new__(Pair)
    seed.trainees = [Trainee({"x": np.zeros(8, np.float32)})]
    Pair.begin(seed.trainees[0])
    monkeypatch.setattr("gossip.peer.Peer.linked", lambda self, *_: raises())
    try:
        with pytest.raises(FaultError, match="Could not join: faults of this library"):
            Node({"x": np.zeros(8, np.float32)}, seeds=[seed.node.address], config=QUICK).start()
    finally:
        monkeypatch.undo()
        end(seed.trainees)


@pytest.mark.parametrize("report", ["collected", "adopted", "linked"])
def test_a_fault_while_it_joins_begins_the_joining_anew(report, monkeypatch):
    seed = Trainee({"x": np.full(ELEMENTS, 7.0, np.float32)})
    Pair.begin(seed)
    plain, own = getattr(Peer, report), seed.side.peer
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
        assert newcomer.side.peer.genesis == own.genesis
        until(lambda: newcomer.side.peer.counts.done > 0)
        assert newcomer.model["x"][0] == pytest.approx(7.0)
    finally:
        end([seed, newcomer])


def test_a_loop_in_lockstep_is_let_go_on(monkeypatch):
    """It stands at its boundary for a mix that nobody will finish."""
    config = dataclasses.replace(QUICK, max_version_gap=0)
    made = Pair(config=config)
    try:
        made.service.faults._restarted.extend([time.monotonic()] * 3)
        made.call(raises)
        until(lambda: made.service.resting)
        steps = made.side.steps
        until(lambda: made.side.steps > steps + 20)
    finally:
        end(made.trainees)


# -- the boundary ---------------------------------------------------------------------------------------------------
def boundary_of(vector):
    state = ModelState({"x": vector})
    return Boundary(state, VectorPool(state), KeptWeights(state))


def test_updates_of_finished_exchanges_outlive_a_fault_and_wishes_do_not():
    live = np.zeros(8, np.float32)
    boundary = boundary_of(live)
    boundary.owe()
    boundary.owe()
    boundary.want_update(Update(Vector(np.ones(8, np.float32))))
    boundary.want_snapshot(7)
    boundary.restart()
    visit = boundary.visit(lambda vector: None)
    assert live.tolist() == [1.0] * 8
    assert not visit.snapshots
    assert boundary.owed == 0, "an update that never comes would hold up every snapshot"


def test_weights_on_trial_at_a_fault_give_way_to_those_that_were_kept():
    live = np.zeros(8, np.float32)
    boundary = boundary_of(live)
    boundary.want_adoption(Adoption(np.ones(8, np.float32), trial=True))
    boundary.visit(lambda vector: None)
    assert live.tolist() == [1.0] * 8
    boundary.restart()
    assert boundary.visit(lambda vector: None).restored
    assert live.tolist() == [0.0] * 8


def test_weights_that_were_not_taken_over_yet_are_not_after_a_fault():
    live = np.zeros(8, np.float32)
    boundary = boundary_of(live)
    boundary.want_adoption(Adoption(np.ones(8, np.float32)))
    boundary.restart()
    assert not boundary.visit(lambda vector: None).replaced
    assert live.tolist() == [0.0] * 8


def test_updates_that_wait_for_all_ranks_outlive_a_fault_too():
    live = np.zeros(8, np.float32)
    plain = boundary_of(live)
    ranks = SimpleNamespace(tell=lambda *_: None, send=lambda _: None)
    boundary = RanksBoundary(ranks, plain.model, plain.vectors, plain.kept)
    boundary.owe()
    boundary.want_update(Update(Vector(np.ones(8, np.float32))))
    boundary.want_adoption(Adoption(np.full(8, 5.0, np.float32)))
    boundary.restart()
    assert boundary.owed == 1
    boundary.open()
    assert not boundary.visit(lambda vector: None).replaced
    assert boundary.owed == 0
    assert live.tolist() == [1.0] * 8


# -- what is told ---------------------------------------------------------------------------------------------------
def test_of_several_errors_the_users_is_told_and_never_a_cancellation():
    cancelled = trio.Cancelled.__new__(trio.Cancelled)
    group = BaseExceptionGroup("", [cancelled, ExceptionGroup("", [KeyError("x"), LocalError("Mend it.")])])
    assert str(first_cause(group)) == "Mend it."
    assert isinstance(first_cause(BaseExceptionGroup("", [cancelled, KeyError("x")])), KeyError)


def test_a_traceback_obeys_no_terminal():
    try:
        raise RemoteError("x", "\x1b[2J\n of a stranger")
    except RemoteError as error:
        told = trace(error)
    assert "\x1b" not in told
    assert told.splitlines()[-1] == r"RemoteError: '\x1b[2J\n of a stranger'"


# -- the command ----------------------------------------------------------------------------------------------------
SCRIPT = """
import time
import numpy as np
from node import Node

with Node({"x": np.zeros(8, np.float32)}) as node:
    node.step()
    node._training.thread.call(lambda: [].pop())
    for _ in range(100):
        node.step()
        time.sleep(0.01)
"""


@pytest.mark.parametrize(("how", "code"), [("restart", 0), ("raise", 4)])
def test_a_command_says_what_to_report_and_ends_as_was_asked(tmp_path, how, code):
    script, log = tmp_path / "train.py", tmp_path / "log.jsonl"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "gossip", "run", "--on-fault", how, "--log", str(log), "--quiet", str(script)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    [row] = [row for row in map(json.loads, log.read_text().splitlines()) if row["event"] == "restarted"]
    assert re.search(r"\(IndexError in train.py:\d+\) ended the network side, .* Report the traceback", row["sentence"])
    assert "IndexError: 'pop from empty list'" in row["traceback"]
    assert row["traceback"] in done.stderr
    assert ("gossip: The network side of this node ended" in done.stderr) is (code == 4)

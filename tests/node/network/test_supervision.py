"""A fault of the network side costs a node a moment of its swarm, while the loop trains on."""

from __future__ import annotations

import gc
import os
import re
import threading
from types import SimpleNamespace

import pytest

from gossip.arithmetic.moments import MomentForm
from gossip.effects import (
    Adopt,
    Confirm,
    CopyFrozen,
    CopyMoments,
    CopyPiece,
    Dial,
    Effect,
    Gather,
    HashFrozen,
    LeaveOut,
    LookUp,
    MemberChanged,
    MemberState,
    Merge,
    Mix,
    MixMoments,
    Notice,
    ReceiveMoments,
    ReceivePiece,
    Release,
    Rename,
    Restore,
    Send,
    SendMoments,
    SendPiece,
    Snapshot,
    Transfer,
    TryDial,
    UseLastSnapshot,
)
from gossip.handlers import HANDLERS
from gossip.ids import Address, PeerId
from gossip.membership import members
from gossip.membership.protocol import Membership
from gossip.peer import Peer
from gossip.wire.messages import (
    Abort,
    Accept,
    Ack,
    Begin,
    Busy,
    Close,
    Commit,
    Digest,
    Fetch,
    Gossip,
    Invite,
    Joined,
    Nack,
    Offer,
    Outcome,
    Ping,
    PingReq,
    Reach,
    Reached,
    Records,
    Refuse,
    Serving,
    Settled,
    StatusQuery,
    Widen,
)
from node.links.connector import Connector
from node.network import link_life
from node.network.runtime import REPORTS, Runtime
from node.network.striping import Striping
from node.network.transfers.streams import Streams
from node.observe.page.exposition import Exposition
from tests.node.conftest import end, until
from tests.node.faulty import Pair, crash, raises

NOBODY = b"\x07" * 16
FAULTS = 12  # More than the descriptors or threads that may be in use for a moment.
MESSAGES = [
    Offer(1, "", b"", 0.0, 0.5, "fp32"), Accept(1, 0.0, 0.5, "fp32"), Commit(1), Outcome(1), Settled(1, True),
    Invite(1, "", b"", 0.0, "fp32"), Joined(1, 0.0, "fp32"), Begin(1, (), 0.0, "fp32"), Busy(1), Refuse(1, "layout"),
    Abort(1, "late"), Fetch(1, (), 0, 0), Serving(1, 0.0, b"", (), ()), Reach(), Reached(True),
]  # fmt: skip
MEMBERSHIP_MESSAGES = [
    Ping(1, ()), Ack(1, ()), PingReq(1, PeerId(NOBODY), ()), Nack(1), Gossip(()), Digest(b""), Records((), b""),
]  # fmt: skip
# Messages that the reader of a link does not pass to the peer. Each has an example, the owner and the name of its
# handler, and the part of the network side that the handler belongs to.
DISPATCHED = {
    StatusQuery: (StatusQuery(b""), link_life, "status_page", None),
    Close: (Close("version", "Another version.", ()), Connector, "notify_once", "connector"),
    Widen: (Widen(1), Striping, "on_widen", "striping"),
}
MOMENTS = MomentForm(("sum",), ("second",), 1)
EFFECTS = [
    Send(NOBODY, Reach()), Dial(Address("127.0.0.1", 1)), LookUp(), TryDial(NOBODY, Address("127.0.0.1", 1)),
    Snapshot(1), CopyPiece(1, 0, 1), UseLastSnapshot(1), CopyFrozen(1, 0, 1), HashFrozen(0, 1),
    Transfer(1, NOBODY, "fp32"), Gather(1, (), 0, "fp32"), LeaveOut(1, None, means=True), Mix(1, 0.5), Merge(1, 0.5),
    Rename(1, 2), Release(1), SendPiece(1, NOBODY, 0, 1), ReceivePiece(1, NOBODY, 0, 1, 1), Adopt((), ()), Confirm(),
    Restore(), MemberChanged(NOBODY, None, MemberState.ALIVE), Notice("fault", ""), CopyMoments(1, MOMENTS, 0, 1),
    SendMoments(1, NOBODY, MOMENTS, 0, 1), ReceiveMoments(1, NOBODY, MOMENTS, 0, 1), MixMoments(1),
]  # fmt: skip


def named(one):
    return type(one).__name__


@pytest.fixture(scope="module")
def pair():
    made = Pair()
    yield made
    end(made.trainees)


def test_every_handler_effect_and_report_is_tried():
    assert {type(message) for message in MESSAGES} == set(HANDLERS)
    assert {type(message) for message in MEMBERSHIP_MESSAGES} == members.MEMBERSHIP_MESSAGES
    assert {type(effect) for effect in EFFECTS} == set(Effect.__args__)
    assert all(callable(getattr(Peer, report)) for report in REPORTS)


def raise_once(monkeypatch, owner, name, is_meant=lambda *_: True):
    """Make the next call whose arguments satisfy ``is_meant`` raise."""
    plain, left = getattr(owner, name), [1]

    def function(*arguments):
        if left[0] and is_meant(*arguments):
            left[0] -= 1
            raise ZeroDivisionError
        return plain(*arguments)

    monkeypatch.setattr(owner, name, function)


def a_fault_ends_its_link_alone(pair, message):
    """Assert that a message of the second node causes a fault in the first, which ends their link only.

    Without a message, wait for one that the second node sends by itself.
    """
    peer, found = pair.side.network.peer, pair.service.faults
    restarts, count = found.restarts, found.count
    other = pair.trainees[1].side
    until(lambda: other.network.runtime.links.newest(peer.id) is not None)
    if message is not None:
        other.network.call(lambda: other.network.runtime.links.newest(peer.id).send(message))
        other.network.call(lambda: other.network.runtime.links.flush())
    until(lambda: found.count == count + 1)
    before = peer.exchanges.done_count
    until(lambda: peer.exchanges.done_count > before)
    assert pair.side.network.peer is peer, "the network side stays"
    assert found.restarts == restarts


@pytest.mark.parametrize("message", MESSAGES, ids=named)
def test_a_fault_at_a_message_ends_its_link_alone(pair, message, monkeypatch):
    peer, handlers = pair.side.network.peer, SimpleNamespace(handler=HANDLERS[type(message)])
    raise_once(monkeypatch, handlers, "handler", lambda who, *_: who is peer)
    monkeypatch.setitem(HANDLERS, type(message), handlers.handler)
    a_fault_ends_its_link_alone(pair, message)


@pytest.mark.parametrize("message", MEMBERSHIP_MESSAGES, ids=named)
def test_a_fault_at_a_message_of_the_membership_ends_its_link_alone(pair, message, monkeypatch):
    members = pair.side.network.peer.membership
    raise_once(
        monkeypatch, Membership, "receive", lambda who, _, one, __: who is members and type(one) is type(message)
    )
    a_fault_ends_its_link_alone(pair, message)


@pytest.mark.parametrize("kind", DISPATCHED, ids=lambda kind: kind.__name__)
def test_a_fault_at_a_message_that_concerns_a_link_ends_that_link_alone(pair, kind, monkeypatch):
    """The messages concern the status page, the end of a link, and its lanes."""
    message, owner, name, part = DISPATCHED[kind]
    runtime = pair.side.network.runtime
    ours = None if part is None else getattr(runtime, part)
    raise_once(monkeypatch, owner, name, lambda who, *_: ours is None or who is ours)
    a_fault_ends_its_link_alone(pair, message)


@pytest.mark.parametrize("name", ["buffer_for", "on_body"])
def test_a_fault_at_a_chunk_ends_its_link_alone(pair, name, monkeypatch):
    streams = pair.side.network.runtime.streams
    raise_once(monkeypatch, Streams, name, lambda who, *_: who is streams)
    a_fault_ends_its_link_alone(pair, None)


@pytest.mark.parametrize("effect", EFFECTS, ids=named)
def test_a_fault_in_performing_an_effect_begins_the_network_side_anew(pair, effect, monkeypatch):
    runtime, plain = pair.side.network.runtime, Runtime.perform_one

    def perform_one(self, one):
        if self is runtime and type(one) is type(effect):
            raise ZeroDivisionError
        plain(self, one)

    def fault():
        monkeypatch.setattr(Runtime, "perform_one", perform_one)
        if not isinstance(effect, Send | Snapshot | Transfer | Mix | Release):  # These come by themselves.
            pair.call(lambda: runtime.perform([effect]))

    pair.begins_anew(fault)


@pytest.mark.parametrize("report", REPORTS)
def test_a_fault_in_a_report_to_the_peer_begins_the_network_side_anew(pair, report):
    runtime = pair.side.network.runtime

    def faulty(*_, **__):
        raise ZeroDivisionError

    def fault():
        setattr(runtime.peer, report, runtime.guard_report(faulty))
        if report not in (
            "tick",
            "on_stepped",
            "update_counts",
            "on_snapshotted",
            "on_streamed",
        ):  # These come by themselves.
            pair.call(getattr(runtime.peer, report))

    pair.begins_anew(fault)


async def dies():
    raises()


@pytest.mark.parametrize("where", ["a call", "a task", "a link's end", "the loop", "the deadline"])
def test_a_fault_anywhere_in_the_network_thread_begins_the_network_side_anew(pair, where, monkeypatch):
    runtime = pair.side.network.runtime

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
                monkeypatch.setattr(runtime, "on_batch_end", raises)

    pair.begins_anew(fault)


def test_a_fault_is_told_with_its_traceback_and_counted(pair, caplog):
    caplog.clear()
    pair.begins_anew(lambda: pair.call(raises))
    restarts = pair.service.faults.restarts
    assert re.search(r"A fault of this library \(ZeroDivisionError in faulty.py:\d+\)", caplog.text)
    assert "Report the traceback" in caplog.text
    assert "in raises" in caplog.text
    assert pair.node.metrics().network_restarts == restarts > 0
    assert f"gossip_network_restarts_total {restarts}.0" in Exposition().render(pair.side.source()).decode()
    assert "restarted" in [event.kind for event in pair.node.history()]


def test_the_next_network_side_is_a_later_life_of_the_same_node(pair):
    """Members accept a record of a higher incarnation, and dial the address that they know."""
    record = pair.side.network.peer.membership.me
    pair.begins_anew(lambda: pair.call(raises))
    again = pair.side.network.peer.membership.me
    assert (again.id, again.address) == (record.id, record.address)
    assert again.incarnation > record.incarnation
    assert again.steps >= record.steps
    other = pair.trainees[1]
    assert [one.id for one in other.do(lambda node: node.members)][1:] == [pair.known_as]
    until(lambda: other.side.network.peer.membership.record(again.id).incarnation >= again.incarnation)


def test_nothing_is_left_behind_by_many_faults(pair):
    def left():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    pair.begins_anew(lambda: pair.call(raises), soon=False)  # Other tests cover the delay.
    descriptors, threads = left()
    for _ in range(FAULTS):
        pair.begins_anew(lambda: pair.call(raises), soon=False)
    # A link may be opened twice meanwhile, and an idle worker thread ends after some seconds.
    until(lambda: left()[0] <= descriptors + 4 and left()[1] <= threads + 2)

"""A fault of the network side costs a node a moment of its swarm, while the loop trains on."""

import dataclasses
import gc
import os
import threading
from types import SimpleNamespace

import pytest
import trio

from gossip.effects import Mix, Release, Send, Snapshot, Transfer
from gossip.handlers import HANDLERS
from gossip.ids import Claim, PeerId
from gossip.membership.members import MEMBERSHIP_MESSAGES
from gossip.peer import Peer
from gossip.wire.messages import Close, StatusQuery, Widen
from node.links.connector import Connector
from node.network import link_life
from node.network.runtime import REPORTS, Runtime
from node.network.striping import Striping
from node.network.transfers.streams import Streams
from tests.node.conftest import end, until
from tests.node.faulty import Pair, crash, raises
from tests.node.offline import in_trio, runtime

FAULTS = 12  # More than the descriptors or threads that may be in use for a moment.
PEER_MESSAGES = sorted({*HANDLERS, *MEMBERSHIP_MESSAGES}, key=lambda kind: kind.__name__)
# Messages that the reader of a link does not pass to the peer. Each has an example, the owner and the name of its
# handler, and the part of the network side that the handler belongs to.
DISPATCHED = {
    StatusQuery: (StatusQuery(b""), link_life, "status_page", None),
    Close: (Close("version", "Another version.", ()), Connector, "notify_once", "connector"),
    Widen: (Widen(1), Striping, "on_widen", "striping"),
}
# Values that change nothing, by the kind of a message's field.
HARMLESS = {
    "int": 1, "float": 0.5, "bool": True, "text": "", "bytes": b"", "id": PeerId(b"\x07" * 16), "ids": (),
    "record?": None, "updates": (), "names": (), "scalars": (), "claim": Claim(0, 0, 0, 0), "any": (),
}  # fmt: skip


def harmless(kind):
    return kind(**{field.name: HARMLESS[field.metadata["kind"].form] for field in dataclasses.fields(kind)})


def by_name(kind):
    return kind.__name__


@pytest.fixture(scope="module")
def pair():
    made = Pair()
    yield made
    end(made.trainees)


# -- faults that end a link --------------------------------------------------------------------------------------------
def raise_once(monkeypatch, owner, name, is_meant):
    """Make the next call whose arguments satisfy ``is_meant`` raise."""
    plain, left = getattr(owner, name), [1]

    def function(*arguments):
        if left[0] and is_meant(*arguments):
            left[0] -= 1
            raise ZeroDivisionError
        return plain(*arguments)

    monkeypatch.setattr(owner, name, function)


def check_that_a_link_alone_ends(pair, message):
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


@pytest.mark.parametrize("kind", PEER_MESSAGES, ids=by_name)
def test_a_fault_of_the_peer_at_a_message_ends_its_link_alone(pair, kind, monkeypatch):
    peer = pair.side.network.peer
    raise_once(monkeypatch, Peer, "receive", lambda who, _, message, __: who is peer and type(message) is kind)
    check_that_a_link_alone_ends(pair, harmless(kind))


@pytest.mark.parametrize("kind", DISPATCHED, ids=by_name)
def test_a_fault_at_a_message_that_concerns_a_link_ends_that_link_alone(pair, kind, monkeypatch):
    """The messages concern the status page, the end of a link, and its lanes."""
    message, owner, name, part = DISPATCHED[kind]
    ours = None if part is None else getattr(pair.side.network.runtime, part)
    raise_once(monkeypatch, owner, name, lambda who, *_: ours is None or who is ours)
    check_that_a_link_alone_ends(pair, message)


@pytest.mark.parametrize("name", ["buffer_for", "on_body"])
def test_a_fault_at_a_chunk_ends_its_link_alone(pair, name, monkeypatch):
    streams = pair.side.network.runtime.streams
    raise_once(monkeypatch, Streams, name, lambda who, *_: who is streams)
    check_that_a_link_alone_ends(pair, None)


# -- faults that end the network side ----------------------------------------------------------------------------------
@pytest.mark.parametrize("report", REPORTS)
@in_trio
def test_a_fault_in_any_report_to_the_peer_ends_the_network_side(report, monkeypatch):
    plain, is_faulty = getattr(Peer, report), []

    def reported(*arguments, **named):
        return raises() if is_faulty else plain(*arguments, **named)

    monkeypatch.setattr(Peer, report, reported)
    node = runtime()
    node.nursery = SimpleNamespace(cancel_scope=trio.CancelScope())
    is_faulty.append(True)
    assert getattr(node.peer, report)() == []
    assert isinstance(node.failure, ZeroDivisionError)
    assert node.nursery.cancel_scope.cancel_called


def faulty(*_, **__):
    raises()


@pytest.mark.parametrize("report", ["tick", "on_stepped", "update_counts", "on_snapshotted", "on_streamed"])
def test_a_fault_in_a_report_of_a_running_node_begins_the_network_side_anew(pair, report):
    runtime = pair.side.network.runtime
    pair.begins_anew(lambda: setattr(runtime.peer, report, runtime.guard_report(faulty)))


@pytest.mark.parametrize("kind", [Send, Snapshot, Transfer, Mix, Release], ids=by_name)
def test_a_fault_in_performing_an_effect_begins_the_network_side_anew(pair, kind, monkeypatch):
    runtime, plain = pair.side.network.runtime, Runtime.perform_one

    def perform_one(self, effect):
        if self is runtime and type(effect) is kind:
            raises()
        plain(self, effect)

    pair.begins_anew(lambda: monkeypatch.setattr(Runtime, "perform_one", perform_one))


async def dies():
    raises()


@pytest.mark.parametrize("where", ["a call", "a task", "a link's end", "the loop", "the deadline"])
def test_a_fault_anywhere_in_the_network_thread_begins_the_network_side_anew(pair, where, monkeypatch):
    runtime = pair.side.network.runtime
    faults = {
        "a call": lambda: pair.call(raises),
        "a task": lambda: pair.call(lambda: runtime.spawn(dies)),
        "a link's end": lambda: monkeypatch.setattr(runtime.links, "flush", raises),
        "the loop": lambda: pair.call(crash),
        "the deadline": lambda: monkeypatch.setattr(runtime, "on_batch_end", raises),
    }
    pair.begins_anew(faults[where])


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

    pair.begins_anew(lambda: pair.call(raises))
    descriptors, threads = left()
    for _ in range(FAULTS):
        pair.begins_anew(lambda: pair.call(raises))
    # A link may be opened twice meanwhile, and an idle worker thread ends after some seconds.
    until(lambda: left()[0] <= descriptors + 4 and left()[1] <= threads + 2)

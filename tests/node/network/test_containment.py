"""A fault at one link's message ends that link only; a fault in one exchange's work ends that exchange only."""

import re
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import trio

from gossip.averaging.jobs import MixJob
from gossip.errors import LocalError, ProtocolError
from gossip.wire.frames import PREFIX_BYTES, decode, encode
from gossip.wire.messages import (
    Abort,
    Chunk,
    Close,
    Commit,
    Fetch,
    Hello,
    Invite,
    Offer,
    Outcome,
    Ping,
    Settled,
    StatusQuery,
)
from node.faults import MAX_LOGGED_PLACES, Faults
from node.network.link_life import FloodError, LinkLife
from node.network.transfers import streams
from tests.agreement.scenario import Scenario, make_peer
from tests.node.offline import ELEMENTS, OTHER, in_trio, link, runtime

OTHER_RECORD = make_peer(1, (), Scenario([], 0.0), 0.0).membership.me


def test_a_fault_in_mixing_loses_that_exchange_and_nothing_else(train, until, monkeypatch):
    plain, left = MixJob.run, [4]

    def run(self):
        if left[0]:
            left[0] -= 1
            raise MemoryError
        plain(self)

    monkeypatch.setattr(streams, "INLINE_ELEMENTS", 0)
    monkeypatch.setattr(MixJob, "run", run)
    trainees = [train({"x": np.zeros(ELEMENTS, np.float32)})]
    trainees.append(train({"x": np.ones(ELEMENTS, np.float32)}, seeds=[trainees[0].node.address]))
    until(lambda: not left[0])
    before = trainees[0].node.metrics().exchanges_done
    until(lambda: all(trainee.node.metrics().exchanges_done > before + 5 for trainee in trainees))
    assert sum(trainee.side.network.runtime.faults.count for trainee in trainees) == 4


@pytest.mark.parametrize("size", [0, 2 * streams.INLINE_ELEMENTS], ids=["at once", "in another thread"])
@in_trio
async def test_a_mean_that_meets_a_fault_fails_its_exchange(size):
    node = runtime()
    failures, group = [], SimpleNamespace(session=7, can_average=True, rows=SimpleNamespace(size=size))
    group.average_slice, failed = lambda: 1 / 0, trio.Event()
    report = lambda *what: (failures.append(what[:2]), failed.set(), [])[-1]  # noqa: E731
    node.averager.peer = SimpleNamespace(on_failed=report)
    node.averager.average_slice(group, lambda: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.streams.run_jobs)
        with trio.fail_after(10):
            await failed.wait()
        nursery.cancel_scope.cancel()
    assert failures == [(7, "fault")]
    assert [kind for kind, _ in node.events if kind == "fault"] == ["fault"]


@in_trio
async def test_both_sides_hear_of_a_fault_at_a_message_and_nobody_its_text():
    def receive(*_):
        raise ZeroDivisionError("text of a stranger")

    node = runtime()
    node.peer.receive = receive
    ours, reader = link(capacity_bytes=1 << 16)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.run_link, ours, Hello(1, 1, "default", "", (), OTHER_RECORD))
        await trio.testing.wait_all_tasks_blocked()
        await reader.stream.send_all(encode(Ping(1, ())))
        said = []
        while (got := await reader.read_message()) is not None:
            said.append(got[0])
    assert Close("fault", "your message caused a fault here (ZeroDivisionError).", ()) in said
    [sentence] = [sentence for kind, sentence in node.events if kind == "fault"]
    told = r"A message from \w{8} raised ZeroDivisionError in test_containment.py:\d+, a .*; its link is closed."
    assert re.fullmatch(told, sentence)
    assert not len(node.links)
    assert not node.peer.linked_peers


def test_each_place_of_a_fault_is_told_once_and_no_more_than_so_many():
    told = []
    faults = Faults(lambda kind, sentence: told.append(sentence))
    for line in (*range(2 * MAX_LOGGED_PLACES), 0):
        try:
            exec(compile("\n" * line + "1 / 0", f"made_{line}.py", "exec"))
        except ZeroDivisionError as error:
            faults.contain(error, "A test", "nothing has happened")
    assert len(set(told)) == len(told) == MAX_LOGGED_PLACES
    assert faults.count == 2 * MAX_LOGGED_PLACES + 1
    assert told[0] == "A test raised ZeroDivisionError in made_0.py:1, a fault of this library; nothing has happened."


@pytest.mark.parametrize(
    "error", [LocalError("The user's."), trio.Cancelled.__new__(trio.Cancelled), KeyboardInterrupt()]
)
def test_errors_for_the_user_cancellations_and_interrupts_are_not_contained(error):
    faults = Faults(lambda kind, sentence: None)
    for raised in (error, BaseExceptionGroup("", [ZeroDivisionError(), error])):
        with pytest.raises(type(raised)):
            faults.contain(raised, "A test", "")


# -- what waits for a link ---------------------------------------------------------------------------------------------
def offer(session):
    return Offer(session, "", b"", 0.0, 0.5, "fp32")


def fitting_offer(node, session):
    ready = node.peer.local
    return Offer(session, ready.fingerprint, ready.run_id, 0.0, 0.5, "fp32")


def linked():
    """Return a node, and its link to another one that its peer knows."""
    node = runtime()
    ours, _ = link()
    node.links.add(ours)
    node.perform(node.peer.on_linked(OTHER, OTHER_RECORD, node.now))
    return node, ours


def always_choose_the_other(peer):
    peer.partners.choose = lambda asked, now, *more: OTHER if not asked else None


@in_trio
async def test_an_offer_whose_session_is_over_is_not_sent_when_its_link_comes():
    """Its refusal would leave the link bound for good: it could neither go idle nor make room for another."""
    node = runtime()
    ours, _ = link()
    begins = [offer(5), Invite(6, "", b"", 0.0, "fp32"), Fetch(8, (), 0, 0)]
    node.undelivered[OTHER] = deque([*begins, Abort(5, "late"), Settled(9, True)])
    node.links.add(ours)
    LinkLife(node, ours).announce_link(OTHER_RECORD)
    assert not node.transfers.table
    sent = [decode(frame[PREFIX_BYTES:]) for frame in ours.outbox]
    assert [one for one in sent if isinstance(one, Offer | Invite | Fetch | Abort | Settled)] == [
        Abort(5, "late"), Settled(9, True)
    ]  # fmt: skip


@in_trio
async def test_an_offer_that_waited_for_its_link_is_sent_while_its_session_lasts():
    node = runtime()
    peer = node.peer
    always_choose_the_other(peer)
    [wish] = peer.exchanges.begin_mix(node.now)
    [sent] = peer.on_snapshotted(wish.session, node.now)
    assert peer.view.should_send(OTHER, sent.message)
    assert not peer.view.should_send(peer.id, sent.message)
    peer.exchanges.abandon()
    assert not peer.view.should_send(OTHER, sent.message)


async def accepts_from(node, ours, *messages):
    """Let the link receive these messages, and then end."""
    left = list(messages)

    class Reader:
        async def read_message(self):
            return (left[0], int(isinstance(left.pop(0), Chunk))) if left else None

        async def discard(self, count):
            """Discard the body."""

    ours.reader = Reader()
    await LinkLife(node, ours).read()


@in_trio
async def test_an_offer_that_is_refused_binds_no_link():
    node, ours = linked()
    await accepts_from(node, ours, offer(5), Outcome(6), Fetch(7, (), 3, 1))  # The first offers another layout.
    assert not node.transfers.table
    await accepts_from(node, ours, fitting_offer(node, 8))
    assert {session: transfer.link for session, transfer in node.transfers.table.items()} == {8: ours}
    await accepts_from(node, ours, Abort(8, "late"))
    assert not node.transfers.table


@in_trio
async def test_an_offer_that_crosses_the_end_of_an_idle_link_benches_nobody():
    node, ours = linked()
    peer, benched = node.peer, []
    always_choose_the_other(peer)
    peer.partners.note_failure = lambda partner, now: benched.append(partner)
    node.perform(peer.exchanges.begin_mix(node.now))
    node.averager.use_copies(node.averager.boundary.visit(lambda vector: None))
    assert node.transfers.used_links() == {ours}
    LinkLife(node, ours).on_message(Close("idle", "", ()))
    LinkLife(node, ours).announce_end()
    assert not benched
    assert not peer.exchanges.table


@in_trio
async def test_an_offer_over_a_link_that_this_node_is_closing_begins_nothing():
    """Its answer could not be sent, so that the exchange would fail on this side alone."""
    node, ours = linked()
    ours.retire()
    await accepts_from(node, ours, fitting_offer(node, 8))
    assert not node.peer.exchanges.table
    assert not node.transfers.table


@pytest.mark.parametrize("message", [Outcome(7), Settled(7, True)])
@in_trio
async def test_how_an_exchange_ended_is_asked_and_told_over_the_newest_link(message):
    """The link on which the session began may be congested.

    Once, an answer came too late behind retransmitted packets, and one side dropped what the other had mixed.
    """
    node = runtime()
    (old, _), (new, _) = link(), link()
    said = []
    for one in (old, new):
        one.send = lambda message, one=one: said.append((one, message))
        node.links.add(one)
    node.averager.open(7).link = old
    node.send(OTHER, message)
    node.send(OTHER, Commit(7))
    assert said == [(new, message), (old, Commit(7))]


@in_trio
async def test_a_chunk_of_a_session_that_failed_here_before_it_began_is_late_and_no_fault():
    node = runtime()
    ours, _ = link()
    node.streams.fail_later(7, "overflow")
    assert node.streams.buffer_for(ours, Chunk(7, 0, 1024, 0), 4096) is None
    with pytest.raises(ProtocolError):
        node.streams.buffer_for(ours, Chunk(8, 0, 1024, 0), 4096)


@pytest.mark.parametrize(
    ("message", "allowed"),
    [(Chunk(7, 0, 1, 0), 200), (StatusQuery(b""), 10), (Outcome(3), 200)],
)
@in_trio
async def test_the_messages_of_one_link_are_limited_in_number(message, allowed, monkeypatch):
    """Late chunks of one byte move nothing, and status queries have long answers."""
    monkeypatch.setattr("node.network.link_life.MESSAGES_PER_S", 200)  # A slow machine reads them in a second.
    node = runtime()
    ours, _ = link()
    ours.send = lambda message: None
    node.transfers.ended.append(7)
    await accepts_from(node, ours, *[message] * allowed)
    with pytest.raises(FloodError):
        await accepts_from(node, ours, *[message] * (allowed + 1))

"""The order of frames on a link, the limits of a link that its peer does not read, and sending without a task."""

from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
import trio.testing

from gossip.averaging.streams import Sender
from gossip.codecs import get_codec
from gossip.ids import PeerId
from gossip.wire.frames import encode
from gossip.wire.messages import MAX_RECORDS, Accept, Chunk, Commit, Hint, Nack, Records, StatusReply
from node.links import pool as pools
from node.links.frame_reader import FrameReader
from node.links.link import CONTROL_BURST, FLUSHED_CHUNKS, OUTBOX_BYTES, OUTBOX_FRAMES, Link
from node.links.pool import Links
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.network.link_life import CLOSE_S, LinkLife
from node.transport.byte_stream import MAX_READS_IN_A_ROW, BrokenLinkError
from tests.node import offline
from tests.node.network.carriers import SOCKET_BYTES, loopback_pair
from tests.node.network.carriers import in_trio as on_sockets
from tests.node.offline import in_trio
from tests.node.offline import link as linked

SIZE = 2_048
SMALL, LARGE = 1_024, 1 << 18  # Elements: what both sockets hold at once, and twice what they hold.
FP32 = get_codec("fp32")


def ignore(session):
    """Stand for the callbacks that a test does not need."""


@asynccontextmanager
async def writing(link, on_finished=ignore):
    """Run the writing task of a link until it waits; cancel it in the end."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.write_loop, ignore, on_finished)
        await trio.testing.wait_all_tasks_blocked()
        yield
        nursery.cancel_scope.cancel()


async def socket_link():
    """Return a node's links, of which one goes over a socket, that link, and the stream at its far end."""
    near, far = await loopback_pair()
    links, link = Links(), Link(near, FrameReader(near), PeerId(bytes(16)))
    links.add(link)
    return links, link, far


async def kinds(reader, count):
    """Return the types of the next ``count`` messages; discard the bodies of chunks."""
    found = []
    for _ in range(count):
        got = await reader.read_message()
        assert got is not None
        found.append(type(got[0]))
        await reader.discard(got[1])
    return found


def pooled(elements=SIZE):
    """Return a pool, a vector of it, and a Sender of that vector."""
    pool = VectorPool(ModelState({"x": np.zeros(elements, np.float32)}))
    vector = pool.take()
    vector.array[:] = np.arange(elements)
    return pool, vector, Sender(7, vector.array, FP32, elements, lease=pool.lease(vector))


def send_at_once(links, link, message, sender=None):
    """Send a message, and begin a stream, in one batch of effects."""
    links.batch_depth += 1
    link.send(message)
    if sender is not None:
        link.start_bulk(7, sender)
    links.batch_depth -= 1
    links.flush()


ACCEPT = Accept(7, 0.0, 0.5, "fp32")


# -- the order of frames -----------------------------------------------------------------------------------------------
@in_trio
async def test_no_chunk_goes_ahead_of_what_was_sent_before_it():
    """An Accept is sent, and its stream begins, while the link is busy sending.

    A chunk ahead of the Accept would belong to no session, and end the link.
    """
    before = 2 * CONTROL_BURST
    link, reader = linked(capacity_bytes=16)
    async with writing(link):
        for number in range(before):
            link.send(Nack(number))
            await trio.testing.wait_all_tasks_blocked()  # The first of them is being sent.
        link.send(ACCEPT)
        link.start_bulk(7, Sender(7, np.zeros(SIZE, np.float32), FP32, 1_024))
        assert await kinds(reader, before + 3) == [*[Nack] * before, Accept, Chunk, Chunk]


@in_trio
async def test_a_stream_goes_on_between_control_frames_that_never_end():
    link, reader = linked()
    link.start_bulk(7, Sender(7, np.zeros(SIZE, np.float32), FP32, 1_024))
    for number in range(4 * CONTROL_BURST):
        link.send(Nack(number))
    async with writing(link):
        found = await kinds(reader, 2 * CONTROL_BURST + 2)
        assert found.count(Chunk) == 2


@on_sockets
async def test_a_flush_from_within_a_flush_sends_nothing_ahead_of_what_was_popped():
    """The link notices the end of a vector while it takes frames, and its callback's message is flushed at once."""
    _, link, far = await socket_link()
    reader = FrameReader(far)

    def finished(session):
        link.send(Nack(3))
        link.flush()

    async with writing(link, finished):
        sender = Sender(7, np.zeros(SMALL, np.float32), FP32, SMALL)
        sender.next_frame()  # All of it is sent; the link learns this when it asks for more.
        link.start_bulk(7, sender)
        for number in (1, 2):
            link.send(Nack(number))
        link.flush()
        assert [(await reader.read_message())[0] for _ in range(3)] == [Nack(1), Nack(2), Nack(3)]


# -- vectors go back to the pool ---------------------------------------------------------------------------------------
@in_trio
async def test_a_vector_that_is_being_sent_goes_back_to_the_pool_when_its_chunk_is_out():
    """The session ends in the middle of a chunk.

    If another exchange took the vector then, it would overwrite the chunk, and the partner would report a wrong
    checksum.
    """
    link, reader = linked()
    pool, vector, sender = pooled()
    async with writing(link):
        link.start_bulk(7, sender)
        await trio.testing.wait_all_tasks_blocked()
        link.stop_bulk(7, sender)
        pool.give(vector)  # The session gives it back at this point, too.
        assert pool.take().array is not vector.array
        assert await kinds(reader, 1) == [Chunk]
        await trio.testing.wait_all_tasks_blocked()
        assert pool.take().array is vector.array


@in_trio
async def test_a_vector_whose_stream_is_stopped_before_it_begins_goes_back_to_the_pool_once():
    link, _ = linked()
    pool, vector, sender = pooled()
    link.start_bulk(7, sender)
    link.stop_bulk(7, sender)
    assert not pool.free_arrays
    pool.give(vector)
    assert [len(kept) for kept in pool.free_arrays.values()] == [1]


@on_sockets
async def test_a_link_that_is_cut_in_the_middle_of_a_chunk_releases_its_vector():
    links, link, _ = await socket_link()
    pool, vector, sender = pooled(LARGE)
    async with writing(link):
        send_at_once(links, link, ACCEPT, sender)
        assert link.batch is not None, "two sockets of 64 KiB hold no megabyte"
    link.stop_bulk(7, sender)
    pool.give(vector)
    assert [len(kept) for kept in pool.free_arrays.values()] == [1]


# -- limits ------------------------------------------------------------------------------------------------------------
RECORDS = Records(tuple(Hint(PeerId(bytes(16)), 1, False, PeerId(bytes(16))) for _ in range(MAX_RECORDS)), b"")
STATUS = StatusReply(("x" * 300,) * 200, (), False)  # 60 kB, almost as much as a header may have.


@pytest.mark.parametrize(
    ("message", "most"),
    [(STATUS, OUTBOX_BYTES // len(encode(STATUS))), (Nack(1), OUTBOX_FRAMES)],
    ids=["bytes", "frames"],
)
@in_trio
async def test_a_link_that_nobody_reads_is_closed_at_so_many_bytes_or_frames(message, most):
    link, _ = linked()
    for _ in range(most):
        link.send(message)
    assert not link.is_closed
    link.send(message)
    assert link.is_closed
    assert link.is_unread


@in_trio
async def test_links_that_nobody_reads_hold_no_more_together_than_is_allowed(monkeypatch):
    """Only the link with the largest backlog is closed."""
    monkeypatch.setattr(pools, "OUTBOXES_BYTES", 20 * len(encode(RECORDS)))
    pool = Links()
    made = [linked(bytes([number]) * 16)[0] for number in range(8)]
    for link in made:
        pool.add(link)
    for _ in range(12):
        made[3].send(RECORDS)
    for link in made:
        link.send(RECORDS)
    assert [link.is_closed for link in made] == [False] * 8
    for _ in range(3):
        made[5].send(RECORDS)
    assert [number for number, link in enumerate(made) if link.is_closed] == [3]
    pool.remove(made[3])
    assert pool.waiting_bytes == 10 * len(encode(RECORDS))


@pytest.mark.parametrize("end", ["retire", "finish", "close_now", "theirs"])
@in_trio
async def test_nothing_begins_on_a_link_that_is_closing(end):
    pool, older, newer = Links(), linked()[0], linked()[0]
    pool.add(older)
    pool.add(newer)
    assert pool.newest(newer.peer) is newer
    if end == "theirs":
        newer.is_orderly = True  # The other side said that it does not need the link.
    else:
        getattr(newer, end)()
    assert pool.newest(newer.peer) is older
    pool.remove(older)
    assert pool.newest(newer.peer) is None


@in_trio
async def test_the_link_that_gives_way_is_another_each_time_and_closes_although_nobody_reads():
    node = offline.runtime()
    older, newer = (linked(capacity_bytes=0)[0] for _ in range(2))
    for number, link in enumerate((older, newer)):
        link.used_at = node.now + number
        node.links.add(link)
    life = LinkLife(node, linked()[0])
    assert [life.close_idle_link() for _ in range(3)] == [True, True, False]
    node.close_stalled_links(node.now)
    assert not any((older.is_closed, newer.is_closed)), "what it sends last is on its way"
    node.close_stalled_links(node.now + 2 * CLOSE_S)
    assert older.is_closed
    assert newer.is_closed


@in_trio
async def test_a_message_that_cannot_be_written_closes_its_link_and_nothing_else():
    link, reader = linked()
    link.send(StatusReply(2 * STATUS.metrics, (), False))  # This is larger than a header.
    assert "StatusReply" in link.fault
    assert not link.outbox
    with pytest.raises(BrokenLinkError):
        await reader.read_message()


# -- small messages and vectors leave within the call that sends them; the writing task sends the rest -----------------
@on_sockets
async def test_an_accept_and_its_vector_are_out_before_any_task_has_its_turn():
    links, link, far = await socket_link()
    async with writing(link):
        pool, vector, sender = pooled(SMALL)
        send_at_once(links, link, ACCEPT, sender)
        pool.give(vector)  # The session gives it back at this point, too.
        assert pool.take().array is vector.array, "the kernel has a copy"
        assert not link.bulk
        assert not link.outbox
        assert links.waiting_bytes == link.outbox_bytes == 0
        count = 0
        with far.lend() as sock:  # Calls on this socket block and let no other task run.
            while count < link.bytes_sent:
                count += len(sock.recv(SOCKET_BYTES))
        assert count == link.bytes_sent > 4 * SMALL


@on_sockets
async def test_the_writing_task_first_sends_what_the_kernel_did_not_take():
    links, link, far = await socket_link()
    async with writing(link):
        pool, vector, sender = pooled(LARGE)
        send_at_once(links, link, ACCEPT, sender)
        pool.give(vector)
        assert pool.take().array is not vector.array, "it is still being sent"
        send_at_once(links, link, Commit(7))
        reader, found = FrameReader(far), []
        for kind in (Accept, Chunk, Commit):
            message, body_bytes = await reader.read_message()
            assert type(message) is kind
            body = bytearray(body_bytes)
            await reader.read_exactly(memoryview(body))
            found.append(body)
        assert np.array_equal(np.frombuffer(found[1], np.float32), np.arange(LARGE, dtype=np.float32))
        await trio.testing.wait_all_tasks_blocked()
        assert pool.take().array is vector.array
        assert links.waiting_bytes == link.outbox_bytes == 0


@on_sockets
async def test_an_error_of_a_link_is_raised_in_its_own_task_and_not_where_a_message_is_sent():
    links, link, _ = await socket_link()

    async def write():
        with pytest.raises(BrokenLinkError):
            await link.write_loop(ignore, ignore)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await trio.testing.wait_all_tasks_blocked()
        link.stream.close_now()
        send_at_once(links, link, Nack(1))


@on_sockets
async def test_a_vector_of_many_chunks_lets_other_tasks_run_meanwhile():
    links, link, _ = await socket_link()
    async with writing(link):
        # The sockets would hold all of these chunks.
        sender = Sender(7, np.zeros(4 * FLUSHED_CHUNKS * 256, np.float32), FP32, 256)
        send_at_once(links, link, ACCEPT, sender)
        assert sender.position == FLUSHED_CHUNKS * 256


@on_sockets
async def test_a_stream_that_always_has_something_to_read_lets_other_tasks_run():
    near, far = await loopback_pair()
    await far.send_all(bytes(4 * MAX_READS_IN_A_ROW))
    turns = 0

    async def other():
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        for _ in range(4 * MAX_READS_IN_A_ROW):
            assert await near.receive_into(memoryview(bytearray(1))) == 1
        assert turns >= 2
        nursery.cancel_scope.cancel()

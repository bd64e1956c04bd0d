"""Small messages and vectors leave within the call that sends them, before any other task runs.

The writing task of a link sends what the kernel did not take.
"""

from __future__ import annotations

import numpy as np
import trio
import trio.testing

from gossip.averaging.streams import Sender
from gossip.ids import PeerId
from gossip.wire.messages import Accept, Chunk, Commit, Nack
from node.links.frame_reader import FrameReader
from node.links.link import FLUSHED_CHUNKS, Link
from node.links.pool import Links
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.transport import byte_stream
from node.transport.byte_stream import MAX_READS_IN_A_ROW
from tests.node.network.carriers import FP32, SOCKET_BYTES, in_trio, loopback_pair

SMALL, LARGE = 1_024, 1 << 18  # elements: what both sockets hold at once, and twice what they hold


async def linked(nursery):
    """Return a node's links, one of them with an idle writing task, and the far end of that link."""
    near, far = await loopback_pair()
    link = Link(near, FrameReader(near), PeerId(bytes(16)))
    links = Links()
    links.add(link)
    nursery.start_soon(link.write_loop, lambda session: None, lambda session: None)
    await trio.testing.wait_all_tasks_blocked()
    return links, link, far


def pooled(elements):
    pool = VectorPool(ModelState({"x": np.zeros(elements, np.float32)}))
    vector = pool.take()
    vector.array[:] = np.arange(elements)
    return pool, vector, Sender(7, vector.array, FP32, elements, lease=pool.lease(vector))


def agreed(links, link, sender):
    """Send an Accept and begin its stream in one batch."""
    links.batch_depth += 1
    link.send(Accept(7, 0.0, 0.5, "fp32"))
    link.start_bulk(7, sender)
    links.batch_depth -= 1
    links.flush()


@in_trio
async def test_an_accept_and_its_vector_are_out_before_any_task_has_its_turn():
    async with trio.open_nursery() as nursery:
        links, link, far = await linked(nursery)
        pool, vector, sender = pooled(SMALL)
        agreed(links, link, sender)
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
        nursery.cancel_scope.cancel()


@in_trio
async def test_what_the_kernel_did_not_take_the_writing_task_sends_before_all_else():
    async with trio.open_nursery() as nursery:
        links, link, far = await linked(nursery)
        pool, vector, sender = pooled(LARGE)
        agreed(links, link, sender)
        assert link.batch is not None, "two sockets of 64 KiB hold no megabyte"
        pool.give(vector)
        assert pool.take().array is not vector.array, "it is still being sent"
        links.batch_depth += 1
        link.send(Commit(7))
        links.batch_depth -= 1
        links.flush()
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
        nursery.cancel_scope.cancel()


@in_trio
async def test_what_the_end_of_a_stream_sends_goes_behind_what_was_taken_before():
    async with trio.open_nursery() as nursery:
        links, link, far = await linked(nursery)

        def finished(session):
            link.send(Nack(2))
            links.flush()

        link.on_finished = finished
        sender = Sender(7, np.zeros(SMALL, np.float32), FP32, SMALL)
        sender.next_frame()  # All of it is sent; the link learns this when it asks for more.
        links.batch_depth += 1
        link.send(Nack(1))
        link.start_bulk(7, sender)
        links.flush()
        links.batch_depth -= 1
        reader = FrameReader(far)
        assert [(await reader.read_message())[0] for _ in range(2)] == [Nack(1), Nack(2)]
        nursery.cancel_scope.cancel()


@in_trio
async def test_a_link_cut_in_the_middle_of_what_was_begun_lets_its_vector_go():
    async with trio.open_nursery() as nursery:
        links, link, _ = await linked(nursery)
        pool, vector, sender = pooled(LARGE)
        agreed(links, link, sender)
        nursery.cancel_scope.cancel()
    link.stop_bulk(7, sender)
    pool.give(vector)
    assert [len(kept) for kept in pool.free_arrays.values()] == [1]


@in_trio
async def test_what_is_wrong_with_a_link_is_met_by_its_own_task_and_by_nobody_who_sends():
    ended = []

    async def write(link):
        try:
            await link.write_loop(lambda session: None, lambda session: None)
        except byte_stream.BrokenLinkError:
            ended.append(link)

    async with trio.open_nursery() as nursery:
        near, _ = await loopback_pair()
        link, links = Link(near, FrameReader(near), PeerId(bytes(16))), Links()
        links.add(link)
        nursery.start_soon(write, link)
        await trio.testing.wait_all_tasks_blocked()
        near.close_now()
        links.batch_depth += 1
        link.send(Nack(1))
        links.batch_depth -= 1
        links.flush()
        await trio.testing.wait_all_tasks_blocked()
    assert ended == [link]


@in_trio
async def test_a_vector_of_many_chunks_leaves_the_loop_to_others_meanwhile():
    async with trio.open_nursery() as nursery:
        links, link, _ = await linked(nursery)
        sender = Sender(
            7, np.zeros(4 * FLUSHED_CHUNKS * 256, np.float32), FP32, 256
        )  # The sockets would hold all of these.
        agreed(links, link, sender)
        assert sender.position == FLUSHED_CHUNKS * 256
        nursery.cancel_scope.cancel()


@in_trio
async def test_who_always_finds_something_to_read_has_others_read_too():
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

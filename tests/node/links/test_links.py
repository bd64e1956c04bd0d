"""The order of frames on a link, and the limits of a link that its peer does not read."""

from __future__ import annotations

import numpy as np
import pytest
import trio
import trio.testing

from gossip.averaging.streams import Sender
from gossip.codecs import get_codec
from gossip.ids import PeerId
from gossip.wire.frames import encode
from gossip.wire.messages import MAX_RECORDS, Accept, Chunk, Hint, Nack, Records
from node.links import link as links
from node.links import pool as pools
from node.links.frame_reader import FrameReader
from node.links.link import CONTROL_BURST, Link
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from tests.memory_stream import memory_stream_pair
from tests.node.transport.test_tls import loopback_pair

SIZE = 2_048
FP32 = get_codec("fp32")


def linked(capacity_bytes=4_096):
    """Return a link and a reader of its far end. Sends wait once ``capacity_bytes`` are unread."""
    near, far = memory_stream_pair(capacity_bytes)
    return Link(near, FrameReader(near), PeerId(bytes(16))), FrameReader(far)


async def kinds(reader, count):
    """Return the types of the next ``count`` messages; discard the bodies of chunks."""
    found = []
    for _ in range(count):
        got = await reader.read_message()
        assert got is not None
        found.append(type(got[0]))
        await reader.discard(got[1])
    return found


def test_no_chunk_goes_ahead_of_what_was_sent_before_it():
    """An Accept is sent, and its stream begins, while the link is busy sending.

    A chunk ahead of the Accept would belong to no session, and end the link.
    """
    before = 2 * CONTROL_BURST

    async def main():
        link, reader = linked(capacity_bytes=16)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.write_loop, lambda session: None, lambda session: None)
            for number in range(before):
                link.send(Nack(number))
                await trio.testing.wait_all_tasks_blocked()  # The first of them is being sent.
            link.send(Accept(7, 0.0, 0.5, "fp32"))
            link.start_bulk(7, Sender(7, np.zeros(SIZE, np.float32), FP32, 1_024))
            with trio.fail_after(10):
                assert await kinds(reader, before + 3) == [*[Nack] * before, Accept, Chunk, Chunk]
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_stream_goes_on_between_control_frames_that_never_end():
    async def main():
        link, reader = linked()
        sender = Sender(7, np.zeros(SIZE, np.float32), FP32, 1_024)
        async with trio.open_nursery() as nursery:
            link.start_bulk(7, sender)
            for number in range(4 * CONTROL_BURST):
                link.send(Nack(number))
            nursery.start_soon(link.write_loop, lambda session: None, lambda session: None)
            with trio.fail_after(10):
                found = await kinds(reader, 2 * CONTROL_BURST + 2)
            assert found.count(Chunk) == 2
            nursery.cancel_scope.cancel()

    trio.run(main)


def pooled():
    """Return a pool, a vector of it, and a Sender of that vector."""
    pool = VectorPool(ModelState({"x": np.zeros(SIZE, np.float32)}))
    vector = pool.take()
    return pool, vector, Sender(7, vector.array, FP32, SIZE, lease=pool.lease(vector))


def test_a_vector_that_is_being_sent_goes_back_to_the_pool_when_its_chunk_is_out():
    """The session ends in the middle of a chunk.

    If another exchange took the vector then, it would overwrite the chunk, and the partner would report a wrong
    checksum.
    """

    async def main():
        link, reader = linked()
        pool, vector, sender = pooled()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.write_loop, lambda session: None, lambda session: None)
            link.start_bulk(7, sender)
            await trio.testing.wait_all_tasks_blocked()
            link.stop_bulk(7, sender)
            pool.give(vector)  # The session gives it back at this point, too.
            other = pool.take()
            assert other.array is not vector.array
            with trio.fail_after(10):
                assert await kinds(reader, 1) == [Chunk]
            await trio.testing.wait_all_tasks_blocked()
            assert pool.take().array is vector.array
            nursery.cancel_scope.cancel()

    trio.run(main)


@pytest.mark.parametrize("begun", [False, True])
def test_a_vector_goes_back_to_the_pool_once_when_its_stream_ends(begun):
    async def main():
        link, reader = linked(1 << 20)
        pool, vector, sender = pooled()
        async with trio.open_nursery() as nursery:
            link.start_bulk(7, sender)
            if begun:
                nursery.start_soon(link.write_loop, lambda session: None, lambda session: None)
                assert await kinds(reader, 1) == [Chunk]
                await trio.testing.wait_all_tasks_blocked()
            link.stop_bulk(7, sender)
            assert not pool.free_arrays
            pool.give(vector)
            assert [len(kept) for kept in pool.free_arrays.values()] == [1]
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_one_that_breaks_in_the_middle_of_a_chunk_lets_its_vector_go():
    async def main():
        link, _ = linked()
        pool, vector, sender = pooled()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.write_loop, lambda session: None, lambda session: None)
            link.start_bulk(7, sender)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        link.stop_bulk(7, sender)
        pool.give(vector)
        assert [len(kept) for kept in pool.free_arrays.values()] == [1]

    trio.run(main)


RECORDS = Records(tuple(Hint(PeerId(bytes(16)), 1, False, PeerId(bytes(16))) for _ in range(MAX_RECORDS)), b"")


def test_a_link_that_nobody_reads_is_closed_at_so_many_bytes():
    async def main():
        link, _ = linked()
        while not link.is_closed:
            link.send(RECORDS)
            assert link.outbox_bytes <= links.OUTBOX_BYTES
            assert len(link.outbox) <= links.OUTBOX_FRAMES

    trio.run(main)


def test_links_that_nobody_reads_hold_no_more_together_than_is_allowed(monkeypatch):
    """Only the link with the largest backlog is closed."""
    monkeypatch.setattr(pools, "OUTBOXES_BYTES", 20 * len(encode(RECORDS)))

    async def main():
        pool = pools.Links()
        made = [linked()[0] for _ in range(8)]
        for number, link in enumerate(made):
            link.peer = PeerId(bytes([number]) * 16)
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

    trio.run(main)


def test_what_was_sent_waits_no_longer():
    async def main():
        pool = pools.Links()
        link, reader = linked(1 << 20)
        pool.add(link)
        async with trio.open_nursery() as nursery:
            for number in range(100):
                link.send(Nack(number))
            assert pool.waiting_bytes == link.outbox_bytes > 0
            nursery.start_soon(link.write_loop, lambda session: None, lambda session: None)
            await kinds(reader, 100)
            await trio.testing.wait_all_tasks_blocked()
            assert pool.waiting_bytes == link.outbox_bytes == 0
            nursery.cancel_scope.cancel()

    trio.run(main)


@pytest.mark.parametrize("end", ["retire", "finish", "close_now", "theirs"])
def test_nothing_begins_on_a_link_that_is_closing(end):
    async def main():
        pool = pools.Links()
        older, newer = linked()[0], linked()[0]
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

    trio.run(main)


class Finished:
    """A sender whose chunks have all been sent."""

    def next_frame(self, apart=False):
        return None

    def let_go(self):
        """Release nothing."""


def test_a_flush_from_within_a_flush_sends_nothing_ahead_of_what_was_popped():
    """The link notices the end of a vector while it takes frames, and its callback's message is flushed at once."""

    async def main():
        near, far = await loopback_pair()
        link, reader = Link(near, FrameReader(near), PeerId(bytes(16))), FrameReader(far)

        def finished(session):
            link.send(Nack(3))
            link.flush()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.write_loop, lambda session: None, finished)
            await trio.testing.wait_all_tasks_blocked()
            link.start_bulk(7, Finished())
            for number in (1, 2):
                link.send(Nack(number))
            link.flush()
            with trio.fail_after(10):
                assert [(await reader.read_message())[0] for _ in range(3)] == [Nack(1), Nack(2), Nack(3)]
            nursery.cancel_scope.cancel()
        near.close_now(), far.close_now()

    trio.run(main)

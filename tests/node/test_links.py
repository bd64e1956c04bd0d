"""What one link carries, in which order, and what becomes of it when nobody reads."""

from __future__ import annotations

import numpy as np
import trio
import trio.testing

from gossip.codecs import get_codec
from gossip.ids import PeerId
from gossip.messages import Accept, Chunk, Nack
from node.links import CONTROL_BURST, FrameReader, Link
from node.stream import memory_stream_pair
from node.transfer import Sender

SIZE = 2_048
FP32 = get_codec("fp32")


def linked(capacity_bytes=4_096):
    """A link, and who reads what it sends; it waits after so many bytes that nobody reads."""
    near, far = memory_stream_pair(capacity_bytes)
    return Link(near, FrameReader(near), PeerId(bytes(16)), None), FrameReader(far)


async def kinds(reader, count):
    """The types of the next so many messages; what chunks carry is thrown away."""
    found = []
    for _ in range(count):
        got = await reader.message()
        assert got is not None
        found.append(type(got[0]))
        await reader.discard(got[1])
    return found


def test_no_chunk_goes_ahead_of_what_was_sent_before_it():
    """An Accept is said, and its stream begun, while the link waits to send something else: a chunk that came first
    would belong to nothing, and end the link."""
    before = 2 * CONTROL_BURST

    async def main():
        link, reader = linked(capacity_bytes=16)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.write_loop, lambda session: None, lambda session: None)
            for number in range(before):
                link.send(Nack(number))
                await trio.testing.wait_all_tasks_blocked()  # the first of them is being sent
            link.send(Accept(7, 0.0, 0.5, (), "fp32"))
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

"""Threads that carry sealed vectors: records that chunks end inside, changed bytes, and when a stream is lent."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import trio

from gossip.averaging.streams import Sender
from gossip.codecs import get_codec
from gossip.errors import ProtocolError
from gossip.wire.frames import PREFIX_BYTES, decode, encode
from gossip.wire.messages import Nack
from node.links.frame_reader import FrameReader
from node.transport.blocking_io import BlockingIoPool, BlockingSealed
from node.transport.sealed import RECORD_BYTES, leave_tls
from tests.node.network.carriers import (
    CHUNK,
    FP32,
    SIZE,
    End,
    at_work,
    check_differences,
    in_trio,
    loopback_pair,
    sealed_pair,
    until,
    vectors,
)
from tests.node.transport.sealing import ACCEPTOR, DIALLER
from tests.node.transport.test_blocking_io import unwanted_is_not_waited_for
from tests.node.transport.test_tls import receive_exactly, tls_ends


@pytest.mark.parametrize("name", ["fp32", "int8"])
@in_trio
async def test_chunks_that_end_inside_a_record_go_both_ways_bit_for_bit(name):
    chunk = 3 * RECORD_BYTES // 4 + 256
    a, b = vectors()
    codec = get_codec(name)
    streams = await sealed_pair()
    ends = [End(stream, ours, codec) for ours, stream in zip((a, b), streams, strict=True)]
    for end, ours in zip(ends, (a, b), strict=True):
        end.session.sender = Sender(1, ours, codec, chunk)
    async with trio.open_nursery() as nursery:
        for end in ends:
            end.begin(nursery)
        await until(lambda: all(end.receiver.is_complete and end.flowed for end in ends))
        nursery.cancel_scope.cancel()
    check_differences(ends, a, b, codec)
    assert all(end.receiver.threads == {"gossip-receive"} for end in ends)
    assert at_work() == []


@in_trio
async def test_what_is_said_meanwhile_goes_both_ways_between_chunks():
    ours, theirs = vectors()
    near, far = await sealed_pair()
    end, reader = End(near, ours), FrameReader(far)
    sender = Sender(1, theirs, FP32, CHUNK)
    found = []

    async def send():
        for number in range(SIZE // CHUNK):
            for piece in sender.next_frame():
                await far.send_all(piece)
            await far.send_all(encode(Nack(number)))

    async with trio.open_nursery() as nursery:
        end.begin(nursery)
        nursery.start_soon(send)
        while len(found) < SIZE // CHUNK + 1:
            message, body_bytes = await reader.read_message()
            if not found:
                await until(lambda: "gossip-send" in at_work())
                end.link.send(Nack(5))
            found.append(message)
            await reader.discard(body_bytes)
        assert found.index(Nack(5)) in (1, 2, 3, 4, 5)
        await until(lambda: end.receiver.is_complete and len(end.messages) == SIZE // CHUNK)
        nursery.cancel_scope.cancel()
    assert end.messages == [Nack(number) for number in range(SIZE // CHUNK)]
    assert np.array_equal(end.receiver.out, theirs - ours)


async def some_of_a_chunk(other, theirs, count, spoiled=None):
    """Send ``count`` bytes of the first chunk's record, with byte ``spoiled`` changed. Return the rest."""
    header, body = Sender(1, theirs, FP32, CHUNK).next_frame()
    sealed = bytearray()

    async def gather(*pieces):
        for piece in pieces:
            sealed.extend(piece)

    await other.sealer.send(gather, header, body)
    if spoiled is not None:
        sealed[spoiled] ^= 1
    await other.inner.send_all(sealed[:count])
    return sealed[count:]


@pytest.mark.parametrize("place", [200, 150_000, -1])
@in_trio
async def test_a_changed_byte_of_a_chunk_ends_the_link_in_a_thread_and_nothing_of_it_is_used(place):
    ours, theirs = vectors()
    near, far = await sealed_pair()
    end = End(near, ours)

    async def feed():
        async with trio.open_nursery() as nursery:
            end.begin(nursery, both=False)
            rest = await some_of_a_chunk(far, theirs, 100_000, spoiled=place)
            await far.inner.send_all(rest)
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as caught:
        await feed()
    assert caught.group_contains(ProtocolError)
    assert at_work() == []
    assert not end.receiver.threads
    assert end.receiver.position == 0


@pytest.mark.parametrize(
    ("sealed", "checksum", "fault"), [(True, 0, ""), (True, 1, "checksum"), (False, 0, "checksum")]
)
@in_trio
async def test_a_chunk_without_a_checksum_is_one_of_a_sealed_link_alone(sealed, checksum, fault):
    ours, theirs = vectors()
    near, far = await sealed_pair() if sealed else await loopback_pair()
    end, other = End(near, ours), End(far, theirs)
    async with trio.open_nursery() as nursery:
        end.begin(nursery, both=False)
        other.sessions.add(other.session)
        header, body = other.session.sender.next_frame()
        chunk = decode(header[PREFIX_BYTES:], len(body))
        assert (chunk.checksum == 0) is sealed
        chunk = dataclasses.replace(chunk, checksum=checksum)
        for piece in (encode(chunk, len(body)), body):
            await far.send_all(piece)
        await until(lambda: end.flowed or end.receiver.position)
        assert end.receiver.fault == fault
        nursery.cancel_scope.cancel()


@in_trio
async def test_a_thread_does_not_wait_for_a_sealed_vector_that_nobody_wants():
    await unwanted_is_not_waited_for(*await sealed_pair())


@in_trio
async def test_a_stream_is_lent_once_both_directions_are_sealed():
    alice, bob = await tls_ends(loopback_pair)
    hands = BlockingIoPool()
    assert hands.lend(alice) is None
    early = await leave_tls(alice, DIALLER, ACCEPTOR)
    assert hands.lend(early) is None, "what comes may be TLS's still"
    late = await leave_tls(bob, ACCEPTOR, DIALLER)
    await late.send_all(b"w")
    await receive_exactly(early, 1)
    lent = hands.lend(early)
    assert isinstance(lent, BlockingSealed)
    lent.close_now()

"""The contract of all that carries vectors: sockets in the loop and in threads, TLS, sealed records, lanes."""

import contextlib
import dataclasses
import time

import numpy as np
import pytest
import trio

from gossip.averaging.pair import PairAverage
from gossip.averaging.streams import Sender
from gossip.averaging.vectors import Vector
from gossip.codecs import get_codec
from gossip.effects import Transfer
from gossip.errors import ProtocolError
from gossip.wire.frames import PREFIX_BYTES, decode, encode
from gossip.wire.messages import Nack
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from tests.node.network.carriers import (
    CARRIERS,
    CHUNK,
    ENDS,
    FP32,
    PARTNER,
    SIZE,
    at_work,
    check_differences,
    half_a_chunk,
    in_trio,
    one_end,
    two_ends,
    until,
    vectors,
)

each_carrier = pytest.mark.parametrize("name", CARRIERS)


async def all_arrived(name, ends):
    """Wait for both vectors, and until the loop has both links back from the threads."""
    await until(lambda: all(end.receiver.is_complete for end in ends))
    if CARRIERS[name].threads:
        await until(lambda: all(end.flowed for end in ends) and not at_work())


@each_carrier
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
@in_trio
async def test_a_vector_goes_both_ways_bit_for_bit(name, codec):
    a, b = vectors()
    coded = get_codec(codec)
    async with trio.open_nursery() as nursery:
        ends = await two_ends(name, nursery, a, b, coded)
        for end in ends:
            end.begin(nursery)
        await all_arrived(name, ends)
        nursery.cancel_scope.cancel()
    check_differences(ends, a, b, coded)
    in_threads = all(end.receiver.threads == {"gossip-receive"} for end in ends)
    assert in_threads is CARRIERS[name].threads
    assert at_work() == []


@each_carrier
@in_trio
async def test_messages_sent_during_a_transfer_arrive_in_order(name):
    a, b = vectors()
    said = [Nack(number) for number in range(16)]
    async with trio.open_nursery() as nursery:
        ends = await two_ends(name, nursery, a, b)
        for end in ends:
            end.begin(nursery)
        for message in said:
            for end in ends:
                end.link.send(message)
            await trio.sleep(0.001)
        await all_arrived(name, ends)
        await until(lambda: all(len(end.messages) == 16 for end in ends))
        nursery.cancel_scope.cancel()
    assert ends[0].messages == ends[1].messages == said
    assert np.array_equal(ends[0].receiver.out, b - a)


@each_carrier
@pytest.mark.parametrize("how", ENDS)
@in_trio
async def test_nothing_is_used_of_an_incomplete_chunk(name, how):
    """If threads carry the vector, one waits for the rest of the chunk, the other for a partner that reads nothing."""
    ours, theirs = vectors()
    began = time.monotonic()
    with contextlib.suppress(BaseExceptionGroup):  # Of BrokenLinkErrors, which a cut raises.
        async with trio.open_nursery() as nursery:
            end, other = await one_end(name, nursery, ours)
            end.begin(nursery)
            await half_a_chunk(other, theirs)
            if CARRIERS[name].threads:
                await until(lambda: at_work() == ["gossip-receive", "gossip-send"])
            await trio.sleep(0.05)  # All wait in the kernel.
            ENDS[how](end, other, nursery)
            if how == "cut" and CARRIERS[name].lanes:
                end.link.close_now()  # The end of one lane leaves its link alone.
    assert at_work() == []
    assert not end.receiver.threads
    assert end.receiver.position == 0
    assert time.monotonic() - began < 10


@each_carrier
@pytest.mark.parametrize("whole", [False, True])
@in_trio
async def test_a_vector_that_is_no_longer_wanted_is_not_written(name, whole):
    """The session ends in the middle of a chunk, and its vectors have other owners when the rest arrives."""
    ours, theirs = vectors()
    pool = VectorPool(ModelState({"x": ours}))
    pair = PairAverage(Transfer(1, PARTNER, "fp32"), Vector(ours.copy()), FP32, None, pool)
    pair.create_receiver()
    async with trio.open_nursery() as nursery:
        end, other = await one_end(name, nursery, ours, receiver=pair.receiver)
        end.begin(nursery, both=False)
        rest = await half_a_chunk(other, theirs)
        await trio.sleep(0.05)
        end.release()
        pair.release()
        taken = [pool.take() for _ in range(3)]
        for vector in taken:
            vector.array.fill(7.0)
        await other.send_all(rest)
        if whole:  # The chunks that follow are dropped.
            sender = Sender(1, theirs[CHUNK:], FP32, CHUNK, origin=CHUNK)
            while (frame := sender.next_frame()) is not None:
                for piece in frame:
                    await other.send_all(piece)
        if CARRIERS[name].lanes:
            await trio.sleep(0.05)
        else:
            await other.send_all(encode(Nack(1)))
            await until(lambda: end.messages and not at_work())
        assert all((vector.array == 7.0).all() for vector in taken)
        assert pair.receiver.position == 0
        nursery.cancel_scope.cancel()


@each_carrier
@pytest.mark.parametrize("change", [{"start": 0}, {"elements": SIZE}, {"elements": CHUNK + 1}, {"elements": 0}])
@in_trio
async def test_a_chunk_that_does_not_fit_ends_the_connection(name, change):
    ours, theirs = vectors()
    sender, ends = Sender(1, theirs, FP32, CHUNK), []

    async def feed():
        async with trio.open_nursery() as nursery:
            end, other = await one_end(name, nursery, ours)
            ends.append(end)
            end.begin(nursery, both=False)
            for piece in sender.next_frame():
                await other.send_all(piece)
            header, body = sender.next_frame()
            chunk = dataclasses.replace(decode(header[PREFIX_BYTES:], len(body)), **change)
            await other.send_all(encode(chunk, len(body)))
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as caught:
        await feed()
    assert caught.group_contains(ProtocolError)
    assert at_work() == []
    assert ends[0].receiver.position <= CHUNK


@pytest.mark.parametrize("name", [name for name in CARRIERS if "sealed" not in name])
@in_trio
async def test_a_chunk_with_a_wrong_bit_is_not_used(name):
    """Sealed records have no checksum per chunk, since their own seal ends the link; tests of sealed links show it."""
    ours, theirs = vectors()
    async with trio.open_nursery() as nursery:
        end, other = await one_end(name, nursery, ours)
        end.begin(nursery, both=False)
        rest = bytearray(await half_a_chunk(other, theirs))
        rest[-1] ^= 1
        await other.send_all(rest)
        await until(lambda: end.flowed if CARRIERS[name].threads else end.receiver.fault)
        assert end.receiver.fault == "checksum"
        assert not end.receiver.threads
        assert at_work() == []
        nursery.cancel_scope.cancel()

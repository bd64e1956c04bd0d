"""Threads that carry large vectors; tests/node/network/test_carriers.py holds the contract of all carriers."""

import dataclasses
import errno
import os
import threading

import numpy as np
import pytest
import trio
import trio.lowlevel

from gossip.averaging.streams import DifferenceReceiver, Sender
from gossip.errors import ProtocolError
from gossip.wire.frames import PREFIX_BYTES, decode, encode
from gossip.wire.messages import Nack
from node.links.frame_reader import FrameReader
from node.network.transfers import streams
from node.transport.blocking_io import BlockingIoPool, BlockingSealed, run_to_end
from node.transport.sealed import leave_tls
from node.transport.tls import TlsStream
from tests.node.network.carriers import (
    CHUNK,
    FP32,
    SIZE,
    End,
    at_work,
    half_a_chunk,
    in_trio,
    loopback_pair,
    sealed_pair,
    until,
    vectors,
)
from tests.node.trainees import mixed
from tests.node.transport.sealing import ACCEPTOR, DIALLER
from tests.node.transport.test_tls import ALICE_CONTEXTS, memory_pair, receive_exactly, tls_ends

plain_and_sealed = pytest.mark.parametrize("pair", [loopback_pair, sealed_pair])


@plain_and_sealed
@in_trio
async def test_messages_go_both_ways_between_the_chunks_of_threads(pair):
    ours, theirs = vectors()
    near, far = await pair()
    end, reader, found = End(near, ours), FrameReader(far), []

    async def send():
        sender = Sender(1, theirs, FP32, CHUNK)
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
        assert found.index(Nack(5)) in (1, 2, 3, 4, 5), "behind what the sockets hold, and ahead of the rest"
        await until(lambda: end.receiver.is_complete and len(end.messages) == SIZE // CHUNK)
        await until(lambda: not at_work())
        nursery.cancel_scope.cancel()
    assert end.messages == [Nack(number) for number in range(SIZE // CHUNK)]
    assert np.array_equal(end.receiver.out, theirs - ours)


@plain_and_sealed
@in_trio
async def test_a_thread_does_not_wait_for_a_vector_that_nobody_wants(pair):
    ours, theirs = vectors()
    near, far = await pair()
    end = End(near, ours)
    async with trio.open_nursery() as nursery:
        end.begin(nursery, both=False)
        for piece in Sender(1, theirs, FP32, CHUNK).next_frame():
            await far.send_all(piece)
        await until(lambda: end.receiver.position == CHUNK)
        assert at_work() == ["gossip-receive"]
        end.release()
        await until(lambda: not at_work())
        await far.send_all(encode(Nack(1)))
        await until(lambda: end.messages)
        nursery.cancel_scope.cancel()


@in_trio
async def test_a_peer_that_stops_inside_a_chunk_of_an_ended_session_holds_a_thread_no_longer_than_a_stall():
    ours, theirs = vectors()
    near, other = await loopback_pair()
    end = End(near, ours)
    async with trio.open_nursery() as nursery:
        end.begin(nursery, both=False)
        await half_a_chunk(other, theirs)
        await until(at_work)
        now = end.link.clock.current_time()
        assert not end.link.is_held_up(now + 9.0, 3.0, 9.0), "which is found by its session"
        end.release()
        assert not end.link.is_held_up(now, 3.0, 9.0)
        assert end.link.is_held_up(now + 9.0, 3.0, 9.0)
        nursery.cancel_scope.cancel()


def no_descriptor(number):
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("lacking", ["thread", "descriptor"])
@in_trio
async def test_without_a_thread_or_a_descriptor_for_it_a_stream_goes_on_in_the_loop(lacking, monkeypatch):
    ours, theirs = vectors()
    near, far = await loopback_pair()
    pool = BlockingIoPool(2)
    if lacking == "thread":
        for _ in range(2):
            pool.limiter.acquire_on_behalf_of_nowait(object())
    else:
        monkeypatch.setattr(os, "dup", no_descriptor)
    ends = [End(near, ours, io_pool=pool), End(far, theirs, io_pool=pool)]
    async with trio.open_nursery() as nursery:
        for end in ends:
            end.begin(nursery)
        await until(lambda: all(end.receiver.is_complete for end in ends))
        nursery.cancel_scope.cancel()
    assert ends[0].receiver.threads == {threading.current_thread().name}
    assert np.array_equal(ends[0].receiver.out, theirs - ours)


@in_trio
async def test_a_tls_stream_and_a_stream_without_a_socket_are_not_lent():
    near, _ = await memory_pair()
    assert BlockingIoPool().lend(near) is None
    plain, _ = await loopback_pair()
    assert BlockingIoPool().lend(TlsStream(plain, ALICE_CONTEXTS, server_side=False)) is None
    lent = BlockingIoPool().lend(plain)
    assert lent is not None
    lent.close_now()


@in_trio
async def test_a_stream_is_lent_once_both_directions_are_sealed():
    alice, bob = await tls_ends(loopback_pair)
    pool = BlockingIoPool()
    early = await leave_tls(alice, DIALLER, ACCEPTOR)
    assert pool.lend(early) is None, "what comes may be TLS's still"
    late = await leave_tls(bob, ACCEPTOR, DIALLER)
    await late.send_all(b"w")
    await receive_exactly(early, 1)
    lent = pool.lend(early)
    assert isinstance(lent, BlockingSealed)
    lent.close_now()


@pytest.mark.parametrize("place", [200, 150_000, -1])
@in_trio
async def test_a_changed_byte_of_a_sealed_chunk_ends_the_link_in_a_thread_and_nothing_of_it_is_used(place):
    ours, theirs = vectors()
    near, far = await sealed_pair()
    end, sealed = End(near, ours), bytearray()

    async def gather(*pieces):
        for piece in pieces:
            sealed.extend(piece)

    async def feed():
        async with trio.open_nursery() as nursery:
            end.begin(nursery, both=False)
            await far.inner.send_all(sealed)
            await trio.sleep_forever()

    await far.sealer.send(gather, *Sender(1, theirs, FP32, CHUNK).next_frame())
    sealed[place] ^= 1
    with pytest.raises(BaseExceptionGroup) as caught:
        await feed()
    assert caught.group_contains(ProtocolError)
    assert at_work() == []
    assert not end.receiver.threads
    assert end.receiver.position == 0


@pytest.mark.parametrize(
    ("pair", "checksum", "fault"), [(sealed_pair, 0, ""), (sealed_pair, 1, "checksum"), (loopback_pair, 0, "checksum")]
)
@in_trio
async def test_a_chunk_without_a_checksum_is_one_of_a_sealed_link_alone(pair, checksum, fault):
    ours, theirs = vectors()
    near, far = await pair()
    end, other = End(near, ours), End(far, theirs)
    async with trio.open_nursery() as nursery:
        end.begin(nursery, both=False)
        other.start(other.sender)
        header, body = other.sender.next_frame()
        chunk = decode(header[PREFIX_BYTES:], len(body))
        assert (chunk.checksum == 0) is (pair is sealed_pair)
        for piece in (encode(dataclasses.replace(chunk, checksum=checksum), len(body)), body):
            await far.send_all(piece)
        await until(lambda: end.flowed or end.receiver.position)
        assert end.receiver.fault == fault
        nursery.cancel_scope.cancel()


def test_a_coroutine_that_waits_for_the_loop_is_an_error_in_a_thread():
    async def waits(stream):
        await trio.lowlevel.checkpoint()

    with pytest.raises(RuntimeError):
        run_to_end(waits, None)


@pytest.mark.parametrize("encrypted", [False, True])
def test_nodes_mix_in_threads_which_end_with_them(encrypted, train, until, quick, monkeypatch, secret):
    options = {"config": quick} | ({"secret": secret} if encrypted else {})
    monkeypatch.setattr(streams, "LARGE_BYTES", SIZE)
    seen = set()
    use = DifferenceReceiver.use_chunk

    def noted(self, where, body):
        seen.add(threading.current_thread().name)
        use(self, where, body)

    monkeypatch.setattr(DifferenceReceiver, "use_chunk", noted)
    models = [{"x": np.zeros(SIZE, np.float32)} for _ in range(2)]
    first = train(models[0], **options)
    second = train(models[1], seeds=[first.node.address], **options)
    second.do(lambda _: models[1]["x"].fill(1.0))
    until(mixed(first, second, times=4))
    assert "gossip-receive" in seen
    for one in (first, second):
        one.stop()
    assert at_work() == []
    assert abs(float(models[0]["x"].mean()) - 0.5) < 0.25

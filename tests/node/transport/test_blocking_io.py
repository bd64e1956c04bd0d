"""Threads that carry large vectors; tests/node/network/test_carriers.py holds the contract of all carriers."""

from __future__ import annotations

import errno
import os
import threading

import numpy as np
import pytest
import trio
import trio.lowlevel

from gossip.averaging.streams import DifferenceReceiver, Sender
from gossip.wire.frames import encode
from gossip.wire.messages import Nack
from node.identity.keys import new_secret
from node.links.frame_reader import FrameReader
from node.network.transfers import streams
from node.transport.blocking_io import BlockingIoPool, run_to_end
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
    until,
    vectors,
)
from tests.node.transport.test_tls import ALICE_CONTEXTS, memory_pair


@in_trio
async def test_what_is_sent_meanwhile_goes_between_two_chunks_of_a_thread():
    (ours,) = vectors(1)
    near, far = await loopback_pair()
    end, reader = End(near, ours), FrameReader(far)
    found = []
    async with trio.open_nursery() as nursery:
        end.begin(nursery)
        while len(found) < SIZE // CHUNK + 1:
            message, body_bytes = await reader.read_message()
            if not found:
                await until(lambda: "gossip-send" in at_work())
                end.link.send(Nack(5))
            found.append(message)
            await reader.discard(body_bytes)
        assert found.index(Nack(5)) in (1, 2, 3, 4, 5), "behind what the sockets hold, and ahead of the rest"
        await until(lambda: "gossip-send" not in at_work())
        nursery.cancel_scope.cancel()


@in_trio
async def test_what_comes_meanwhile_is_heard_and_the_vector_goes_on():
    ours, theirs = vectors()
    near, other = await loopback_pair()
    end = End(near, ours)
    sender = Sender(1, theirs, FP32, CHUNK)
    async with trio.open_nursery() as nursery:
        end.begin(nursery, both=False)
        for number in range(SIZE // CHUNK):
            for piece in sender.next_frame():
                await other.send_all(piece)
            await other.send_all(encode(Nack(number)))
        await until(lambda: end.receiver.is_complete and len(end.messages) == SIZE // CHUNK)
        nursery.cancel_scope.cancel()
    assert end.messages == [Nack(number) for number in range(SIZE // CHUNK)]
    assert np.array_equal(end.receiver.out, theirs - ours)


async def unwanted_is_not_waited_for(near, far):
    ours, theirs = vectors()
    end = End(near, ours)
    async with trio.open_nursery() as nursery:
        end.begin(nursery, both=False)
        for piece in Sender(1, theirs, FP32, CHUNK).next_frame():
            await far.send_all(piece)
        await until(lambda: end.receiver.position == CHUNK)
        assert at_work() == ["gossip-receive"]
        end.sessions.release(1)
        await until(lambda: not at_work())
        await far.send_all(encode(Nack(1)))
        await until(lambda: end.messages)
        nursery.cancel_scope.cancel()


@in_trio
async def test_a_thread_does_not_wait_for_a_vector_that_nobody_wants():
    await unwanted_is_not_waited_for(*await loopback_pair())


@in_trio
async def test_who_leaves_a_chunk_of_a_session_that_is_over_half_sent_holds_a_thread_no_longer_than_a_stall():
    ours, theirs = vectors()
    near, other = await loopback_pair()
    end = End(near, ours)
    async with trio.open_nursery() as nursery:
        end.begin(nursery, both=False)
        await half_a_chunk(other, theirs)
        await until(at_work)
        now = end.link.clock.current_time()
        assert not end.link.is_held_up(now + 9.0, 3.0, 9.0), "which is found by its session"
        end.sessions.release(1)
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
    hands = BlockingIoPool(2)
    if lacking == "thread":
        for _ in range(2):
            hands.limiter.acquire_on_behalf_of_nowait(object())
    else:
        monkeypatch.setattr(os, "dup", no_descriptor)
    ends = [End(near, ours, hands=hands), End(far, theirs, hands=hands)]
    async with trio.open_nursery() as nursery:
        for end in ends:
            end.begin(nursery)
        await until(lambda: all(end.receiver.is_complete for end in ends))
        nursery.cancel_scope.cancel()
    assert ends[0].receiver.threads == {threading.current_thread().name}
    assert np.array_equal(ends[0].receiver.out, theirs - ours)


@in_trio
async def test_what_is_encrypted_or_no_socket_stays_in_the_loop():
    near, _ = await memory_pair()
    assert BlockingIoPool().lend(near) is None
    plain, _ = await loopback_pair()
    assert BlockingIoPool().lend(TlsStream(plain, ALICE_CONTEXTS, server_side=False)) is None
    lent = BlockingIoPool().lend(plain)
    assert lent is not None
    lent.close_now()


def test_what_waits_for_the_loop_is_no_work_for_a_thread():
    async def waits(stream):
        await trio.lowlevel.checkpoint()

    with pytest.raises(RuntimeError):
        run_to_end(waits, None)


@pytest.mark.parametrize("encrypted", [False, True])
def test_nodes_mix_in_threads_which_end_with_them(encrypted, train, until, quick, monkeypatch, tmp_path):
    options = {"config": quick}
    if encrypted:
        options["secret"] = tmp_path / "secret"
        options["secret"].write_text(new_secret())
        options["secret"].chmod(0o600)
    monkeypatch.setattr(streams, "LARGE_BYTES", SIZE)
    seen = set()
    use = DifferenceReceiver.use_chunk

    def noted(self, where, body):
        seen.add(threading.current_thread().name)
        use(self, where, body)

    monkeypatch.setattr(DifferenceReceiver, "use_chunk", noted)
    models = [{"x": np.full(SIZE, value, np.float32)} for value in (0.0, 0.0)]
    first = train(models[0], **options)
    second = train(models[1], seeds=[first.node.address], **options)
    second.do(lambda _: models[1]["x"].fill(1.0))
    until(lambda: all(one.node.metrics().exchanges_done > 3 for one in (first, second)))
    assert "gossip-receive" in seen
    for one in (first, second):
        one.stop()
    assert at_work() == []
    assert abs(float(models[0]["x"].mean()) - 0.5) < 0.25

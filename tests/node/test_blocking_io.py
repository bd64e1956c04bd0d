"""Large vectors are carried by threads: bit for bit as without, and no longer than anybody wants them."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import socket
import threading
import time

import numpy as np
import pytest
import trio
import trio.lowlevel

from gossip.averaging.pair import PairAverage
from gossip.averaging.streams import DifferenceReceiver, Sender
from gossip.averaging.vectors import Vector
from gossip.codecs import get_codec
from gossip.effects import Transfer
from gossip.errors import ProtocolError
from gossip.ids import PeerId
from gossip.wire.frames import PREFIX_BYTES, decode, encode
from gossip.wire.messages import Nack
from node.identity.keys import new_secret
from node.links.frame_reader import FrameReader
from node.links.link import Link
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.network.transfers import streams
from node.network.transfers.sessions import StreamSession, StreamSessions
from node.transport.blocking_io import BlockingIoPool, finished
from node.transport.byte_stream import PlainStream
from node.transport.tls import TlsStream
from tests.node.test_tls import ALICE_CONTEXTS, memory_pair

SIZE, CHUNK = 1 << 20, 1 << 16  # 4 MiB in 16 chunks: more than both sockets hold
SOCKET_BYTES = 65_536
PARTNER = PeerId(bytes(16))
FP32 = get_codec("fp32")


async def loopback_pair():
    """Two ends that hold little, so that whoever sends more waits for the other."""
    with trio.socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        await listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        client = trio.socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        await client.connect(listener.getsockname())
        server, _ = await listener.accept()
    for sock in (client, server):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    CONNECTED.extend([PlainStream(client), PlainStream(server)])
    return CONNECTED[-2:]


CONNECTED = []


def shut_down():
    for stream in CONNECTED:
        with contextlib.suppress(OSError), stream.lend() as sock:
            sock.shutdown(socket.SHUT_RDWR)


def in_trio(test):
    """Bounded, threads that nothing else ends included, and with everything closed that :func:`loopback_pair` made."""

    @functools.wraps(test)
    def run(**arguments):
        async def main():
            bound = threading.Timer(35.0, shut_down)
            bound.start()
            try:
                with trio.fail_after(30):
                    await test(**arguments)
            finally:
                bound.cancel()
                while CONNECTED:
                    CONNECTED.pop().close_now()

        trio.run(main)

    return run


def at_work():
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("gossip-"))


async def until(what):
    while not what():  # noqa: ASYNC110 - the state of a thread
        await trio.sleep(0.005)


class Receiver(DifferenceReceiver):
    """Which says in which thread it computed."""

    threads: set[str]

    def use(self, where, body):
        self.threads.add(threading.current_thread().name)
        super().use(where, body)


class End:
    """One end of a connection, with a link, and one session on it whose vector is large."""

    def __init__(self, stream, ours, codec=FP32, receiver=None, hands=None):
        self.link = Link(stream, FrameReader(stream), PARTNER)
        self.link.hands = hands or BlockingIoPool()
        self.sessions, self.messages, self.flowed = StreamSessions(), [], []
        self.receiver = receiver or Receiver(1, ours, np.zeros_like(ours), codec)
        self.receiver.threads = set()
        self.session = StreamSession(
            1, PARTNER, self.link, Sender(1, ours, codec, CHUNK), receiver=self.receiver
        )  # fmt: skip

    def begin(self, nursery, both=True):
        if not both:
            self.session.sender = None
        self.sessions.add(self.session, large=True)
        nursery.start_soon(self.link.write_loop, lambda session: None, lambda session: None)
        nursery.start_soon(self.read)
        nursery.start_soon(self.link.cut_when_cancelled)

    async def read(self):
        await self.link.read_loop(
            self.messages.append,
            functools.partial(self.sessions.place, self.link),
            self.session.arrived,
            lambda chunk: self.sessions.table.get(chunk.session),
            self.flowed.append,
        )


def vectors(count=2):
    return np.random.default_rng(0).standard_normal((count, SIZE)).astype(np.float32)


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
@in_trio
async def test_a_large_vector_goes_both_ways_in_threads_bit_for_bit(name):
    a, b = vectors()
    codec = get_codec(name)
    near, far = await loopback_pair()
    ends = [End(near, a, codec), End(far, b, codec)]
    async with trio.open_nursery() as nursery:
        for end in ends:
            end.begin(nursery)
        await until(lambda: all(end.receiver.done and end.flowed for end in ends))
        nursery.cancel_scope.cancel()
    quantised = np.empty_like(a), np.empty_like(b)
    codec.quantised(a, quantised[0], 1)
    codec.quantised(b, quantised[1], 1)
    assert np.array_equal(ends[0].receiver.out, quantised[1] - quantised[0])
    assert np.array_equal(ends[1].receiver.out, quantised[0] - quantised[1])
    assert all(end.receiver.threads == {"gossip-receive"} for end in ends)
    assert at_work() == []


@in_trio
async def test_what_is_sent_meanwhile_goes_between_two_chunks_of_a_thread():
    (ours,) = vectors(1)
    near, far = await loopback_pair()
    end, reader = End(near, ours), FrameReader(far)
    found = []
    async with trio.open_nursery() as nursery:
        end.begin(nursery)
        while len(found) < SIZE // CHUNK + 1:
            message, body_bytes = await reader.message()
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
        await until(lambda: end.receiver.done and len(end.messages) == SIZE // CHUNK)
        nursery.cancel_scope.cancel()
    assert end.messages == [Nack(number) for number in range(SIZE // CHUNK)]
    assert np.array_equal(end.receiver.out, theirs - ours)


async def half_a_chunk(other, theirs):
    """Of the first; returns what is left of it."""
    header, body = Sender(1, theirs, FP32, CHUNK).next_frame()
    await other.send_all(header)
    await other.send_all(body[:100_000])
    return body[100_000:]


def stall(end, other, nursery):
    """What the runtime does, 9 s later."""
    (stalled,) = end.sessions.stalled(end.link.clock.current_time() + 9.0, 3.0)
    stalled.link.close_now()


ENDS = {
    "cut": lambda end, other, nursery: other.close_now(),
    "stall": stall,
    "cancel": lambda end, other, nursery: nursery.cancel_scope.cancel(),
}


@pytest.mark.parametrize("how", ENDS)
@in_trio
async def test_what_ends_a_link_in_the_middle_of_a_chunk_ends_both_threads(how):
    """One of them waits for the rest of a chunk, the other for a partner that reads nothing."""
    ours, theirs = vectors()
    near, other = await loopback_pair()
    end = End(near, ours)
    began = time.monotonic()
    with contextlib.suppress(BaseExceptionGroup):  # of BrokenLinkErrors; what cancels raises nothing
        async with trio.open_nursery() as nursery:
            end.begin(nursery)
            await half_a_chunk(other, theirs)
            await until(lambda: at_work() == ["gossip-receive", "gossip-send"])
            await trio.sleep(0.05)  # both wait in the kernel
            ENDS[how](end, other, nursery)
    assert at_work() == []
    assert not end.receiver.threads, "nothing of it is used"
    assert end.receiver.position == 0
    assert time.monotonic() - began < 10
    assert end.link.hands.lend(end.link.stream) is None


@pytest.mark.parametrize("whole", [False, True])
@in_trio
async def test_a_vector_that_nobody_wants_any_more_is_not_written(whole):
    """Its session ends in the middle of a chunk, and its vectors are others' when the rest comes."""
    ours, theirs = vectors()
    pool = VectorPool(ModelState({"x": ours}))
    snapshot = Vector(ours.copy())
    pair = PairAverage(Transfer(1, PARTNER, "fp32"), snapshot, FP32, None, pool)
    near, other = await loopback_pair()
    pair.stream()
    end = End(near, ours, receiver=pair.receiver)
    async with trio.open_nursery() as nursery:
        end.begin(nursery, both=False)
        rest = await half_a_chunk(other, theirs)
        await until(lambda: at_work() == ["gossip-receive"])
        end.sessions.release(1)
        pair.release()
        taken = [pool.take() for _ in range(3)]
        for vector in taken:
            vector.array.fill(7.0)
        await other.send_all(rest)
        if whole:  # and what follows is thrown away
            sender = Sender(1, theirs, FP32, CHUNK)
            sender.next_frame()
            while (frame := sender.next_frame()) is not None:
                for piece in frame:
                    await other.send_all(piece)
        await other.send_all(encode(Nack(1)))
        await until(lambda: end.messages and not at_work())
        assert all((vector.array == 7.0).all() for vector in taken)
        assert pair.receiver.position == 0
        nursery.cancel_scope.cancel()


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
        assert not end.link.held_up(now + 9.0, 3.0, 9.0), "which is found by its session"
        end.sessions.release(1)
        assert not end.link.held_up(now, 3.0, 9.0)
        assert end.link.held_up(now + 9.0, 3.0, 9.0)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("change", [{"start": 0}, {"elements": SIZE}, {"elements": CHUNK + 1}, {"elements": 0}])
@in_trio
async def test_a_chunk_that_does_not_fit_ends_the_link_in_a_thread_too(change):
    ours, theirs = vectors()
    near, other = await loopback_pair()
    end = End(near, ours)
    sender = Sender(1, theirs, FP32, CHUNK)

    async def feed():
        async with trio.open_nursery() as nursery:
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


@in_trio
async def test_wrong_bytes_are_noticed_in_a_thread_and_told_in_the_loop():
    ours, theirs = vectors()
    near, other = await loopback_pair()
    end = End(near, ours)
    async with trio.open_nursery() as nursery:
        end.begin(nursery, both=False)
        header, body = Sender(1, theirs, FP32, CHUNK).next_frame()
        await other.send_all(header)
        await other.send_all(bytes(body[:-1]) + bytes([body[-1] ^ 1]))
        await until(lambda: end.flowed)
        assert end.receiver.fault == "checksum"
        assert not end.receiver.threads, "it is not used"
        assert at_work() == []
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
        await until(lambda: all(end.receiver.done for end in ends))
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
        finished(waits, None)


@pytest.mark.parametrize("encrypted", [False, True])
def test_nodes_mix_in_threads_which_end_with_them(encrypted, train, until, quick, monkeypatch, tmp_path):
    options = {"config": quick}
    if encrypted:
        options["secret"] = tmp_path / "secret"
        options["secret"].write_text(new_secret())
        options["secret"].chmod(0o600)
    monkeypatch.setattr(streams, "LARGE_BYTES", SIZE)
    seen = set()
    use = DifferenceReceiver.use

    def noted(self, where, body):
        seen.add(threading.current_thread().name)
        use(self, where, body)

    monkeypatch.setattr(DifferenceReceiver, "use", noted)
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

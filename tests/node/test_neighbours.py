"""Members on one host exchange vectors by its memory: bit for bit as by streams, and what was not whole is not used."""

from __future__ import annotations

import fcntl
import os

import numpy as np
import pytest
import trio
import trio.testing

from gossip.averaging.streams import DifferenceReceiver, Sender
from gossip.codecs import Spread, get_codec
from gossip.config import Config
from gossip.errors import ProtocolError
from gossip.wire.messages import Came, Chunk, Lent, Meet, Read
from node.model.host_memory import HostMemory
from node.model.pool import VectorPool
from node.transfers import neighbours
from node.transfers.loans import LOANS, Loan
from tests.gossip.codecs.spreads import observe
from tests.node.lending import FP32, HIGH, LOW, SIZE, Side, lent, met, played
from tests.node.test_transfer import deliver, frames


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch):
    monkeypatch.setattr(VectorPool, "SHARED_ELEMENTS", SIZE)


@pytest.fixture
def sides():
    yield from played()


def test_a_vector_crosses_without_a_byte_on_the_link_and_is_kept_until_it_is_read(sides):
    @sides
    async def test():
        a, b = met()
        vectors = [side.pool.take() for side in (a, b)]
        for value, vector in enumerate(vectors):
            vector.array[:] = value
        one = a.begin(7, vectors[0].array, vector=vectors[0])
        two = b.begin(7, vectors[1].array, vector=vectors[1])
        b.hear(*a.says())
        assert b.arrived == [7]
        assert np.all(two.receiver.out == -1.0)
        assert two.receiver.done
        assert not one.sender.done
        assert vectors[0].users == 2
        a.hear(*b.says())
        assert np.all(one.receiver.out == 1.0)
        assert one.sender.done
        assert vectors[0].users == 1
        assert a.served == [7]
        b.hear(*a.says())
        assert two.sender.done
        assert a.says() == b.says() == []
        assert a.failures == b.failures == []


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_what_a_codec_makes_of_it_is_what_a_stream_brings(sides, name):
    @sides
    async def test():
        a, b = met()
        codec = get_codec(name)
        vectors = [side.pool.take() for side in (a, b)]
        for seed, vector in enumerate(vectors):
            vector.array[:] = np.random.default_rng(seed).standard_normal(SIZE)
        a.begin(7, vectors[0].array, codec, vector=vectors[0])
        two = b.begin(7, vectors[1].array, codec, vector=vectors[1])
        b.hear(*a.says())
        a.hear(*b.says())
        streamed = DifferenceReceiver(7, vectors[1].array, np.empty(SIZE, np.float32), codec)
        sender = Sender(7, vectors[0].array, codec, Config().chunk_elements)
        assert all(deliver(streamed, *frame) for frame in frames(sender))
        assert np.array_equal(streamed.out, two.receiver.out)
        assert streamed.difference_sq == two.receiver.difference_sq


def test_a_codec_that_needs_what_the_partner_holds_streams(sides):
    @sides
    async def test():
        a, _ = met()
        spread = Spread(SIZE)
        observe(spread, np.ones(SIZE, np.float32))
        vector = a.pool.take()
        codec = get_codec("moniqua4").bound(spread)
        assert a.neighbours.lend(a.link, 7, vector.array, codec, vector) is None
        assert a.neighbours.lend(a.link, 7, np.zeros(SIZE, np.float32), FP32, vector) is None, "it lies elsewhere"
        assert vector.users == 1


def test_after_an_abort_the_vector_is_nobody_elses_until_the_partner_has_read_it(sides):
    @sides
    async def test():
        a, b = met()
        vector = a.pool.take()
        a.begin(7, vector.array, vector=vector)
        a.sessions.release(7)
        a.pool.give(vector)
        assert a.pool.take().array is not vector.array
        b.sessions.recent.append(7)  # it is over there too
        b.hear(*a.says())
        a.hear(*b.says())
        assert a.pool.take().array is vector.array
        assert not a.served


def test_who_never_says_that_it_has_read_is_told_to_use_it_no_more(sides, monkeypatch):
    """The vector is another's from then on. What was being read meanwhile is dropped, however far it came."""

    @sides
    async def test():
        a, b = met()
        vector = a.pool.take()
        a.begin(7, vector.array, vector=vector)
        entry = b.begin(7, np.zeros(SIZE, np.float32))
        now = trio.current_time()
        a.neighbours.watch(now + 100)
        assert vector.users == 2, "its session is watched, and ends with its link"
        a.sessions.release(7)
        a.pool.give(vector)
        a.neighbours.watch(now + 2)
        assert vector.users == 1

        run = neighbours.Borrowing.run

        def late(self):
            a.neighbours.watch(now + 100)
            assert not vector.users
            run(self)

        monkeypatch.setattr(neighbours.Borrowing, "run", late)
        b.hear(*a.says())
        assert entry.receiver.done
        assert b.arrived == []
        assert b.failures == [(7, "broken")]


def test_a_link_that_ends_takes_back_what_was_lent_before_its_sessions_fail(sides):
    @sides
    async def test():
        a, b = met()
        vector = lent(a, b)
        a.neighbours.end(a.link)
        assert vector.users == 1
        b.hear(*a.says())
        assert b.arrived == []
        assert b.failures == [(7, "broken")]
        assert a.neighbours.lend(a.link, 8, vector.array, FP32, vector) is None
        other = b.pool.take()
        assert b.neighbours.lend(b.link, 8, other.array, FP32, other) is None
        assert other.users == 1


def test_no_link_holds_more_than_two_loans(sides):
    @sides
    async def test():
        a, _ = met()
        vector = a.pool.take()
        lent = [a.neighbours.lend(a.link, session, vector.array, FP32, vector) for session in range(LOANS + 1)]
        assert [isinstance(one, Loan) for one in lent] == [True] * LOANS + [False]
        a.hear(Read(1))
        assert a.neighbours.lend(a.link, 0, vector.array, FP32, vector) is None, "it is out already"
        assert a.neighbours.lend(a.link, 9, vector.array, FP32, vector) is not None


def unsealed(size):
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    return descriptor


def short(size):
    descriptor = unsealed(size - 1)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


@pytest.mark.parametrize("make", [unsealed, short, lambda size: os.open("/dev/zero", os.O_RDONLY)])
def test_what_is_no_memory_that_stays_as_it_is_ends_the_link(sides, make):
    @sides
    async def test():
        a, b = met()
        descriptor = make(4 * SIZE)
        a.link.channel.pass_on(7, descriptor)
        os.close(descriptor)
        entry = b.begin(7, np.zeros(SIZE, np.float32))
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ProtocolError):
            b.hear(Lent(7, 0, SIZE))
        assert entry.receiver.position == 0
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "lent", [Lent(7, 0, SIZE - 1), Lent(7, 0, 2 * SIZE), Lent(7, 4, SIZE), Lent(7, 1, SIZE), Lent(8, 0, SIZE)]
)
def test_what_is_not_our_vector_ends_the_link(sides, lent):
    @sides
    async def test():
        a, b = met()
        memory = HostMemory(SIZE)
        for session in (7, 8):
            a.link.channel.pass_on(session, memory.descriptor)
        b.begin(7, np.zeros(SIZE, np.float32))
        with pytest.raises(ProtocolError):
            b.hear(lent)
        assert b.arrived == []


def test_a_vector_comes_one_way_or_the_other(sides):
    @sides
    async def test():
        a, b = met()
        memory = HostMemory(SIZE)
        for session in (7, 7, 8):
            a.link.channel.pass_on(session, memory.descriptor)
        b.begin(7, np.zeros(SIZE, np.float32)).borrowing = True
        begun = b.begin(8, np.zeros(SIZE, np.float32))

        def both(session):
            b.sessions.place(b.link, Chunk(session, 0, 1_024, 0), 4_096)
            b.hear(Lent(session, 0, SIZE))

        for session in (7, 8):
            with pytest.raises(ProtocolError):
                both(session)
        assert begun.receiver.filling
        with pytest.raises(ProtocolError):
            Side(HIGH, LOW).hear(Lent(7, 0, SIZE))  # without a channel
        with pytest.raises(ProtocolError):
            b.hear(Came(True))
        with pytest.raises(ProtocolError):
            a.hear(Meet(bytes(16), bytes(16)))
        assert b.arrived == []


def test_without_a_descriptor_left_the_exchange_fails_and_the_next_one_streams(sides):
    @sides
    async def test():
        a, b = met()
        vector = lent(a, b)
        os.close(b.link.channel.take(7))
        b.hear(*a.says())
        assert b.failures == [(7, "broken")]
        assert not b.by_memory
        assert not a.link.channel.open
        a.hear(*b.says())
        assert vector.users == 1
        assert a.neighbours.lend(a.link, 8, vector.array, FP32, vector) is None

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
from gossip.ids import PeerId
from gossip.wire.messages import Came, Chunk, Hello, Lent, Meet, Read
from node.links.frame_reader import FrameReader
from node.links.link import Link
from node.model.host_memory import HostMemory
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.transfers import neighbours
from node.transfers.loans import LOANS, Loan
from node.transfers.neighbours import CHANNELS, Neighbours
from node.transfers.sessions import StreamSession, StreamSessions
from node.transport.shared import MeetingPlace
from tests.gossip.codecs.spreads import observe
from tests.memory_stream import memory_stream_pair
from tests.node import offline
from tests.node.test_transfer import deliver, frames

SIZE = 20_000
LOW, HIGH = PeerId(bytes(16)), PeerId(bytes([255] * 16))
HOST = "memory 0123"
FP32 = get_codec("fp32")


MADE = []


class Side:
    """A node's neighbours, one link of it, and what it said there."""

    def __init__(self, me, other):
        MADE.append(self)
        self.me, self.said, self.failures, self.arrived, self.served, self.told = me, [], [], [], [], []
        self.by_memory = set()
        self.pool = VectorPool(ModelState({"x": np.zeros(SIZE, np.float32)}))
        self.sessions = StreamSessions()
        self.neighbours = Neighbours(
            lambda: me, HOST, Config(), self, self.pool, self.sessions, lambda *task: None,
            lambda lent: self.arrived.append(lent.session), self.served.append, self.goes,
        )  # fmt: skip
        self.neighbours.tell = self.told.append
        self.link = self.linked(other)

    def linked(self, other):
        stream, _ = memory_stream_pair()
        link = Link(stream, FrameReader(stream), other)
        link.send = self.said.append
        return link

    def goes(self, peer, on):
        (self.by_memory.add if on else self.by_memory.discard)(peer)

    def failed(self, session, code):
        self.failures.append((session, code))

    def hear(self, *messages):
        for message in messages:
            self.neighbours.heard(self.link, message)

    def says(self):
        said, self.said[:] = list(self.said), []
        return said

    def begin(self, session, ours, codec=FP32, vector=None):
        """A session that takes a vector, and lends one where one is given."""
        receiver = DifferenceReceiver(session, ours, np.zeros_like(ours), codec)
        entry = StreamSession(session, self.link.peer, self.link, receiver=receiver)
        if vector is not None:
            entry.sender = self.neighbours.lend(self.link, session, vector.array[: ours.size], codec, vector)
        self.sessions.add(entry)
        return entry


def hello(*capabilities):
    return Hello(1, 1, "s", "", capabilities, None)


def met():
    """Two sides that have a channel."""
    a, b = Side(LOW, HIGH), Side(HIGH, LOW)
    for side in (a, b):
        side.neighbours.begin(side.link, hello("other", HOST))
    b.hear(*a.says())
    a.hear(*b.says())
    assert a.link.channel.open
    assert b.link.channel.open
    return a, b


def lent(a, b):
    """A vector of the one's that the other has a session for, and does not know of yet."""
    vector = a.pool.take()
    a.begin(7, vector.array, vector=vector)
    b.begin(7, np.zeros(SIZE, np.float32))
    return vector


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch):
    monkeypatch.setattr(VectorPool, "SHARED_ELEMENTS", SIZE)


@pytest.fixture
def sides():
    """Plays a test in trio, and ends what :class:`Side` began."""

    async def main(test):
        with trio.fail_after(20):
            await test()

    def play(test):
        trio.run(main, test)

    yield play
    while MADE:
        side = MADE.pop()
        for link in [*side.neighbours.near, side.link]:
            side.neighbours.end(link)


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


def test_no_more_than_sixteen_links_have_a_channel(sides):
    @sides
    async def test():
        a = Side(LOW, HIGH)
        links = [a.linked(HIGH) for _ in range(CHANNELS + 5)]
        before = len(os.listdir("/proc/self/fd"))
        for link in links:
            a.neighbours.begin(link, hello(HOST))
        assert len(a.says()) == CHANNELS
        assert len(os.listdir("/proc/self/fd")) == before + CHANNELS
        a.neighbours.end(links[0])
        a.neighbours.begin(links[-1], hello(HOST))
        (said,) = a.says()
        assert isinstance(said, Meet)
        for link in links:
            a.neighbours.end(link)
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("theirs", [(), ("memory 4567",), ("another",)])
def test_who_is_elsewhere_or_knows_nothing_of_it_is_sent_nothing(sides, theirs):
    @sides
    async def test():
        a = Side(LOW, HIGH)
        a.neighbours.begin(a.link, hello(*theirs))
        assert a.says() == []
        a.neighbours.host = None
        a.neighbours.begin(a.link, hello(HOST))
        assert a.says() == []
        assert not a.neighbours.near


def test_who_cannot_come_is_told_of_once_and_streams(sides):
    @sides
    async def test():
        a, b = Side(LOW, HIGH), Side(HIGH, LOW)
        for side in (a, b):
            side.neighbours.begin(side.link, hello(HOST))
        (meet,) = a.says()
        b.hear(Meet(bytes(16), bytes(16)), Meet(meet.name, bytes(16)))
        assert b.says() == [Came(False), Came(True)]
        assert len(b.told) == 1
        a.hear(Came(True))
        assert a.link.channel is None
        assert len(a.told) == 1
        assert "reached through its network" in a.told[0]
        with pytest.raises(ProtocolError):
            a.hear(Came(True))


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


def test_a_node_goes_by_memory_for_as_long_as_a_channel_is_open_at_both_ends(sides):
    @sides
    async def test():
        a, b = met()
        assert (a.by_memory, b.by_memory) == ({HIGH}, {LOW})
        a.neighbours.end(a.link)
        assert not a.by_memory
        assert b.by_memory == {LOW}
        b.neighbours.watch(trio.current_time())
        assert not b.by_memory


def test_one_that_reads_a_vector_when_the_channel_is_closed_goes_by_it_no_more(sides):
    @sides
    async def test():
        a, b = met()
        lent(a, b)
        a.link.channel.close()
        b.hear(*a.says())
        assert b.failures == [(7, "broken")]
        assert not b.by_memory


def test_of_two_channels_with_one_member_either_does(sides):
    @sides
    async def test():
        a, b = met()
        first = a.link, b.link
        for side, other in ((a, HIGH), (b, LOW)):
            side.link = side.linked(other)
            side.neighbours.begin(side.link, hello(HOST))
        b.hear(*a.says())
        a.hear(*b.says())
        a.neighbours.end(first[0])
        b.neighbours.watch(trio.current_time())
        assert (a.by_memory, b.by_memory) == ({HIGH}, {LOW})
        a.neighbours.end(a.link)
        b.neighbours.watch(trio.current_time())
        assert not a.by_memory | b.by_memory
        b.neighbours.end(first[1])


@pytest.mark.parametrize("why", ["small", "elsewhere"])
def test_who_has_nothing_that_can_be_read_where_it_lies_does_not_go_by_memory(sides, monkeypatch, why):
    @sides
    async def test():
        if why == "small":
            monkeypatch.setattr(VectorPool, "SHARED_ELEMENTS", SIZE + 1)
        else:
            monkeypatch.setattr(ModelState, "takes", lambda state, vector: False)
        a, b = met()
        assert not a.by_memory | b.by_memory


def test_a_place_to_meet_is_closed_with_its_link(sides):
    @sides
    async def test():
        a = Side(LOW, HIGH)
        before = len(os.listdir("/proc/self/fd"))
        a.neighbours.begin(a.link, hello(HOST))
        assert isinstance(a.neighbours.near[a.link], MeetingPlace)
        a.neighbours.end(a.link)
        a.neighbours.end(a.link)
        assert len(os.listdir("/proc/self/fd")) == before


def test_without_the_memory_for_it_a_node_goes_on(sides, monkeypatch):
    @sides
    async def test():
        runtime = offline.runtime()

        def none_left(self):
            raise MemoryError

        monkeypatch.setattr(type(runtime.streams), "touch", none_left)
        await runtime.streams.touch_beside()
        assert not runtime.events[1:], "nothing was taken yet"
        runtime.streams.taken = True
        await runtime.streams.touch_beside()
        assert "it is taken when it is needed" in str(runtime.events)

"""Several connections of one link: their contents, and the effects of a cut or of a lying peer."""

from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
import trio.testing

from gossip.averaging.streams import DifferenceReceiver, Sender
from gossip.codecs import get_codec
from gossip.config import Config
from gossip.errors import ProtocolError
from gossip.wire.frames import encode
from gossip.wire.messages import Accept, Chunk, Nack, Widen
from node.links.frame_reader import FrameReader
from node.links.stripes import LEAST_ELEMENTS, Lane, chunk_elements
from node.network.transfers import streams
from node.network.transfers.transfer import LinkTransfer, LinkTransfers
from node.observe import losses
from node.transport.byte_stream import BrokenLinkError
from node.transport.loss import PathRecord
from tests.memory_stream import memory_stream_pair
from tests.node import offline
from tests.node.offline import in_trio

SIZE = 1 << 18  # elements: 64 chunks when eight connections share them
FP32 = get_codec("fp32")


class End:
    """One end of a link with lanes. ``far`` has the other side's reader of each lane."""

    def __init__(self, nursery, lanes, dialled, capacity_bytes):
        self.link, self.main = offline.link(capacity_bytes=capacity_bytes)
        self.sent, self.finished, self.errors, self.far = [], [], [], []
        self.dialled = dialled
        nursery.start_soon(self.link.write_loop, self.sent.append, self.finished.append)
        for _ in range(lanes):
            near, far = memory_stream_pair(capacity_bytes)
            self.far.append(FrameReader(far))
            nursery.start_soon(self.run, Lane(self.link, near, FrameReader(near)))

    async def run(self, lane):
        try:
            await lane.run(self.dialled, self.place, lambda chunk: None)
        except* (BrokenLinkError, ProtocolError) as group:
            self.errors.extend(group.exceptions)

    async def place(self, chunk, size):
        await trio.lowlevel.checkpoint()
        return memoryview(bytearray(size))

    def start(self, sender):
        self.link.start_bulk(sender.session, sender, shared=True)


@asynccontextmanager
async def open_end(lanes, dialled=False, capacity_bytes=1 << 16):
    """Run an end whose lanes it has admitted, unless it ``dialled`` them."""
    async with trio.open_nursery() as nursery:
        end = End(nursery, lanes, dialled, capacity_bytes)
        for far in [] if dialled else end.far:
            assert isinstance((await far.read_message())[0], Widen)
        yield end
        nursery.cancel_scope.cancel()


class Noted(Sender):
    """A sender that counts in ``free`` the calls of ``let_go``."""

    free = 0

    def let_go(self):
        self.free += 1


def ramp(size=SIZE):
    return np.arange(size, dtype=np.float32)


def one_chunk(session):
    return Sender(session, ramp(LEAST_ELEMENTS), FP32, LEAST_ELEMENTS)


async def chunk_of(reader):
    """Return the next chunk of a connection, and its values."""
    message, body_bytes = await reader.read_message()
    assert isinstance(message, Chunk)
    body = bytearray(body_bytes)
    await reader.read_exactly(memoryview(body))
    return message, np.frombuffer(bytes(body), np.float32)


@pytest.mark.parametrize(
    ("largest", "elements", "lanes", "chunk"),
    [
        (131_072, 10**8, 0, 131_072), (131_072, 250_000, 0, 131_072), (131_072, 250_000, 8, LEAST_ELEMENTS),
        (131_072, 2_500_000, 8, 36_864), (1 << 20, 10**8, 8, 131_072), (1_024, 250_000, 8, 1_024),
    ],
)  # fmt: skip
def test_lanes_share_a_vector_in_whole_blocks_and_no_chunk_is_too_large(largest, elements, lanes, chunk):
    assert chunk_elements(largest, elements, lanes) == chunk


@in_trio
async def test_a_vector_goes_over_all_lanes_and_messages_go_over_the_link():
    async with open_end(lanes=3) as end, trio.open_nursery() as nursery:
        assert len(end.link.lanes) == 3
        sender = Noted(7, ramp(), FP32, LEAST_ELEMENTS)
        end.link.send(Accept(7, 0.0, 0.5, "fp32"))
        end.start(sender)
        there, counts = np.zeros(SIZE, np.float32), [0, 0, 0]

        async def read(place, far):
            while True:
                chunk, body = await chunk_of(far)
                there[chunk.start : chunk.start + chunk.elements] = body
                counts[place] += 1

        for place, far in enumerate(end.far):
            nursery.start_soon(read, place, far)
        assert isinstance((await end.main.read_message())[0], Accept)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert np.array_equal(there, ramp())
        assert sum(counts) == SIZE // LEAST_ELEMENTS
        assert min(counts) > 0
        assert end.finished == [7]
        assert end.sent == [7] * sum(counts)
        assert sender.free >= 1
        assert end.link.bytes_sent > 4 * SIZE
        end.link.send(Nack(1))
        assert isinstance((await end.main.read_message())[0], Nack)
        nursery.cancel_scope.cancel()


@in_trio
async def test_a_dialled_lane_carries_no_chunk_before_the_other_side_admits_it():
    async with open_end(lanes=1, dialled=True) as end:
        await trio.testing.wait_all_tasks_blocked()
        assert len(end.link.lanes) == 0
        end.start(one_chunk(7))
        assert (await chunk_of(end.main))[0].start == 0, "the link carries it"
        await end.far[0].stream.send_all(encode(Widen(1)))
        await trio.testing.wait_all_tasks_blocked()
        end.start(one_chunk(8))
        assert (await chunk_of(end.far[0]))[0].session == 8


@in_trio
async def test_no_chunk_goes_over_a_lane_before_earlier_messages_have_left():
    async with open_end(lanes=1, capacity_bytes=16) as end:
        end.link.send(Nack(1))
        await trio.testing.wait_all_tasks_blocked()  # It is being sent.
        end.link.send(Accept(7, 0.0, 0.5, "fp32"))
        end.start(one_chunk(7))
        with trio.move_on_after(0.05) as waited:
            await end.far[0].read_message()
        assert waited.cancelled_caught
        for _ in range(2):
            await end.main.read_message()
        assert (await chunk_of(end.far[0]))[0].session == 7


@pytest.mark.parametrize("cut", [False, True])
@in_trio
async def test_a_stopped_vector_is_released_when_its_last_chunk_is_out(cut):
    async with open_end(lanes=2, capacity_bytes=1_024) as end:
        sender = Noted(7, ramp(), FP32, LEAST_ELEMENTS)
        end.start(sender)
        await trio.testing.wait_all_tasks_blocked()  # Both are in the middle of a chunk.
        for _ in range(2):  # A second call does no harm.
            end.link.stop_bulk(7, sender)
        assert sender.free == 0
        assert (await chunk_of(end.far[0]))[0].session == 7
        await trio.testing.wait_all_tasks_blocked()
        assert sender.free == 0
        if cut:
            end.far[1].stream.close_now()
        else:
            await chunk_of(end.far[1])
        await trio.testing.wait_all_tasks_blocked()
        assert sender.free == 1
        assert end.finished == []
        assert {type(error) for error in end.errors} == ({BrokenLinkError} if cut else set())


@pytest.mark.parametrize(
    "said",
    [encode(Nack(1)), encode(Widen(3)), encode(Chunk(7, 0, 1_024, 1)), encode(Chunk(7, 0, 131_328, 1), 525_312)],
    ids=["message", "second Widen", "chunk without a body", "chunk above the limit"],
)
@in_trio
async def test_a_lane_takes_chunks_and_nothing_else(said):
    async with open_end(lanes=1) as end:
        await end.far[0].stream.send_all(said)
        await trio.testing.wait_all_tasks_blocked()
        assert [type(error) for error in end.errors] == [ProtocolError]


@in_trio
async def test_a_link_goes_on_without_a_lane_that_the_other_side_closes():
    async with open_end(lanes=2) as end:
        await end.far[0].stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert end.errors == []
        assert len(end.link.lanes) == 1
        end.start(one_chunk(7))
        assert (await chunk_of(end.far[1]))[0].session == 7


def arriving():
    """Return a function that asks for the buffer of a chunk, at a place among four, of a vector that arrives."""
    link, _ = offline.link()
    ours = ramp(4 * LEAST_ELEMENTS)
    receiver = DifferenceReceiver(7, ours, np.empty_like(ours), FP32)
    transfer = LinkTransfer(7, link.clock.current_time)
    transfer.start(link, None, receiver)
    transfers = LinkTransfers({7: transfer})

    def buffer_for(place, over_lane):
        chunk = Chunk(7, place * LEAST_ELEMENTS, LEAST_ELEMENTS, 1)
        return transfers.buffer_for(link, chunk, 4 * LEAST_ELEMENTS, over_lane=over_lane)

    return buffer_for


@pytest.mark.parametrize("first", [False, True])
@in_trio
async def test_a_vector_comes_over_its_link_or_over_lanes(first):
    buffer_for = arriving()
    buffer_for(0, over_lane=first)
    with pytest.raises(ProtocolError, match="over its link and over others"):
        buffer_for(1, over_lane=not first)


@in_trio
async def test_chunks_may_come_out_of_order_over_lanes_alone():
    with pytest.raises(ProtocolError, match="must begin at 0"):
        arriving()(1, over_lane=False)
    assert arriving()(1, over_lane=True) is not None


@pytest.fixture
def held_up(monkeypatch):
    """Treat every connection as narrow, and check all the time."""
    monkeypatch.setattr(losses, "CHECK_PERIOD_S", 0.0)
    monkeypatch.setattr(losses, "MIN_BYTES", 0)
    monkeypatch.setattr(PathRecord, "is_narrow", True)


def links_of(trainee):
    return trainee.side.service.runtime.links.all()


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("encrypted", [False, True])
def test_nodes_mix_over_as_many_connections_as_they_may(
    encrypted, codec, large, train, until, held_up, monkeypatch, secret
):
    options = {"config": Config(mix_every_steps=2, join_timeout_s=3.0, connections=5, codec=codec)}
    if encrypted:
        options["secret"] = secret
    if large:
        monkeypatch.setattr(streams, "LARGE_BYTES", 1)
    models = [{"x": np.zeros(SIZE, np.float32)} for _ in range(2)]
    first = train(models[0], **options)
    second = train(models[1], seeds=[first.node.address], **options)
    until(lambda: all([len(link.lanes) for link in links_of(one)] == [5] for one in (first, second)))
    lanes = [lane for one in (first, second) for link in links_of(one) for lane in link.lanes.all]
    assert len(lanes) == 10
    trained = ramp() / SIZE
    second.do(lambda _: np.copyto(models[1]["x"], trained))
    before = {one: one.node.metrics().exchanges_done for one in (first, second)}
    until(lambda: all(one.node.metrics().exchanges_done > 5 + done for one, done in before.items()))
    assert all(lane.reader.bytes_received > 8_192 for lane in lanes)
    failed = [one.node.metrics().exchanges_failed for one in (first, second)]
    for one in (first, second):
        one.stop()
    assert failed == [0, 0]
    assert np.abs(models[0]["x"] - trained / 2).max() < 0.25

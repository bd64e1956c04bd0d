"""Several connections of one link: their contents, and the effects of a cut or of a lying peer."""

from __future__ import annotations

import numpy as np
import pytest
import trio
import trio.testing

from gossip.averaging.streams import DifferenceReceiver, Sender
from gossip.codecs import get_codec
from gossip.config import Config
from gossip.errors import ProtocolError
from gossip.ids import PeerId
from gossip.wire.frames import encode
from gossip.wire.messages import Accept, Chunk, Nack, Widen
from node.identity.keys import new_secret
from node.links.frame_reader import FrameReader
from node.links.link import Link
from node.links.stripes import LEAST_ELEMENTS, Lane, chunk_elements
from node.network.transfers import streams
from node.network.transfers.sessions import StreamSession, StreamSessions
from node.observe import losses
from node.transport.byte_stream import BrokenLinkError
from node.transport.loss import PathRecord
from tests.memory_stream import memory_stream_pair
from tests.node.offline import in_trio

SIZE = 1 << 18  # elements: 64 chunks when eight connections share them
FP32 = get_codec("fp32")


class End:
    """One end of a link with lanes, and the bodies that arrive. ``far`` has the other side's reader of each lane."""

    def __init__(self, nursery, lanes=2, dialled=False, capacity_bytes=1 << 16):
        near, far = memory_stream_pair(capacity_bytes)
        self.link, self.main = Link(near, FrameReader(near), PeerId(bytes(16))), FrameReader(far)
        self.sent, self.finished, self.bodies, self.errors, self.far = [], [], [], [], []
        self.nursery, self.dialled = nursery, dialled
        nursery.start_soon(self.link.write_loop, self.sent.append, self.finished.append)
        for _ in range(lanes):
            self.add(capacity_bytes)

    def add(self, capacity_bytes=1 << 16):
        near, far = memory_stream_pair(capacity_bytes)
        self.far.append(FrameReader(far))
        self.nursery.start_soon(self.run, Lane(self.link, near, FrameReader(near)))

    async def run(self, lane):
        try:
            await lane.run(self.dialled, self.place, self.bodies.append)
        except* (BrokenLinkError, ProtocolError) as group:
            self.errors.extend(group.exceptions)

    async def place(self, chunk, size):
        await trio.lowlevel.checkpoint()
        self.body = bytearray(size)
        return memoryview(self.body)


class Noted(Sender):
    """A sender that counts in ``free`` the calls of ``let_go``."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.free = 0

    def let_go(self):
        self.free += 1


def ramp(size=SIZE):
    return np.arange(size, dtype=np.float32)


async def chunk_of(reader, size=None):
    """Return the next chunk of a connection, and its values."""
    message, body_bytes = await reader.read_message()
    assert isinstance(message, Chunk)
    body = bytearray(body_bytes)
    await reader.read_exactly(memoryview(body))
    return message, np.frombuffer(bytes(body), np.float32)


def test_chunks_are_as_many_as_connections_have_use_for_and_whole_blocks():
    assert chunk_elements(131_072, 10**8, 0) == 131_072
    assert chunk_elements(131_072, 250_000, 0) == 131_072
    assert chunk_elements(131_072, 250_000, 8) == LEAST_ELEMENTS
    assert chunk_elements(131_072, 2_500_000, 8) == 36_864
    assert chunk_elements(1 << 20, 10**8, 8) == 131_072
    assert chunk_elements(1_024, 250_000, 8) == 1_024


@in_trio
async def test_who_was_dialled_says_that_a_lane_is_let_in_and_a_vector_goes_over_all_of_them():
    async with trio.open_nursery() as nursery:
        end = End(nursery, 3)
        for far in end.far:
            assert isinstance((await far.read_message())[0], Widen)
        assert len(end.link.lanes) == 3
        sender = Noted(7, ramp(), FP32, LEAST_ELEMENTS)
        end.link.send(Accept(7, 0.0, 0.5, "fp32"))
        end.link.start_bulk(7, sender, shared=True)
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
        assert isinstance((await end.main.read_message())[0], Nack), "and its messages go over the link"
        nursery.cancel_scope.cancel()


@in_trio
async def test_who_dialled_sends_no_chunk_before_it_is_let_in():
    async with trio.open_nursery() as nursery:
        end = End(nursery, 1, dialled=True)
        await trio.testing.wait_all_tasks_blocked()
        assert len(end.link.lanes) == 0
        end.link.start_bulk(7, Sender(7, ramp(LEAST_ELEMENTS), FP32, LEAST_ELEMENTS), shared=True)
        assert (await chunk_of(end.main))[0].start == 0, "the link carries it"
        await end.far[0].stream.send_all(encode(Widen(1)))
        await trio.testing.wait_all_tasks_blocked()
        end.link.start_bulk(8, Sender(8, ramp(LEAST_ELEMENTS), FP32, LEAST_ELEMENTS), shared=True)
        assert (await chunk_of(end.far[0]))[0].session == 8
        nursery.cancel_scope.cancel()


@in_trio
async def test_no_chunk_goes_over_a_lane_before_the_words_that_go_before_it_have_left():
    async with trio.open_nursery() as nursery:
        end = End(nursery, 1, capacity_bytes=16)
        await end.far[0].read_message()
        end.link.send(Nack(1))
        await trio.testing.wait_all_tasks_blocked()  # It is being sent.
        end.link.send(Accept(7, 0.0, 0.5, "fp32"))
        end.link.start_bulk(7, Sender(7, ramp(LEAST_ELEMENTS), FP32, LEAST_ELEMENTS), shared=True)
        with trio.move_on_after(0.05) as waited:
            await end.far[0].read_message()
        assert waited.cancelled_caught
        await end.main.read_message()
        await end.main.read_message()
        assert (await chunk_of(end.far[0]))[0].session == 7
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("cut", [False, True])
@in_trio
async def test_what_is_stopped_is_let_go_when_the_last_chunk_of_it_is_out(cut):
    async with trio.open_nursery() as nursery:
        end = End(nursery, 2, capacity_bytes=1_024)
        for far in end.far:
            await far.read_message()
        sender = Noted(7, ramp(), FP32, LEAST_ELEMENTS)
        end.link.start_bulk(7, sender, shared=True)
        await trio.testing.wait_all_tasks_blocked()  # Both are in the middle of a chunk.
        end.link.stop_bulk(7, sender)
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
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "said",
    [
        encode(Nack(1)),
        encode(Widen(3)),
        encode(Chunk(7, 0, 1_024, 1)),
        encode(Chunk(7, 0, 131_328, 1), 525_312),
    ],
)
@in_trio
async def test_over_a_lane_come_chunks_and_nothing_else(said):
    async with trio.open_nursery() as nursery:
        end = End(nursery, 1)
        await end.far[0].read_message()
        await end.far[0].stream.send_all(said)
        await trio.testing.wait_all_tasks_blocked()
        assert [type(error) for error in end.errors] == [ProtocolError]
        nursery.cancel_scope.cancel()


@in_trio
async def test_a_lane_that_the_other_side_closes_is_gone_and_the_link_goes_on():
    async with trio.open_nursery() as nursery:
        end = End(nursery, 2)
        for far in end.far:
            await far.read_message()
        await end.far[0].stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert end.errors == []
        assert len(end.link.lanes) == 1
        end.link.start_bulk(7, Sender(7, ramp(LEAST_ELEMENTS), FP32, LEAST_ELEMENTS), shared=True)
        assert (await chunk_of(end.far[1]))[0].session == 7
        nursery.cancel_scope.cancel()


def agreed(receiver):
    """Return the table of a session whose vector arrives over lanes, and its link."""
    near, _ = memory_stream_pair()
    link = Link(near, FrameReader(near), PeerId(bytes(16)))
    sessions = StreamSessions()
    sessions.add(StreamSession(7, link.peer, link, receiver=receiver))
    return sessions, link


@in_trio
async def test_a_vector_comes_over_its_link_or_over_lanes():
    ours = ramp(4 * LEAST_ELEMENTS)
    for first in (False, True):
        sessions, link = agreed(DifferenceReceiver(7, ours, np.empty_like(ours), FP32))
        chunk = Chunk(7, 0, LEAST_ELEMENTS, 1)
        sessions.buffer_for(link, chunk, 4 * LEAST_ELEMENTS, over_lane=first)
        with pytest.raises(ProtocolError, match="over its link and over others"):
            sessions.buffer_for(
                link, Chunk(7, LEAST_ELEMENTS, LEAST_ELEMENTS, 1), 4 * LEAST_ELEMENTS, over_lane=not first
            )


@in_trio
async def test_over_its_link_alone_chunks_come_in_order():
    ours = ramp(4 * LEAST_ELEMENTS)
    later = Chunk(7, LEAST_ELEMENTS, LEAST_ELEMENTS, 1)
    sessions, link = agreed(DifferenceReceiver(7, ours, np.empty_like(ours), FP32))
    with pytest.raises(ProtocolError, match="must begin at 0"):
        sessions.buffer_for(link, later, 4 * LEAST_ELEMENTS)
    sessions, link = agreed(DifferenceReceiver(7, ours, np.empty_like(ours), FP32))
    assert sessions.buffer_for(link, later, 4 * LEAST_ELEMENTS, over_lane=True) is not None


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
    encrypted, codec, large, train, until, held_up, monkeypatch, tmp_path
):
    config = {"mix_every_steps": 2, "join_timeout_s": 3.0}
    options = {"config": Config(**config, connections=5, codec=codec)}
    if encrypted:
        options["secret"] = tmp_path / "secret"
        options["secret"].write_text(new_secret())
        options["secret"].chmod(0o600)
    if large:
        monkeypatch.setattr(streams, "LARGE_BYTES", 1)
    models = [{"x": np.full(SIZE, value, np.float32)} for value in (0.0, 0.0)]
    first = train(models[0], **options)
    second = train(models[1], seeds=[first.node.address], **options)
    until(lambda: all([len(link.lanes) for link in links_of(one)] == [5] for one in (first, second)))
    lanes = [lane for one in (first, second) for link in links_of(one) for lane in link.lanes.all]
    assert len(lanes) == 10
    second.do(lambda _: models[1]["x"].fill(1.0))
    before = {one: one.node.metrics().exchanges_done for one in (first, second)}
    until(lambda: all(one.node.metrics().exchanges_done > 5 + done for one, done in before.items()))
    assert all(lane.reader.bytes_received > 8_192 for lane in lanes)
    failed = [one.node.metrics().exchanges_failed for one in (first, second)]
    for one in (first, second):
        one.stop()
    assert failed == [0, 0]
    assert abs(float(models[0]["x"].mean()) - 0.5) < 0.25

"""Extra connections of a link: their opening and admission, and the limits of a lying member."""

from __future__ import annotations

from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio
import trio.testing

from gossip.config import Config
from gossip.errors import ProtocolError
from gossip.ids import Address, PeerId
from gossip.wire.frames import encode
from gossip.wire.messages import Chunk, Close, Hello, Widen
from node.links.frame_reader import FrameReader
from node.links.link import Link
from node.links.pool import Links
from node.network.striping import Striping
from tests.agreement.scenario import Scenario, make_peer
from tests.harness.configs import tuned
from tests.memory_stream import memory_stream_pair
from tests.node.offline import OTHER, in_trio, runtime

RECORD = make_peer(1, (), Scenario([], 0.0), 0.0).membership.me
NAME, THERE = b"n" * 16, Address("10.0.0.1", 7)


class Far:
    """A Connector that records its dials, and gives the given answers."""

    def __init__(self, answers=()):
        self.dialled, self.spawned, self.answers = [], [], list(answers)

    def spawn(self, task, *args):
        self.spawned.append((task, args))

    async def dial_lane(self, *whom):
        self.dialled.append(whom)
        await trio.lowlevel.checkpoint()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def all(self):
        while self.spawned:
            task, args = self.spawned.pop(0)
            await task(*args)


def link(peer=OTHER, address=None, named=NAME):
    near, far = memory_stream_pair()
    made = Link(near, FrameReader(near), PeerId(peer))
    made.name_for_their_lanes, made.name_for_our_lanes, made.address, made.far = NAME, named, address, FrameReader(far)
    return made


def striping(answers=(), **config):
    links, far = Links(), Far(answers)
    return Striping(links, far, tuned(**config)), links, far


@in_trio
async def test_who_dialled_opens_them_once_and_who_was_dialled_asks_once():
    one, links, far = striping([None] * 9, connections=4)
    ours, theirs = link(address=THERE), link(PeerId(b"x" * 16))
    for each in (ours, theirs):
        links.add(each)
        one.widen(each)
        one.widen(each)
    await far.all()
    assert far.dialled == [(THERE, OTHER, NAME)] * 4
    assert one.opening_lanes == 0
    assert list(theirs.outbox) == [encode(Widen(4))]
    assert not ours.outbox


@pytest.mark.parametrize(("most", "asked", "opened"), [(4, 2, 2), (4, 64, 4), (1, 8, 0), (4, 1, 0), (4, 0, 0)])
@in_trio
async def test_who_is_asked_opens_no_more_than_it_may_itself(most, asked, opened):
    one, links, far = striping([None] * 9, connections=most)
    ours = link(address=THERE)
    links.add(ours)
    one.on_widen(ours, asked)
    one.on_widen(ours, asked)
    await far.all()
    assert len(far.dialled) == opened


@in_trio
async def test_nobody_is_asked_who_knows_nothing_of_it_or_where_one_is_all_there_may_be():
    for named, most in ((b"", 8), (NAME, 1)):
        one, links, far = striping(connections=most)
        for each in (link(address=THERE, named=named), link(named=named)):
            links.add(each)
            one.widen(each)
            assert not each.outbox
        assert far.spawned == []


@in_trio
async def test_who_dialled_asks_for_nothing_that_it_can_open_itself():
    one, links, _ = striping()
    theirs = link()
    links.add(theirs)
    with pytest.raises(ProtocolError):
        one.on_widen(theirs, 2)


@in_trio
async def test_all_links_together_have_as_many_as_there_may_be_links():
    one, links, far = striping([None] * 9, connections=8, max_links=3)
    for number in range(3):
        ours = link(PeerId(bytes([number]) * 16), THERE)
        links.add(ours)
        one.widen(ours)
    assert len(far.spawned) == one.opening_lanes == 3


@in_trio
async def test_a_dial_that_fails_leaves_the_link_as_it_is():
    one, links, far = striping([OSError(), ProtocolError("no"), None], connections=3)
    ours = link(address=THERE)
    links.add(ours)
    one.widen(ours)
    await far.all()
    assert one.opening_lanes == 0
    assert not ours.lanes.all


@in_trio
async def test_what_comes_when_its_link_is_gone_is_closed():
    late = link()
    one, links, _ = striping([late], connections=2)
    ours = link(address=THERE)
    links.add(ours)
    one.opening_lanes += 1
    await one.open_lane(ours)
    with pytest.raises(Exception, match="broke"):
        await late.far.stream.receive_into(memoryview(bytearray(1)))


@pytest.mark.parametrize(("peer", "joins", "connections", "lets_in"), [
    (OTHER, NAME, 8, True), (OTHER, b"m" * 16, 8, False), (OTHER, NAME[:8], 8, False),
    (PeerId(b"x" * 16), NAME, 8, False),  # The name belongs to another member's link.
    (OTHER, NAME, 2, False), (OTHER, NAME, 1, False),  # Two connections exist already.
])  # fmt: skip
@in_trio
async def test_a_lane_is_let_in_by_the_name_that_its_own_link_was_given(peer, joins, connections, lets_in):
    one, links, _ = striping(connections=connections)
    theirs, admitted = link(), []
    theirs.admit_lane = lambda stream, reader, dialled: admitted.append((stream, dialled)) or True
    theirs.lanes.all += [object()] * 2
    links.add(theirs)
    lane = link(peer)
    await one.on_lane(lane, Hello(1, 1, "default", "", (), RECORD, joins=joins))
    assert admitted == [(lane.stream, False)] * lets_in
    if not lets_in:
        assert await lane.far.read_message() is None, "it is closed in order, and whoever dialled goes on without"


class Running:
    """A runtime with one link to a member, whose messages come over the link and a lane."""

    def __init__(self, node, main, lane):
        self.node, self.main, self.lane = node, main, lane


@asynccontextmanager
async def with_lane():
    node = runtime(Config(filter="none", stall_s=0.2))
    near, far = memory_stream_pair()
    ours = Link(near, FrameReader(near), OTHER)
    ours.name_for_their_lanes = ours.name_for_our_lanes = NAME
    beside, other = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.run_link, ours, Hello(1, 1, "default", "", (), RECORD))
        await trio.testing.wait_all_tasks_blocked()
        lane = Link(beside, FrameReader(beside), OTHER)
        await node.striping.on_lane(lane, Hello(1, 1, "default", "", (), RECORD, joins=NAME))
        reader = FrameReader(other)
        assert isinstance((await reader.read_message())[0], Widen)
        assert node.links.striped_links == 1
        yield Running(node, FrameReader(far), reader)
        nursery.cancel_scope.cancel()


async def ends(reader):
    """Return the messages until the end, and then the error that ended the reading, if any."""
    said = []
    try:
        while (got := await reader.read_message()) is not None:
            said.append(got[0])
    except Exception as error:
        said.append(error)
    return said


@in_trio
async def test_a_chunk_of_what_was_never_agreed_is_waited_for_and_ends_the_link():
    async with with_lane() as running:
        said = trio.current_time()
        await running.lane.stream.send_all(encode(Chunk(5, 0, 1_024, 1), 4_096) + bytes(4_096))
        await ends(running.main)
        assert trio.current_time() - said >= 0.2
        await trio.testing.wait_all_tasks_blocked()
        assert not len(running.node.links)


@in_trio
async def test_a_chunk_of_what_is_over_is_thrown_away():
    async with with_lane() as running:
        body = np.zeros(1_024, np.float32).tobytes()
        await running.lane.stream.send_all(encode(Chunk(5, 0, 1_024, 1), len(body)) + body)
        await trio.sleep(0.02)
        running.node.sessions.expect_late_chunks(5)
        for _ in range(3):
            await running.lane.stream.send_all(encode(Chunk(5, 0, 1_024, 1), len(body)) + body)
        await trio.sleep(0.3)
        assert len(running.node.links) == 1
        assert running.node.links.striped_links == 1


@pytest.mark.parametrize("which", ["lane", "main"])
@in_trio
async def test_a_link_and_its_lanes_end_together(which):
    async with with_lane() as running:
        getattr(running, which).stream.close_now()
        await ends(running.main if which == "lane" else running.lane)
        await trio.testing.wait_all_tasks_blocked()
        assert not len(running.node.links)
        assert running.node.links.striped_links == 0


@in_trio
async def test_who_leaves_ends_its_lanes_in_order():
    async with with_lane() as running:
        await running.node.leave(1.0)
        assert not any(isinstance(said, Exception) for said in await ends(running.lane))


@in_trio
async def test_a_link_that_is_not_needed_is_closed_with_its_lanes_in_order():
    async with with_lane() as running:
        running.node.links.all()[0].retire()
        assert not any(isinstance(said, Exception) for said in await ends(running.lane))
        assert [said.code for said in await ends(running.main) if isinstance(said, Close)] == ["idle"]


@in_trio
async def test_who_lies_over_a_lane_has_done_so():
    async with with_lane() as running:
        await running.lane.stream.send_all(encode(Close("idle", "", ())))
        await ends(running.main)
        await trio.testing.wait_all_tasks_blocked()
        assert not len(running.node.links)
        assert (OTHER, "fault") in running.node.peer.misbehaviour.levels

"""Extra connections of a link: their opening and admission, and the limits of a lying member."""

from contextlib import asynccontextmanager
from types import SimpleNamespace

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
from node.transport.byte_stream import BrokenLinkError
from tests.agreement.scenario import Scenario, make_peer
from tests.harness.configs import tuned
from tests.memory_stream import memory_stream_pair
from tests.node.offline import OTHER, in_trio, runtime

RECORD = make_peer(1, (), Scenario([], 0.0), 0.0).membership.me
NAME, THERE = b"n" * 16, Address("10.0.0.1", 7)


def hello(**changes):
    return Hello(1, 1, "default", "", (), RECORD, **changes)


def link(peer=OTHER, address=None, named=NAME):
    near, far = memory_stream_pair()
    made = Link(near, FrameReader(near), PeerId(peer))
    made.name_for_their_lanes, made.name_for_our_lanes, made.address, made.far = NAME, named, address, FrameReader(far)
    return made


# -- decisions ---------------------------------------------------------------------------------------------------------
class Dialler:
    """A Connector that records its dials, and gives the given answers."""

    def __init__(self, answers):
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

    async def dial_all(self):
        while self.spawned:
            task, args = self.spawned.pop(0)
            await task(*args)


def striping(*links, answers=(None,) * 9, **config):
    """Return the Striping of a node with these links, and its Dialler."""
    pool, dialler = Links(), Dialler(answers)
    for one in links:
        pool.add(one)
    return Striping(pool, dialler, tuned(**config)), dialler


@in_trio
async def test_the_side_that_dialled_opens_lanes_once_and_the_other_side_asks_once():
    ours, theirs = link(address=THERE), link(PeerId(b"x" * 16))
    one, dialler = striping(ours, theirs, connections=4)
    for each in (ours, ours, theirs, theirs):
        one.widen(each)
    await dialler.dial_all()
    assert dialler.dialled == [(THERE, OTHER, NAME)] * 4
    assert one.opening_lanes == 0
    assert list(theirs.outbox) == [encode(Widen(4))]
    assert not ours.outbox


@pytest.mark.parametrize(("most", "asked", "opened"), [(4, 2, 2), (4, 64, 4), (1, 8, 0), (4, 1, 0), (4, 0, 0)])
@in_trio
async def test_a_request_opens_no_more_lanes_than_the_node_wants_itself_and_once(most, asked, opened):
    ours = link(address=THERE)
    one, dialler = striping(ours, connections=most)
    one.on_widen(ours, asked)
    one.on_widen(ours, asked)
    await dialler.dial_all()
    assert len(dialler.dialled) == opened


@pytest.mark.parametrize(("named", "most"), [(b"", 8), (NAME, 1)], ids=["an older version", "one connection"])
@in_trio
async def test_no_lane_is_opened_or_asked_for_where_none_can_be(named, most):
    links = link(address=THERE, named=named), link(PeerId(b"x" * 16), named=named)
    one, dialler = striping(*links, connections=most)
    for each in links:
        one.widen(each)
        assert not each.outbox
    assert dialler.spawned == []


@in_trio
async def test_a_member_that_dialled_may_not_ask_for_what_it_can_open_itself():
    theirs = link()
    with pytest.raises(ProtocolError):
        striping(theirs)[0].on_widen(theirs, 2)
    theirs.path = "punched"  # Neither side can open more.
    striping(theirs)[0].on_widen(theirs, 2)
    striping(theirs)[0].widen(theirs)
    assert not theirs.outbox


@in_trio
async def test_all_links_together_have_as_many_lanes_as_there_may_be_links():
    links = [link(PeerId(bytes([number]) * 16), THERE) for number in range(3)]
    one, dialler = striping(*links, connections=8, max_links=3)
    for each in links:
        one.widen(each)
    assert len(dialler.spawned) == one.opening_lanes == 3


@in_trio
async def test_a_dial_that_fails_leaves_the_link_as_it_is():
    ours = link(address=THERE)
    one, dialler = striping(ours, answers=[OSError(), ProtocolError("no"), None], connections=3)
    one.widen(ours)
    await dialler.dial_all()
    assert one.opening_lanes == 0
    assert not ours.lanes.all


@in_trio
async def test_a_lane_that_comes_when_its_link_is_gone_is_closed():
    late, ours = link(), link(address=THERE)
    one, _ = striping(ours, answers=[late], connections=2)
    await one.open_lane(ours)
    with pytest.raises(BrokenLinkError):
        await late.far.stream.receive_into(memoryview(bytearray(1)))


@pytest.mark.parametrize(("peer", "joins", "connections", "is_let_in"), [
    (OTHER, NAME, 8, True), (OTHER, b"m" * 16, 8, False), (OTHER, NAME[:8], 8, False),
    (PeerId(b"x" * 16), NAME, 8, False),  # The name belongs to another member's link.
    (OTHER, NAME, 2, False), (OTHER, NAME, 1, False),  # Two connections exist already.
])  # fmt: skip
@in_trio
async def test_a_lane_is_let_in_by_the_name_that_its_own_link_was_given(peer, joins, connections, is_let_in):
    theirs, lane, admitted = link(), link(peer), []
    theirs.admit_lane = lambda stream, reader, dialled: admitted.append((stream, dialled)) or True
    theirs.lanes.all += [object()] * 2
    one, _ = striping(theirs, connections=connections)
    await one.on_lane(lane, hello(joins=joins))
    assert admitted == [(lane.stream, False)] * is_let_in
    if not is_let_in:
        assert await lane.far.read_message() is None, "it is closed in order, and whoever dialled goes on without"


# -- a link with a lane ------------------------------------------------------------------------------------------------
@asynccontextmanager
async def with_lane():
    """Run a node with one link to a member. Yield the node, and the member's reader of the link and of its lane."""
    node = runtime(Config(filter="none", stall_s=0.2))
    ours, lane = link(), link()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.run_link, ours, hello())
        await trio.testing.wait_all_tasks_blocked()
        await node.striping.on_lane(lane, hello(joins=NAME))
        assert isinstance((await lane.far.read_message())[0], Widen)
        assert node.links.striped_links == 1
        yield SimpleNamespace(node=node, link=ours.far, lane=lane.far)
        nursery.cancel_scope.cancel()


async def read_to_end(reader):
    """Return the messages until the end, and then the error that ended the reading, if any."""
    said = []
    try:
        while (got := await reader.read_message()) is not None:
            said.append(got[0])
    except Exception as error:
        said.append(error)
    return said


async def check_that_the_link_ends(running):
    await read_to_end(running.link)
    await trio.testing.wait_all_tasks_blocked()
    assert not len(running.node.links)


LATE = encode(Chunk(5, 0, 1_024, 1), 4_096) + bytes(4_096)


@in_trio
async def test_a_chunk_of_what_was_never_agreed_is_waited_for_and_ends_the_link():
    async with with_lane() as running:
        began = trio.current_time()
        await running.lane.stream.send_all(LATE)
        await check_that_the_link_ends(running)
        assert trio.current_time() - began >= 0.2


@in_trio
async def test_a_chunk_of_a_session_that_is_over_is_dropped():
    async with with_lane() as running:
        await running.lane.stream.send_all(LATE)
        await trio.sleep(0.02)
        running.node.transfers.expect_late_chunks(5)
        for _ in range(3):
            await running.lane.stream.send_all(LATE)
        await trio.sleep(0.3)
        assert len(running.node.links) == running.node.links.striped_links == 1


@pytest.mark.parametrize(("cut", "other"), [("lane", "link"), ("link", "lane")])
@in_trio
async def test_a_link_and_its_lanes_end_together(cut, other):
    async with with_lane() as running:
        getattr(running, cut).stream.close_now()
        await read_to_end(getattr(running, other))
        await check_that_the_link_ends(running)
        assert running.node.links.striped_links == 0


@in_trio
async def test_a_node_that_leaves_ends_its_lanes_in_order():
    async with with_lane() as running:
        await running.node.leave(1.0)
        assert not any(isinstance(said, Exception) for said in await read_to_end(running.lane))


@in_trio
async def test_a_link_that_is_not_needed_is_closed_with_its_lanes_in_order():
    async with with_lane() as running:
        running.node.links.all()[0].retire()
        assert not any(isinstance(said, Exception) for said in await read_to_end(running.lane))
        assert [said.code for said in await read_to_end(running.link) if isinstance(said, Close)] == ["idle"]


@in_trio
async def test_a_message_over_a_lane_is_misbehaviour_and_ends_the_link():
    async with with_lane() as running:
        await running.lane.stream.send_all(encode(Close("idle", "", ())))
        await check_that_the_link_ends(running)
        assert (OTHER, "fault") in running.node.peer.misbehaviour.levels

"""Channels between members on one host: how many there are, with whom, and until when."""

from __future__ import annotations

import os

import pytest
import trio
import trio.testing

from gossip.errors import ProtocolError
from gossip.wire.messages import Came, Meet
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.transfers.neighbours import CHANNELS
from node.transport.shared import MeetingPlace
from tests.node import offline
from tests.node.lending import HIGH, HOST, LOW, SIZE, Side, hello, lent, met, played


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch):
    monkeypatch.setattr(VectorPool, "SHARED_ELEMENTS", SIZE)


@pytest.fixture
def sides():
    yield from played()


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

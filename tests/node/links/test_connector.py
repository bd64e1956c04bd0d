"""Dialling and accepting: whatever happens meanwhile, no stream is left open."""

import socket

import pytest
import trio

from gossip.config import Config
from gossip.ids import Address, MemberRecord, PeerId
from gossip.wire.messages import Hello
from node.links.connector import Access, Connector
from node.transport import tcp
from node.transport.byte_stream import BrokenLinkError
from node.transport.tcp import TcpNetwork
from tests.memory_stream import memory_stream_pair
from tests.node.links.link_owner import LinkOwner
from tests.node.offline import in_trio

HERE, THERE = Address("127.0.0.1", 6), Address("127.0.0.1", 7)
ME, ASKED, OTHER = (MemberRecord(PeerId(name * 16), b"k" * 32, 1, address=HERE) for name in (b"m", b"a", b"o"))


class OneStream:
    """A network on which every dial is answered with the same stream."""

    def __init__(self, stream):
        self.stream = stream

    async def connect(self, address, allows=None):
        await trio.lowlevel.checkpoint()
        assert allows is None or allows(address.host)
        return self.stream


class Greeting:
    """A greeter that learns who answers, and finally calls ``then``."""

    def __init__(self, record, then):
        self.record, self.then = record, then

    async def greet(self, *_given):
        await trio.lowlevel.checkpoint()
        self.then()
        return Hello(1, 1, "s", "f", (), self.record)


async def is_closed(far):
    """Fail unless the other end of a stream has been closed."""
    with pytest.raises(BrokenLinkError):
        await far.receive_into(memoryview(bytearray(1)))


@in_trio
async def test_a_dial_that_is_cancelled_as_its_hello_ends_leaves_no_stream_open():
    near, far = memory_stream_pair()
    missed = []

    async def run_link(link, _theirs):
        try:
            await trio.sleep_forever()
        finally:
            link.stream.close_now()

    async with trio.open_nursery() as nursery:
        greeting = Greeting(ASKED, nursery.cancel_scope.cancel)
        connector = Connector(Access(OneStream(near), greeting), Config(), LinkOwner(ME, run_link, missed.append))
        connector.nursery = nursery
        connector.dial(THERE, ASKED.id)
        connector.dial(THERE, OTHER.id)
    await is_closed(far)
    assert missed == [OTHER.id], "the peer that was expected at the same address and is not there"


@in_trio
async def test_a_connection_that_cannot_be_tuned_is_closed(monkeypatch):
    def refuse(_socket, _host):
        raise OSError("gone already")

    async def handle(_stream):
        raise AssertionError("nothing can be done with it")

    network = TcpNetwork(Address("127.0.0.1", 0))
    address = await network.bind()
    monkeypatch.setattr(tcp, "tune", refuse)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.serve, handle, nursery)
        with trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            await sock.connect((address.host, address.port))
            assert await sock.recv(1) == b""
        nursery.cancel_scope.cancel()
    network.close()


class Faulty:
    """A handshake, or a way to the network, that meets a bug in the program."""

    async def greet(self, *_given):
        raise ZeroDivisionError

    async def connect(self, address, allows=None):
        raise UnicodeError("label empty or too long")


@pytest.mark.parametrize("where", ["connect", "greet", "accept", "try"])
@in_trio
async def test_a_fault_before_the_hello_ends_that_connection_and_nothing_else(where):
    near, far = memory_stream_pair()
    missed, told = [], []
    owner = LinkOwner(ME, missed=missed.append, told=lambda *notice: told.append(notice))
    network = OneStream(near) if where == "greet" else Faulty()
    connector = Connector(Access(network, Faulty()), Config(), owner)
    async with trio.open_nursery() as nursery:
        connector.nursery = nursery
        if where == "accept":
            await connector.accept(near)
        elif where == "try":
            assert not await connector.try_dial(THERE)
        else:
            connector.dial(THERE, ASKED.id)
    has_stream = where in ("greet", "accept")
    if has_stream:
        await is_closed(far)
    assert missed == ([ASKED.id] if where in ("connect", "greet") else [])
    [(kind, sentence)] = told
    assert kind == "fault"
    assert ("ZeroDivisionError" if has_stream else "UnicodeError") in sentence

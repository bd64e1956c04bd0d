"""Links are sealed if both ends support it, and no attacker keeps two such members in TLS."""

import functools
import itertools
import threading

import msgpack
import numpy as np
import pytest
import trio
import trio.testing

from gossip.config import Config
from gossip.errors import ProtocolError, RefusedError, RemoteError
from gossip.wire.frames import PREFIX, encode
from gossip.wire.messages import Close, Hello, Ping
from node.links import connector
from node.links.frame_reader import FrameReader
from node.links.handshake import Greeter
from node.transport import sealed
from node.transport.byte_stream import BrokenLinkError
from node.transport.sealed import SealedStream, leave_tls
from node.transport.tls import TlsStream
from tests.node.transport.sealing import ACCEPTOR, DIALLER
from tests.node.transport.test_tls import ALICE_CONTEXTS, BOB_CONTEXTS, memory_pair


class Spoiler:
    """An attacker on the path that changes what one side sends."""

    peer_host = "memory"

    def __init__(self, inner):
        self.inner, self.spoil, self.sent = inner, bytes, []

    async def receive_into(self, buffer):
        return await self.inner.receive_into(buffer)

    async def send_all(self, data):
        self.sent.append(bytes(data))
        data = self.spoil(self.sent[-1])
        if data:
            await self.inner.send_all(data)

    async def aclose(self):
        await self.inner.aclose()

    def close_now(self):
        self.inner.close_now()


def in_no_time(test):
    """Run a test on a clock that jumps whenever all tasks wait, so that timeouts take no time."""

    @functools.wraps(test)
    def run(**arguments):
        clock = trio.testing.MockClock(autojump_threshold=0)
        trio.run(functools.partial(test, **arguments), clock=clock)

    return run


async def met(near, far, shares=(DIALLER, ACCEPTOR), spoils=None):
    """Return both streams after the handshake that ``Connector`` makes, or the errors that were raised."""
    found = {name: BrokenLinkError("It was kept waiting.") for name in ("near", "far")}

    async def side(name, inner, contexts, server_side, share):
        tls = TlsStream(inner, contexts, server_side=server_side)
        with trio.move_on_after(Config().hello_timeout_s):
            await greeted(name, inner, tls, share)
        if isinstance(found[name], RemoteError):
            tls.close_now()

    async def greeted(name, inner, tls, share):
        try:
            await tls.handshake()
            if spoils is not None and name == "near":
                inner.spoil = spoils
            reader = FrameReader(tls)
            theirs = await Greeter("swarm", None).greet(tls, reader, None, None, None, share)
            stream = await leave_tls(tls, share, theirs.share) if share and theirs.share else tls
            reader.stream = stream
            for number in (1, 2):
                await stream.send_all(encode(Ping(number, ())))
                got = await reader.read_message()
                if got is not None and isinstance(got[0], Close):
                    raise RefusedError(got[0].code, got[0].sentence)
                assert got == (Ping(number, ()), 0)
            found[name] = stream
        except RemoteError as error:
            found[name] = error

    async with trio.open_nursery() as nursery:
        nursery.start_soon(side, "near", near, ALICE_CONTEXTS, False, shares[0])
        nursery.start_soon(side, "far", far, BOB_CONTEXTS, True, shares[1])
    return found["near"], found["far"]


@pytest.mark.parametrize("shares", [(DIALLER, ACCEPTOR), (DIALLER, b""), (b"", ACCEPTOR), (b"", b"")])
@in_no_time
async def test_a_link_is_sealed_where_both_can_and_tls_where_one_cannot(shares):
    kinds = {type(stream) for stream in await met(*await memory_pair(), shares)}
    assert kinds == {SealedStream if all(shares) else TlsStream}


@in_no_time
async def test_a_share_of_another_length_is_refused():
    near, far = await met(*await memory_pair(), (DIALLER[:31], ACCEPTOR))
    assert near.code == "protocol", "it left TLS, and heard what the other still said there"
    assert isinstance(far, ProtocolError)


def flipped(place):
    def spoil(data):
        changed = bytearray(data)
        changed[place % len(data)] ^= 1
        return bytes(changed)

    return spoil


SPOILS = {
    "twice": lambda data: data + data,
    "cut": lambda data: data[:-1],
    "plain": lambda data: encode(Hello(1, 1, "swarm", "", (), None)),
    **{f"byte {place}": flipped(place) for place in (0, 3, 5, 20, 60, -1)},
}


async def met_through(spoil, which):
    """Return both ends after an attacker changed the sends of one side for whose number ``which`` returns True."""
    one, other = await memory_pair()
    numbers = itertools.count()
    return await met(Spoiler(one), other, spoils=lambda data: spoil(data) if which(next(numbers)) else data)


@pytest.mark.parametrize("how", SPOILS)
@pytest.mark.parametrize("after", [0, 1, 2])
@in_no_time
async def test_no_attacker_on_the_path_keeps_two_that_can_seal_in_tls(how, after):
    """The changes begin at the Hello, at the end of TLS, or at the first record."""
    near, far = await met_through(SPOILS[how], lambda number: number >= after)
    assert not isinstance(near, TlsStream)
    assert isinstance(far, RemoteError)


@in_no_time
async def test_sealed_data_does_not_stand_for_a_missing_end_of_tls():
    """The attacker withholds the end of TLS, and lets the sealed data through."""
    _, far = await met_through(lambda data: b"", lambda number: number == 1)
    assert isinstance(far, RemoteError)


@in_no_time
async def test_neither_shares_nor_later_messages_can_be_read_on_the_path():
    one, other = await memory_pair()
    path = Spoiler(one)
    near, _ = await met(path, other)
    assert isinstance(near, SealedStream)
    await near.send_all(encode(Close("idle", "nobody on the path reads this", ())))
    assert len(path.sent) >= 4
    keys = near.sealer.direction.key, near.opener.direction.key
    for secret in (DIALLER, ACCEPTOR, b"GSP1", b"swarm", b"nobody", *keys):
        assert secret not in b"".join(path.sent)


@in_no_time
async def test_a_hello_without_a_share_is_one_of_a_node_that_cannot_seal():
    header = {"t": "hello", "version_min": 1, "version_max": 1, "swarm": "s", "fingerprint": "", "capabilities": [],
              "record": None}  # fmt: skip
    packed = msgpack.packb(header)
    near, far = await memory_pair()
    await far.send_all(PREFIX.pack(b"GSP1", len(packed), 0) + packed)
    hello, _ = await FrameReader(near).read_message()
    assert hello.share == b""


# -- nodes -------------------------------------------------------------------------------------------------------------
def streams_of(trainee):
    return [link.stream for link in trainee.do(lambda node: node._training.network.runtime.links.all())]


def test_nodes_with_a_secret_seal_and_those_that_cannot_mix_with_them_in_tls(train, until, quick, secret, monkeypatch):
    """One of the three has a library that cannot open a record in place."""
    old = set()
    monkeypatch.setattr(connector, "fresh_share", lambda: b"" if threading.get_ident() in old else sealed.fresh_share())

    def start(**options):
        return train({"x": np.zeros(4096, np.float32)}, secret=secret, config=quick, **options)

    nodes = [start()]
    old.add(nodes[0].side.network.thread.ident)
    nodes += [start(seeds=[nodes[0].node.address]) for _ in range(2)]
    until(lambda: all(len(streams_of(one)) >= 2 for one in nodes))
    until(lambda: all(one.node.metrics().exchanges_done > 3 for one in nodes))
    kinds = [{type(stream) for stream in streams_of(one)} for one in nodes]
    assert kinds == [{TlsStream}, {TlsStream, SealedStream}, {TlsStream, SealedStream}]

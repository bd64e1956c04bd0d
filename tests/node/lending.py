"""Two sides of a link on one host, of which either lends the other its vectors."""

from __future__ import annotations

import numpy as np
import trio
import trio.testing

from gossip.averaging.streams import DifferenceReceiver
from gossip.codecs import get_codec
from gossip.config import Config
from gossip.ids import PeerId
from gossip.wire.messages import Hello
from node.links.frame_reader import FrameReader
from node.links.link import Link
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.transfers.neighbours import Neighbours
from node.transfers.sessions import StreamSession, StreamSessions
from tests.memory_stream import memory_stream_pair

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


def played():
    """Yield what plays a test in trio, and end afterwards what :class:`Side` began."""

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

"""Messages of newer versions: they are skipped with their bodies, and count against the limits of their link."""

from __future__ import annotations

from types import SimpleNamespace

import trio

from gossip.wire.messages import Ping, Unknown
from node.links.reading import read_link


class Reader:
    def __init__(self, *frames):
        self.frames, self.discarded = list(frames), []

    async def read_message(self):
        await trio.lowlevel.checkpoint()
        return self.frames.pop(0) if self.frames else None

    async def discard(self, elements):
        await trio.lowlevel.checkpoint()
        self.discarded.append(elements)


def test_an_unknown_message_is_skipped_and_counted():
    reader, told = Reader((Unknown("later"), 5_000), (Ping(1, ()), 0), (Unknown("later"), 0)), []
    link = SimpleNamespace(
        reader=reader, motion=None, io_pool=None, clock=SimpleNamespace(current_time=lambda: 7.0), used_at=0.0,
        ignored_messages=0,
    )  # fmt: skip
    trio.run(read_link, link, told.append, None, None)
    assert told == [Unknown("later"), Ping(1, ()), Unknown("later")]
    assert (link.ignored_messages, link.used_at, reader.discarded) == (2, 7.0, [5_000, 0])

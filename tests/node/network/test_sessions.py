"""Detection of stalled streams."""

from __future__ import annotations

import math
from types import SimpleNamespace

from gossip.averaging.streams import Receiver
from gossip.codecs import CODECS
from gossip.ids import PeerId
from gossip.wire.messages import Chunk
from node.network.transfers.sessions import StreamSession, StreamSessions
from tests.node.offline import in_trio


class Fills(Receiver):
    """A receiver of 2,048 elements that discards its bytes."""

    def __init__(self):
        super().__init__(1, 2048, CODECS["fp32"])

    def body_buffer(self, positions, size):
        return memoryview(bytearray(size))


def under_way(receiver):
    """Return the table of sessions and its only one, which sends as well. It began 0 s ago."""
    sessions = StreamSessions()
    link = SimpleNamespace(start_bulk=lambda *_, **__: None, stream=None, received_at=-math.inf, sent_at=-math.inf)
    session = StreamSession(1, PeerId(b"B" * 16), link, SimpleNamespace(done=False), receiver)
    sessions.add(session)
    return sessions, session


@in_trio
def test_a_partner_that_reads_and_sends_nothing_has_stalled():
    """Once, the partner's reading of our bytes counted as progress."""
    sessions, session = under_way(Fills())
    begun = session.heard_at
    session.moved_at = begun + 2.9
    assert sessions.stalled_sessions(begun + 2.9, 3.0) == []
    assert sessions.stalled_sessions(begun + 3.1, 3.0) == [session]
    session.heard_at = -math.inf
    sessions.buffer_for(session.link, Chunk(1, 0, 1024, 0), 4096)
    assert sessions.stalled_sessions(begun + 2.9, 3.0) == [], "a chunk that begins is something of theirs"


@in_trio
def test_a_vector_that_is_here_is_waited_for_by_what_we_send():
    sessions, session = under_way(SimpleNamespace(is_complete=True))
    session.heard_at -= 100.0
    assert sessions.stalled_sessions(session.moved_at + 2.9, 3.0) == []
    assert sessions.stalled_sessions(session.moved_at + 3.1, 3.0) == [session]


@in_trio
def test_a_stream_that_only_goes_out_has_nothing_to_hear():
    sessions, session = under_way(None)
    session.heard_at -= 100.0
    assert sessions.stalled_sessions(session.moved_at + 2.9, 3.0) == []


@in_trio
def test_bytes_of_an_incomplete_chunk_are_movement():
    sessions, session = under_way(Fills())
    begun = session.heard_at
    session.link.sent_at = begun + 5.0
    assert sessions.stalled_sessions(begun + 5.1, 3.0) == [session], "nothing of theirs came"
    session.link.received_at = begun + 5.0
    assert sessions.stalled_sessions(begun + 7.9, 3.0) == []
    assert sessions.stalled_sessions(begun + 8.1, 3.0) == [session]

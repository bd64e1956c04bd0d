"""Detection of stalled streams."""

from __future__ import annotations

import math
from types import SimpleNamespace

from gossip.averaging.streams import Receiver
from gossip.codecs import CODECS
from gossip.ids import PeerId
from gossip.wire.messages import Chunk
from node.network.transfers.sessions import StreamSession, StreamSessions
from tests.node.network.gather_harness import in_trio

B = PeerId(b"B" * 16)


class Fills(Receiver):
    """A receiver that discards its bytes."""

    def body_buffer(self, positions, size):
        return memoryview(bytearray(size))


def under_way(receiver, sent):
    sessions, link = StreamSessions(), SimpleNamespace(start_bulk=lambda *_, **__: None, stream=None)
    link.received_at = link.sent_at = -math.inf
    sessions.add(StreamSession(1, B, link, sender=SimpleNamespace(done=sent), receiver=receiver))
    return sessions, sessions.table[1], link


@in_trio
def test_a_partner_that_reads_and_sends_nothing_has_stalled():
    """Once, the partner's reading of our bytes counted as progress."""
    sessions, session, link = under_way(Fills(1, 2048, CODECS["fp32"]), sent=False)
    begun = session.heard_at
    session.moved_at = begun + 2.9
    assert sessions.stalled_sessions(begun + 2.9, 3.0) == []
    assert sessions.stalled_sessions(begun + 3.1, 3.0) == [session]
    session.heard_at = -math.inf
    sessions.buffer_for(link, Chunk(1, 0, 1024, 0), 4096)
    assert sessions.stalled_sessions(begun + 2.9, 3.0) == [], "a chunk that begins is something of theirs"


@in_trio
def test_what_is_all_here_is_waited_for_by_what_we_send():
    sessions, session, _ = under_way(SimpleNamespace(is_complete=True), sent=False)
    session.heard_at -= 100.0
    assert sessions.stalled_sessions(session.moved_at + 2.9, 3.0) == []
    assert sessions.stalled_sessions(session.moved_at + 3.1, 3.0) == [session]


@in_trio
def test_a_stream_that_only_goes_out_has_nothing_to_hear():
    sessions, session, _ = under_way(None, sent=False)
    session.heard_at -= 100.0
    assert sessions.stalled_sessions(session.moved_at + 2.9, 3.0) == []


@in_trio
def test_bytes_of_a_chunk_that_is_not_whole_are_movement():
    sessions, session, link = under_way(Fills(1, 2048, CODECS["fp32"]), sent=False)
    begun = session.heard_at
    link.sent_at = begun + 5.0
    assert sessions.stalled_sessions(begun + 5.1, 3.0) == [session], "nothing of theirs came"
    link.received_at = begun + 5.0
    assert sessions.stalled_sessions(begun + 7.9, 3.0) == []
    assert sessions.stalled_sessions(begun + 8.1, 3.0) == [session]

"""The stream sessions of one node: the vectors that a session sends and receives, their progress and their stalls."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from gossip.averaging.streams import Receiver, Sender
from gossip.errors import ProtocolError
from gossip.ids import PeerId
from gossip.wire.messages import Chunk
from node.links.link import Link
from node.transport.sealed import SealedStream

__all__ = ["StreamSession", "StreamSessions"]

# Ended sessions that are remembered, so that their late chunks are dropped and are no fault. Far fewer run at once.
ENDED_SESSIONS = 64


@dataclass(slots=True, eq=False)
class StreamSession:
    """The streams of one exchange, of one piece to fetch or of one piece to serve, on one link.

    A piece is a range of the weights that a newcomer fetches. An I/O thread may receive the vector. The lock keeps the
    vector alive while the thread handles a chunk.
    """

    id: int
    partner: PeerId
    link: Link
    sender: Sender | None = None
    receiver: Receiver | None = None
    moved_at: float = 0.0  # The last progress in either direction.
    heard_at: float = 0.0  # The last time that a chunk of the partner's began or arrived.
    clock: Callable[[], float] = lambda: 0.0  # trio's clock, which threads may read.
    is_over: bool = False  # The vectors must not be used any more.
    uses_lanes: bool | None = None  # True if the partner's vector comes over lanes; None before its first chunk.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def buffer_for(self, chunk: Chunk, body_bytes: int, over_lane: bool = False) -> memoryview | None:
        """Return the buffer for the body of a chunk, which may come over a lane; None if the session has ended."""
        assert self.receiver is not None
        with self.lock:
            self.heard_at = self.clock()
            if self.uses_lanes is not None and self.uses_lanes is not over_lane:
                raise ProtocolError("Chunks of one vector came over its link and over others.")
            self.uses_lanes = over_lane
            return None if self.is_over else self.receiver.begin_chunk(chunk, body_bytes, over_lane)

    def on_body(self, chunk: Chunk) -> bool:
        """Handle a chunk whose body is in its buffer. Return True if more chunks are due.

        False means that the vector is complete, that the receiver has a fault, or that the session has ended.
        """
        assert self.receiver is not None
        with self.lock:
            self.moved_at = self.heard_at = self.clock()
            return not self.is_over and self.receiver.finish_chunk(chunk) and not self.receiver.is_complete

    def end(self) -> None:
        """End the session, after a thread has finished the chunk that it handles.

        This usually takes a millisecond, and some ten for the largest chunk that a peer may send, in int8.
        """
        with self.lock:
            self.is_over = True


class StreamSessions:
    """The stream sessions of one node, by session id."""

    def __init__(self) -> None:
        self.table: dict[int, StreamSession] = {}
        self.links: dict[int, Link] = {}  # The link that each session is bound to, from its offer on.
        self.ended: deque[int] = deque(maxlen=ENDED_SESSIONS)
        # The lanes that wait until the session of their chunk is agreed.
        self.session_changed = trio.lowlevel.ParkingLot()

    def add(self, session: StreamSession, large: bool = False) -> None:
        """Start a session's streams. ``large`` says that an I/O thread is worth its cost for sending."""
        session.clock = trio.lowlevel.current_clock().current_time
        session.moved_at = session.heard_at = session.clock()
        self.table[session.id] = session
        is_sealed = isinstance(session.link.stream, SealedStream)
        if session.receiver is not None:
            session.receiver.sealed = is_sealed
        if session.sender is not None:
            session.sender.sealed = is_sealed
            session.link.start_bulk(session.id, session.sender, large, shared=True)
        self.session_changed.unpark_all()

    def expect_late_chunks(self, session: int) -> None:
        """Drop the chunks that still come for this session from now on, without a fault."""
        self.ended.append(session)
        self.session_changed.unpark_all()

    def is_known(self, session: int) -> bool:
        """Return True if the session was agreed here, or has ended."""
        return session in self.table or session in self.ended

    def buffer_for(self, link: Link, chunk: Chunk, body_bytes: int, over_lane: bool = False) -> memoryview | None:
        """Return the buffer for the body of a chunk, which may come over a lane; None if the session has ended.

        Raises:
            ProtocolError: The chunk belongs to no session on this link.
        """
        session = self.table.get(chunk.session)
        if session is None or session.receiver is None:
            if chunk.session in self.ended:
                return None
            raise ProtocolError("A chunk came for a session that was never agreed.")
        if session.link is not link:
            raise ProtocolError("A chunk came over another link than its session's.")
        return session.buffer_for(chunk, body_bytes, over_lane)

    def rename(self, session: int) -> None:
        """Forget a session number, because the offer goes to another partner under a new one."""
        self.expect_late_chunks(session)
        self.links.pop(session, None)

    def release(self, session: int) -> None:
        """End a session and its streams."""
        self.rename(session)
        entry = self.table.pop(session, None)
        if entry is not None:
            entry.end()
            if entry.sender is not None:
                entry.link.stop_bulk(session, entry.sender)

    def sessions_on(self, link: Link) -> list[int]:
        """Return the sessions that are bound to this link, and end with it."""
        return [session for session, bound_link in self.links.items() if bound_link is link]

    def stalled_sessions(self, now: float, stall_s: float) -> list[StreamSession]:
        """Return the sessions that have stalled: for ``stall_s`` seconds nothing moved, or the partner sent nothing.

        The second condition holds while data of the partner is due, so that a partner cannot hold its session by
        reading ours and sending nothing. All chunks on a link count for each of its sessions, because streams on one
        link take turns.
        """
        return [
            session for session in self.table.values()
            if (now - self.last_moved_at(session) > stall_s and not self.is_complete(session))
            or (now - max(session.heard_at, session.link.received_at) > stall_s and self.is_receiving(session))
        ]  # fmt: skip

    def last_moved_at(self, session: StreamSession) -> float:
        """Return the time of the last progress in either direction, over the link or lanes too while data is due."""
        link, sender = session.link, session.sender
        # -inf: no data is due in this direction, so that the link's other streams say nothing of it.
        sent_at = link.sent_at if sender is not None and not sender.done else -math.inf
        received_at = link.received_at if self.is_receiving(session) else -math.inf
        return max(session.moved_at, sent_at, received_at)

    @staticmethod
    def is_receiving(session: StreamSession) -> bool:
        return session.receiver is not None and not session.receiver.is_complete

    @staticmethod
    def is_complete(session: StreamSession) -> bool:
        is_sent = session.sender is None or session.sender.done
        return is_sent and (session.receiver is None or session.receiver.is_complete)

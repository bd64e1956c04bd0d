"""The active streams of one node: their vectors, links and progress, and whether they have stalled."""

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

RECENT = 64  # Ended sessions whose late chunks are dropped without closing the link; far more than run at once.


@dataclass(slots=True, eq=False)
class StreamSession:
    """One exchange, one piece to fetch or one piece to serve, on one link."""

    id: int
    partner: PeerId
    link: Link
    sender: Sender | None = None
    receiver: Receiver | None = None
    moved_at: float = 0.0  # The last progress in either direction.
    heard_at: float = 0.0  # The last time that a chunk of the partner's began or arrived.
    clock: Callable[[], float] = lambda: 0.0  # trio's clock, for threads too.
    over: bool = False  # Its vectors must not be used any more.
    wide: bool | None = None  # True if the partner's vector comes over lanes; its first chunk decides.
    lock: threading.Lock = field(default_factory=threading.Lock)  # A thread may be using the vectors.

    def place(self, chunk: Chunk, body_bytes: int, wide: bool = False) -> memoryview | None:
        """Return the buffer for a chunk's body, or None if the session has ended.

        ``wide`` means that the chunk comes over a lane.
        """
        assert self.receiver is not None
        with self.lock:
            self.heard_at = self.clock()
            if self.wide is not None and self.wide is not wide:
                raise ProtocolError("Chunks of one vector came over its link and over others.")
            self.wide = wide
            return None if self.over else self.receiver.place(chunk, body_bytes, wide)

    def arrived(self, chunk: Chunk) -> bool:
        """Process a filled chunk, and return True if more chunks are due.

        False means that the vector is complete, the receiver has a fault, or the session has ended.
        """
        assert self.receiver is not None
        with self.lock:
            self.moved_at = self.heard_at = self.clock()
            return not self.over and self.receiver.arrived(chunk) and not self.receiver.done

    def end(self) -> None:
        """Mark the session as ended, after waiting for a thread in the middle of a chunk.

        That usually takes a millisecond, and some ten for the largest chunk that a peer may send, in int8.
        """
        with self.lock:
            self.over = True


class StreamSessions:
    """The stream sessions of one node, by session id."""

    def __init__(self) -> None:
        self.table: dict[int, StreamSession] = {}
        self.links: dict[int, Link] = {}  # The link that a session began on.
        self.recent: deque[int] = deque(maxlen=RECENT)
        self.changed = trio.lowlevel.ParkingLot()  # Lanes whose chunks belong to a session that is not agreed yet.

    def add(self, session: StreamSession, large: bool = False) -> None:
        """Start a session's streams. ``large``: sending is worth a thread."""
        session.clock = trio.lowlevel.current_clock().current_time
        session.moved_at = session.heard_at = session.clock()
        self.table[session.id] = session
        sealed = isinstance(session.link.stream, SealedStream)
        if session.receiver is not None:
            session.receiver.sealed = sealed
        if session.sender is not None:
            session.sender.sealed = sealed
            session.link.start_bulk(session.id, session.sender, large, shared=True)
        self.changed.unpark_all()

    def late(self, session: int) -> None:
        """Drop chunks that still come for this session."""
        self.recent.append(session)
        self.changed.unpark_all()

    def knows(self, session: int) -> bool:
        """Return True if the session was agreed here, or has ended."""
        return session in self.table or session in self.recent

    def place(self, link: Link, chunk: Chunk, body_bytes: int, wide: bool = False) -> memoryview | None:
        """Return the buffer for a chunk's body, or None if the session has ended.

        ``wide`` means that the chunk comes over a lane.
        """
        session = self.expecting(link, chunk)
        return None if session is None else session.place(chunk, body_bytes, wide)

    def expecting(self, link: Link, message: Chunk) -> StreamSession | None:
        """Return the session to which this message belongs, or None if it has ended."""
        session = self.table.get(message.session)
        if session is None or session.receiver is None:
            if message.session in self.recent:
                return None
            raise ProtocolError("A chunk came for a session that was never agreed.")
        if session.link is not link:
            raise ProtocolError("A chunk came over another link than its session's.")
        return session

    def rename(self, session: int) -> None:
        """Forget a session whose offer goes to another partner under a new number."""
        self.late(session)
        self.links.pop(session, None)

    def release(self, session: int) -> None:
        self.late(session)
        self.links.pop(session, None)
        entry = self.table.pop(session, None)
        if entry is not None:
            entry.end()
            if entry.sender is not None:
                entry.link.stop_bulk(session, entry.sender)

    def on(self, link: Link) -> list[int]:
        """Return the sessions that end with this link."""
        return [session for session, used in self.links.items() if used is link]

    def stalled(self, now: float, stall_s: float) -> list[StreamSession]:
        """Return the sessions in which nothing, or nothing of the partner's, moved for ``stall_s`` seconds.

        The second condition applies while data of the partner is due. Otherwise a partner that reads ours and sends
        nothing would hold its session until the deadline. All chunks on a link count for each of its sessions, since
        streams on one link take turns.
        """
        return [
            session for session in self.table.values()
            if (now - self.moved_at(session) > stall_s and not self.whole(session))
            or (now - max(session.heard_at, session.link.received_at) > stall_s and self.awaits(session))
        ]  # fmt: skip

    def moved_at(self, session: StreamSession) -> float:
        """Return the time of the last progress of vectors that still move, in either direction."""
        link, sender = session.link, session.sender
        sent = link.sent_at if sender is not None and not sender.done else -math.inf
        return max(session.moved_at, sent, link.received_at if self.awaits(session) else -math.inf)

    @staticmethod
    def awaits(session: StreamSession) -> bool:
        return session.receiver is not None and not session.receiver.done

    @staticmethod
    def whole(session: StreamSession) -> bool:
        sent = session.sender is None or session.sender.done
        return sent and (session.receiver is None or session.receiver.done)

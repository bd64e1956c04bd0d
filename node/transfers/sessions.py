"""The streams under way at one node: which vector, which link, what arrived, and whether it still moves."""

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
from gossip.wire.messages import Chunk, Lent
from node.links.link import Link
from node.transfers.loans import Loan
from node.transport.sealed import SealedStream

__all__ = ["StreamSession", "StreamSessions"]

RECENT = 64  # sessions whose late chunks are thrown away instead of ending the link; far more than can be under way


@dataclass(slots=True, eq=False)
class StreamSession:
    """One exchange, one piece fetched or one piece served, on one link."""

    id: int
    partner: PeerId
    link: Link
    sender: Sender | Loan | None = None
    receiver: Receiver | None = None
    moved_at: float = 0.0  # either way
    heard_at: float = 0.0  # something of theirs
    clock: Callable[[], float] = lambda: 0.0  # trio's, for threads as well
    over: bool = False  # its vectors are not to be touched any more
    borrowing: bool = False  # theirs is read where it lies
    wide: bool | None = None  # whether theirs comes over lanes; its first chunk decides
    lock: threading.Lock = field(default_factory=threading.Lock)  # a thread may be at them at the moment

    def place(self, chunk: Chunk, body_bytes: int, wide: bool = False) -> memoryview | None:
        """The buffer for a chunk's body, which comes over a lane where ``wide``; None for a session that is over."""
        assert self.receiver is not None
        with self.lock:
            self.heard_at = self.clock()
            if self.borrowing:
                raise ProtocolError("A chunk came of a vector that was lent.")
            if self.wide is not None and self.wide is not wide:
                raise ProtocolError("Chunks of one vector came over its link and over others.")
            self.wide = wide
            return None if self.over else self.receiver.place(chunk, body_bytes, wide)

    def arrived(self, chunk: Chunk) -> bool:
        """The body is filled. Whether there is more to come: else all is here, or the receiver says what is wrong."""
        assert self.receiver is not None
        with self.lock:
            self.moved_at = self.heard_at = self.clock()
            return not self.over and self.receiver.arrived(chunk) and not self.receiver.done

    def end(self) -> None:
        """Waits for a thread that is in the middle of a chunk's arithmetic: a millisecond as a rule, and some ten
        for the largest chunk that a peer may send, in int8."""
        with self.lock:
            self.over = True


class StreamSessions:
    """By session id."""

    def __init__(self) -> None:
        self.table: dict[int, StreamSession] = {}
        self.links: dict[int, Link] = {}  # the link that a session began on
        self.recent: deque[int] = deque(maxlen=RECENT)
        self.changed = trio.lowlevel.ParkingLot()  # lanes with chunks of what is not agreed yet

    def add(self, session: StreamSession, large: bool = False) -> None:
        """``large``: a thread pays for what is sent."""
        session.clock = trio.lowlevel.current_clock().current_time
        session.moved_at = session.heard_at = session.clock()
        self.table[session.id] = session
        sealed = isinstance(session.link.stream, SealedStream)
        if session.receiver is not None:
            session.receiver.sealed = sealed
        if isinstance(session.sender, Loan):
            session.sender.begin(session.link, session.moved_at)
        elif session.sender is not None:
            session.sender.sealed = sealed
            session.link.start_bulk(session.id, session.sender, large, shared=True)
        self.changed.unpark_all()

    def late(self, session: int) -> None:
        """What still comes for it is thrown away."""
        self.recent.append(session)
        self.changed.unpark_all()

    def knows(self, session: int) -> bool:
        """Whether it was agreed here, or is over."""
        return session in self.table or session in self.recent

    def place(self, link: Link, chunk: Chunk, body_bytes: int, wide: bool = False) -> memoryview | None:
        """The buffer for a chunk's body, which comes over a lane where ``wide``; None for a session that is over."""
        session = self.expecting(link, chunk)
        return None if session is None else session.place(chunk, body_bytes, wide)

    def borrows(self, link: Link, lent: Lent) -> tuple[StreamSession, Receiver] | None:
        """What takes a vector that is lent; None for a session that is over."""
        session = self.expecting(link, lent)
        if session is None or session.receiver is None:
            return None
        with session.lock:
            receiver = session.receiver
            if session.borrowing or receiver.position or receiver.filling:
                raise ProtocolError("A vector was lent of which a part had come.")
            if lent.elements != receiver.size:
                raise ProtocolError(f"{lent.elements} elements were lent where {receiver.size} belong.")
            return None if session.over else (session, receiver)

    def expecting(self, link: Link, message: Chunk | Lent) -> StreamSession | None:
        """The session to which something of its vector came; None where it is over."""
        session = self.table.get(message.session)
        if session is None or session.receiver is None:
            if message.session in self.recent:
                return None
            raise ProtocolError("A chunk came for a session that was never agreed.")
        if session.link is not link:
            raise ProtocolError("A chunk came over another link than its session's.")
        return session

    def rename(self, session: int) -> None:
        """Another partner is asked, under another number."""
        self.late(session)
        self.links.pop(session, None)

    def release(self, session: int) -> None:
        self.late(session)
        self.links.pop(session, None)
        entry = self.table.pop(session, None)
        if entry is not None:
            entry.end()
            if isinstance(entry.sender, Sender):  # a loan is the partner's until it says that it has read it
                entry.link.stop_bulk(session, entry.sender)

    def on(self, link: Link) -> list[int]:
        """Sessions that end with this link."""
        return [session for session, used in self.links.items() if used is link]

    def stalled(self, now: float, stall_s: float) -> list[StreamSession]:
        """Sessions with something still to move in which nothing moved for so long; or nothing of theirs, where theirs
        is waited for: a partner that reads all of ours and sends nothing would hold its session until the deadline.

        Bytes of any chunk on a session's link count as its own: streams on one link take turns, chunk by chunk.
        """
        return [
            session for session in self.table.values()
            if (now - self.moved_at(session) > stall_s and not self.whole(session))
            or (now - max(session.heard_at, session.link.received_at) > stall_s and self.awaits(session))
        ]  # fmt: skip

    def moved_at(self, session: StreamSession) -> float:
        """When bytes of what is still to move last did, either way."""
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

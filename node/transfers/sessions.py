"""The streams under way at one node: which vector, which link, what arrived, and whether it still moves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import trio
from numpy.typing import NDArray

from gossip.errors import ProtocolError
from gossip.ids import PeerId
from gossip.wire.messages import Chunk
from node.transfers.boundary import Vector, VectorPool
from node.transfers.transfer import DifferenceReceiver, Receiver, Sender
from node.transport.links import Link

__all__ = ["StreamSession", "StreamSessions"]

RECENT = 64  # sessions whose late chunks are thrown away instead of ending the link; far more than can be under way


@dataclass(slots=True, eq=False)
class StreamSession:
    """One exchange, one piece fetched or one piece served, on one link."""

    id: int
    partner: PeerId
    link: Link
    sender: Sender | None = None
    receiver: Receiver | None = None
    moved_at: float = 0.0  # either way
    heard_at: float = 0.0  # something of theirs
    difference: Vector | None = None
    positions: NDArray[np.int64] | None = None  # of the elements that it mixes; None: all


class StreamSessions:
    """By session id. Vectors go back to the pool when a session ends."""

    def __init__(self, pool: VectorPool) -> None:
        self.pool = pool
        self.table: dict[int, StreamSession] = {}
        self.snapshots: dict[int, Vector] = {}
        self.links: dict[int, Link] = {}  # the link that a session began on
        self.recent: deque[int] = deque(maxlen=RECENT)

    def add(self, session: StreamSession) -> None:
        session.moved_at = session.heard_at = trio.current_time()
        self.table[session.id] = session
        if session.sender is not None:
            session.link.start_bulk(session.id, session.sender)

    def place(self, link: Link, chunk: Chunk, body_bytes: int) -> memoryview | None:
        """The buffer for a chunk's body; None for a session that is over."""
        session = self.table.get(chunk.session)
        if session is None or session.receiver is None:
            if chunk.session in self.recent:
                return None
            raise ProtocolError("A chunk came for a session that was never agreed.")
        if session.link is not link:
            raise ProtocolError("A chunk came over another link than its session's.")
        session.heard_at = trio.current_time()
        return session.receiver.place(chunk, body_bytes)

    def take_mix(self, session: int) -> tuple[Vector, Vector | None] | None:
        """(snapshot, difference) of a finished exchange: the caller owns them now. None for the difference where
        nothing was received."""
        entry = self.table.get(session)
        snapshot = self.snapshots.pop(session, None)
        if snapshot is None or entry is None or entry.difference is None:
            return None if snapshot is None else (snapshot, None)
        difference, entry.difference = entry.difference, None
        return snapshot, difference

    def rename(self, session: int, to: int) -> None:
        """Another partner is asked with the same snapshot, under a number of its own."""
        self.recent.append(session)
        self.links.pop(session, None)
        snapshot = self.snapshots.pop(session, None)
        if snapshot is not None:
            self.snapshots[to] = snapshot

    def release(self, session: int) -> None:
        self.recent.append(session)
        self.links.pop(session, None)
        entry = self.table.pop(session, None)
        snapshot = self.snapshots.pop(session, None)
        if snapshot is not None:
            self.pool.give(snapshot)  # but for the lease of who sends it
        if entry is not None:
            if entry.sender is not None:
                entry.link.stop_bulk(session, entry.sender)
            filling = entry.receiver is not None and entry.receiver.filling
            if entry.difference is not None and not filling:  # else the link still writes there: it is not used again
                self.pool.give(entry.difference)

    def on(self, link: Link) -> list[int]:
        """Sessions that end with this link."""
        return [session for session, used in self.links.items() if used is link]

    def stalled(self, now: float, stall_s: float) -> list[StreamSession]:
        """Sessions with something still to move in which nothing moved for so long; or nothing of theirs, where theirs
        is waited for: a partner that reads all of ours and sends nothing would hold its session until the deadline."""
        return [
            session for session in self.table.values()
            if (now - session.moved_at > stall_s and not self.whole(session))
            or (now - session.heard_at > stall_s and session.receiver is not None and not session.receiver.done)
        ]  # fmt: skip

    @staticmethod
    def whole(session: StreamSession) -> bool:
        sent = session.sender is None or session.sender.done
        return sent and (session.receiver is None or session.receiver.done)

    @staticmethod
    def norms(session: StreamSession) -> tuple[float, float]:
        receiver = session.receiver
        assert isinstance(receiver, DifferenceReceiver)
        return receiver.difference_sq, receiver.own_sq

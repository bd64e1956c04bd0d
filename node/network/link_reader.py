"""The reader of a link: it passes messages to the peer and chunks to the streams, and limits the rate of messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from gossip.config import Config
from gossip.effects import Effect
from gossip.errors import ProtocolError
from gossip.peer import Peer
from gossip.wire.messages import (
    Accept,
    Ack,
    Chunk,
    Close,
    Commit,
    Digest,
    Fetch,
    Gossip,
    Hello,
    Invite,
    Message,
    Nack,
    Offer,
    Outcome,
    Ping,
    PingReq,
    Records,
    StatusQuery,
    Unknown,
    Widen,
)  # fmt: skip
from node.faults import Faults
from node.links.connector import Connector
from node.links.link import CONTROL_BURST, Link
from node.links.pool import Links
from node.network.striping import Striping
from node.network.transfers.log import ExchangeLog
from node.network.transfers.sessions import StreamSessions
from node.network.transfers.streams import Streams
from node.observe.status import status_page

__all__ = ["FloodError", "LinkReader"]

MESSAGES_PER_S = 2_000  # Limit of one link; a member of the largest swarm sends less than a tenth of it.
# Messages that go to the peer as they are: they begin no session here, and concern neither the link nor a status page.
PEER_MESSAGES = frozenset({Ping, Ack, PingReq, Nack, Gossip, Digest, Records, Accept, Commit})
STATUS_COST = 20  # A query for the status counts as so many messages: up to 64 KiB take about a millisecond to write.


class FloodError(ProtocolError):
    """The other side of a link has exceeded the rate limit."""


class ReaderRuntime(Protocol):
    """The network side that a reader works for: a :class:`node.network.runtime.Runtime`."""

    peer: Peer
    config: Config
    connector: Connector
    faults: Faults
    links: Links
    sessions: StreamSessions
    streams: Streams
    exchange_log: ExchangeLog
    striping: Striping
    read_progress: Callable[[], tuple[int, int]] | None

    @property
    def now(self) -> float: ...
    def perform(self, effects: Iterable[Effect]) -> None: ...
    def end_batch(self) -> None: ...


class LinkReader:
    """The reader of one link, until the link ends. An observer is no member, and may only query the status."""

    __slots__ = ("is_observer", "link", "links", "messages_this_second", "runtime", "second_began_at")

    def __init__(self, runtime: ReaderRuntime, link: Link, observer: bool) -> None:
        self.runtime, self.link, self.is_observer, self.links = runtime, link, observer, runtime.links
        self.second_began_at, self.messages_this_second = runtime.now, 0

    async def run(self) -> None:
        """Read until the other side ends; messages that arrive together are answered together."""
        link, runtime = self.link, self.runtime
        link.reader.before_waiting = runtime.end_batch
        try:
            await link.read_loop(
                self.on_message, self.buffer_for, self.on_body, runtime.streams.inflow_of, runtime.streams.on_progress
            )  # fmt: skip
        finally:
            runtime.end_batch()

    def count_messages(self, messages: int) -> None:
        """Count messages of the current second. Raises FloodError above the limit."""
        used_at = self.link.used_at
        if used_at - self.second_began_at >= 1.0:
            self.second_began_at, self.messages_this_second = used_at, 0
        self.messages_this_second += messages
        if self.messages_this_second > MESSAGES_PER_S:
            raise FloodError("A member sends too many messages.")

    def on_message(self, message: Message) -> None:
        kind, link, links = type(message), self.link, self.links
        self.count_messages(STATUS_COST if kind is StatusQuery else 1)
        links.batch_depth += 1
        try:
            if kind in PEER_MESSAGES and not self.is_observer:
                self.pass_to_peer(message)
            else:
                self.dispatch(message)
        finally:
            links.batch_depth -= 1
        if len(link.outbox) >= CONTROL_BURST:
            links.flush()

    def pass_to_peer(self, message: Message) -> None:
        """Pass a message to the peer, with the time of its arrival."""
        runtime, link = self.runtime, self.link
        runtime.perform(runtime.peer.receive(link.peer, message, link.used_at))

    def dispatch(self, message: Message) -> None:
        """Handle a message that concerns the link or the status page, or may begin a session."""
        runtime, link = self.runtime, self.link
        peer, read_progress = runtime.peer, runtime.read_progress
        if isinstance(message, Unknown):
            return
        if isinstance(message, StatusQuery):
            progress = (0, 0) if read_progress is None else read_progress()
            swarm, mixes = runtime.config.swarm, runtime.exchange_log.mixes()
            faults = runtime.faults.count, runtime.faults.restarts
            link.send(status_page(peer, self.links, swarm, message.after, mixes, progress, faults))
        elif isinstance(message, Close):
            link.is_orderly = link.is_orderly or message.code == "idle"
            if message.code in ("layout", "swarm", "version"):
                runtime.connector.notify_once(f"A member refused this node: {message.sentence}")
        elif isinstance(message, Hello) or self.is_observer:
            raise ProtocolError("A message came that does not belong here.")
        elif isinstance(message, Widen):
            runtime.striping.on_widen(link, message.connections)
        # No answer would go out on an ending link.
        elif not (link.is_ending and isinstance(message, Offer | Invite | Fetch)):
            if isinstance(message, Offer | Invite | Fetch | Outcome) and read_progress is not None:
                peer.update_counts(*read_progress())
            if isinstance(message, Offer | Fetch | Outcome):
                self.begin_session(message)
            else:
                self.pass_to_peer(message)

    def begin_session(self, message: Offer | Fetch | Outcome) -> None:
        """Pass a message to the peer that may begin a session, and bind the session to this link unless it is refused.

        The session is bound before, because it may stream at once.
        """
        links, session = self.runtime.sessions.links, message.session
        is_bound = session in links
        if not is_bound:
            links[session] = self.link
        self.pass_to_peer(message)
        if not (is_bound or self.runtime.peer.view.is_with(session, self.link.peer)):
            links.pop(session, None)  # The peer has refused the session.

    def buffer_for(self, chunk: Chunk, body_bytes: int) -> memoryview | None:
        """Return the buffer for a chunk's body. A chunk of no session has none, and counts as a message."""
        buffer = self.runtime.streams.buffer_for(self.link, chunk, body_bytes)
        if buffer is None:
            self.count_messages(1)
        return buffer

    async def buffer_for_lane(self, chunk: Chunk, body_bytes: int) -> memoryview | None:
        """Return the same for a chunk that comes over a lane, once its session is agreed."""
        buffer = await self.runtime.streams.buffer_once_agreed(self.link, chunk, body_bytes)
        if buffer is None:
            self.count_messages(1)
        return buffer

    def on_body(self, chunk: Chunk) -> None:
        """Handle a chunk whose body is in its buffer."""
        links = self.links
        links.batch_depth += 1
        try:
            self.runtime.streams.on_body(self.link, chunk)
        finally:
            links.batch_depth -= 1

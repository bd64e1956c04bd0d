"""The reader of a link: it dispatches messages and limits their rate."""

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

__all__ = ["FloodError", "Reading"]

MESSAGES_PER_S = 2_000  # Limit of one link; a member of the largest swarm sends less than a tenth of it.
# Messages that begin no session here.
ORDINARY = frozenset({Ping, Ack, PingReq, Nack, Gossip, Digest, Records, Accept, Commit})
STATUS_MESSAGES = 20  # The cost of a status page, in messages: up to 64 KiB take about a millisecond to write.


class FloodError(ProtocolError):
    """A link exceeded its rate limit."""


class Hearing(Protocol):
    """The receiver of a link's messages: a :class:`node.network.runtime.Runtime`."""

    peer: Peer
    config: Config
    connector: Connector
    faults: Faults
    links: Links
    sessions: StreamSessions
    streams: Streams
    exchange_log: ExchangeLog
    striping: Striping
    counts: Callable[[], tuple[int, int]] | None

    @property
    def now(self) -> float: ...
    def perform(self, effects: Iterable[Effect]) -> None: ...
    def settle(self) -> None: ...


class Reading:
    """The reader of one link, until the link ends. An ``observer`` is not a member and may query only the status."""

    __slots__ = ("count", "link", "links", "observer", "runtime", "window")

    def __init__(self, runtime: Hearing, link: Link, observer: bool) -> None:
        self.runtime, self.link, self.observer, self.links = runtime, link, observer, runtime.links
        self.window, self.count = runtime.now, 0  # The start of the current second, and its messages so far.

    async def run(self) -> None:
        link, runtime = self.link, self.runtime
        link.reader.before_waiting = runtime.settle  # Messages that arrive together are answered together.
        try:
            await link.read_loop(
                self.on_message, self.on_chunk, self.on_body, runtime.streams.flow, runtime.streams.moved
            )  # fmt: skip
        finally:
            runtime.settle()

    def cost(self, messages: int) -> None:
        """Count messages towards the limit of this second; raise FloodError beyond it."""
        used_at = self.link.used_at
        if used_at - self.window >= 1.0:
            self.window, self.count = used_at, 0
        self.count += messages
        if self.count > MESSAGES_PER_S:
            raise FloodError("A member sends too many messages.")

    def on_message(self, message: Message) -> None:
        kind, link, links = type(message), self.link, self.links
        self.cost(STATUS_MESSAGES if kind is StatusQuery else 1)
        links.gathering += 1
        try:
            if kind in ORDINARY and not self.observer:
                self.take(message)
            else:
                self.hear(message)
        finally:
            links.gathering -= 1
        if len(link.outbox) >= CONTROL_BURST:
            links.flush()

    def take(self, message: Message) -> None:
        """Pass a message to the peer, at the time of its arrival."""
        runtime, link = self.runtime, self.link
        runtime.perform(runtime.peer.receive(link.peer, message, link.used_at))

    def hear(self, message: Message) -> None:
        """Handle a message that the link, the status page or a new session may concern."""
        runtime, link = self.runtime, self.link
        peer, counts = runtime.peer, runtime.counts
        if isinstance(message, Unknown):
            return
        if isinstance(message, StatusQuery):
            now, faults = counts() if counts is not None else (0, 0), (runtime.faults.count, runtime.faults.restarts)
            swarm, mixes = runtime.config.swarm, runtime.exchange_log.mixes()
            link.send(status_page(peer, self.links, swarm, message.after, mixes, now, faults))
        elif isinstance(message, Close):
            link.orderly = link.orderly or message.code == "idle"
            if message.code in ("layout", "swarm", "version"):
                runtime.connector.tell(f"A member refused this node: {message.sentence}")
        elif isinstance(message, Hello) or self.observer:
            raise ProtocolError("A message came that does not belong here.")
        elif isinstance(message, Widen):
            runtime.striping.asked(link, message.connections)
        # No answer would go out on an ending link.
        elif not (link.ending and isinstance(message, Offer | Invite | Fetch)):
            if isinstance(message, Offer | Invite | Fetch | Outcome) and counts is not None:
                peer.counted(*counts())
            self.open(message) if isinstance(message, Offer | Fetch | Outcome) else self.take(message)

    def open(self, message: Offer | Fetch | Outcome) -> None:
        """Take a message that may begin a session on this link, which may stream at once."""
        links, session = self.runtime.sessions.links, message.session
        known = session in links
        if not known:
            links[session] = self.link
        self.take(message)
        if not (known or self.runtime.peer.view.is_with(session, self.link.peer)):
            links.pop(session, None)  # The session was refused.

    def on_chunk(self, chunk: Chunk, size: int) -> memoryview | None:
        place = self.runtime.streams.place(self.link, chunk, size)
        if place is None:
            self.cost(1)  # A chunk that belongs to no session counts as a message.
        return place

    async def on_lane_chunk(self, chunk: Chunk, size: int) -> memoryview | None:
        place = await self.runtime.streams.agreed(self.link, chunk, size)
        if place is None:
            self.cost(1)
        return place

    def on_body(self, chunk: Chunk) -> None:
        links = self.links
        links.gathering += 1
        try:
            self.runtime.streams.arrived(self.link, chunk)
        finally:
            links.gathering -= 1

"""The life of one link of a node, from the finished Hello to the end of its stream. All of it runs in trio's thread.

It passes messages to the peer and chunks to the streams, and limits the rate of messages. A *chunk* is a piece of a
vector, whose values are its *body*. A *lane* is a further connection of the link, for chunks alone.
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import trio

from gossip.config import Config
from gossip.effects import Effect
from gossip.errors import ProtocolError, RemoteError
from gossip.ids import MemberRecord, PeerId, short
from gossip.peer import Peer
from gossip.wire.messages import (
    Abort,
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
    LayoutQuery,
    Meet,
    Message,
    Nack,
    Offer,
    Outcome,
    Ping,
    PingReq,
    Reach,
    Records,
    StatusQuery,
    Unknown,
    Widen,
)  # fmt: skip
from node.faults import Faults, leaf_errors
from node.links.connector import OBSERVER_S, Connector
from node.links.frame_reader import FrameReader
from node.links.link import CONTROL_BURST, Link, refuse_lane
from node.links.pool import Links
from node.links.reading import read_link
from node.links.stripes import Lane
from node.network.striping import Striping
from node.network.transfers.log import ExchangeLog
from node.network.transfers.streams import Streams
from node.network.transfers.transfer import LinkTransfers
from node.observe.figures import Source
from node.observe.status import layout_page, status_page
from node.transport.blocking_io import BlockingIoPool
from node.transport.byte_stream import BrokenLinkError, ByteStream

MESSAGES_PER_S = 2_000  # Limit for one link; a member of the largest swarm sends less than a tenth of it.
CLOSE_S = 1.0  # The most seconds for the last frames and the close of a link to leave.
# Messages that go to the peer as they are: they begin no session here, and concern neither the link nor a status page.
PEER_MESSAGES = frozenset({Ping, Ack, PingReq, Nack, Gossip, Digest, Records, Accept, Commit})
FROM_OBSERVERS = Abort | Digest | Fetch  # Messages of an observer that the peer handles.
SILENT = Ack | PingReq | Nack | Gossip | Records | Reach | Meet  # Messages of an observer that change nothing.
STATUS_COST = 20  # A status query counts as 20 messages: its reply of up to 64 KiB takes a millisecond to write.


class FloodError(ProtocolError):
    """The other side of a link has exceeded the rate limit."""


class LinkRuntime(Protocol):
    """The network side that a link belongs to: a :class:`node.network.runtime.Runtime`."""

    peer: Peer
    config: Config
    connector: Connector
    faults: Faults
    links: Links
    io_pool: BlockingIoPool
    transfers: LinkTransfers
    streams: Streams
    exchange_log: ExchangeLog
    striping: Striping
    undelivered: dict[PeerId, deque[Message]]
    read_progress: Callable[[], tuple[int, int]] | None
    is_stopping: bool

    @property
    def now(self) -> float: ...
    def perform(self, effects: Iterable[Effect]) -> None: ...
    def end_batch(self) -> None: ...
    def send(self, to: PeerId, message: Message) -> None: ...
    def report_misbehaviour(self, culprit: PeerId | str, kind: str) -> None: ...
    def notify(self, kind: str, sentence: str) -> None: ...


class LinkLife:
    """The tasks of one link: they read, write, and tell the peer when the link begins and ends."""

    def __init__(self, runtime: LinkRuntime, link: Link) -> None:
        self.runtime, self.link, self.links = runtime, link, runtime.links
        self.is_observer = False  # The other side is no member. It may read the status, the layout and weights.
        self.culprit: PeerId | str = link.peer  # Whose misbehaviour is counted; an observer's is its host's.
        self.second_began_at, self.messages_this_second = runtime.now, 0  # For the rate limit.

    async def run(self, theirs: Hello) -> None:
        """Run the link until its stream ends. A side without a record in its Hello is an observer and no member."""
        runtime, link, member = self.runtime, self.link, theirs.record  # `member` is None for an observer.
        self.is_observer = member is None
        self.culprit = link.stream.peer_host if member is None else link.peer
        # The handshake pool bounds the number of observers.
        is_full = member is not None and len(runtime.links) >= runtime.config.internal.max_links
        if runtime.is_stopping or (is_full and not self.close_idle_link()):
            runtime.undelivered.pop(link.peer, None)
            link.stream.close_now()
            return
        runtime.links.add(link)
        try:
            if member is not None:
                self.announce_link(member)
            with trio.CancelScope() as scope:
                link.cancel_scope, link.io_pool = scope, runtime.io_pool
                async with trio.open_nursery() as nursery:
                    link.admit_lane = functools.partial(self.admit_lane, nursery)
                    nursery.start_soon(self.send_until_finished, scope)
                    nursery.start_soon(link.cut_when_cancelled)
                    try:
                        await self.read()
                    except Exception as error:
                        self.on_fault(error)
                    finally:
                        link.admit_lane = refuse_lane
                        link.finish()
                        scope.deadline = trio.current_time() + CLOSE_S  # Until then the writer sends what is queued.
        except* RemoteError as group:
            self.on_remote_error(group)
        except* Exception as error:
            self.on_fault(error)
        finally:
            link.stream.close_now()
            if link.fault:
                runtime.notify("fault", link.fault)
            if link.is_unread:
                runtime.report_misbehaviour(self.culprit, "unread")
            try:
                self.announce_end()
            except Exception as error:
                self.on_fault(error)

    def close_idle_link(self) -> bool:
        """Close the link that has been idle longest among those without a session; return False if there is none."""
        runtime = self.runtime
        # A node that cannot be dialled keeps links to some members, its homes.
        busy, homes = runtime.transfers.used_links(), runtime.peer.reach.homes
        links = [link for link in runtime.links.all() if link.retired_at == math.inf]
        idle = [link for link in links if link not in busy and link.peer not in homes]
        if not idle:
            return False
        min(idle, key=lambda link: link.used_at).retire()
        return True

    def announce_link(self, member: MemberRecord) -> None:
        """Tell the peer of the link, and send the messages that waited for it and still apply."""
        runtime, other = self.runtime, self.link.peer
        waiting = runtime.undelivered.pop(other, None)
        runtime.perform(runtime.peer.on_linked(other, member, runtime.now, self.link.sighting))
        for message in waiting or ():
            if runtime.peer.view.should_send(other, message):
                runtime.send(other, message)

    def admit_lane(self, nursery: trio.Nursery, stream: ByteStream, reader: FrameReader, dialled: bool) -> bool:
        """Start a lane of the link; return False if the link is ending."""
        if self.runtime.is_stopping or self.link.is_ending:
            return False
        nursery.start_soon(Lane(self.link, stream, reader).run, dialled, self.buffer_for_lane, self.on_body)
        return True

    async def send_until_finished(self, scope: trio.CancelScope) -> None:
        """Send until the link finishes, then close its stream and end its tasks."""
        runtime, link = self.runtime, self.link

        def on_chunk_sent(session: int) -> None:
            transfer = runtime.transfers.table.get(session)
            if transfer is not None:
                transfer.moved_at = link.used_at

        try:
            await link.write_loop(on_chunk_sent, runtime.streams.on_piece_sent)
            with trio.move_on_after(CLOSE_S):
                await link.stream.aclose()
        except RemoteError:
            pass
        scope.cancel()

    # -- messages --------------------------------------------------------------------------------------------------
    async def read(self) -> None:
        """Read until the other side ends; messages that arrive together are answered together."""
        link, streams = self.link, self.runtime.streams
        link.reader.before_waiting = self.runtime.end_batch
        try:
            await read_link(
                link, self.on_message, self.buffer_for, self.on_body, streams.inflow_of, streams.on_inflow
            )  # fmt: skip
        finally:
            self.runtime.end_batch()

    def count_messages(self, messages: int) -> None:
        """Count messages of the current second. Raises FloodError above the limit."""
        used_at = self.link.used_at
        if used_at - self.second_began_at >= 1.0:
            self.second_began_at, self.messages_this_second = used_at, 0
        self.messages_this_second += messages
        if self.messages_this_second > MESSAGES_PER_S:
            raise FloodError("A member sends too many messages.")

    def on_message(self, message: Message) -> None:
        """Handle a message, which counts against the rate limit. Its replies are sent with the rest of its batch."""
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
            steps, samples = (0, 0) if read_progress is None else read_progress()
            source = Source(
                peer, self.links, steps, samples, peer.local.progress.samples, mixes=runtime.exchange_log.mixes(),
                faults=runtime.faults.count, restarts=runtime.faults.restarts,
            )  # fmt: skip
            link.send(status_page(source, runtime.config.swarm, message.after))
        elif isinstance(message, Close):
            link.is_orderly = link.is_orderly or message.code == "idle"
            if message.code in ("layout", "swarm", "version"):
                runtime.connector.notify_once(f"A member refused this node: {message.sentence}")
        elif isinstance(message, LayoutQuery):
            self.count_messages(STATUS_COST - 1)
            layout = runtime.connector.greeter.layout
            if layout is not None:
                link.send(layout_page(layout, message.first))
        elif self.is_observer and isinstance(message, Ping):
            link.send(Ack(message.seq, ()))  # Without news, which are passed on so many times and no more.
        elif self.is_observer and isinstance(message, SILENT):
            pass  # A reader believes that it is a member. Nobody else does.
        elif isinstance(message, Hello) or (self.is_observer and not isinstance(message, FROM_OBSERVERS)):
            raise ProtocolError("A message came that does not belong here.")
        elif isinstance(message, Widen):
            runtime.striping.on_widen(link, message.connections)
        # Begin nothing on an ending link, where no answer would go out.
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
        runtime, session = self.runtime, message.session
        is_known = session in runtime.transfers.table
        transfer = runtime.streams.averager.open(session)
        is_bound = transfer.link is not None
        if not is_bound:
            transfer.link = self.link
        self.pass_to_peer(message)
        visit, piece = self.link.visit, runtime.peer.donating.table.get(session)
        if visit is not None and piece is not None:  # An observer has the time of its piece, and then more.
            visit.deadline = max(visit.deadline, piece.deadline + OBSERVER_S)
        if not (is_bound or runtime.peer.view.is_with(session, self.link.peer)):  # The peer has refused the session.
            transfer.link = None
            if not is_known:
                runtime.transfers.table.pop(session, None)

    # -- chunks ----------------------------------------------------------------------------------------------------
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
        self.links.batch_depth += 1
        try:
            self.runtime.streams.on_body(self.link, chunk)
        finally:
            self.links.batch_depth -= 1

    # -- the end ---------------------------------------------------------------------------------------------------
    def on_fault(self, error: Exception) -> None:
        """Handle a fault of this program that a message caused: only this link ends.

        The other side is told the kind of the fault, but never its text, which may contain anything.

        Raises:
            RemoteError: The error is the other side's fault, and no fault of this program.
        """
        if isinstance(error, RemoteError):
            raise error
        self.runtime.faults.contain(error, f"A message from {short(self.link.peer)}", "its link is closed")
        kind = type(next(leaf_errors(error))).__name__
        self.link.send(Close("fault", f"your message caused a fault here ({kind}).", ()))

    def on_remote_error(self, group: BaseExceptionGroup[RemoteError]) -> None:
        """Handle errors of the other side: report misbehaviour, unless only the network broke the link."""
        for error in group.exceptions:
            if isinstance(error, BaseExceptionGroup):
                self.on_remote_error(error)
            elif not isinstance(error, BrokenLinkError):
                self.runtime.report_misbehaviour(self.culprit, "flood" if isinstance(error, FloodError) else "fault")

    def announce_end(self) -> None:
        """Tell the peer that the sessions on the link have ended, and that its side has no link left, if so."""
        runtime, link = self.runtime, self.link
        code, is_last = "idle" if link.is_orderly else "broken", runtime.links.remove(link)
        ended = [transfer.session for transfer in runtime.transfers.table.values() if transfer.on_link_ended(link)]
        for session in ended:
            exchange = runtime.peer.exchanges.table.get(session)
            if exchange is None or not exchange.IS_GROUP:  # A group goes on without this member.
                runtime.perform(runtime.peer.on_failed(session, code, runtime.now))
        if is_last and not self.is_observer:
            runtime.perform(runtime.peer.on_unlinked(link.peer, runtime.now, orderly=link.is_orderly))

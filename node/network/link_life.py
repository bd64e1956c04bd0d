"""The life of one link of a node, from the finished Hello to the end of its stream. All of it runs in trio's thread."""

from __future__ import annotations

import functools
from collections import deque
from typing import Protocol

import trio

from gossip.errors import RemoteError
from gossip.ids import MemberRecord, PeerId, short
from gossip.wire.messages import Close, Hello, Message
from node.faults import leaf_errors
from node.links.frame_reader import FrameReader
from node.links.link import Link, refuse_lane
from node.links.stripes import Lane
from node.network.link_reader import FloodError, LinkReader, ReaderRuntime
from node.transport.blocking_io import BlockingIoPool
from node.transport.byte_stream import BrokenLinkError, ByteStream

__all__ = ["LinkLife"]


class LinkRuntime(ReaderRuntime, Protocol):
    """The network side that a link belongs to: a :class:`node.network.runtime.Runtime`."""

    io_pool: BlockingIoPool
    undelivered: dict[PeerId, deque[Message]]
    is_stopping: bool

    def send(self, to: PeerId, message: Message) -> None: ...
    def report_misbehaviour(self, who: PeerId | str, kind: str) -> None: ...
    def notify(self, kind: str, sentence: str) -> None: ...


class LinkLife:
    """The tasks of one link, and what the peer is told when the link begins and ends."""

    def __init__(self, runtime: LinkRuntime, link: Link) -> None:
        self.runtime, self.link = runtime, link

    async def run(self, theirs: Hello) -> None:
        """Run the link until its stream ends. A side without a record in its Hello is an observer and no member."""
        runtime, link, member = self.runtime, self.link, theirs.record
        if member is not None:
            is_full = len(runtime.links) >= runtime.config.internal.max_links
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
                    link_reader = LinkReader(runtime, link, member is None)
                    link.admit_lane = functools.partial(self.admit_lane, link_reader, nursery)
                    nursery.start_soon(self.send_until_finished, scope)
                    nursery.start_soon(link.cut_when_cancelled)
                    try:
                        await link_reader.run()
                    except Exception as error:
                        self.on_fault(error)
                    finally:
                        link.admit_lane = refuse_lane
                        link.finish()
                        scope.deadline = trio.current_time() + 1.0
        except* RemoteError as group:
            self.on_remote_error(group)
        except* Exception as error:
            self.on_fault(error)
        finally:
            link.stream.close_now()
            if link.fault:
                runtime.notify("fault", link.fault)
            if link.is_unread:
                runtime.report_misbehaviour(link.peer, "unread")
            if member is not None:
                try:
                    self.announce_end()
                except Exception as error:
                    self.on_fault(error)

    def close_idle_link(self) -> bool:
        """Close the link that has been idle longest among those without a session; return False if there is none."""
        runtime = self.runtime
        busy, homes = runtime.streams.busy_links(), runtime.peer.reach.homes
        idle = [link for link in runtime.links.all() if link not in busy and link.peer not in homes]
        if not idle:
            return False
        min(idle, key=lambda link: link.used_at).retire()
        return True

    def announce_link(self, member: MemberRecord) -> None:
        """Tell the peer of the link, and send the messages that waited for it and still apply."""
        runtime, other = self.runtime, self.link.peer
        pending = runtime.undelivered.pop(other, None)
        runtime.perform(runtime.peer.on_linked(other, member, runtime.now))
        for message in pending or ():
            if runtime.peer.view.should_send(other, message):
                runtime.send(other, message)

    def admit_lane(
        self, link_reader: LinkReader, nursery: trio.Nursery, stream: ByteStream, reader: FrameReader, dialled: bool
    ) -> bool:  # fmt: skip
        """Start a lane of the link; return False if the link is ending."""
        if self.runtime.is_stopping or self.link.is_ending:
            return False
        lane = Lane(self.link, stream, reader)
        nursery.start_soon(lane.run, dialled, link_reader.buffer_for_lane, link_reader.on_body)
        return True

    async def send_until_finished(self, scope: trio.CancelScope) -> None:
        """Send until the link finishes, then close its stream and end its tasks."""
        runtime, link = self.runtime, self.link

        def on_chunk_sent(session: int) -> None:
            entry = runtime.sessions.table.get(session)
            if entry is not None:
                entry.moved_at = link.used_at

        try:
            await link.write_loop(on_chunk_sent, runtime.streams.on_piece_sent)
            with trio.move_on_after(1.0):
                await link.stream.aclose()
        except RemoteError:
            pass
        scope.cancel()

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
                self.runtime.report_misbehaviour(self.link.peer, "flood" if isinstance(error, FloodError) else "fault")

    def announce_end(self) -> None:
        """Tell the peer that the sessions on the link and perhaps the last link to the other side have ended."""
        runtime, link = self.runtime, self.link
        broken, code = runtime.sessions.sessions_on(link), "idle" if link.is_orderly else "broken"
        last = runtime.links.remove(link)
        for session in broken:
            runtime.sessions.links.pop(session, None)
            runtime.perform(runtime.peer.on_failed(session, code, runtime.now))
        if last:
            runtime.perform(runtime.peer.on_unlinked(link.peer, runtime.now, orderly=link.is_orderly))
        runtime.streams.gathers.on_unlinked(link)

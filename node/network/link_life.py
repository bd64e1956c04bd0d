"""The life of one link of a node, from the finished Hello to the end of its stream."""

from __future__ import annotations

import functools
from collections import deque
from typing import Protocol

import trio

from gossip.errors import RemoteError
from gossip.ids import MemberRecord, PeerId, short
from gossip.wire.messages import Close, Hello, Message
from node.faults import leaves
from node.links.frame_reader import FrameReader
from node.links.link import Link, admits_none
from node.links.stripes import Lane
from node.network.reading import FloodError, Hearing, Reading
from node.transport.blocking_io import BlockingIoPool
from node.transport.byte_stream import BrokenLinkError, ByteStream

__all__ = ["LinkLife"]


class Linking(Hearing, Protocol):
    """The network side that a link belongs to: a :class:`node.network.runtime.Runtime`."""

    hands: BlockingIoPool
    pending: dict[PeerId, deque[Message]]
    stopping: bool

    def send(self, to: PeerId, message: Message) -> None: ...
    def note(self, who: PeerId | str, kind: str) -> None: ...
    def on_event(self, kind: str, sentence: str) -> None: ...


class LinkLife:
    """The tasks of one link, and its effects on the peer when it begins and ends."""

    def __init__(self, runtime: Linking, link: Link) -> None:
        self.runtime, self.link = runtime, link

    async def run(self, theirs: Hello) -> None:
        """Run the link from the other side's Hello to the end of the stream."""
        runtime, link, member = self.runtime, self.link, theirs.record
        if member is not None:
            full = len(runtime.links) >= runtime.config.internal.max_links
            if runtime.stopping or (full and not self.make_room()):
                runtime.pending.pop(link.peer, None)
                link.stream.close_now()
                return
            runtime.links.add(link)
        try:
            if member is not None:
                self.welcome(member)
            with trio.CancelScope() as scope:
                link.cancel_scope, link.hands = scope, runtime.hands
                async with trio.open_nursery() as nursery:
                    reading = Reading(runtime, link, member is None)
                    link.admit = functools.partial(self.admit, reading, nursery)
                    nursery.start_soon(self.write, scope)
                    nursery.start_soon(link.cut_when_cancelled)
                    try:
                        await reading.run()
                    except Exception as error:
                        self.contain(error)
                    finally:
                        link.admit = admits_none
                        link.finish()
                        scope.deadline = trio.current_time() + 1.0
        except* RemoteError as group:
            self.blame(group)
        except* Exception as error:
            self.contain(error)
        finally:
            link.stream.close_now()
            if link.fault:
                runtime.on_event("fault", link.fault)
            if link.unread:
                runtime.note(link.peer, "unread")
            if member is not None:
                try:
                    self.unlink()
                except Exception as error:
                    self.contain(error)

    def make_room(self) -> bool:
        """Close the link that has been idle longest and has no session, if there is one."""
        runtime = self.runtime
        busy, homes = runtime.streams.busy(), runtime.peer.reach.homes
        idle = [link for link in runtime.links.all() if link not in busy and link.peer not in homes]
        if not idle:
            return False
        min(idle, key=lambda link: link.used_at).retire()
        return True

    def welcome(self, member: MemberRecord) -> None:
        """Tell the peer of the link, and send the messages that waited for it."""
        runtime, other = self.runtime, self.link.peer
        pending = runtime.pending.pop(other, None)
        runtime.perform(runtime.peer.linked(other, member, runtime.now))
        for message in pending or ():
            if runtime.peer.view.meant(other, message):
                runtime.send(other, message)

    def admit(
        self, reading: Reading, nursery: trio.Nursery, stream: ByteStream, reader: FrameReader, dialled: bool
    ) -> bool:  # fmt: skip
        """Start a lane of the link, until it ends; return False if the link is ending."""
        if self.runtime.stopping or self.link.ending:
            return False
        nursery.start_soon(Lane(self.link, stream, reader).run, dialled, reading.on_lane_chunk, reading.on_body)
        return True

    async def write(self, scope: trio.CancelScope) -> None:
        """Send until the link finishes, then close its stream."""
        runtime, link = self.runtime, self.link

        def sent(session: int) -> None:
            entry = runtime.sessions.table.get(session)
            if entry is not None:
                entry.moved_at = link.used_at

        try:
            await link.write_loop(sent, runtime.streams.served)
            with trio.move_on_after(1.0):
                await link.stream.aclose()
        except RemoteError:
            pass
        scope.cancel()

    def contain(self, error: Exception) -> None:
        """Contain a fault that a member's link caused: it ends that link only.

        The other side is told the kind of the fault, but never its text, which may contain anything.
        """
        if isinstance(error, RemoteError):
            raise error
        self.runtime.faults.contain(error, f"A message from {short(self.link.peer)}", "its link is closed")
        kind = type(next(leaves(error))).__name__
        self.link.send(Close("fault", f"your message caused a fault here ({kind}).", ()))

    def blame(self, group: BaseExceptionGroup[RemoteError]) -> None:
        """Record misbehaviour if the member at its other end, not just the network, ended a link."""
        for error in group.exceptions:
            if isinstance(error, BaseExceptionGroup):
                self.blame(error)
            elif not isinstance(error, BrokenLinkError):
                self.runtime.note(self.link.peer, "flood" if isinstance(error, FloodError) else "fault")

    def unlink(self) -> None:
        """Tell the peer that the link and the sessions on it have ended."""
        runtime, link = self.runtime, self.link
        broken, code = runtime.sessions.on(link), "idle" if link.orderly else "broken"
        last = runtime.links.remove(link)
        for session in broken:
            runtime.sessions.links.pop(session, None)
            runtime.perform(runtime.peer.failed(session, code, runtime.now))
        if last:
            runtime.perform(runtime.peer.unlinked(link.peer, runtime.now, orderly=link.orderly))
        runtime.streams.gathers.unlinked(link)

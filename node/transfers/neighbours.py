"""Transfers between members on one host: whole vectors in shared memory instead of streams.

Both sides' Hellos name the same host. The side with the smaller id listens on a socket, the other one connects
(:mod:`node.transport.shared`). Either side then passes file descriptors of its vectors' memory there. It announces each
loan over the link, and is told there when the partner has read it. All that fails on this way streams.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import trio

from gossip.averaging.averager import Averager
from gossip.averaging.streams import Receiver
from gossip.averaging.vectors import Floats, Vector
from gossip.codecs import ALIGN, Codec
from gossip.config import Config
from gossip.errors import ProtocolError
from gossip.ids import PeerId, short
from gossip.wire.messages import Came, Hello, Lent, Meet, Read
from node.links.link import Link
from node.model.host_memory import HostMemory, Views
from node.model.pool import VectorPool
from node.transfers.loans import LOANS, Loan
from node.transfers.sessions import StreamSession, StreamSessions
from node.transport.shared import MeetingPlace, SideChannel, connected

__all__ = ["OF_NEIGHBOURS", "Neighbours"]

OF_NEIGHBOURS = Meet | Came | Lent | Read
# Links with a side channel. A host runs a node for each of its devices, and each channel costs one or two descriptors.
CHANNELS = 16
INLINE_ELEMENTS = 1 << 18  # Smaller vectors are read at once, in a third of a millisecond; larger ones in a thread.


class Borrowing:
    """A partner's vector, read from its memory in pieces of our chunk length, so that sums equal those of a stream."""

    def __init__(
        self, session: StreamSession, receiver: Receiver, views: Views, descriptor: int, lent: Lent, chunk: int
    ) -> None:  # fmt: skip
        self.session, self.receiver, self.lent = session, receiver, lent
        self.views, self.descriptor = views, descriptor
        self.chunk = chunk // ALIGN * ALIGN
        self.lost = False  # We had no room for the mapping.

    def run(self) -> None:
        """Read the vector and close the descriptor. Thread-safe.

        Raises:
            ProtocolError: The descriptor is not of sealed memory.
        """
        try:
            theirs = self.views.lying(self.descriptor, self.lent.offset, self.lent.elements)
        except OSError:
            self.lost = True
            return
        finally:
            os.close(self.descriptor)
        if theirs is None:
            raise ProtocolError("What was lent is no memory that stays as it is.")
        session, receiver, more = self.session, self.receiver, True
        while more and not receiver.done:
            with session.lock:
                if session.over:
                    return
                session.moved_at = session.heard_at = session.clock()
                more = receiver.take(theirs[receiver.position : receiver.position + self.chunk])


class Neighbours:
    """One node's side channels to members on this host. All methods but tasks are synchronous and run in trio's thread.

    Args:
        me: Returns our id.
        host: The host's name in our Hello; None disables sharing.
        config: The settings.
        averager: Learns of failures.
        pool: The vectors.
        sessions: The streams.
        spawn: Starts a task.
        arrived: Called when a session's vector is complete.
        served: Called when a newcomer has read its piece.
        by_memory: Called when a member can, or can no longer, read our vectors in memory.
        touch: Allocates an exchange's memory, where that is worth a thread.
    """

    def __init__(
        self, me: Callable[[], PeerId], host: str | None, config: Config, averager: Averager, pool: VectorPool,
        sessions: StreamSessions, spawn: Callable[..., None], arrived: Callable[[Lent], None],
        served: Callable[[int], None], by_memory: Callable[[PeerId, bool], None],
        touch: Callable[[], Awaitable[None]] | None = None,
    ) -> None:  # fmt: skip
        self.me, self.host, self.config, self.averager, self.pool = me, host, config, averager, pool
        self.sessions, self.spawn, self.arrived, self.served = sessions, spawn, arrived, served
        self.by_memory, self.touch = by_memory, touch
        self.near: dict[Link, MeetingPlace | None] = {}  # Links to members on this host.
        self.tell: Callable[[str], None] = lambda sentence: None
        self.told = False  # Whether an unreachable neighbour was reported.
        self.clock = trio.lowlevel.current_clock()

    # -- a link --------------------------------------------------------------------------------------------------
    def begin(self, link: Link, theirs: Hello) -> None:
        if self.host is None or self.host not in theirs.capabilities or len(self.near) >= CHANNELS:
            return
        self.near[link] = None
        if self.me() < link.peer:
            try:
                meeting = self.near[link] = MeetingPlace()
            except OSError as error:
                self.apart(link, (error.strerror or str(error)).lower())
            else:
                link.send(Meet(meeting.name, meeting.token))

    def end(self, link: Link) -> None:
        """Close the link's side channel before its sessions fail: from now on the partner may not use what we lent."""
        meeting = self.near.pop(link, None)
        if meeting is not None:
            meeting.close()
        if link.channel is not None:
            link.channel.close()
            self.closed(link.peer)

    def heard(self, link: Link, message: OF_NEIGHBOURS) -> None:
        """Handle a message. Raise ProtocolError if it does not fit the state."""
        match message:
            case Meet(name, token):
                if link.channel is not None or self.me() < link.peer:
                    raise ProtocolError("A place to meet was named by who should have come to ours.")
                channel = connected(name, token) if link in self.near else None
                link.send(Came(channel is not None))
                self.joined(link, channel)
            case Came(ok):
                meeting = self.near.get(link)
                if meeting is None:
                    raise ProtocolError("A member came to a place to meet that was never named.")
                self.near[link] = None
                channel = meeting.met() if ok else None
                meeting.close()
                self.joined(link, channel)
            case Lent():
                self.borrow(link, message)
            case Read(session):
                self.returned(link, session)

    def joined(self, link: Link, channel: SideChannel | None) -> None:
        link.channel = channel
        if channel is None:
            self.apart(link, "it did not come to the socket, or is another user's")
            return
        if not self.pool.sharing:
            self.pool.share()
            if self.touch is not None:
                self.spawn(self.touch)
        if self.pool.lends:
            self.by_memory(link.peer, True)

    def closed(self, peer: PeerId) -> None:
        """Report that a channel to this member has closed, unless another link to it has one."""
        if not any(link.peer == peer and link.channel is not None and link.channel.open for link in self.near):
            self.by_memory(peer, False)

    def apart(self, link: Link, why: str) -> None:
        if link in self.near and not self.told:
            self.told = True
            self.tell(f"{short(link.peer)} is on this host and is reached through its network all the same: {why}.")

    # -- what we lend --------------------------------------------------------------------------------------------
    def lend(self, link: Link, session: int, values: Floats, codec: Codec, vector: Vector) -> Loan | None:
        """Lend ``values``, a part of ``vector``, to the partner.

        Returns:
            The loan, or None if the values must stream. That includes codecs that need a bound on the spread: their
            bytes hold more than the values.
        """
        channel = link.channel
        if channel is None or codec.needs_spread or len(channel.lent) >= LOANS or session in channel.lent:
            return None
        found = HostMemory.of(values)
        if found is None or not channel.pass_on(session, found[0].descriptor):
            return None
        loan = channel.lent[session] = Loan(session, values, codec, self.pool.lease(vector), *found)
        return loan

    def returned(self, link: Link, number: int) -> None:
        """End a loan that the partner has read, and count its vector as sent."""
        loan = None if link.channel is None else link.channel.lent.pop(number, None)
        if not isinstance(loan, Loan):
            return  # The loan was taken back.
        loan.position = loan.message.elements
        loan.end()
        session = self.sessions.table.get(number)
        if session is not None and session.sender is loan:
            session.moved_at = self.clock.current_time()
            self.served(number)

    def watch(self, now: float) -> None:
        """Close channels whose partner holds a loan of an ended session for too long."""
        for link in self.near:
            channel = link.channel
            for loan in [] if channel is None else list(channel.lent.values()):
                assert isinstance(loan, Loan)
                if loan.session not in self.sessions.table and now - loan.since > self.config.stall_s:
                    assert channel is not None
                    channel.close()
            if channel is not None and not channel.open:
                self.closed(link.peer)

    # -- what we are lent ----------------------------------------------------------------------------------------
    def borrow(self, link: Link, lent: Lent) -> None:
        channel = link.channel
        if channel is None:
            raise ProtocolError("Memory was lent by who has no way to pass it.")
        descriptor = channel.take(lent.session)
        try:
            found = self.sessions.borrows(link, lent)
        except ProtocolError:
            found = None
            raise
        finally:
            if found is None and descriptor is not None:
                os.close(descriptor)
        if found is None or descriptor is None:
            link.send(Read(lent.session))
            # Either we have no descriptor left or the other side has closed the channel. The next vector streams.
            if found is not None:
                channel.close()
                self.closed(link.peer)
                self.averager.failed(lent.session, "broken")
            return
        session, receiver = found
        borrowing = Borrowing(session, receiver, channel.views, descriptor, lent, self.config.chunk_elements)
        if lent.elements > INLINE_ELEMENTS and link.nursery is not None:
            session.borrowing = True
            link.nursery.start_soon(self.borrow_in_thread, link, channel, borrowing)
        else:
            borrowing.run()
            self.borrowed(link, channel, borrowing)

    async def borrow_in_thread(self, link: Link, channel: SideChannel, borrowing: Borrowing) -> None:
        """Read in a thread. It cannot be cancelled and need not be: no partner can hold it up."""
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(borrowing.run)
        self.borrowed(link, channel, borrowing)

    def borrowed(self, link: Link, channel: SideChannel, borrowing: Borrowing) -> None:
        """Return the loan, and use what was read if the partner had lent it all the time."""
        session, whole = borrowing.session, channel.open and not borrowing.lost
        session.borrowing = False
        link.send(Read(session.id))
        if session.over:
            return
        if whole:
            self.arrived(borrowing.lent)
        else:
            self.closed(link.peer)
            self.averager.failed(session.id, "broken")

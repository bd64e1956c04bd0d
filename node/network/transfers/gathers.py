"""Group means on real links: an all-reduce in two phases, reduce-scatter and all-gather.

Each member sends every other its slice, and each owner sends its slice's mean back to all. A member's chunks belong to
its own slice (a mean) or to ours (values). Their absolute start tells which.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from gossip.averaging.all_reduce import GroupAverage
from gossip.averaging.averager import Averager
from gossip.averaging.streams import Receiver, Sender
from gossip.averaging.vectors import Floats, Lease
from gossip.config import Config
from gossip.errors import ProtocolError
from gossip.exchange.groups.group import Group
from gossip.exchange.session import State
from gossip.peer import Peer
from gossip.wire.messages import MAX_GROUP, MIN_CHUNK_ELEMENTS, Chunk
from node.links.link import Link
from node.links.pool import Links
from node.model.pool import VectorPool
from node.network.transfers.sessions import StreamSessions

__all__ = ["GroupTransfers"]


class Parts:
    """Our values for one member's slice, followed by our slice's mean, over one link. A node.links.Bulk."""

    def __init__(self, lease: Lease) -> None:
        self.senders: list[Sender] = []
        self.lease = lease  # The snapshot's lease.
        self.sent = 0  # Elements of the senders that are done.

    def next_frame(self, apart: bool = False) -> tuple[bytes, memoryview] | None:
        while self.senders and self.senders[0].done:
            self.sent += self.senders.pop(0).position
        return self.senders[0].next_frame(apart) if self.senders else None

    @property
    def moved(self) -> int:
        """Return the number of elements that were sent."""
        return self.sent + sum(sender.position for sender in self.senders)

    def let_go(self) -> None:
        self.lease.end()


@dataclass(slots=True, eq=False)
class Early:
    """A chunk that came before its group began here."""

    link: Link
    chunk: Chunk
    body: bytearray
    filled: bool = False


class Ahead:
    """All early chunks of one group, by link and in their order."""

    def __init__(self) -> None:
        self.by_link: dict[Link, dict[int, Early]] = {}  # Each link's chunks by their start.
        self.bytes = self.chunks = 0

    def add(self, link: Link, chunk: Chunk, body_bytes: int) -> Early:
        early = Early(link, chunk, bytearray(body_bytes))
        kept = self.by_link.setdefault(link, {})
        if chunk.start in kept:
            raise ProtocolError("A chunk of a group came twice.")
        kept[chunk.start] = early
        self.bytes += body_bytes
        self.chunks += 1
        return early

    def last(self, link: Link) -> Early | None:
        """Return the link's chunk that is being filled: a link reads one after the other."""
        kept = self.by_link.get(link)
        return next(reversed(kept.values())) if kept else None

    def filled(self) -> list[Early]:
        return [early for kept in self.by_link.values() for early in kept.values() if early.filled]

    def most(self) -> Link:
        """Return the link with the most early data. Each chunk also counts as MIN_CHUNK_ELEMENTS bytes."""
        return max(self.by_link, key=lambda link: self.weight(self.by_link[link]))

    @staticmethod
    def weight(kept: dict[int, Early]) -> int:
        return sum(len(early.body) + MIN_CHUNK_ELEMENTS for early in kept.values())

    def take(self, early: Early) -> None:
        del self.by_link[early.link][early.chunk.start]
        self.bytes -= len(early.body)
        self.chunks -= 1

    def drop(self, link: Link) -> None:
        for early in list(self.by_link.get(link, {}).values()):
            self.take(early)
        self.by_link.pop(link, None)


@dataclass(slots=True, eq=False)
class GroupTransfer:
    """The links of one group; its members are numbered by their places."""

    group: GroupAverage
    out: dict[int, tuple[Link, Parts]] = field(default_factory=dict)
    # By place: the link that a member uses, and the time of the last data over it.
    heard: dict[int, tuple[Link, float]] = field(default_factory=dict)


class GroupTransfers:
    """The transfers between one node's averager and the other members of its groups. Runs in trio's thread."""

    def __init__(
        self, peer: Peer, config: Config, averager: Averager, pool: VectorPool, links: Links, sessions: StreamSessions
    ) -> None:  # fmt: skip
        self.peer, self.config, self.averager, self.pool = peer, config, averager, pool
        self.links, self.sessions = links, sessions
        self.table: dict[int, GroupTransfer] = {}
        self.early: dict[int, Ahead] = {}  # Chunks that came, at least in part, before their group began.

    # -- a group -------------------------------------------------------------------------------------------------
    def gather(self, group: GroupAverage) -> None:
        """Stream to the members that are linked; a further call adds those linked since."""
        number = group.session
        one = self.table.get(number)
        if one is None:
            group.stream()
            one = self.table[number] = GroupTransfer(group)
        for place, member in enumerate(group.members):
            link = None if place == group.place or place in one.out else self.links.newest(member)
            if link is not None:
                one.out[place] = link, Parts(self.pool.lease(self.averager.snapshots[number]))
                one.heard.setdefault(place, (link, trio.current_time()))
                where = group.slices[place]
                self.send(one, place, group.ours[where], where.start)
                if group.mean is not None:
                    self.send(one, place, group.mean, group.slices[group.place].start)
        for early in self.early[number].filled() if number in self.early else ():
            self.replay(number, early)
        self.average(one)

    def send(self, one: GroupTransfer, place: int, values: Floats, start: int) -> None:
        """Queue these values for a member.

        Chunks are shorter in larger groups, whose members share our uplink: otherwise a member could seem stalled.
        """
        if not values.size:
            return
        link, parts = one.out[place]
        group = one.group
        elements = max(self.config.chunk_elements // (len(group.members) - 1), MIN_CHUNK_ELEMENTS)
        most = link.movement
        parts.senders.append(Sender(group.session, values, group.codec, elements, start, most=most))
        link.start_bulk(group.session, parts)

    # -- chunks --------------------------------------------------------------------------------------------------
    def expects(self, session: int) -> bool:
        """Return True if chunks of this session belong to a group."""
        if session in self.table:
            return True
        if not self.config.grouped:
            return False
        exchange = self.peer.exchanges.table.get(session)
        return exchange is not None and exchange.state is State.OFFERED and not exchange.is_initiator

    def place(self, link: Link, chunk: Chunk, body_bytes: int) -> memoryview:
        """Return the buffer for a chunk's body. Early chunks are stored, at most a vector's size in all."""
        one = self.table.get(chunk.session)
        if one is not None:
            return self.receiver(one, link, chunk)[1].place(chunk, body_bytes)
        group = self.peer.exchanges.table.get(chunk.session)
        assert isinstance(group, Group)
        if link.peer not in (group.inviter, *group.invite_list):
            raise ProtocolError("A chunk came of a group to which its sender was not invited.")
        ahead = self.early.setdefault(chunk.session, Ahead())
        early = ahead.add(link, chunk, body_bytes)
        # The other members' values of our slice are less than a vector. Only the last chunk may be shorter than the
        # minimum.
        bound = 4 * self.peer.view.elements
        if ahead.bytes > bound or ahead.chunks > bound // MIN_CHUNK_ELEMENTS + 2 * MAX_GROUP:
            most = ahead.most()
            ahead.drop(most)
            if most is link:
                raise ProtocolError("More of a group's values came early than a vector has.")
            most.close_now()  # This link has used more than its share of the room.
        return memoryview(early.body)

    @staticmethod
    def receiver(one: GroupTransfer, link: Link, chunk: Chunk) -> tuple[int, Receiver]:
        """Return the sender's place and the receiver of a chunk; raise ProtocolError if none is expected."""
        members = one.group.members
        place = members.index(link.peer) if link.peer in members else None
        receiver = None if place is None else one.group.receiver(place, chunk.start)
        if place is None or receiver is None:
            raise ProtocolError("A chunk came that belongs to no part of its group's vector.")
        return place, receiver

    def arrived(self, link: Link, chunk: Chunk) -> None:
        """Process a chunk whose body is filled."""
        one = self.table.get(chunk.session)
        ahead = self.early.get(chunk.session)
        early = None if ahead is None else ahead.last(link)
        if early is not None and early.chunk is chunk:
            early.filled = True
            if one is not None:
                self.replay(chunk.session, early)
            return
        if one is None:
            return  # The group has ended.
        place, receiver = self.receiver(one, link, chunk)
        one.heard[place] = link, trio.current_time()
        if not receiver.arrived(chunk):
            # All sessions on this link have failed, this group included.
            link.close_now()
        elif receiver.done:
            one.group.arrived(place, receiver)
            self.average(one)
            self.finish(one)

    def replay(self, session: int, early: Early) -> None:
        """Process an early chunk as if it came now."""
        ahead = self.early.get(session)
        if ahead is None:
            return  # An earlier chunk has ended the group.
        ahead.take(early)
        if not ahead.chunks:
            del self.early[session]
        try:
            self.place(early.link, early.chunk, len(early.body))[:] = early.body
            self.arrived(early.link, early.chunk)
        except ProtocolError:
            early.link.close_now()

    # -- means ---------------------------------------------------------------------------------------------------
    def average(self, one: GroupTransfer) -> None:
        self.averager.average(one.group, lambda: self.averaged(one))

    def averaged(self, one: GroupTransfer) -> None:
        """Send our slice's mean to all members."""
        group = one.group
        assert group.mean is not None
        for place in sorted(one.out):
            self.send(one, place, group.mean, group.slices[group.place].start)
        self.finish(one)

    def finish(self, one: GroupTransfer) -> None:
        # Without any link nothing can be sent, so the group will fail.
        if one.out:
            self.averager.gathered(one.group)

    # -- ends ----------------------------------------------------------------------------------------------------
    def moved(self, session: int) -> tuple[int, int]:
        """Return the numbers of elements of a group that were sent and received."""
        one = self.table.get(session)
        if one is None:
            return 0, 0
        group, received = one.group, 0
        own = group.slices[group.place]
        for place, where in enumerate(group.slices):
            if place != group.place:
                for slice_, waiting in ((own, group.missing), (where, group.awaited)):
                    receiver = waiting.get(place)
                    whole = slice_.stop - slice_.start if place not in waiting else 0
                    received += whole if receiver is None else receiver.elements_arrived
        return sum(parts.moved for _, parts in one.out.values()), received

    def release(self, session: int) -> None:
        self.early.pop(session, None)
        one = self.table.pop(session, None)
        if one is not None:
            for link, parts in one.out.values():
                link.stop_bulk(session, parts)

    def unlinked(self, link: Link) -> None:
        """Fail the groups that stream over this lost link, unless they have failed already."""
        for number, one in list(self.table.items()):
            used = [out for out, _ in one.out.values()] + [heard for heard, _ in one.heard.values()]
            if link in used:
                self.averager.failed(number, "broken")
        for ahead in self.early.values():
            ahead.drop(link)

    def stalled(self, now: float, stall_s: float) -> list[Link]:
        """Return the links over which a slice, or a mean that has begun, has been due for too long.

        Nothing came over them for ``stall_s`` seconds.
        """
        return [
            link for one in self.table.values() for place, (link, moved_at) in one.heard.items()
            if now - max(moved_at, link.received_at) > stall_s and self.owes(one.group, place)
        ]  # fmt: skip

    @staticmethod
    def owes(group: GroupAverage, place: int) -> bool:
        mean = group.awaited.get(place)  # A mean waits for others until it begins.
        return place in group.missing or (mean is not None and mean.position > 0)

    def links_used(self) -> set[Link]:
        return {link for one in self.table.values() for link, _ in one.out.values()}

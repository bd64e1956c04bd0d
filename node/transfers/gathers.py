"""Group means on real links: everybody's slices to their owners, and the means of them back to all.

What comes from a member lies in its slice's or in ours, and a chunk's absolute start says which. Memory is two vectors
beside the snapshot, by our own layout: the others' values of our slice, and the difference that comes of the means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import trio
from numpy.typing import NDArray

from gossip.arithmetic.group_mean import group_mean, norm_accepts, slices
from gossip.arithmetic.mixing import difference
from gossip.codecs import ALIGN, Codec, get_codec
from gossip.config import Config
from gossip.effects import Effect, Gather
from gossip.errors import ProtocolError
from gossip.exchange.offer import Exchange
from gossip.exchange.session import State
from gossip.filters.registry import filter_of
from gossip.ids import PeerId
from gossip.peer import Peer
from gossip.wire.messages import MAX_GROUP, MIN_CHUNK_ELEMENTS, Chunk
from node.transfers.boundary import Lease, Vector, VectorPool
from node.transfers.sessions import StreamSession, StreamSessions
from node.transfers.transfer import INLINE_ELEMENTS, DifferenceReceiver, Receiver, Sender
from node.transport.links import Link, Links

__all__ = ["GroupTransfers"]

Floats = NDArray[np.float32]

PIECE = 1 << 16  # elements of a difference computed while in cache


class Parts:
    """Our slice, and then its mean, to one member: one after the other over one link. A node.links.Bulk."""

    def __init__(self, lease: Lease) -> None:
        self.senders: list[Sender] = []
        self.lease = lease  # of the snapshot

    def next_frame(self) -> tuple[bytes, memoryview] | None:
        while self.senders and self.senders[0].done:
            del self.senders[0]
        return self.senders[0].next_frame() if self.senders else None

    def let_go(self) -> None:
        self.lease.end()


class SliceIn(Receiver):
    """A member's values of our slice, as everybody decodes them."""

    def __init__(self, session: int, out: Floats, codec: Codec, origin: int) -> None:
        super().__init__(session, out.size, codec, origin)
        self.out = out

    def buffer(self, where: slice, expected: int) -> memoryview:
        if self.codec.raw:
            return memoryview(self.out[where].data).cast("B")
        return self.scratch(expected)

    def use(self, where: slice) -> None:
        if not self.codec.raw:
            self.codec.decode(self.body, self.out[where], None, self.session, self.origin + where.start)


@dataclass(slots=True, eq=False)
class Early:
    """A chunk of a group that has not begun here."""

    link: Link
    chunk: Chunk
    body: bytearray
    filled: bool = False


class Ahead:
    """All chunks of one group that has not begun here, by the link they came over; of each link in their order."""

    def __init__(self) -> None:
        self.by_link: dict[Link, dict[int, Early]] = {}  # by where they begin
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
        """The one that is being filled: a link reads one after the other."""
        kept = self.by_link.get(link)
        return next(reversed(kept.values())) if kept else None

    def filled(self) -> list[Early]:
        return [early for kept in self.by_link.values() for early in kept.values() if early.filled]

    def most(self) -> Link:
        """The link over which most came: by bytes, or by chunks where those are what is too many."""
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
    """One group as this node performs it; members are called by their places."""

    effect: Gather
    codec: Codec
    ours: Floats
    slices: list[slice]
    rows: Vector  # the others' values of our slice
    parts: Floats  # the same, and ours: (members, elements)
    result: Vector | None  # the difference, until the mix owns it
    missing: dict[int, Receiver] = field(default_factory=dict)  # slices that have not all come
    awaited: dict[int, Receiver] = field(default_factory=dict)  # means that have not
    out: dict[int, tuple[Link, Parts]] = field(default_factory=dict)
    heard: dict[int, tuple[Link, float]] = field(default_factory=dict)  # over which link, and when something last came
    refused: list[PeerId] = field(default_factory=list)
    difference_sq: float = 0.0
    own_sq: float = 0.0
    mean: Floats | None = None  # of our slice
    averaging: bool = False
    over: bool = False


class GroupTransfers:
    """Of one node: performs Gather. All methods but tasks are synchronous and run in trio's thread."""

    def __init__(
        self, peer: Peer, config: Config, pool: VectorPool, links: Links, sessions: StreamSessions,
        perform: Callable[[list[Effect]], None], beside: Callable[..., None],
    ) -> None:  # fmt: skip
        """``beside(session, task, ...)`` runs a task, and fails the session where it does not end well."""
        self.peer, self.config, self.pool, self.links, self.sessions = peer, config, pool, links, sessions
        self.perform, self.beside = perform, beside
        self.table: dict[int, GroupTransfer] = {}
        self.early: dict[int, Ahead] = {}  # what came, or began to, before its group began

    # -- a group -------------------------------------------------------------------------------------------------
    def gather(self, effect: Gather) -> bool:
        """Stream to those members to whom there is a link, and at another call to those linked since. False: there is
        no such snapshot."""
        number = effect.session
        one = self.table.get(number)
        if one is None:
            snapshot = self.sessions.snapshots.get(number)
            if snapshot is None:
                return False
            one = self.table[number] = self.begin(effect, snapshot.array)
        for place, member in enumerate(effect.members):
            link = None if place == effect.place or place in one.out else self.links.newest(member)
            if link is not None:
                one.out[place] = link, Parts(self.pool.lease(self.sessions.snapshots[number]))
                one.heard.setdefault(place, (link, trio.current_time()))
                where = one.slices[place]
                self.send(one, place, one.ours[where], where.start)
                if one.mean is not None:
                    self.send(one, place, one.mean, one.slices[effect.place].start)
        for early in self.early[number].filled() if number in self.early else ():
            self.replay(number, early)
        self.average_when_here(one)
        return True

    def begin(self, effect: Gather, ours: Floats) -> GroupTransfer:
        number, members = effect.session, len(effect.members)
        codec, cuts = get_codec(effect.codec), slices(ours.size, members)
        own = cuts[effect.place]
        length = own.stop - own.start
        rows = self.pool.take("weights", ours.size + (MAX_GROUP + 1) * ALIGN)  # slices are of whole blocks
        parts = rows.array[: members * length].reshape(members, length)
        result = self.pool.take("weights", ours.size)
        one = GroupTransfer(effect, codec, ours, cuts, rows, parts, result)
        codec.quantised(ours[own], parts[effect.place], number, own.start)
        for place, where in enumerate(cuts):
            if place == effect.place:
                continue
            if length:
                one.missing[place] = SliceIn(number, parts[place], codec, own.start)
            if where.stop > where.start:
                receiver = DifferenceReceiver(number, ours[where], result.array[where], codec, origin=where.start)
                one.awaited[place] = receiver
        return one

    def send(self, one: GroupTransfer, place: int, values: Floats, start: int) -> None:
        """Chunks are shorter the more members share our way out: none may seem to have stopped."""
        if not values.size:
            return
        link, parts = one.out[place]
        elements = max(self.config.chunk_elements // (len(one.effect.members) - 1), MIN_CHUNK_ELEMENTS)
        parts.senders.append(Sender(one.effect.session, values, one.codec, elements, start))
        link.start_bulk(one.effect.session, parts)

    # -- chunks --------------------------------------------------------------------------------------------------
    def expects(self, session: int) -> bool:
        """Whether chunks of this session are a group's."""
        if session in self.table:
            return True
        exchange = self.peer.exchange(session)
        grouped = self.config.mixing == "group"
        return grouped and exchange is not None and exchange.state is State.OFFERED and not exchange.initiator

    def place(self, link: Link, chunk: Chunk, body_bytes: int) -> memoryview:
        """The buffer for a chunk's body. What is here before its group began here is kept, no more than a vector."""
        one = self.table.get(chunk.session)
        if one is not None:
            return self.receiver(one, link, chunk)[1].place(chunk, body_bytes)
        group = self.peer.exchange(chunk.session)
        assert group is not None
        assert not isinstance(group, Exchange)
        if link.peer not in (group.inviter, *group.candidates):
            raise ProtocolError("A chunk came of a group to which its sender was not invited.")
        ahead = self.early.setdefault(chunk.session, Ahead())
        early = ahead.add(link, chunk, body_bytes)
        # All members' values of our slice are less than a vector, in chunks that are at least so long but for the last.
        bound = 4 * self.peer.elements
        if ahead.bytes > bound or ahead.chunks > bound // MIN_CHUNK_ELEMENTS + 2 * MAX_GROUP:
            most = ahead.most()
            ahead.drop(most)
            if most is link:
                raise ProtocolError("More of a group's values came early than a vector has.")
            most.close_now()  # it takes the others' room: each has the same share
        return memoryview(early.body)

    @staticmethod
    def receiver(one: GroupTransfer, link: Link, chunk: Chunk) -> tuple[int, Receiver]:
        """Whose values these are; raises ProtocolError where none are expected."""
        members, own = one.effect.members, one.slices[one.effect.place]
        place = members.index(link.peer) if link.peer in members else None
        if place is not None:
            ours = own.start <= chunk.start < own.stop
            receiver = (one.missing if ours else one.awaited).get(place)
            if receiver is not None:
                return place, receiver
        raise ProtocolError("A chunk came that belongs to no part of its group's vector.")

    def arrived(self, link: Link, chunk: Chunk) -> None:
        """The body of a chunk is filled."""
        one = self.table.get(chunk.session)
        ahead = self.early.get(chunk.session)
        early = None if ahead is None else ahead.last(link)
        if early is not None and early.chunk is chunk:
            early.filled = True
            if one is not None:
                self.replay(chunk.session, early)
            return
        if one is None:
            return  # it is over
        place, receiver = self.receiver(one, link, chunk)
        one.heard[place] = link, trio.current_time()
        if not receiver.arrived(chunk):
            link.close_now()  # and all that this link carried has failed, this group with it
            return
        if not receiver.done:
            return
        if isinstance(receiver, DifferenceReceiver):
            del one.awaited[place]
            self.add(one, place, receiver.difference_sq, receiver.own_sq)
        else:
            del one.missing[place]
            self.average_when_here(one)
        self.finish_when_here(one)

    def replay(self, session: int, early: Early) -> None:
        """What came early, as if it came now."""
        ahead = self.early.get(session)
        if ahead is None:
            return  # one that came before it ended the group
        ahead.take(early)
        if not ahead.chunks:
            del self.early[session]
        try:
            self.place(early.link, early.chunk, len(early.body))[:] = early.body
            self.arrived(early.link, early.chunk)
        except ProtocolError:
            early.link.close_now()

    # -- means ---------------------------------------------------------------------------------------------------
    def average_when_here(self, one: GroupTransfer) -> None:
        if one.missing or one.averaging or one.mean is not None or not one.parts.size:
            return
        one.averaging = True
        if one.parts.size > INLINE_ELEMENTS:
            self.beside(one.effect.session, self.average_beside, one)
        else:
            self.averaged(one, *self.average(one))

    async def average_beside(self, one: GroupTransfer) -> None:
        self.averaged(one, *await trio.to_thread.run_sync(self.average, one))

    def average(self, one: GroupTransfer) -> tuple[Floats, list[int], float, float]:
        """The mean of our slice, whose values it leaves out, |mean - ours|^2 and |ours|^2 as all take it: once through
        the codec."""
        config, place, result = self.config, one.effect.place, one.result
        assert result is not None
        mean, refused = group_mean(one.parts, place, filter_of(config).mean, config.norm_bound)
        own, ours = one.slices[place], one.parts[place]
        out = result.array[own]
        one.codec.quantised(mean, out, one.effect.session, own.start)
        difference_sq = own_sq = 0.0
        for start in range(0, mean.size, PIECE):
            piece = slice(start, start + PIECE)
            difference_sq += difference(out[piece], ours[piece], out[piece])
            own_sq += float(np.dot(ours[piece], ours[piece]))
        return mean, refused, difference_sq, own_sq

    def averaged(
        self, one: GroupTransfer, mean: Floats, refused: list[int], difference_sq: float, own_sq: float
    ) -> None:
        one.averaging = False
        if one.over:
            self.give_back(one)
            return
        one.mean = mean
        one.refused += [one.effect.members[place] for place in refused]
        for place in sorted(one.out):
            self.send(one, place, mean, one.slices[one.effect.place].start)
        self.add(one, one.effect.place, difference_sq, own_sq)
        self.finish_when_here(one)

    def add(self, one: GroupTransfer, place: int, difference_sq: float, own_sq: float) -> None:
        one.difference_sq += difference_sq
        one.own_sq += own_sq
        where = one.slices[place]
        if norm_accepts(difference_sq, own_sq, where.stop - where.start, self.config.norm_bound) is not None:
            one.refused.append(one.effect.members[place])

    def finish_when_here(self, one: GroupTransfer) -> None:
        """With all means here the difference goes the way of a pair's."""
        if one.missing or one.awaited or one.averaging or one.over or one.result is None:
            return
        if one.mean is None and one.parts.size:
            return
        number = one.effect.session
        link, _ = next(iter(one.out.values()), (None, None))
        if link is None:
            return  # all came, and nothing could be sent: it will fail
        result, one.result = one.result, None
        self.sessions.add(StreamSession(number, link.peer, link, difference=result))
        now = trio.current_time()
        self.perform(self.peer.gathered(number, one.difference_sq, one.own_sq, one.refused, now))

    # -- ends ----------------------------------------------------------------------------------------------------
    def release(self, session: int) -> None:
        self.early.pop(session, None)
        one = self.table.pop(session, None)
        if one is None:
            return
        for link, parts in one.out.values():
            link.stop_bulk(session, parts)
        one.over = True
        if not one.averaging:
            self.give_back(one)

    def give_back(self, one: GroupTransfer) -> None:
        """Buffers go back to the pool, but for those that a link writes to at the moment."""
        if not any(receiver.filling for receiver in one.missing.values()):
            self.pool.give(one.rows)
        if one.result is not None and not any(receiver.filling for receiver in one.awaited.values()):
            self.pool.give(one.result)

    def unlinked(self, link: Link) -> None:
        """Groups that stream over this link have failed, if losing it did not tell them so already."""
        for number, one in list(self.table.items()):
            used = [out for out, _ in one.out.values()] + [heard for heard, _ in one.heard.values()]
            if link in used:
                self.perform(self.peer.failed(number, "broken", trio.current_time()))
        for ahead in self.early.values():
            ahead.drop(link)

    def stalled(self, now: float, stall_s: float) -> list[Link]:
        """Links over which a slice, or a mean that has begun, is awaited, and nothing came for so long."""
        return [
            link for one in self.table.values() for place, (link, moved_at) in one.heard.items()
            if now - moved_at > stall_s and self.owes(one, place)
        ]  # fmt: skip

    @staticmethod
    def owes(one: GroupTransfer, place: int) -> bool:
        mean = one.awaited.get(place)  # which itself waits for others, until it begins
        return place in one.missing or (mean is not None and mean.position > 0)

    def links_used(self) -> set[Link]:
        return {link for one in self.table.values() for link, _ in one.out.values()}

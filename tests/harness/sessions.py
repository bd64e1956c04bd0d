"""A driver's work on vectors: snapshots, streams, group means, masses, and the pieces that a newcomer collects."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from gossip import effects
from gossip.exchange.session import State
from gossip.ids import PeerId
from tests.harness.model import Model, Number

if TYPE_CHECKING:
    from tests.harness.network import Link


@dataclass(slots=True, eq=False)
class Session:
    """The state of one session, from Snapshot or ReceivePiece to Release."""

    pushes: int = 0
    value: Number | None = None  # The snapshot, once it is taken.
    given: Number = 0  # The mass that the snapshot carries away.
    total: Number = 0  # The mass times the value.
    reported: bool = False  # True once the peer knows that the snapshot is taken.
    partner: PeerId | None = None
    link: Link | None = None  # The link of the session's stream.
    theirs: Number | None = None
    transfer: effects.Transfer | None = None
    collect: effects.ReceivePiece | None = None
    serve: effects.SendPiece | None = None
    moments: effects.ReceiveMoments | None = None
    gather: effects.Gather | None = None
    values: dict[PeerId, Number] = field(default_factory=dict)  # In a group: each member's vector, once received.
    means: dict[PeerId, Number] = field(default_factory=dict)  # In a group: the mean of each member's slice.
    late: set[tuple[str, PeerId]] = field(default_factory=set)  # ("values" or "means", member) that are left out.
    sent: dict[PeerId, bool] = field(default_factory=dict)  # The members we stream to; True once our mean was sent too.


class Sessions:
    """The part of a :class:`tests.harness.host.Host` that holds its weights and its sessions."""

    def __init__(self, value: int, conserves: bool, exact: bool) -> None:
        self.model = Model(value, conserves, exact)
        self.sessions: dict[int, Session] = {}
        self.bound: dict[int, Link] = {}  # The link that carries all traffic of a session.
        self.wishes: dict[int, Session] = {}  # The snapshots to take at the next boundary.
        self.early: dict[int, list[tuple[Any, ...]]] = {}  # Streams of groups that have not begun here.
        self.mixes: list[tuple[float, int, PeerId | None]] = []  # (time, session, partner)
        self.adoption: effects.Adopt | None = None
        self.kept: Number | None = None  # The earlier weights, while others are on trial.
        self.restoring = False
        self.pieces: list[tuple[int, int, Number]] = []
        self.base: Number = 0  # The value of the frozen weights.
        self.kept_base: Number = 0  # The earlier frozen weights, while others are on trial.
        self.hash_s = 0.0  # Seconds to hash the frozen weights.
        self.hashes = 0  # Requests for that hash so far; only the latest is answered.
        self.joining_since = -1.0

    @property
    def value(self) -> Number:
        return self.model.value

    @value.setter
    def value(self, value: Number) -> None:
        self.model.total = self.model.mass * value

    # -- effects -----------------------------------------------------------------------------------------------------
    def average(self, effect: effects.Effect) -> None:
        """Perform an effect that is about vectors."""
        match effect:
            case effects.Snapshot(number, pushes):
                self.sessions[number] = self.wishes[number] = Session(pushes)
            case effects.UseLastSnapshot(number):  # This driver keeps no earlier snapshot, so it takes a new one.
                if number not in self.sessions:
                    self.sessions[number] = self.wishes[number] = Session()
            case effects.CopyFrozen(number):
                self.sessions[number] = Session(value=self.base)
                self.later(0.0, self.call, "on_recalled", number)
            case effects.HashFrozen():
                self.hashes += 1
                self.later(self.hash_s, self.hashed, self.hashes, hash_of(self.base))
            case effects.Transfer(number, partner):
                session, link = self.sessions[number], self.bound.get(number)
                if link is None:
                    self.later(0.0, self.call, "on_failed", number, "broken")
                    return
                session.transfer, session.partner, session.link = effect, partner, link
                if effect.sends:
                    self.stream(link, number, "theirs", session.value)
            case effects.Gather(number, members):
                session = self.sessions[number]
                session.gather, session.values[self.id] = effect, session.value
                for member in members:
                    if member != self.id and member not in session.sent and member in self.links:
                        session.sent[member] = False
                        self.stream(self.links[member][-1], number, "values", session.value)
                for came in self.early.pop(number, []):
                    self.arrived(*came)
                self.reduce(number, session)
            case effects.LeaveOut(number, peers, means):
                if (session := self.sessions.get(number)) is None:  # The effect before it ended the group.
                    return
                for member in set(session.gather.members if peers is None else peers) - {self.id}:
                    session.late |= {("values", member)} if member not in session.values else set()
                    session.late |= {("means", member)} if means and member not in session.means else set()
                self.reduce(number, session)
            case effects.Mix(number, weight):
                session = self.sessions[number]
                self.model.pending.append(Fraction(weight) * (session.theirs - session.value))
                self.mixes.append((self.world.now, number, session.partner))
            case effects.Merge(number, mass):  # If nothing was received, our own mass returns.
                session = self.sessions[number]
                if session.theirs is not None:
                    self.mixes.append((self.world.now, number, session.partner))
                self.model.merges.append((mass, mass * (session.value if session.theirs is None else session.theirs)))
            case effects.Rename(number, to):
                self.sessions[to] = self.sessions.pop(number)
                self.bound.pop(number, None)
            case effects.Release(number):
                session = self.sessions.pop(number, None)  # A reservation without a snapshot has no session.
                for table in (self.wishes, self.bound, self.early):
                    table.pop(number, None)
                if session is not None and session.given and not session.reported:
                    self.model.merges.append((session.given, session.total))  # The mass was never sent.
            case effects.SendPiece(number, partner, start):
                session, link = self.sessions[number], self.bound.get(number)
                if session.value is None or link is None or link.other(self).id != partner:
                    self.later(0.0, self.call, "on_failed", number, "broken")
                    return
                session.serve = effect
                self.piece(number, start, link)
            case effects.ReceivePiece(number, partner):
                session = self.sessions[number] = Session(partner=partner, collect=effect)
                if self.joining_since != self.peer.joining.began_at:  # Discard the pieces of an abandoned joining.
                    self.joining_since = self.peer.joining.began_at
                    self.pieces.clear()
                if partner not in self.links:
                    self.later(0.0, self.call, "on_failed", number, "broken")
                    return
                session.link = self.bound[number] = self.links[partner][-1]
            case effects.CopyMoments(number):
                self.sessions[number] = self.wishes[number] = Session()
            case effects.SendMoments(number, partner):
                link = self.bound.get(number)
                if link is None or link.other(self).id != partner:
                    self.later(0.0, self.call, "on_failed", number, "broken")
                    return
                self.stream(link, number, "moments", self.sessions[number].value)
                self.later(self.world.network.streamed_s(link, self), self.call, "on_served", number)
            case effects.ReceiveMoments(number, partner):
                session = self.sessions[number] = Session(partner=partner, moments=effect)
                if partner not in self.links:
                    self.later(0.0, self.call, "on_failed", number, "broken")
                    return
                session.link = self.bound[number] = self.links[partner][-1]
            case effects.MixMoments(number):
                if self.sessions[number].theirs is None:
                    self.world.fail("moments are mixed once they are whole", f"{self} is told {effect}")
            case effects.Adopt():
                self.adoption = effect
            case effects.Confirm():
                self.kept = None
            case effects.Restore():
                self.restoring = True
            case effects.MemberChanged() | effects.Notice():
                pass  # The log has them.
            case _:
                self.world.fail("a driver performs every effect", f"{self} is told {effect}")

    # -- streams -----------------------------------------------------------------------------------------------------
    def stream(self, link: Link, number: int, what: str, value: Any) -> None:
        to = link.other(self)
        to.later(self.world.network.streamed_s(link, self), to.arrived, link, self, number, what, value)

    def arrived(self, link: Link, sender: Sessions, number: int, what: str, value: Number) -> None:
        """Receive a whole stream of one kind: ``theirs`` (pair, push), ``values`` or ``means`` (group), ``moments``."""
        session = self.sessions.get(number)
        if not link.carries(self):
            return
        if what == "moments":
            right = session is not None and session.moments is not None and session.link is link
            if right and session.partner == sender.id and session.theirs is None:
                session.theirs = value
                self.call("on_moments", number, True)
            return
        if what == "theirs":
            right = session is not None and session.transfer is not None and session.transfer.receives
            if right and session.link is link and session.partner == sender.id and session.theirs is None:
                session.theirs = value
                self.report("on_streamed", number, session)
        elif session is None or session.gather is None:
            if number in self.peer.exchanges.table:
                self.early.setdefault(number, []).append((link, sender, number, what, value))
        elif sender.id in session.gather.members and (what, sender.id) not in session.late:
            getattr(session, what)[sender.id] = value
            self.reduce(number, session)

    def reduce(self, number: int, session: Session) -> None:
        """Send our slice's mean to all once no value is awaited, and report the group once no mean is awaited.

        Late members are not awaited. Our value stays in the slice of a member without a mean.
        """
        members, late = session.gather.members, session.late
        if any(member not in session.values and ("values", member) not in late for member in members):
            return
        if self.id not in session.means:
            session.means[self.id] = sum(session.values.values()) / len(session.values)
        mean = session.means[self.id]
        for member, sent in session.sent.items():
            if not sent and member in self.links:
                session.sent[member] = True
                self.stream(self.links[member][-1], number, "means", mean)
        one = self.peer.exchanges.table.get(number)
        has_all = all(member in session.means or ("means", member) in late for member in members)
        if has_all and one is not None and one.state is State.STREAMING:
            is_one = all(session.means.get(member) == mean for member in members)  # A sum of floats would round.
            means = [session.means.get(member, session.value) for member in members]
            session.theirs = mean if is_one else sum(means) / len(means)
            self.report("on_gathered", number, session, {}, sorted({member for _, member in late}))

    def report(self, event: str, number: int, session: Session, *more: Any) -> None:
        """Report ``event`` with the squared distance between the two vectors and the squared norm of ours."""
        apart, own, elements = float(session.theirs - session.value), float(session.value), self.peer.view.elements
        self.call(event, number, apart * apart * elements, own * own * elements, *more)

    # -- what a newcomer collects ------------------------------------------------------------------------------------
    def piece(self, number: int, start: int, link: Link) -> None:
        session = self.sessions.get(number)
        if session is None or session.serve is None or not link.open[link.place(self)]:
            return
        stop, to = min(start + self.world.config.chunk_elements, session.serve.stop), link.other(self)
        delay_s = self.world.network.streamed_s(link, self, chunk=True)
        to.later(delay_s, to.collected, link, number, start, stop, session.value)
        if stop < session.serve.stop:
            self.later(delay_s, self.piece, number, stop, link)
        else:
            self.later(delay_s, self.call, "on_served", number)

    def collected(self, link: Link, number: int, start: int, stop: int, value: Number) -> None:
        session = self.sessions.get(number)
        if session is None or session.collect is None or session.link is not link or not link.carries(self):
            return
        if session.collect.compare:
            held, elements = next((mine for a, b, mine in reversed(self.pieces) if a <= start < b), value), stop - start
            self.call("on_compared", number, float(value - held) ** 2 * elements, float(held) ** 2 * elements)
            return
        self.pieces = [one for one in self.pieces if one[:2] != (start, stop)]  # Another donor may send it again.
        self.pieces.append((start, stop, value))
        self.call("on_collected", number, stop)

    def hashed(self, request: int, digest: bytes) -> None:
        """Report the hash of the frozen weights, unless another was asked for meanwhile."""
        if request == self.hashes:
            self.call("on_frozen_hashed", digest)

    def adopt(self) -> tuple[float, float]:
        """Overwrite the weights with the received ones; return their squared distance and our squared norm."""
        local, trial = self.peer.local, self.adoption.trial
        frozen = [one for one in self.pieces if local.elements <= one[0] < local.weights and local.frozen_elements]
        covered, base = elements_of(self.pieces), elements_of(frozen)
        if covered != self.peer.joining.size - (0 if self.adoption.frozen else local.frozen_elements):
            self.world.fail("a joining vector is whole", f"{self} adopts {covered} elements")
        before = self.base
        if base:
            self.base = sum(mine * (stop - start) for start, stop, mine in frozen) / base
        summed = sum(mine * (stop - start) for start, stop, mine in self.pieces if (start, stop, mine) not in frozen)
        value, own = summed / (covered - base), self.model.value
        self.kept, self.kept_base = (own if trial else None), before
        self.replace(value)
        self.adoption = None
        self.pieces.clear()
        return float(value - own) ** 2 * self.peer.view.elements, float(own) ** 2 * self.peer.view.elements

    def replace(self, value: Number) -> None:
        self.model.replace(value)


def elements_of(pieces: list[tuple[int, int, Number]]) -> int:
    return sum(stop - start for start, stop, _ in pieces)


def hash_of(base: Number) -> bytes:
    """Return the hash that a driver would compute of frozen weights with this value."""
    return hashlib.blake2b(str(float(base)).encode(), digest_size=32).digest()

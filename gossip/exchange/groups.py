"""Group means of one peer: when the slices are streamed, and whether all of them arrived everywhere.

Moshpit SGD (Ryabinin et al., NeurIPS 2021) averages in groups of up to M, everybody sending each member its slice and
each member the mean of its slice to everybody: about twice the vector in all, however large the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gossip.arithmetic.group_mean import norm_accepts
from gossip.arithmetic.mixing import stability_limit
from gossip.effects import Dial, Effect, Gather, MemberState, Mix, Send
from gossip.exchange.agreement import answers
from gossip.exchange.gathering import Gathering
from gossip.exchange.matchmaking import Forming
from gossip.exchange.session import State, version_gap, within
from gossip.exchange.session_table import DOUBT_RETRY_S
from gossip.ids import PeerId
from gossip.wire.messages import MAX_GROUP, Abort, Accept, Begin, Commit, Offer, Outcome, Refuse, Settled

__all__ = ["Groups"]

DOUBTS = 2  # groups asked after at once, two vectors each: the one that a cut left, and the next


class Groups(Forming):
    """All group means of one peer: one at a time, its own or another's. In the place of
    :class:`gossip.exchange.exchanges.Exchanges`, with what Peer and the drivers ask of those."""

    # -- the beginning -------------------------------------------------------------------------------------------
    def gather(self, one: Gathering, now: float) -> list[Effect]:
        elements = self.local.elements
        seconds = 8 * elements / (self.config.slowest_rate_mb_s * 1e6) + 1.0
        seconds += max(self.durations.allowance(peer) for peer in one.members)
        one.state, one.since, one.deadline = State.STREAMING, now, now + seconds
        dials: list[Effect] = []
        for peer in one.members:
            if peer != self.me and not self.mates.linked(peer):
                address = self.mates.address(peer)
                if address is not None:  # else it dials us
                    dials.append(Dial(address, peer))
        return [*dials, self.streams(one, now)]

    def streams(self, one: Gathering, now: float) -> Gather:
        place = one.members.index(self.me)
        return Gather(one.session, one.members, place, one.codec, one.deadline - now)

    def linked(self, peer: PeerId, now: float) -> list[Effect]:
        """There is a link to ``peer``, perhaps the one that a group waits for."""
        return [
            self.streams(one, now) for one in self.table.values()
            if one.state is State.STREAMING and peer in one.members
        ]  # fmt: skip

    # -- messages ------------------------------------------------------------------------------------------------
    def on_offer(self, sender: PeerId, offer: Offer, now: float) -> list[Effect]:
        return [Send(sender, Refuse(offer.session, "mixing"))]

    def on_accept(self, sender: PeerId, accept: Accept, now: float) -> list[Effect]:
        return [Send(sender, Abort(accept.session, "late"))]

    def on_begin(self, sender: PeerId, begin: Begin, now: float) -> list[Effect]:
        one = self.table.get(begin.session)
        if one is None or one.inviter != sender or one.initiator or one.state is not State.OFFERED:
            return [Send(sender, Abort(begin.session, "late"))]
        members = begin.members
        right = (
            2 <= len(members) <= MAX_GROUP and list(members) == sorted(set(members)) and self.me in members
            and sender in members and answers(begin, spread=False)
        )  # fmt: skip
        if not right:
            return [Send(sender, Abort(begin.session, "terms")), *self.fail(one, "terms")]
        one.members, one.mean, one.codec = members, begin.version, begin.codec
        return self.gather(one, now)

    def on_abort(self, sender: PeerId, session: int, code: str, now: float) -> list[Effect]:
        one = self.table.get(session)
        if one is None or sender not in one.others or sender in one.committed:
            return []
        if one.state is State.OFFERED and one.initiator:
            return self.without(one, sender, now)
        if not one.initiator and sender != one.inviter:
            return []
        return self.fail(one, code)

    def on_commit(self, sender: PeerId, session: int, now: float) -> list[Effect]:
        """A member has all means; when all have, the inviter says so."""
        one = self.table.get(session)
        if one is None or not one.initiator or sender not in one.members:
            return []
        one.committed.add(sender)
        return self.finish_all(one, now)

    def finish_all(self, one: Gathering, now: float) -> list[Effect]:
        if one.state is not State.VERIFIED or len(one.committed) < len(one.members) - 1:
            return []
        told = [Send(peer, Settled(one.session, True)) for peer in one.members if peer != self.me]
        return [*told, *self.finish(one, now)]

    def on_outcome(self, sender: PeerId, session: int, now: float) -> list[Effect]:
        """The inviter knows; another member knows only what it was told. Whoever has no memory of it, as an inviter
        that was restarted, proves nothing and says nothing."""
        one = self.table.get(session)
        if one is None:
            known = self.verdicts.get(session)
            return [] if known is None else [Send(sender, Settled(session, known))]
        if one.initiator and sender in one.members:
            return self.on_commit(sender, session, now)  # who asks has committed
        return []

    def on_settled(self, sender: PeerId, settled: Settled, now: float) -> list[Effect]:
        one = self.table.get(settled.session)
        if one is None or one.initiator or sender not in one.members:
            return []
        if one.state not in (State.VERIFIED, State.DOUBT) or (sender != one.inviter and not settled.committed):
            return []  # one that dropped it proves nothing
        return self.finish(one, now) if settled.committed else self.fail(one, "aborted")

    # -- reports of the driver -----------------------------------------------------------------------------------
    def gathered(
        self, session: int, difference_sq: float, own_sq: float, refused: Iterable[PeerId], now: float
    ) -> list[Effect]:
        """All slices are means: |mean - ours|^2, |ours|^2, and whose slices are left out of ours or are no means."""
        one = self.table.get(session)
        if one is None or one.state is not State.STREAMING:
            return []
        members = len(one.members)
        elements = self.local.elements
        code = norm_accepts(difference_sq, own_sq, elements, self.config.norm_bound)
        for peer in refused:
            self.refusals.add(peer, code or "norm")
            self.conduct.note(peer, "refused", now)
            if code is not None:
                self.mates.failed(peer, now)
        if code is not None:
            return self.failed(session, code, now)
        self.seen.append((difference_sq * 2 * members / (members - 1), own_sq))
        one.state = State.VERIFIED
        one.deadline = now + max(self.config.stall_s, one.deadline - now)
        return self.finish_all(one, now) if one.initiator else [Send(one.inviter, Commit(session))]

    def failed(self, session: int, code: str, now: float) -> list[Effect]:
        """A stream of this session stalled, brought wrong bytes, or its link broke ("broken")."""
        one = self.table.get(session)
        if one is None or one.state is not State.STREAMING:
            return []  # what all means are here for, or none yet, needs no stream
        told: list[Effect] = [] if one.initiator else [Send(one.inviter, Abort(session, code))]
        return [*told, *self.fail(one, code)]

    def unlinked(self, peer: PeerId, now: float, orderly: bool = False) -> list[Effect]:
        """No link to ``peer`` is left, and perhaps none can be made."""
        effects: list[Effect] = []
        for one in list(self.table.values()):
            if peer not in one.others:
                continue
            match one.state:
                case State.OFFERED if one.initiator:
                    self.count("unreached")
                    self.mates.failed(peer, now, silent=True)
                    effects += self.without(one, peer, now)
                case State.PREPARING | State.OFFERED if not one.initiator:
                    effects += self.end(one)
                case State.STREAMING:
                    self.mates.failed(peer, now)
                    effects += self.failed(one.session, "broken", now)
                case State.VERIFIED if one.initiator and peer not in one.committed:
                    self.mates.failed(peer, now)
                    effects += self.fail(one, "broken")
                case State.VERIFIED if peer == one.inviter:
                    effects += self.doubt(one, now)
        return effects

    def look_elsewhere(self, state: Callable[[PeerId], MemberState | None], now: float) -> list[Effect]:
        """Whoever is no longer held ALIVE is not waited for until the time is up; one that streams must be DEAD, since
        a doubt passes."""
        effects: list[Effect] = []
        for one in list(self.table.values()):
            if one.initiator and one.state is State.OFFERED:
                lost = [peer for peer in one.invited if state(peer) is not MemberState.ALIVE]
            elif one.state is State.STREAMING:
                lost = [p for p in one.members if p != self.me and state(p) in (MemberState.DEAD, MemberState.LEFT)]
            else:
                continue
            for peer in lost:
                effects += self.unlinked(peer, now)
        return effects

    def doubt(self, one: Gathering, now: float) -> list[Effect]:
        """Ask the inviter how it ended; when it does not answer, the others, who may have heard."""
        ended: list[Effect] = []
        if one.state is not State.DOUBT:
            one.state, one.since = State.DOUBT, max(now, one.deadline)  # by then the inviter has decided
            oldest = self.beyond(DOUBTS)
            ended = [] if oldest is None else self.fail(oldest, "doubt")
        one.deadline = now + DOUBT_RETRY_S
        return [*ended, *[Send(peer, Outcome(one.session)) for peer in one.members if peer != self.me]]

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for one in [one for one in self.table.values() if one.deadline <= now]:
            if self.table.get(one.session) is not one:
                continue  # it made way for a doubt
            if one.state is State.OFFERED and one.initiator:
                for peer in one.invited:
                    self.count("unanswered")
                    self.mates.failed(peer, now, silent=True)
                effects += self.settle_members(one, now)
            elif one.state in (State.PREPARING, State.OFFERED):
                effects += self.withdraw(one)
            elif one.state is State.STREAMING:
                effects += self.failed(one.session, "deadline", now)
            elif one.initiator:
                effects += self.fail(one, "deadline")
            elif one.state is State.VERIFIED or now - one.since < self.config.doubt_s:
                effects += self.doubt(one, now)
            else:
                effects += self.fail(one, "doubt")
        return effects

    def abandon(self) -> list[Effect]:
        """Drop everything under way: the weights they began from are about to be replaced."""
        effects: list[Effect] = []
        for one in list(self.table.values()):
            if one.state in (State.PREPARING, State.OFFERED):
                effects += self.withdraw(one)
            elif one.initiator:
                effects += self.fail(one, "replaced")
            else:
                if one.state is State.STREAMING:
                    effects.append(Send(one.inviter, Abort(one.session, "replaced")))
                effects += self.end(one)  # having said COMMIT we leave it to the others: our weights go
        return effects

    # -- endings -------------------------------------------------------------------------------------------------
    def finish(self, one: Gathering, now: float) -> list[Effect]:
        self.remember(one.session, True)
        if one.state is not State.DOUBT:
            self.durations.add(one.inviter, now - one.since)
        self.done += 1
        self.mates.mixes += 1
        others = [peer for peer in one.members if peer != self.me]
        self.last_partner = others[0]
        self.mixed_at += others
        self.own_mixed = self.own_mixed or one.initiator
        self.local.version = within(self.local.version + version_gap(one.mean, one.ours))
        plain = self.local.settling or self.diverges(one)
        return [Mix(one.session, 1.0, plain=plain), *self.end(one)]

    def diverges(self, one: Gathering) -> bool:
        """Whether the outer step would drive groups of this one's size apart: a group begins with two, and the limit of
        its rate is smaller the fewer they are. All members there are agree whatever the rate that a Config allows."""
        config, members = self.config, len(one.members)
        if config.plain or config.outer[1] < stability_limit(config.outer[0], members):
            return False
        return self.mates.beyond(one.members)

    def fail(self, one: Gathering, code: str) -> list[Effect]:
        """It comes to nothing. A group that had not begun is none that failed."""
        told: list[Effect] = []
        if one.initiator:
            self.remember(one.session, False)
            told = [Send(peer, Abort(one.session, code)) for peer in one.others if peer != self.me]
            self.gave_up = True
        if one.state not in (State.PREPARING, State.OFFERED):
            self.count(code)
        return [*told, *self.end(one)]

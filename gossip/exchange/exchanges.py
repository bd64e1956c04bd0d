"""All exchanges of one peer: from the moment at which both sides stream to how each of them ends."""

from __future__ import annotations

from collections.abc import Callable

from gossip.arithmetic.subsets import ALL
from gossip.codecs import CODECS
from gossip.conduct import NEVER
from gossip.effects import Effect, MemberState, Merge, Mix, Send
from gossip.exchange.agreement import answers
from gossip.exchange.offering import Offering
from gossip.exchange.session import Exchange, State, version_gap, within
from gossip.exchange.session_table import DOUBT_RETRY_S
from gossip.ids import PeerId
from gossip.wire.messages import Abort, Accept, Busy, Commit, Outcome, Settled

__all__ = ["Exchanges"]

EXCUSED = 256  # partners remembered, as many as there may be links
INNOCENT = ("replaced", "late", "overflow")  # reasons for an abort that are nobody's fault
COMMITTING = (State.STREAMING, State.VERIFIED, State.DOUBT)  # before these nothing of ours can have arrived


class Exchanges(Offering):
    """All exchanges of one peer: those of its own mix, and ``partners.incoming()`` that others offered."""

    # -- messages ------------------------------------------------------------------------------------------------
    def on_accept(self, sender: PeerId, accept: Accept, now: float) -> list[Effect]:
        exchange = self.table.get(accept.session)
        if exchange is None or exchange.partner != sender:
            return [Send(sender, Abort(accept.session, "late"))]
        if exchange.state is not State.OFFERED:
            return []  # said twice; an Abort could follow our COMMIT
        spread = self.bounded and exchange.part is ALL
        agreed = answers(accept, spread) and 0 < accept.weight <= exchange.weight
        if not agreed:
            return [Send(sender, Abort(accept.session, "terms")), *self.fail(exchange, now, "terms")]
        exchange.weight, exchange.theirs, exchange.answer_s = accept.weight, accept.version, now - exchange.since
        exchange.codec, exchange.state = accept.codec, State.STREAMING
        return [self.transfer(exchange, now)]

    def on_commit(self, sender: PeerId, session: int, now: float) -> list[Effect]:
        exchange = self.table.get(session)
        if exchange is None or exchange.partner != sender or exchange.state not in COMMITTING:
            return []
        if exchange.push:
            return self.finish(exchange, now) if exchange.initiator else []
        exchange.committed = True
        return self.finish(exchange, now) if exchange.state is not State.STREAMING else []

    def on_abort(self, sender: PeerId, session: int, code: str, now: float) -> list[Effect]:
        exchange = self.table.get(session)
        if exchange is None or exchange.partner != sender:
            return []
        if exchange.state is State.OFFERED:
            return self.offer(exchange, now)
        self.conduct.note(sender, "wasted", now)
        return self.fail(exchange, now, code)

    def on_outcome(self, sender: PeerId, session: int, now: float) -> list[Effect]:
        """Their COMMIT is sent (or, of a push, their vector), or they would not ask; so the answer is whether ours
        is."""
        exchange = self.table.get(session)
        if exchange is not None and exchange.partner == sender:
            verified = not exchange.push and exchange.state in (State.VERIFIED, State.DOUBT)
            ended = self.finish(exchange, now) if verified else self.fail(exchange, now, "broken")
            return [*ended, Send(sender, Settled(session, verified))]
        return [Send(sender, Settled(session, (sender, session) in self.verdicts))]

    def on_settled(self, sender: PeerId, settled: Settled, now: float) -> list[Effect]:
        exchange = self.table.get(settled.session)
        if exchange is None or exchange.partner != sender or exchange.state is not State.DOUBT:
            return []
        return self.finish(exchange, now) if settled.committed else self.fail(exchange, now, "aborted")

    # -- reports of the driver -----------------------------------------------------------------------------------
    def streamed(self, session: int, difference_sq: float, own_sq: float, now: float) -> list[Effect]:
        """All of theirs is here, with checksums right."""
        exchange = self.table.get(session)
        if exchange is None or exchange.state is not State.STREAMING:
            return []
        partner, elements = exchange.partner, self.elements(exchange)
        refused = self.filter.judge(partner, difference_sq, own_sq, elements, self.local.version)
        if refused is not None:
            self.refusals.add(partner, refused)
            self.conduct.note(partner, "refused", now)
            return [Send(partner, Abort(session, refused)), *self.fail(exchange, now, refused)]
        whole = self.local.elements / elements if exchange.part.kind != "all" else 1.0
        self.seen.append((difference_sq * whole, own_sq * whole))
        taken, why = self.filter.take(partner, exchange.weight, difference_sq, elements, self.partners.here)
        for code in why:
            self.refusals.add(partner, code)
        if taken == 1.0:
            self.conduct.excuse(partner, "clipped")
        else:
            self.conduct.note(partner, "clipped", now)
            exchange.weight *= taken
            exchange.mass *= taken  # of a push: what counts for less moves its receiver less
        commit = Send(partner, Commit(session))
        if exchange.committed or exchange.push:
            return [commit, *self.finish(exchange, now)]
        exchange.state = State.VERIFIED
        exchange.until = now + max(self.config.stall_s, exchange.until - now)
        if exchange.parked:
            exchange.deadline = exchange.until
        return [commit]

    def failed(self, session: int, code: str, now: float) -> list[Effect]:
        """The streams of this session stalled or brought wrong bytes, or the link it ran over broke ("broken")."""
        exchange = self.table.get(session)
        if exchange is None:
            return []
        match exchange.state:
            case State.VERIFIED:
                return self.doubt(exchange, now)
            case State.OFFERED:
                if code == "idle":  # the offer crossed the word that the link was not needed
                    return self.offer(exchange, now)
                return self.unanswered(exchange, now, "unreached")
            case State.STREAMING if exchange.push and exchange.initiator and self.conserves:
                return self.doubt(exchange, now)  # all of it may have arrived
            case State.STREAMING:
                self.conduct.note(exchange.partner, "wasted", now)
                untold = code in ("broken", "idle")
                told: list[Effect] = [] if untold else [Send(exchange.partner, Abort(session, code))]
                return [*told, *self.fail(exchange, now, code)]
            case State.PREPARING if not exchange.initiator:
                return self.fail(exchange, now, code)
        return []

    def unlinked(self, peer: PeerId, now: float, orderly: bool = False) -> list[Effect]:
        """No link to ``peer`` is left, and perhaps none can be made. ``orderly``: the last was not needed. What ran
        on it was told one by one, and an offer may be waiting for another link."""
        if orderly:
            return []
        sessions = [one.session for one in self.table.values() if one.partner == peer and one.state is not State.DOUBT]
        return [effect for session in sessions for effect in self.failed(session, "broken", now)]

    def look_elsewhere(self, state: Callable[[PeerId], MemberState | None], now: float) -> list[Effect]:
        """An offer to one that is no longer held ALIVE goes to another, before its time is up; and a doubt ends when
        the only one who knows is gone."""
        lost = [
            own.session for own in self.table.values()
            if own.initiator and own.state is State.OFFERED and state(own.partner) is not MemberState.ALIVE
        ]  # fmt: skip
        effects = [effect for session in lost for effect in self.failed(session, "broken", now)]
        for exchange in [one for one in self.table.values() if one.state is State.DOUBT]:
            if state(exchange.partner) in (MemberState.DEAD, MemberState.LEFT):
                effects += self.fail(exchange, now, "doubt")
        return effects

    def doubt(self, exchange: Exchange, now: float) -> list[Effect]:
        """Ask the partner how it ended. A partner that died at the worst moment, or will not say, costs one exchange
        and not doubt_s of them: neither our own mix nor anybody's offer waits for the answer."""
        ended: list[Effect] = []
        if exchange.state is not State.DOUBT:
            exchange.state, exchange.since = State.DOUBT, now
            self.outgoing.pop(exchange.session, None)
            oldest = self.beyond(self.most_doubts)
            ended = [] if oldest is None else self.fail(oldest, now, "doubt")
        exchange.deadline = now + DOUBT_RETRY_S
        return [*ended, Send(exchange.partner, Outcome(exchange.session))]

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for exchange in [one for one in self.table.values() if one.deadline <= now]:
            if self.table.get(exchange.session) is not exchange:
                continue  # it made way for a doubt
            if now < exchange.until and exchange.state is not State.DOUBT:
                self.park(exchange, now)
                exchange.deadline = exchange.until
            elif exchange.state is State.OFFERED:
                self.conduct.note(exchange.partner, "wasted", now)
                told = Send(exchange.partner, Abort(exchange.session, "late"))
                effects += [told, *self.unanswered(exchange, now, "unanswered")]
            elif exchange.state is State.PREPARING:
                effects += [Send(exchange.partner, Busy(exchange.session)), *self.drop(exchange)]
            elif exchange.state is State.STREAMING:
                effects += self.failed(exchange.session, "deadline", now)
            elif exchange.state is State.VERIFIED:
                self.partners.failed(exchange.partner, now)  # whose link is whole, and who does not say COMMIT
                self.conduct.note(exchange.partner, "wasted", now)
                exchange.blamed = True
                effects += self.doubt(exchange, now)
            elif now - exchange.since < self.config.doubt_s:
                effects += self.doubt(exchange, now)
            else:
                if not exchange.blamed:
                    self.conduct.note(exchange.partner, "wasted", now)
                effects += self.fail(exchange, now, "doubt")
        return effects

    def abandon(self) -> list[Effect]:
        """Drop everything under way: the weights they began from are about to be replaced."""
        effects: list[Effect] = []
        for exchange in list(self.table.values()):
            if exchange.state in (State.OFFERED, State.STREAMING):
                effects.append(Send(exchange.partner, Abort(exchange.session, "replaced")))
            elif exchange.state is State.PREPARING and not exchange.initiator:
                effects.append(Send(exchange.partner, Busy(exchange.session)))
            exchange.mass = 0.0  # of weights that go
            effects += self.drop(exchange)
        return effects

    def unanswered(self, exchange: Exchange, now: float, code: str) -> list[Effect]:
        """Nothing came of an offer, and another partner is asked."""
        self.count(code)
        self.partners.failed(exchange.partner, now, silent=True)
        return self.offer(exchange, now)

    # -- endings -------------------------------------------------------------------------------------------------
    def finish(self, exchange: Exchange, now: float) -> list[Effect]:
        session, partner = exchange.session, exchange.partner
        self.remember((partner, session), True)
        doubted = exchange.state is State.DOUBT
        if not doubted:
            seconds = now - exchange.since
            self.durations.add(partner, seconds, CODECS[exchange.codec].encoded_bytes(self.elements(exchange)))
            self.partners.heard(partner, seconds)
            self.streams.add(partner, seconds)
        if exchange.initiator:
            self.answers.add(partner, exchange.answer_s)
        self.done += 1
        self.last_partner = partner
        self.conduct.excuse(partner, "wasted")
        self.excused.pop(partner, None)
        self.partners.mixed(partner, now, exchange.initiator)
        if exchange.push and not exchange.initiator:
            return [Merge(session, exchange.mass), *self.end(exchange)]
        if not doubted:  # else its own mix was given up for this one, and it has earned no trust by it
            self.mixed_at.append(partner)
            self.own_mixed = self.own_mixed or exchange.initiator
            self.gave_way = self.gave_way and not exchange.initiator
        if exchange.push:
            return self.end(exchange)
        if self.learns and exchange.part is ALL:
            self.bounded = True
        if self.fragments is not None:
            self.fragments.mixed(exchange.part)
        # The weights' age is averaged as the weights are: by the difference of what was exchanged.
        if exchange.theirs > NEVER > exchange.ours:
            self.conduct.note(partner, "claims", now)
        moved = exchange.weight if exchange.part is ALL else exchange.weight * exchange.part.share
        self.local.version = within(self.local.version + moved * version_gap(exchange.theirs, exchange.ours))
        late = (doubted or exchange.overtaken) and not self.config.plain
        return [Mix(session, exchange.weight, late, self.local.settling), *self.end(exchange)]

    def excuses(self, partner: PeerId) -> bool:
        """Whether an exchange that ended for an innocent reason costs its partner nothing. A reason is a claim, and who
        gives one again and again holds a slot as well as who gives none: it is believed once for each finished
        exchange."""
        if partner in self.excused:
            return False
        self.excused[partner] = None
        if len(self.excused) > EXCUSED:
            del self.excused[next(iter(self.excused))]
        return True

    def fail(self, exchange: Exchange, now: float, code: str) -> list[Effect]:
        self.count(code)
        if code == "overflow":
            self.bounded = False  # once more with a codec that needs no bound, which shows how wide it must be
        if not exchange.blamed and not (code in INNOCENT and self.excuses(exchange.partner)):
            self.partners.failed(exchange.partner, now, silent=exchange.state is State.PREPARING)
        if exchange.initiator and not exchange.parked:
            self.gave_up = True
        return self.drop(exchange)

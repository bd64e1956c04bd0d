"""The peers' decisions at the fast level: which pairs exchange and when, one exchange at a time, in virtual time.

A simulated peer decides as :class:`gossip.peer.Peer` does: when a mix is due, which partner to ask, when it is busy,
the weight of a pair, and when to background a slow exchange. Single messages are not simulated. An offer and its answer
take their transfer times. Everything that follows an answer is computed at once, and is revised only if a peer dies.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import cast

from gossip.arithmetic.mixing import pair_cap
from gossip.config import Config
from gossip.exchange.durations import Waits
from gossip.exchange.exchanges import MAX_STREAM_RATIO
from gossip.ids import PeerId
from gossip.initiator import RETRY_S
from gossip.recent import Recent
from gossip.schedule import Schedule, collision_delay_s
from gossip.selection.partners import MAX_MIXED, MIN_GAP
from gossip.selection.rule import uniform
from sim.engine.events import Events
from sim.exchanges.clocks import Clocks
from sim.exchanges.intervals import Intervals
from sim.exchanges.meeting import FIRST, SECOND, Meeting
from sim.exchanges.strangers import Strangers
from sim.exchanges.streams import StreamTimes
from sim.exchanges.tape import ADD, DROP, SNAP, Tape
from sim.seeds import Draws

__all__ = ["Control"]


class Control:
    """The decisions of all peers. Each list holds one entry per peer.

    ``intervals``: None if no peer chooses its own interval.
    """

    def __init__(
        self, events: Events, config: Config, clocks: Clocks, streams: StreamTimes, tape: Tape, draws: Sequence[Draws],
        intervals: Intervals | None,
    ) -> None:  # fmt: skip
        self.events, self.config, self.clocks = events, config, clocks
        self.streams, self.tape, self.draws, self.intervals = streams, tape, draws, intervals
        self.rngs = [cast(random.Random, one) for one in draws]  # Draws has all methods that gossip calls
        peers = len(draws)
        self.alive: list[int] = []
        self.ready = [False] * peers  # the peer is up and has the run's weights
        self.schedules = [Schedule(config, rng) for rng in self.rngs]
        self.table: list[list[Meeting]] = [[] for _ in range(peers)]  # exchanges in progress
        self.moving = [0] * peers  # number of exchanges that take a slot
        self.outgoing: list[list[Meeting]] = [[] for _ in range(peers)]  # exchanges with a slot that the peer initiated
        self.waiting = [False] * peers  # a due mix waits for the end of an exchange that another peer initiated
        self.retry_at = [0.0] * peers
        self.due_at = [math.inf] * peers  # time of the valid event for the next mix; other events are void
        self.counted = [0] * peers  # step count at its last update
        self.met = [Recent[int, int](MAX_MIXED) for _ in range(peers)]  # step count at the last mix, by recent partner
        self.last_partner = [-1] * peers
        self.strangers = Strangers(self.table, self.met)
        self.answers: dict[int, Waits] = {}  # the durations of answers, by peer
        self.waits: dict[int, Waits] = {}  # the durations of streams with their commits, by peer
        self.asking = -1  # the peer that selects a partner now; see fits()
        self.plain, self.overlaps, self.incoming = config.plain, config.overlaps, config.incoming_limit
        self.most = config.incoming_limit + 1  # limit of exchanges in progress where mixes overlap
        self.max_backgrounded = config.incoming_limit + config.partners
        # Counters for the report
        self.mixes = self.failed = self.offers = self.busy = self.accepts = 0

    def begin(self, peer: int) -> None:
        """Let a peer that has received the run's weights take part from now on."""
        self.ready[peer] = True
        self.retry_at[peer], self.waiting[peer], self.due_at[peer] = 0.0, False, math.inf
        schedule = self.schedules[peer]
        schedule.due_steps = schedule.earned_steps = self.counted[peer]  # a node's new life counts from 0 instead
        schedule.begin(self.counted[peer], self.events.now)
        self.arm(peer)

    def fits(self, peer: int) -> bool:
        return peer != self.asking and self.ready[peer]

    def overlapping(self, peer: int) -> bool:
        """Return True if mixes may overlap now, as in :attr:`gossip.exchange.exchanges.Exchanges.overlapping`."""
        answers, waits = self.answers.get(peer), self.waits.get(peer)
        if not self.overlaps or answers is None or waits is None:
            return False
        return waits.median_s <= MAX_STREAM_RATIO * answers.median_s < math.inf

    def every(self, peer: int) -> int:
        """Return the local steps between two mixes of a peer at present."""
        every = self.schedules[peer].every
        assert every is not None, "mixes by steps alone"
        return every

    def due_steps(self, peer: int) -> int:
        """Return the step count at which the peer's next mix is due, given its mixes in progress."""
        return self.schedules[peer].postponed_steps(self.moving[peer] if self.overlapping(peer) else 0)

    # -- initiating an exchange ----------------------------------------------------------------------------------
    def arm(self, peer: int) -> None:
        """Schedule a check at the boundary where the next mix is due, unless an earlier check is scheduled."""
        now, due = self.events.now, self.due_steps(peer)
        steps = self.clocks.after(peer, max(now, self.retry_at[peer]))
        when = self.clocks.time(peer, max(due, steps))
        if when < self.due_at[peer]:
            self.due_at[peer] = when
            self.events.push(when, self.on_due, peer, when)

    def on_due(self, peer: int, when: float) -> None:
        """Initiate an exchange at a boundary if the peer's mix is due."""
        if when != self.due_at[peer]:
            return
        self.due_at[peer] = math.inf
        overlapping = self.overlapping(peer)
        if (self.outgoing[peer] and not overlapping) or not self.ready[peer]:
            return
        steps = self.clocks.after(peer, when) - 1
        if steps < self.due_steps(peer) or when < self.retry_at[peer]:
            self.arm(peer)
            return
        self.counted[peer] = steps
        if self.moving[peer] >= (self.most if overlapping else 1):  # all slots are taken by exchanges in progress
            self.waiting[peer], self.retry_at[peer] = True, when + RETRY_S
            return
        others = {one.partner(peer) for one in self.table[peer]}
        partner = self.choose(peer, others, again=False)
        if partner is None:
            self.waiting[peer], self.retry_at[peer] = self.moving[peer] > 0, when + RETRY_S
            if not self.waiting[peer]:
                self.arm(peer)
            return
        one = Meeting(peer, self.tape.exchange(peer), steps, when, others)
        self.tape.put(peer, steps, SNAP, one.number, FIRST)
        self.outgoing[peer].append(one)
        self.table[peer].append(one)
        self.moving[peer] += 1
        self.ask(one, partner)
        if overlapping:
            self.arm(peer)

    def choose(self, peer: int, asked: set[int], again: bool) -> int | None:
        """Select a partner as :meth:`gossip.selection.partners.Partners.choose` does, or None."""
        self.asking, rng = peer, self.rngs[peer]
        wary = self.strangers.barred(peer, self.events.now)
        if again or wary:
            known = list(self.met[peer])
            partner = uniform(known, rng, self.fits, asked)
            if partner is not None or (wary and known):
                return partner
        return uniform(self.alive, rng, self.fits, asked)

    def ask(self, one: Meeting, partner: int) -> None:
        peer = one.first
        one.asked.add(partner)
        one.attempt += 1
        one.second, one.since = partner, self.events.now
        one.weight = pair_cap(self.moving[peer])
        self.offers += 1
        if self.streams.near:
            self.on_offer(one, one.attempt)
        else:
            takes = self.streams.message(peer, partner, one.since)
            self.events.push(one.since + takes, self.on_offer, one, one.attempt)

    def on_busy(self, one: Meeting, attempt: int) -> None:
        """Ask another partner, preferably a recent one; after too many refusals, back off for a while."""
        if attempt != one.attempt or one.ended:
            return
        peer, backgrounded, partner = one.first, one.backgrounded & 1, None
        if not backgrounded and len(one.asked) < one.tries:
            partner = self.choose(peer, one.asked, again=True)
        if partner is not None:
            self.ask(one, partner)
            return
        self.give_up(one)
        if not backgrounded:
            self.collided(peer)
        self.released(peer)

    def give_up(self, one: Meeting) -> None:
        """Abandon an offer that the peer has made."""
        one.ended = 3
        self.tape.put(one.first, one.begun, DROP, one.number, FIRST)
        self.leave(one, FIRST)

    def collided(self, peer: int) -> None:
        self.retry_at[peer] = self.events.now + collision_delay_s(self.rngs[peer])

    def leave(self, one: Meeting, side: int) -> None:
        """Remove an exchange from one side, and free the slot that it takes there."""
        peer = one.second if side else one.first
        self.table[peer].remove(one)
        if one.backgrounded >> side & 1:
            return
        self.moving[peer] -= 1
        if not side:
            self.outgoing[peer].remove(one)

    # -- answering an offer --------------------------------------------------------------------------------------
    def on_offer(self, one: Meeting, attempt: int) -> None:
        if attempt != one.attempt or one.ended:
            return
        first, second, now = one.first, one.second, self.events.now
        if not self.ready[second]:  # the responder died meanwhile, and its machine resets the connection
            self.events.push(now + self.streams.latency(second, first), self.on_unreached, one, attempt)
            return
        steps = self.clocks.after(second, now)
        self.counted[second] = steps - 1
        if self.takes(second, first):
            self.accept(one, steps, now)
            return
        self.busy += 1
        if self.streams.near:
            self.on_busy(one, attempt)
        else:
            takes = self.streams.message(second, first, now)
            self.wait(one, FIRST, one.since, now + takes, self.answers)
            self.events.push(now + takes, self.on_busy, one, attempt)

    def on_unreached(self, one: Meeting, attempt: int) -> None:
        """Count the failure of an offer to a dead peer, and ask another one."""
        if attempt == one.attempt and not one.ended:
            self.failed += 1
            self.strangers.slow(one.first, one.second, self.events.now)
            self.on_busy(one, attempt)

    def takes(self, peer: int, sender: int) -> bool:
        """Return True if the peer accepts an offer: it has a free slot and has not just mixed with the sender."""
        moving, own, now = self.moving[peer], self.outgoing[peer], self.events.now
        offers = [one for one in own if now < one.answered]
        crossed = next((one for one in offers if one.second == sender), None)
        if crossed is not None:
            if peer < sender:  # the smaller index wins if two offers cross
                return False
            offers.remove(crossed)
            moving -= 1
        if self.streams.patient and (self.streams_with(peer, sender) or self.strangers.shuns(peer, sender, now)):
            return False
        limit, overlapping = 1, self.overlapping(peer)
        if self.plain or overlapping:
            limit = self.incoming - (sender == self.last_partner[peer] and self.incoming > 1)
            limit += len(own) - (crossed is not None)
        if overlapping:
            limit = min(limit, self.most)
        overdue = next((one for one in offers if moving >= limit and self.overdue(peer, one)), None)
        if moving - (overdue is not None) >= limit:
            return False
        met = self.met[peer].get(sender)
        if met is not None and self.counted[peer] - met < MIN_GAP * self.every(peer):
            self.asking = peer
            if uniform(self.alive, self.rngs[peer], self.fits, (sender,)) is not None:
                return False
        if crossed is not None:
            self.give_up(crossed)
        elif overdue is not None:
            self.background(overdue, FIRST)
        return True

    def accept(self, one: Meeting, steps: int, now: float) -> None:
        """Accept an offer, and compute the exchange from the responder's snapshot at its next boundary on."""
        first, second, tape, streams = one.first, one.second, self.tape, self.streams
        self.table[second].append(one)
        self.moving[second] += 1
        one.weight = min(one.weight, pair_cap(self.moving[second]))
        at = one.at = self.clocks.time(second, steps)
        one.steps = steps
        self.accepts += 1
        tape.second[one.number], tape.weight[one.number] = second, one.weight
        tape.every[FIRST][one.number], tape.every[SECOND][one.number] = self.every(first), self.every(second)
        tape.put(second, steps, SNAP, one.number, SECOND)
        if streams.instant:
            one.answered, one.verified = at, (at, at)
            streams.begin(at, at)
            self.events.push(at, self.on_both, one, now)
            return
        answered = one.answered = at + streams.message(second, first, at)
        streams.begin(at, answered)
        # The responder sends its Accept and then its stream. The initiator streams once it has the Accept. Each side
        # sends its Commit when it has received the other's stream.
        verified = at + streams.stream(second, first, at), answered + streams.stream(first, second, answered)
        one.verified = verified
        ends = (
            max(verified[0], verified[1] + streams.message(second, first, verified[1])),
            max(verified[1], verified[0] + streams.message(first, second, verified[0])),
        )
        self.wait(one, FIRST, one.since, answered, self.answers)
        for side, since, wished in ((FIRST, answered, one.wished), (SECOND, at, now)):
            self.wait(one, side, since, ends[side], self.waits)
            self.events.push(ends[side], self.on_end, one, side, wished)

    # -- the end of an exchange ----------------------------------------------------------------------------------
    def on_both(self, one: Meeting, wished: float) -> None:
        self.on_end(one, FIRST, one.wished)
        self.on_end(one, SECOND, wished)

    def on_end(self, one: Meeting, side: int, wished: float) -> None:
        """Finish the exchange for one side, which adds the result at its next boundary."""
        if one.ended >> side & 1:
            return
        peer, partner = (one.second, one.first) if side else (one.first, one.second)
        now, other = self.events.now, one.ended
        one.ended = other | 1 << side
        steps = self.clocks.after(peer, now)
        self.tape.every_at_end[side][one.number] = self.every(peer)
        self.tape.put(peer, steps, ADD, one.number, side)
        if one.broken:  # the other side is dead, so nothing else will free the snapshots
            self.tape.put(peer, steps, DROP, one.number, side)
        self.mixes += 1
        self.streams.timed(now - wished)
        if self.streams.patient or self.overlaps:
            since = one.at if side else one.answered
            self.waits.setdefault(peer, Waits()).add(cast(PeerId, partner), now - since)
            if not side:
                self.answers.setdefault(peer, Waits()).add(cast(PeerId, partner), one.answered - one.since)
        self.leave(one, side)
        if side and self.counted[peer] < one.steps:
            self.counted[peer] = one.steps
        met, counted = self.met[peer], self.counted[peer]
        if partner not in met:
            self.strangers.mixed(peer)
        met[partner] = counted
        self.last_partner[peer] = partner
        if self.intervals is not None:
            if not side:
                self.intervals.note(peer, partner, now - one.since)
            self.intervals.adapt(peer, self.schedules[peer], steps - 1, self.clocks.time(peer, steps - 1))
        self.schedules[peer].on_mixed(counted, now, not side)
        self.released(peer)

    def released(self, peer: int) -> None:
        """Check again for a due mix after an exchange has freed a slot."""
        if self.waiting[peer] and self.moving[peer] < (self.most if self.overlapping(peer) else 1):
            self.waiting[peer], self.retry_at[peer] = False, self.events.now
        if not self.waiting[peer]:
            self.arm(peer)

    # -- the end of a peer ---------------------------------------------------------------------------------------
    def end(self, peer: int, steps: int) -> None:
        """Remove a peer that dies or leaves after ``steps`` counted steps, and reset its state."""
        self.ready[peer] = False
        for one in self.table[peer]:
            self.part(one, peer)
        self.table[peer].clear()
        self.met[peer].clear()
        self.moving[peer] = 0
        self.outgoing[peer].clear()
        self.due_at[peer], self.counted[peer], self.last_partner[peer] = math.inf, steps, -1
        self.strangers.forget(peer)
        self.answers.pop(peer, None)
        self.waits.pop(peer, None)
        if self.intervals is not None:
            self.intervals.forget(peer)
        self.schedules[peer] = Schedule(self.config, self.rngs[peer])

    def part(self, one: Meeting, peer: int) -> None:
        """End an exchange for a dying peer.

        The other side still mixes if the whole stream and the Commit are already on their way to it.
        """
        now, side, tape = self.events.now, SECOND if peer == one.second else FIRST, self.tape
        if one.answered == math.inf:  # an offer without an Accept
            one.ended = 3
            tape.put(peer, one.begun, DROP, one.number, side)
            return
        other, partner = 1 - side, one.partner(peer)
        latency = self.streams.latency(peer, partner)
        if one.ended >> other & 1:  # the other side has mixed
            one.ended = 3
            tape.put(partner, self.clocks.after(partner, now), DROP, one.number, other)
        elif one.verified[side] <= now and one.verified[other] - latency <= now:
            one.ended, one.broken = 1 << side, True
        else:
            one.ended = 3
            self.events.push(now + latency + self.streams.closed_s(self.draws[peer]), self.on_broken, one, other)

    def on_broken(self, one: Meeting, side: int) -> None:
        """Fail the exchange on one side, which learns that its partner is gone."""
        peer, partner = (one.second, one.first) if side else (one.first, one.second)
        if one not in self.table[peer]:
            return  # this peer is gone as well
        self.failed += 1
        steps = max(one.steps if side else one.begun, self.clocks.after(peer, self.events.now))
        self.tape.put(peer, steps, DROP, one.number, side)
        self.strangers.slow(peer, partner, self.events.now)
        self.leave(one, side)
        if not (side or one.backgrounded & 1):
            self.collided(peer)
        self.released(peer)

    # -- slow exchanges ------------------------------------------------------------------------------------------
    def wait(self, one: Meeting, side: int, since: float, until: float, usual: dict[int, Waits]) -> None:
        """Schedule the exchange to be backgrounded if the wait from ``since`` to ``until`` exceeds the usual one."""
        waits = usual.get(one.second if side else one.first)
        if waits is not None and until - since > waits.limit_s:
            when = max(since + waits.limit_s, self.events.now)
            self.events.push(when, self.on_impatient, one, side, one.attempt)

    def on_impatient(self, one: Meeting, side: int, attempt: int) -> None:
        peer = one.second if side else one.first
        if attempt == one.attempt and not (one.ended | one.backgrounded) >> side & 1 and one in self.table[peer]:
            self.background(one, side)
            self.released(peer)

    def background(self, one: Meeting, side: int) -> None:
        """Background an exchange, which frees its slot, if the limit of backgrounded exchanges allows it."""
        peer, partner = (one.second, one.first) if side else (one.first, one.second)
        if sum(each.is_backgrounded_at(peer) for each in self.table[peer]) >= self.max_backgrounded:
            return
        one.backgrounded |= 1 << side
        self.moving[peer] -= 1
        if not side:
            self.outgoing[peer].remove(one)
        self.strangers.slow(peer, partner, self.events.now)

    def overdue(self, peer: int, own: Meeting) -> bool:
        """Return True if the peer's own offer waits unusually long and can be backgrounded for another peer's offer."""
        waits = self.answers.get(peer)
        backgrounded = sum(each.is_backgrounded_at(peer) for each in self.table[peer])
        late = waits is not None and self.events.now - own.since >= waits.learned_limit_s
        return late and backgrounded < self.max_backgrounded

    def streams_with(self, peer: int, sender: int) -> bool:
        """Return True if an exchange between the two peers has reached its streams."""
        now = self.events.now
        return any(
            one.partner(peer) == sender and now >= (one.at if peer == one.second else one.answered)
            for one in self.table[peer]
        )

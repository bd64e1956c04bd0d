"""The peers' decisions at the fast level: which pairs exchange and when, one exchange at a time, in virtual time.

A simulated peer decides as :class:`gossip.peer.Peer` does: when a mix is due, which partner to ask, when it is busy,
the weight of a pair, and when to background a slow exchange (:mod:`sim.exchanges.pair_exchange`). Single messages are
not simulated. An offer and its answer take their transfer times. Everything that follows an answer is computed at once,
and is revised only if a peer dies.

The way of an exchange: on_due, send_offer, on_offer, accept (or on_busy and the next offer), on_end for each side. The
arithmetic follows later: decisions only log it on the tape (:mod:`sim.exchanges.tape`), for the *boundary*, the end of
a training step, at which a peer copies or changes its model. Where answers take long, a peer's mixes *overlap*.
"""

import math
import random
from collections.abc import Sequence
from typing import cast

from gossip.arithmetic.mixing import pair_cap
from gossip.config import Config
from gossip.exchange.durations import Waits
from gossip.initiator import RETRY_S
from gossip.recent import Recent
from gossip.schedule import Schedule, collision_delay_s
from gossip.selection.partners import MAX_MIXED, MIN_GAP
from gossip.selection.rule import uniform
from gossip.unordered import UnorderedList
from sim.engine.events import Events
from sim.exchanges.clocks import Clocks
from sim.exchanges.intervals import Intervals, UsualWaits
from sim.exchanges.pair_exchange import BOTH, INITIATOR, RESPONDER, PairExchange, Slots
from sim.exchanges.strangers import Strangers
from sim.exchanges.streams import StreamTimes
from sim.exchanges.tape import ADD, DROP, SNAPSHOT, Tape
from sim.seeds import Draws


class Decisions:
    """The decisions of all peers, which are numbered from 0. Each list holds one entry per peer.

    ``intervals``: None if no peer chooses the number of steps between its mixes.
    """

    def __init__(
        self, events: Events, config: Config, clocks: Clocks, streams: StreamTimes, tape: Tape, draws: Sequence[Draws],
        intervals: Intervals | None,
    ) -> None:  # fmt: skip
        self.events, self.config, self.clocks = events, config, clocks
        self.streams, self.tape, self.draws, self.intervals = streams, tape, draws, intervals
        # The same generators under the type that gossip asks for: Draws has all methods that gossip calls.
        self.rngs = [cast(random.Random, draw) for draw in draws]
        peers = len(draws)
        self.alive = UnorderedList[int]()  # The peers that are up.
        self.ready = [False] * peers  # The peer is up and has the run's weights.
        self.schedules = [Schedule(config, rng) for rng in self.rngs]
        self.slots = Slots(peers)
        self.waits_for_slot = [False] * peers  # A due mix waits for the end of an exchange that another peer initiated.
        self.retry_at = [0.0] * peers  # The peer initiates no exchange before this time.
        self.due_at = [math.inf] * peers  # Time of the valid event for the next mix; other events are void.
        self.counted_steps = [0] * peers  # The count that it decides by; like a node, it looks only now and then.
        # Step count at the last mix, by recent partner.
        self.mixed_with = [Recent[int, int](MAX_MIXED) for _ in range(peers)]
        self.last_partner = [-1] * peers  # -1 before the first mix of a life.
        self.strangers = Strangers(self.slots.exchanges, self.mixed_with)
        self.usual_waits = UsualWaits()
        self.selecting = -1  # The peer for which is_candidate() answers at the moment; -1 before the first.
        # Plain: without an outer step, so that a peer may take part in several exchanges at once.
        self.is_plain, self.can_overlap, self.max_incoming = config.plain, config.overlaps, config.incoming_limit
        self.max_overlapping = config.incoming_limit + 1  # Limit of exchanges in progress where mixes overlap.
        self.max_backgrounded = config.incoming_limit + config.partners
        # Counters for the report: mixes of both sides, failures, and messages by kind.
        self.mixes = self.failures = self.offers = self.refusals = self.accepts = 0

    def begin(self, peer: int) -> None:
        """Let a peer that has received the run's weights take part from now on."""
        self.ready[peer] = True
        self.retry_at[peer], self.waits_for_slot[peer], self.due_at[peer] = 0.0, False, math.inf
        schedule, steps = self.schedules[peer], self.counted_steps[peer]
        schedule.due_steps = schedule.fair_steps = steps  # Steps are counted over all lives; a node counts from 0.
        schedule.begin(steps, self.events.now)
        self.schedule_check(peer)

    def is_candidate(self, peer: int) -> bool:
        """Return True if the selecting peer may choose this one."""
        return peer != self.selecting and self.ready[peer]

    def is_overlapping(self, peer: int) -> bool:
        """Return True if mixes may overlap now, as :attr:`gossip.exchange.exchanges.Exchanges.is_overlapping` does."""
        return self.can_overlap and self.usual_waits.are_answers_long(peer)

    def interval_steps(self, peer: int) -> int:
        """Return the local steps between two mixes of a peer at present."""
        steps = self.schedules[peer].every
        assert steps is not None, "mixes by steps alone"
        return steps

    def due_steps(self, peer: int) -> int:
        """Return the step count at which the peer's next mix is due, given its mixes in progress."""
        return self.schedules[peer].postponed_steps(self.slots.used[peer] if self.is_overlapping(peer) else 0)

    # -- initiating an exchange ----------------------------------------------------------------------------------
    def schedule_check(self, peer: int) -> None:
        """Schedule a check at the boundary where the next mix is due, unless an earlier check is scheduled."""
        now, due = self.events.now, self.due_steps(peer)
        steps = self.clocks.next_boundary(peer, max(now, self.retry_at[peer]))
        when = self.clocks.time_of(peer, max(due, steps))
        if when < self.due_at[peer]:
            self.due_at[peer] = when
            self.events.push(when, self.on_due, peer, when)

    def on_due(self, peer: int, when: float) -> None:
        """Initiate an exchange at a boundary if the peer's mix is due."""
        if when != self.due_at[peer]:  # An earlier check has replaced this one.
            return
        self.due_at[peer] = math.inf
        is_overlapping = self.is_overlapping(peer)
        if (self.slots.own[peer] and not is_overlapping) or not self.ready[peer]:
            return
        steps = self.clocks.next_boundary(peer, when) - 1  # The event is at a boundary: these are the steps done there.
        if steps < self.due_steps(peer) or when < self.retry_at[peer]:
            self.schedule_check(peer)
            return
        self.counted_steps[peer] = steps
        if self.slots.used[peer] >= (self.max_overlapping if is_overlapping else 1):
            self.waits_for_slot[peer], self.retry_at[peer] = True, when + RETRY_S
            return
        engaged = {exchange.partner_of(peer) for exchange in self.slots.exchanges[peer]}
        partner = self.choose_partner(peer, engaged, is_retry=False)
        if partner is None:
            self.waits_for_slot[peer], self.retry_at[peer] = self.slots.used[peer] > 0, when + RETRY_S
            if not self.waits_for_slot[peer]:
                self.schedule_check(peer)
            return
        exchange = PairExchange(peer, self.tape.new_exchange(peer), steps, when, engaged)
        self.tape.append(peer, steps, SNAPSHOT, exchange.number, INITIATOR)
        self.slots.add(exchange, INITIATOR)
        self.send_offer(exchange, partner)
        if is_overlapping:
            self.schedule_check(peer)

    def choose_partner(self, peer: int, excluded: set[int], is_retry: bool) -> int | None:
        """Select a partner as :meth:`gossip.selection.partners.Partners.choose` does, or None."""
        self.selecting, rng = peer, self.rngs[peer]
        is_wary = self.strangers.is_wary(peer, self.events.now)
        if is_retry or is_wary:
            recent = list(self.mixed_with[peer])
            partner = uniform(recent, rng, self.is_candidate, excluded)
            if partner is not None or (is_wary and recent):
                return partner
        return uniform(self.alive, rng, self.is_candidate, excluded)

    def send_offer(self, exchange: PairExchange, partner: int) -> None:
        peer, now = exchange.initiator, self.events.now
        exchange.asked.add(partner)
        exchange.attempt += 1
        exchange.responder, exchange.offered_at = partner, now
        exchange.weight = pair_cap(self.slots.used[peer])
        self.offers += 1
        if self.streams.has_instant_messages:
            self.on_offer(exchange, exchange.attempt)
        else:
            arrives = now + self.streams.message_s(peer, partner, now)
            self.events.push(arrives, self.on_offer, exchange, exchange.attempt)

    def on_busy(self, exchange: PairExchange, attempt: int) -> None:
        """Ask another partner, preferably a recent one; after too many refusals, back off for a while."""
        if attempt != exchange.attempt or exchange.ended:
            return
        peer, is_backgrounded, partner = exchange.initiator, exchange.is_backgrounded_by(INITIATOR), None
        if not is_backgrounded and len(exchange.asked) < exchange.max_asked:
            excluded = exchange.asked | self.overlapping_partners(peer, exchange)
            partner = self.choose_partner(peer, excluded, is_retry=True)
        if partner is not None:
            self.send_offer(exchange, partner)
            return
        self.abandon_offer(exchange)
        if not is_backgrounded:
            self.back_off(peer)
        self.on_slot_freed(peer)

    def overlapping_partners(self, peer: int, offer: PairExchange) -> set[int]:
        """Return the partners of the other exchanges that take slots, if mixes overlap: these have different partners.

        One of them may have begun while ``offer`` was waiting for its answer.
        """
        if not self.is_overlapping(peer):
            return set()
        others = [other for other in self.slots.exchanges[peer] if other is not offer]
        return {other.partner_of(peer) for other in others if not other.is_backgrounded_at(peer)}

    def abandon_offer(self, exchange: PairExchange) -> None:
        exchange.ended = BOTH
        self.tape.append(exchange.initiator, exchange.initiator_steps, DROP, exchange.number, INITIATOR)
        self.slots.remove(exchange, INITIATOR)

    def back_off(self, peer: int) -> None:
        self.retry_at[peer] = self.events.now + collision_delay_s(self.rngs[peer])

    # -- answering an offer --------------------------------------------------------------------------------------
    def on_offer(self, exchange: PairExchange, attempt: int) -> None:
        """Accept the offer or answer Busy; a dead responder's machine resets the connection."""
        if attempt != exchange.attempt or exchange.ended:
            return
        initiator, responder, now = exchange.initiator, exchange.responder, self.events.now
        if not self.ready[responder]:
            self.events.push(now + self.streams.latency(responder, initiator), self.on_unreached, exchange, attempt)
            return
        steps = self.clocks.next_boundary(responder, now)
        self.counted_steps[responder] = steps - 1
        if self.make_room(responder, initiator):
            self.accept(exchange, steps, now)
            return
        self.refusals += 1
        if self.streams.has_instant_messages:
            self.on_busy(exchange, attempt)
        else:
            answered_at = now + self.streams.message_s(responder, initiator, now)
            self.limit_wait(exchange, INITIATOR, exchange.offered_at, answered_at, self.usual_waits.answers)
            self.events.push(answered_at, self.on_busy, exchange, attempt)

    def on_unreached(self, exchange: PairExchange, attempt: int) -> None:
        """Count the failure of an offer to a dead peer, and ask another one."""
        if attempt == exchange.attempt and not exchange.ended:
            self.note_failure(exchange.initiator, exchange.responder)
            self.on_busy(exchange, attempt)

    def note_failure(self, peer: int, partner: int, is_own: bool = True) -> None:
        """Count a failed exchange of a peer; ``is_own`` is True if it initiated it."""
        self.failures += 1
        self.strangers.note_slow(peer, partner, self.events.now)
        if is_own and self.intervals is not None:
            self.intervals.note_failure(peer)

    def make_room(self, peer: int, sender: int) -> bool:
        """Return True if the peer accepts an offer: it has a free slot and has not just mixed with the sender.

        If necessary, it first abandons its own offer to the sender, or backgrounds one that waits for long.
        """
        used_slots, now = self.slots.used[peer], self.events.now
        unanswered = [exchange for exchange in self.slots.own[peer] if now < exchange.accept_arrives_at]
        # The peer's own offer to the sender, which crossed the sender's offer on the way.
        crossed = next((exchange for exchange in unanswered if exchange.responder == sender), None)
        if crossed is not None:
            if peer < sender:  # The smaller index wins if two offers cross.
                return False
            unanswered.remove(crossed)
            used_slots -= 1
        if self.streams.can_be_slow and (
            self.is_streaming_with(peer, sender) or self.strangers.is_declined(peer, sender, now)
        ):
            return False
        max_slots = self.max_slots(peer, sender, len(self.slots.own[peer]) - (crossed is not None))
        overdue = None  # An own offer that waits for long, and is backgrounded if its slot is needed.
        if used_slots >= max_slots:
            overdue = next((offer for offer in unanswered if self.is_overdue(peer, offer)), None)
        if used_slots - (overdue is not None) >= max_slots:
            return False
        steps_at_mix = self.mixed_with[peer].get(sender)
        if steps_at_mix is not None and self.counted_steps[peer] - steps_at_mix < MIN_GAP * self.interval_steps(peer):
            self.selecting = peer
            if uniform(self.alive, self.rngs[peer], self.is_candidate, (sender,)) is not None:
                return False
        if crossed is not None:
            self.abandon_offer(crossed)
        elif overdue is not None:
            self.background(overdue, INITIATOR)
        return True

    def max_slots(self, peer: int, sender: int, own_exchanges: int) -> int:
        """Return the number of used slots at which the peer refuses an offer; ``own_exchanges`` it has initiated."""
        is_overlapping = self.is_overlapping(peer)
        if not (self.is_plain or is_overlapping):
            return 1
        # The last partner may not take the last slot, which is kept for others. Own exchanges come on top.
        is_last_kept = sender == self.last_partner[peer] and self.max_incoming > 1
        limit = self.max_incoming - is_last_kept + own_exchanges
        return min(limit, self.max_overlapping) if is_overlapping else limit

    def accept(self, exchange: PairExchange, steps: int, now: float) -> None:
        """Accept an offer, and compute when the exchange ends on either side.

        It begins with the responder's snapshot at its next boundary, after ``steps`` steps.
        """
        initiator, responder, tape, streams = exchange.initiator, exchange.responder, self.tape, self.streams
        self.slots.add(exchange, RESPONDER)
        exchange.weight = min(exchange.weight, pair_cap(self.slots.used[responder]))
        snapshot_at = exchange.snapshot_at = self.clocks.time_of(responder, steps)
        exchange.responder_steps = steps
        self.accepts += 1
        tape.responders[exchange.number], tape.weights[exchange.number] = responder, exchange.weight
        for side, peer in enumerate((initiator, responder)):
            tape.intervals[side][exchange.number] = self.interval_steps(peer)
        tape.append(responder, steps, SNAPSHOT, exchange.number, RESPONDER)
        if streams.are_instant:
            exchange.accept_arrives_at, exchange.commits_at = snapshot_at, (snapshot_at, snapshot_at)
            streams.count(snapshot_at, snapshot_at)
            self.events.push(snapshot_at, self.on_both_ends, exchange, now)
            return
        accepted_at = exchange.accept_arrives_at = snapshot_at + streams.message_s(responder, initiator, snapshot_at)
        streams.count(snapshot_at, accepted_at)
        # The responder sends its Accept and then its stream. The initiator streams once it has the Accept. Each side
        # sends its Commit when it has received the other's stream, and ends when it has both.
        commits_at = (
            snapshot_at + streams.stream_s(responder, initiator, snapshot_at),
            accepted_at + streams.stream_s(initiator, responder, accepted_at),
        )
        exchange.commits_at = commits_at
        ends_at = (
            max(commits_at[0], commits_at[1] + streams.message_s(responder, initiator, commits_at[1])),
            max(commits_at[1], commits_at[0] + streams.message_s(initiator, responder, commits_at[0])),
        )
        self.limit_wait(exchange, INITIATOR, exchange.offered_at, accepted_at, self.usual_waits.answers)
        sides = (INITIATOR, accepted_at, exchange.requested_at), (RESPONDER, snapshot_at, now)
        for side, streams_at, requested_at in sides:
            self.limit_wait(exchange, side, streams_at, ends_at[side], self.usual_waits.streams)
            self.events.push(ends_at[side], self.on_end, exchange, side, requested_at)

    # -- the end of an exchange ----------------------------------------------------------------------------------
    def on_both_ends(self, exchange: PairExchange, responder_requested_at: float) -> None:
        self.on_end(exchange, INITIATOR, exchange.requested_at)
        self.on_end(exchange, RESPONDER, responder_requested_at)

    def on_end(self, exchange: PairExchange, side: int, requested_at: float) -> None:
        """Finish the exchange for one side, which adds the result at its next boundary.

        ``requested_at`` is when this side's snapshot was requested.
        """
        if exchange.has_ended_for(side):
            return
        exchange.ended |= 1 << side
        peer, partner = exchange.peer_and_partner(side)
        now = self.events.now
        steps = self.clocks.next_boundary(peer, now)
        self.tape.end_intervals[side][exchange.number] = self.interval_steps(peer)
        self.tape.append(peer, steps, ADD, exchange.number, side)
        if exchange.has_dead_side:  # Nothing else will free the snapshots.
            self.tape.append(peer, steps, DROP, exchange.number, side)
        self.mixes += 1
        self.streams.durations.add(now - requested_at)
        if self.streams.can_be_slow or self.can_overlap:
            self.usual_waits.add(exchange, side, now)
        self.slots.remove(exchange, side)
        if side == RESPONDER:
            self.counted_steps[peer] = max(self.counted_steps[peer], exchange.responder_steps)
        counted_steps = self.counted_steps[peer]
        if partner not in self.mixed_with[peer]:
            self.strangers.note_mix(peer)
        self.mixed_with[peer][partner] = counted_steps
        self.last_partner[peer] = partner
        if self.intervals is not None:
            if side == INITIATOR:
                self.intervals.note_duration(peer, partner, now - exchange.offered_at)
            boundary_at = self.clocks.time_of(peer, steps - 1)
            self.intervals.choose_interval(peer, self.schedules[peer], steps - 1, boundary_at)
        self.schedules[peer].on_mixed(counted_steps, now, side == INITIATOR)
        self.on_slot_freed(peer)

    def on_slot_freed(self, peer: int) -> None:
        """Check again for a due mix after an exchange has freed a slot."""
        max_slots = self.max_overlapping if self.is_overlapping(peer) else 1
        if self.waits_for_slot[peer] and self.slots.used[peer] < max_slots:
            self.waits_for_slot[peer], self.retry_at[peer] = False, self.events.now
        if not self.waits_for_slot[peer]:
            self.schedule_check(peer)

    # -- the end of a peer ---------------------------------------------------------------------------------------
    def end(self, peer: int, steps: int) -> None:
        """Remove a peer that dies or leaves after ``steps`` counted steps, and reset its state."""
        self.ready[peer] = False
        for exchange in self.slots.exchanges[peer]:
            self.end_for_dead(exchange, peer)
        self.slots.clear(peer)
        self.mixed_with[peer].clear()
        self.due_at[peer], self.counted_steps[peer], self.last_partner[peer] = math.inf, steps, -1
        self.strangers.forget(peer)
        self.usual_waits.forget(peer)
        if self.intervals is not None:
            self.intervals.forget(peer)
        self.schedules[peer] = Schedule(self.config, self.rngs[peer])

    def end_for_dead(self, exchange: PairExchange, peer: int) -> None:
        """End an exchange of a peer that dies.

        The other side still mixes if the whole stream and the Commit are already on their way to it.
        """
        now, side, tape = self.events.now, RESPONDER if peer == exchange.responder else INITIATOR, self.tape
        if exchange.accept_arrives_at == math.inf:  # An offer without an Accept.
            exchange.ended = BOTH
            tape.append(peer, exchange.initiator_steps, DROP, exchange.number, side)
            return
        other_side, partner = 1 - side, exchange.partner_of(peer)
        latency = self.streams.latency(peer, partner)
        if exchange.has_ended_for(other_side):  # The other side has mixed.
            exchange.ended = BOTH
            tape.append(partner, self.clocks.next_boundary(partner, now), DROP, exchange.number, other_side)
        elif exchange.commits_at[side] <= now and exchange.commits_at[other_side] - latency <= now:
            exchange.ended, exchange.has_dead_side = 1 << side, True
        else:
            exchange.ended = BOTH
            learns_at = now + latency + self.streams.draw_closing_s(self.draws[peer])
            self.events.push(learns_at, self.on_broken, exchange, other_side)

    def on_broken(self, exchange: PairExchange, side: int) -> None:
        """Fail the exchange on one side, which learns that its partner is gone."""
        peer, partner = exchange.peer_and_partner(side)
        if exchange not in self.slots.exchanges[peer]:
            return  # This peer is gone as well.
        self.note_failure(peer, partner, is_own=side == INITIATOR)
        snapshot_steps = exchange.responder_steps if side == RESPONDER else exchange.initiator_steps
        steps = max(snapshot_steps, self.clocks.next_boundary(peer, self.events.now))
        self.tape.append(peer, steps, DROP, exchange.number, side)
        self.slots.remove(exchange, side)
        if side == INITIATOR and not exchange.is_backgrounded_by(INITIATOR):
            self.back_off(peer)
        self.on_slot_freed(peer)

    # -- slow exchanges ------------------------------------------------------------------------------------------
    def limit_wait(
        self, exchange: PairExchange, side: int, since: float, until: float, usual_waits: dict[int, Waits]
    ) -> None:
        """Schedule the exchange to be backgrounded if the wait from ``since`` to ``until`` exceeds the usual one."""
        waits = usual_waits.get(exchange.peer_and_partner(side)[0])
        if waits is not None and until - since > waits.limit_s:
            when = max(since + waits.limit_s, self.events.now)
            self.events.push(when, self.on_long_wait, exchange, side, exchange.attempt)

    def on_long_wait(self, exchange: PairExchange, side: int, attempt: int) -> None:
        peer, _ = exchange.peer_and_partner(side)
        is_void = exchange.has_ended_for(side) or exchange.is_backgrounded_by(side) or attempt != exchange.attempt
        if not is_void and exchange in self.slots.exchanges[peer]:
            self.background(exchange, side)
            self.on_slot_freed(peer)

    def background(self, exchange: PairExchange, side: int) -> None:
        """Background an exchange, which frees its slot, if the limit of backgrounded exchanges allows it."""
        peer, partner = exchange.peer_and_partner(side)
        if self.slots.backgrounded(peer) >= self.max_backgrounded:
            return
        exchange.backgrounded |= 1 << side
        self.slots.free(exchange, side)
        self.strangers.note_slow(peer, partner, self.events.now)

    def is_overdue(self, peer: int, offer: PairExchange) -> bool:
        """Return True if the peer's own offer waits unusually long and can be backgrounded for another peer's offer."""
        waits = self.usual_waits.answers.get(peer)
        is_late = waits is not None and self.events.now - offer.offered_at >= waits.learned_limit_s
        return is_late and self.slots.backgrounded(peer) < self.max_backgrounded

    def is_streaming_with(self, peer: int, partner: int) -> bool:
        """Return True if an exchange between the two peers has reached its streams."""
        shared = [exchange for exchange in self.slots.exchanges[peer] if exchange.partner_of(peer) == partner]
        return any(self.events.now >= exchange.streams_at(peer) for exchange in shared)

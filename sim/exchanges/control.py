"""Who exchanges with whom and when: the decisions of :mod:`gossip`, an exchange at a time, in virtual time.

What a peer decides is what :class:`gossip.peer.Peer` decides: when a mix is due, whom to ask, who is busy, how much a
pair weighs. What it leaves out is every message: an offer and its answer take their latencies, and what follows from
them is known at once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import cast

from gossip.arithmetic.mixing import pair_cap
from gossip.config import Config
from gossip.exchange.beginning import TRIES
from gossip.peer import WAIT_S
from gossip.schedule import Schedule
from gossip.selection.partners import APART, MET
from gossip.selection.rule import uniform
from sim.engine.events import Events
from sim.exchanges.clocks import Clocks
from sim.exchanges.draws import Draws
from sim.exchanges.streams import Streams
from sim.exchanges.tape import ADD, SNAP, Tape

__all__ = ["Control", "Exchange"]

COLLIDED_S, APART_S = 0.02, 0.08  # as a peer waits that found everybody busy


class Exchange:
    """``first`` asks, ``second`` is asked last."""

    __slots__ = ("asked", "attempt", "first", "number", "second", "steps", "weight", "wished")

    def __init__(self, first: int, now: float) -> None:
        self.first, self.second, self.number, self.attempt = first, -1, -1, 0
        self.asked: set[int] = set()
        self.weight = 0.5
        self.wished = now  # who asked wanted its snapshot
        self.steps = 0  # at the snapshot of who was asked


class Control:
    """All peers' decisions. Each peer's state is a place in every list."""

    def __init__(
        self, events: Events, config: Config, clocks: Clocks, streams: Streams, tape: Tape, draws: Sequence[Draws]
    ) -> None:
        self.events, self.config, self.clocks = events, config, clocks
        self.streams, self.tape, self.draws = streams, tape, draws
        peers = len(draws)
        self.alive: list[int] = []
        self.ready = [False] * peers  # up, with the weights of the run
        self.schedules = [Schedule(config, cast(random.Random, one)) for one in draws]
        self.moving = [0] * peers  # exchanges that take a slot
        self.outgoing: list[Exchange | None] = [None] * peers  # its own
        self.waiting = [False] * peers  # its mix is due, and waits for the end of one that another asked for
        self.retry_at = [0.0] * peers
        self.due_at = [math.inf] * peers  # the event of its next mix that counts
        self.counted = [0] * peers  # its steps, as it last counted them
        self.met: list[dict[int, int]] = [{} for _ in range(peers)]  # partners lately, and the steps at the last mix
        self.last_partner = [-1] * peers
        self.asking = -1
        self.plain, self.incoming = config.plain, config.incoming_limit
        every = config.mix_every_steps
        assert every is not None, "mixes by steps alone"
        self.apart = APART * every
        # What came of it
        self.mixes = self.failed = self.offers = self.busy = self.accepts = 0

    # -- who is there --------------------------------------------------------------------------------------------
    def found(self, peer: int) -> None:
        """It is there from the beginning, with the weights of the run."""
        self.alive.append(peer)
        self.ready[peer] = True
        self.schedules[peer].begin(self.counted[peer], self.events.now)
        self.arm(peer)

    def fits(self, peer: int) -> bool:
        return peer != self.asking and self.ready[peer]

    # -- a mix of its own ----------------------------------------------------------------------------------------
    def arm(self, peer: int) -> None:
        """Look at the boundary where the next mix is due; one that is looked at before that will see by itself."""
        now = self.events.now
        steps = self.clocks.after(peer, max(now, self.retry_at[peer]))
        due = self.schedules[peer].due_steps
        when = self.clocks.time(peer, max(due, steps))
        if when < self.due_at[peer]:
            self.due_at[peer] = when
            self.events.push(when, self.on_due, peer, when)

    def on_due(self, peer: int, when: float) -> None:
        """It is at a boundary where its mix may be due."""
        if when != self.due_at[peer]:
            return
        self.due_at[peer] = math.inf
        if self.outgoing[peer] is not None or not self.ready[peer]:
            return
        steps = self.clocks.after(peer, when) - 1
        if steps < self.schedules[peer].due_steps or when < self.retry_at[peer]:
            self.arm(peer)
            return
        self.counted[peer] = steps
        if self.moving[peer]:  # what is under way is a mix already
            self.waiting[peer], self.retry_at[peer] = True, when + WAIT_S
            return
        one = Exchange(peer, when)
        self.asking = peer
        partner = uniform(self.alive, cast(random.Random, self.draws[peer]), self.fits)
        if partner is None:
            self.retry_at[peer] = when + WAIT_S
            self.arm(peer)
            return
        self.outgoing[peer] = one
        self.moving[peer] += 1
        self.ask(one, partner)

    def ask(self, one: Exchange, partner: int) -> None:
        peer = one.first
        one.asked.add(partner)
        one.second = partner
        one.weight = pair_cap(self.moving[peer])
        self.offers += 1
        takes = self.streams.message(peer, partner, self.events.now)
        if takes:
            self.events.push(self.events.now + takes, self.on_offer, one)
        else:
            self.on_offer(one)

    def on_busy(self, one: Exchange) -> None:
        """Another is asked: one that it mixed with lately, and where all were asked nobody for a while."""
        if one.attempt < 0:
            return
        peer, partner = one.first, None
        if len(one.asked) < TRIES:
            self.asking = peer
            rng = cast(random.Random, self.draws[peer])
            partner = uniform(list(self.met[peer]), rng, self.fits, one.asked)
            if partner is None:
                partner = uniform(self.alive, rng, self.fits, one.asked)
        if partner is not None:
            self.ask(one, partner)
            return
        self.outgoing[peer] = None
        self.moving[peer] -= 1
        self.retry_at[peer] = self.events.now + COLLIDED_S + APART_S * self.draws[peer].random()
        self.released(peer)

    # -- an offer ------------------------------------------------------------------------------------------------
    def on_offer(self, one: Exchange) -> None:
        if one.attempt < 0:
            return
        first, second, now = one.first, one.second, self.events.now
        steps = self.clocks.after(second, now)
        self.counted[second] = steps - 1
        if not self.takes(second, first):
            self.busy += 1
            takes = self.streams.message(second, first, now)
            if takes:
                self.events.push(now + takes, self.on_busy, one)
            else:
                self.on_busy(one)
            return
        self.moving[second] += 1
        one.weight = min(one.weight, pair_cap(self.moving[second]))
        self.accept(one, steps, now)

    def takes(self, peer: int, sender: int) -> bool:
        """Whether it has room, and has not just mixed with this one."""
        moving, own = self.moving[peer], self.outgoing[peer]
        crossed = own is not None and own.second == sender and own.number < 0
        if crossed:
            if peer < sender:  # of two offers that cross the smaller number's is the exchange
                return False
            moving -= 1
        if self.plain:
            limit = self.incoming - (sender == self.last_partner[peer] and self.incoming > 1)
            if moving >= limit + (own is not None and not crossed):
                return False
        elif moving:
            return False
        met = self.met[peer].get(sender)
        if met is not None and self.counted[peer] - met < self.apart:
            self.asking = peer
            if uniform(self.alive, cast(random.Random, self.draws[peer]), self.fits, (sender,)) is not None:
                return False
        if own is not None and crossed:
            self.drop(own)
        return True

    def drop(self, own: Exchange) -> None:
        """Its own offer makes way for the one that crossed it."""
        self.outgoing[own.first] = None
        self.moving[own.first] -= 1
        own.attempt = -1

    def accept(self, one: Exchange, steps: int, now: float) -> None:
        """Who is asked takes its snapshot at its next boundary; both streams and both commits follow from that."""
        first, second = one.first, one.second
        at = self.clocks.time(second, steps)
        self.accepts += 1
        tape, one.steps = self.tape, steps
        number = one.number = tape.exchange(first, second, one.weight)
        tape.put(first, self.counted[first], SNAP, number, 0)
        tape.put(second, steps, SNAP, number, 1)
        streams = self.streams
        answered = at + streams.message(second, first, at)
        streams.begin(at, answered)
        # The answer goes ahead of one stream, the other stream follows it; then each COMMIT.
        verified = at + streams.stream(second, first, at), answered + streams.stream(first, second, answered)
        if verified[0] == verified[1] == at:
            self.events.push(at, self.on_both, one, now)
            return
        told = (
            verified[1] + streams.message(second, first, verified[1]),
            verified[0] + streams.message(first, second, verified[0]),
        )
        self.events.push(max(verified[0], told[0]), self.on_end, one, 0, one.wished)
        self.events.push(max(verified[1], told[1]), self.on_end, one, 1, now)

    # -- its end -------------------------------------------------------------------------------------------------
    def on_both(self, one: Exchange, wished: float) -> None:
        self.on_end(one, 0, one.wished)
        self.on_end(one, 1, wished)

    def on_end(self, one: Exchange, side: int, wished: float) -> None:
        """One side has mixed: what came of it is added at its next boundary."""
        peer, partner = (one.second, one.first) if side else (one.first, one.second)
        now = self.events.now
        self.tape.put(peer, self.clocks.after(peer, now), ADD, one.number, side)
        self.mixes += 1
        self.streams.timed(now - wished)
        self.moving[peer] -= 1
        if not side:
            self.outgoing[peer] = None
        elif self.counted[peer] < one.steps:
            self.counted[peer] = one.steps
        met, counted = self.met[peer], self.counted[peer]
        met.pop(partner, None)
        met[partner] = counted
        if len(met) > MET:
            del met[next(iter(met))]
        self.last_partner[peer] = partner
        self.schedules[peer].mixed(counted, now, not side)
        self.released(peer)

    def released(self, peer: int) -> None:
        """An exchange is over, and the next mix may be due sooner than it would look."""
        if self.waiting[peer] and not self.moving[peer]:
            self.waiting[peer], self.retry_at[peer] = False, self.events.now
        if not self.waiting[peer]:
            self.arm(peer)

"""The mixes that a peer begins by itself: when one may begin, and what the end of a mix changes."""

from __future__ import annotations

import math
import random
from typing import Any

from gossip.effects import Effect
from gossip.exchange.exchanges import Exchanges
from gossip.schedule import Schedule, collided_s
from gossip.selection.partners import Partners
from gossip.state_transfer.joining import Joining, Phase

__all__ = ["WAIT_S", "Initiator"]

WAIT_S = 0.25  # delay of the next mix if there is no partner
SEARCHES = 2  # failed searches in a row before a busy partner is asked to reserve its next exchange for us
IDLE = Phase.IDLE  # reading an Enum's attributes is slow


class Initiator:
    """The mixes that one peer begins. Drivers read when the next one is due."""

    def __init__(
        self, exchanges: Exchanges[Any], partners: Partners, schedule: Schedule, joining: Joining, rng: random.Random
    ) -> None:
        self.exchanges, self.partners, self.schedule, self.joining = exchanges, partners, schedule, joining
        self.local, self.config, self.rng = exchanges.local, exchanges.config, rng
        self.waiting = False  # our mix is due, and waits for the end of one that another peer initiated
        self.lonely = False  # no partner was found when our mix was due the last time
        self.searches = 0  # failed searches for a partner since streams began
        self.mixing = False  # exchanges of a mix are finished, but the mix may not be

    # -- for the driver ------------------------------------------------------------------------------------------
    @property
    def offering(self) -> bool:
        """Return True if we may not begin a mix: one is in progress, or as many as may overlap."""
        exchanges = self.exchanges
        return exchanges.is_engaged if exchanges.is_overlapping else bool(exchanges.own_exchanges)

    @property
    def due_steps(self) -> int:
        """Return the step count of our next mix, at which to call ``stepped``, unless :attr:`offering`."""
        return self.schedule.steps_beside(self.exchanges.postponing_exchanges)

    @property
    def mix_at(self) -> float:
        """Return the time from which a due mix may begin, so that a driver takes a snapshot with it.

        It is infinite while other exchanges prevent a mix, and if no partner was found the last time. The first mix
        with a new partner then begins a step later, and a node that stays alone copies nothing.
        """
        exchanges = self.exchanges
        waits = exchanges.table and (exchanges.is_engaged or exchanges.reserved_session)
        return math.inf if self.lonely or self.waiting or waits else self.schedule.retry_at

    @property
    def next_mix(self) -> tuple[float, float]:
        """Return :attr:`due_steps`, infinite while :attr:`offering`, and :attr:`mix_at` for drivers that read both."""
        return math.inf if self.offering else self.due_steps, self.mix_at

    # -- for the peer --------------------------------------------------------------------------------------------
    @property
    def deadline(self) -> float:
        """Return the time to call :meth:`begin`, if mixes are timed by the clock."""
        exchanges, schedule = self.exchanges, self.schedule
        if self.joining.phase is not IDLE or not self.local.ready or self.offering or exchanges.reserved_session:
            return math.inf
        return max(schedule.time_beside(exchanges.postponing_exchanges), schedule.retry_at)

    def begin(self, now: float) -> list[Effect]:
        """Begin a mix if one is due and may begin."""
        exchanges, local = self.exchanges, self.local
        waiting = now < self.schedule.retry_at or self.offering or self.joining.phase is not IDLE
        if not local.ready or local.left or waiting or exchanges.reserved_session:
            return []
        if not (self.schedule.due(local.steps, now, exchanges.postponing_exchanges) or local.settling):
            return []
        effects = exchanges.begin_mix(now)
        self.lonely = not (effects or exchanges.used_slots)
        if not effects:
            self.schedule.wait(now, WAIT_S)
            self.waiting = exchanges.used_slots > 0
        return effects

    def ended(self, now: float) -> list[Effect]:
        """Handle exchanges that ended or began to stream: schedule the next mix, or begin the reserved one."""
        exchanges, schedule, local = self.exchanges, self.schedule, self.local
        effects: list[Effect] = []
        if exchanges.mixed_partners:
            self.mixing = self.mixing or self.partners.counts(exchanges.mixed_partners)
            exchanges.mixed_partners.clear()
        if self.mixing and not (self.partners.several and exchanges.own_exchanges):
            self.mixing = False
            if self.config.auto_interval:
                self.adapt()
            schedule.mixed(local.steps, now, exchanges.has_own_mixed)
            exchanges.has_own_mixed = False
        if self.waiting and not exchanges.is_engaged and (exchanges.has_freed_slot or not exchanges.used_slots):
            self.waiting = False  # otherwise frequent offers of one member would keep us waiting
            schedule.wait(now, 0.0)
        if exchanges.has_given_up:
            exchanges.has_given_up = False
            self.searches += 1
            exchanges.is_reservation_due = self.searches >= SEARCHES
            schedule.wait(now, collided_s(self.rng))
        if exchanges.has_freed_slot:
            exchanges.has_freed_slot = False
            effects += exchanges.begin_reserved(now)
        if exchanges.is_reservation_due:
            exchanges.is_reservation_due = False
            self.searches = 0
            if schedule.behind and self.joining.phase is IDLE and not local.settling:
                effects += exchanges.reserve_next(now)
        return effects

    def adapt(self) -> None:
        """Choose the interval anew from the cost of exchanges."""
        local = self.local
        self.schedule.adapt(local.steps, local.boundary_at, self.exchanges.usual_cost(), local.machine)
        local.every = self.schedule.every
        local.progress.set_interval(local.every)

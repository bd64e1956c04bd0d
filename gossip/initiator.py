"""The mixes that a peer begins by itself: when one may begin, and what the end of a mix changes.

A *mix* is an exchange, or one with each of several partners. An exchange in progress takes a *slot*, one of the few
places that bound them. By a *reservation* two busy peers agree on their next exchange
(:mod:`gossip.exchange.reservation`).
"""

import math
import random
from typing import Any

from gossip.effects import Effect
from gossip.exchange.exchanges import Exchanges
from gossip.schedule import Schedule, collision_delay_s
from gossip.selection.partners import Partners
from gossip.state_transfer.joining import Newcomer, Phase

# Mixes of a peer that leaves. Each leaves half of what it alone has learned with a partner, and half with the next.
LAST_MIXES = 3

RETRY_S = 0.25  # Delay of the next mix if there is no partner.
# Failed searches in a row after which a busy partner is asked to reserve its next exchange for us.
MAX_SEARCHES = 2
IDLE = Phase.IDLE  # Reading an Enum's attributes is slow.


class Initiator:
    """The mixes that one peer begins. Drivers read when the next one is due."""

    def __init__(
        self, exchanges: Exchanges[Any], partners: Partners, schedule: Schedule, joining: Newcomer, rng: random.Random
    ) -> None:
        self.exchanges, self.partners, self.schedule, self.joining = exchanges, partners, schedule, joining
        self.local, self.config, self.rng = exchanges.local, exchanges.config, rng
        self.is_waiting = False  # Our mix is due, and waits for the end of one that another peer initiated.
        self.is_lonely = False  # No partner was found when our mix was due the last time.
        self.search_count = 0  # Failed searches for a partner since streams began.
        self.has_mixed = False  # An exchange of the mix is finished. With several partners a mix is several exchanges.
        self.moved_steps = 0  # Step count up to which the movement of the model was measured.

    # -- for the driver ------------------------------------------------------------------------------------------
    @property
    def is_blocked(self) -> bool:
        """Return True if we may not begin a mix: one is in progress, or as many as may overlap, or we are paused."""
        exchanges = self.exchanges
        if self.local.paused:
            return True
        return exchanges.is_engaged if exchanges.is_overlapping else exchanges.has_own

    @property
    def due_steps(self) -> int:
        """Return the step count of our next mix, at which to call ``on_stepped``, unless :attr:`is_blocked`."""
        return self.schedule.postponed_steps(self.exchanges.postponing_exchanges)

    @property
    def mix_at(self) -> float:
        """Return the time from which a due mix may begin, so that a driver takes a snapshot with it.

        It is infinite while other exchanges prevent a mix, and if no partner was found the last time. A node that stays
        alone then copies nothing, and its first mix with a new partner begins a step later.
        """
        exchanges = self.exchanges
        is_prevented = exchanges.table and (exchanges.is_engaged or exchanges.reserved_session)
        return math.inf if self.is_lonely or self.is_waiting or is_prevented else self.schedule.retry_at

    @property
    def next_mix(self) -> tuple[float, float]:
        """Return :attr:`due_steps`, infinite while :attr:`is_blocked`, and :attr:`mix_at`."""
        return math.inf if self.is_blocked else self.due_steps, self.mix_at

    # -- for the peer --------------------------------------------------------------------------------------------
    @property
    def deadline(self) -> float:
        """Return the time to call :meth:`begin`, if mixes are timed by the clock."""
        exchanges, schedule = self.exchanges, self.schedule
        if self.joining.phase is not IDLE or not self.local.ready or self.is_blocked or exchanges.reserved_session:
            return math.inf
        return max(schedule.postponed_time(exchanges.postponing_exchanges), schedule.retry_at)

    def begin(self, now: float) -> list[Effect]:
        """Begin a mix if one is due and may begin."""
        exchanges, local = self.exchanges, self.local
        must_wait = now < self.schedule.retry_at or self.is_blocked or self.joining.phase is not IDLE
        if not local.ready or local.left or must_wait or exchanges.reserved_session:
            return []
        if not (self.schedule.is_due(local.steps, now, exchanges.postponing_exchanges) or local.settling):
            return []
        effects = exchanges.begin_mix(now)
        self.is_lonely = not (effects or exchanges.used_slots)
        if self.is_lonely:
            local.last_mixes = 0
        if not effects:
            self.schedule.retry_at = now + RETRY_S
            self.is_waiting = exchanges.used_slots > 0
        return effects

    def hand_over(self, partners: int, now: float) -> list[Effect]:
        """Begin the last mixes before we leave, one after another, if the weights have steps that no partner has.

        Args:
            partners: The number of members to mix with.
            now: The time.
        """
        if self.local.steps <= self.local.mixed_steps or self.local.finished:
            return []
        self.local.last_mixes = min(partners, LAST_MIXES)
        self.schedule.due_at = self.schedule.retry_at = now
        return self.begin(now)

    def follow_up(self, now: float) -> list[Effect]:
        """Do what follows from exchanges that ended or began to stream.

        Schedule the next mix after a finished one, retry after a failed search, and begin or make a reservation.
        """
        exchanges, schedule, local = self.exchanges, self.schedule, self.local
        effects: list[Effect] = []
        if exchanges.mixed_partners:
            self.has_mixed = self.has_mixed or self.partners.counts_as_mix(exchanges.mixed_partners)
            exchanges.mixed_partners.clear()
        if self.has_mixed and not (self.partners.mixes_with_several and exchanges.has_own):
            self.has_mixed = False
            if self.config.auto_interval:
                self.adapt_interval()
            schedule.on_mixed(local.steps, now, exchanges.has_own_mixed)
            exchanges.has_own_mixed = False
            if local.last_mixes:
                local.last_mixes -= 1
                schedule.due_at = now if local.last_mixes else math.inf
        if self.is_waiting and not exchanges.is_engaged and (exchanges.has_freed_slot or not exchanges.used_slots):
            self.is_waiting = False  # Otherwise frequent offers of one member would keep us waiting.
            schedule.retry_at = now
        if exchanges.has_given_up:
            exchanges.has_given_up = False
            self.search_count += 1
            exchanges.is_reservation_due = self.search_count >= MAX_SEARCHES
            schedule.retry_at = now + collision_delay_s(self.rng)
        if exchanges.has_freed_slot:
            exchanges.has_freed_slot = False
            effects += exchanges.begin_reserved(now)
        if exchanges.is_reservation_due:
            exchanges.is_reservation_due = False
            self.search_count = 0
            if schedule.is_behind and self.joining.phase is IDLE and not (local.settling or local.paused):
                effects += exchanges.reserve_next(now)
        return effects

    def adapt_interval(self) -> None:
        """Choose the interval anew from the cost of exchanges."""
        local = self.local
        exchanges = self.exchanges
        self.schedule.adapt_interval(
            local.steps, local.boundary_at, exchanges.usual_cost(), local.machine, exchanges.own_results.are_failing
        )
        local.steps_per_mix = self.schedule.every
        local.progress.set_interval(local.steps_per_mix)

    def on_moved(self, moved: float) -> None:
        """Tell the filter how far local steps have moved the model, once for each boundary.

        Args:
            moved: The norm of the movement since the last call; NaN if it was not measured.
        """
        if math.isnan(moved) or self.local.steps <= self.moved_steps:
            return
        self.exchanges.filter.on_moved(moved)
        self.moved_steps = self.local.steps

"""A node's side of the training loop: its step boundary, visited where there is a reason to."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from gossip.averaging.boundary import Boundary, Update, Visit
from gossip.config import Config
from gossip.peer import Peer

__all__ = ["Bell", "Owner", "Signals", "StepLoop"]

VISIT_S = 0.002  # between two looks at wishes of the network


class Signals:
    """What the loop reads of the network's decisions without asking it: plain numbers, written after each of them."""

    __slots__ = ("by_steps", "due_steps", "held", "lockstep", "mix_at")

    def __init__(self, config: Config) -> None:
        self.by_steps, self.lockstep = config.interval_steps is not None, config.max_version_gap is not None
        self.due_steps: float = 0  # the step count at which the next mix is due
        self.mix_at = math.inf  # and from when on it would begin, as far as is known
        self.held = False  # the loop must wait at its boundary

    def release(self) -> None:
        """Forget the mix that is due or under way, and let the loop go on."""
        self.due_steps = self.mix_at = math.inf
        self.held = False

    def read(self, peer: Peer) -> bool:
        """After a decision; returns whether the loop is let go on."""
        due_steps, self.mix_at = peer.next_mix
        self.due_steps = due_steps if self.by_steps else math.inf
        if not self.lockstep:
            return False
        before, self.held = self.held, peer.held
        return before and not self.held


class Bell:
    """Wakes a loop that has nothing else to do, as threading.Event does: where it does not wait, for nothing."""

    __slots__ = ("event", "rung", "waited")

    def __init__(self) -> None:
        self.event, self.rung, self.waited = threading.Event(), False, False

    def set(self) -> None:
        self.rung = True
        if self.waited:  # said before the other looks at what we said before we looked
            self.event.set()

    def clear(self) -> None:
        self.rung = False

    def wait(self, timeout_s: float) -> None:
        self.event.clear()
        self.waited = True
        if not self.rung:
            self.event.wait(timeout_s)
        self.waited = False


class Owner(Protocol):
    """Who runs the loop, and can speak to the network."""

    def replaced(self, weights: Any) -> None:
        """The model holds these now."""

    def mixed(self, updates: Sequence[Update]) -> None:
        """What exchanges brought was added to the model."""

    def keeps(self) -> bool:
        """Whether it is time for a copy of the weights that serves newcomers while the loop stands."""

    def updated(self, visit: Visit) -> None:
        """The network's thread is to hear of a visit, and of nothing else."""

    def report(self, visit: Visit) -> None:
        """It is to hear of a visit, and how far the loop is."""


class StepLoop:
    """When the loop looks at its boundary, what it takes along, and when it reports. Times are those of the network's
    clock; it says at least every ``report_s`` that it is alive, and looks at wishes no more often than every
    ``rest_s``, so that a step of a tiny model is not slowed by each."""

    def __init__(
        self, config: Config, boundary: Boundary, owner: Owner, report_s: float, rest_s: float = VISIT_S
    ) -> None:  # fmt: skip
        self.boundary, self.owner, self.signals = boundary, owner, Signals(config)
        self.lockstep = config.max_version_gap is not None
        self.lands = config.max_version_gap == 0  # a mix is in the model before the next step
        self.report_s, self.rest_s = report_s, 0.0 if self.lockstep else rest_s
        self.ahead = config.paired  # what is pushed is copied when it is asked for, with its mass
        self.reported_at = self.looked_at = -math.inf

    def step(self, steps: int, now: float) -> None:
        """The loop has taken so many steps, and stands between two."""
        due, late = steps >= self.signals.due_steps, now - self.reported_at > self.report_s
        if late or ((due or self.boundary.wanted) and now - self.looked_at >= self.rest_s):
            self.looked_at = now
            self.visit(now, due, due or late)

    def visit(self, now: float, due: bool = False, report: bool = True) -> None:
        """Fulfil the network's wishes, and report, unless all there was to do was to add what an exchange brought.
        ``due``: a mix begins here."""
        boundary, owner = self.boundary, self.owner
        ahead = due and self.ahead and self.signals.mix_at <= now
        whole = ahead and boundary.expected is None  # a snapshot of a part serves no newcomer
        visit = boundary.visit(owner.replaced, ahead, report and not whole and owner.keeps())
        if visit.updates and not visit.adopted:
            owner.mixed(visit.updates)
        if visit.updates_alone and not report:
            owner.updated(visit)
        else:
            self.reported_at = now
            owner.report(visit)

    def waits(self, landing: bool) -> bool:
        """Whether the loop must stay at this boundary: a mix is under way for longer than ``max_version_gap`` allows,
        or ``landing``, one that it waited for has not all landed."""
        return self.signals.held or (landing and (self.boundary.owed > 0 or self.boundary.wanted))

"""The visits of a training loop to its step boundary: when there is a reason, and what follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from gossip.averaging.boundary import Boundary, Update, Visit
from gossip.config import Config
from node.network.hints import LoopHints

__all__ = ["Owner", "StepLoop"]

VISIT_S = 0.002  # The least interval between two visits for the network's requests.


class Owner(Protocol):
    """The loop's owner, which can call the network thread."""

    def replaced(self, weights: Any) -> None:
        """Note that the model now holds these weights."""

    def mixed(self, updates: Sequence[Update]) -> None:
        """Note that updates of exchanges were added to the model."""

    def keeps(self) -> bool:
        """Return True if it is time for a copy of the weights, which serves newcomers while the loop is idle."""

    def updated(self, visit: Visit) -> None:
        """Tell the network thread of a visit that only added updates."""

    def report(self, visit: Visit) -> None:
        """Tell the network thread of a visit and of the loop's progress."""


class StepLoop:
    """The schedule of visits to the step boundary, and of reports. Times are those of the network's clock.

    It reports at least every ``report_s`` seconds. It looks at requests at most every ``rest_s`` seconds, so that they
    do not slow each step of a tiny model.
    """

    def __init__(
        self, config: Config, boundary: Boundary, owner: Owner, report_s: float, rest_s: float = VISIT_S
    ) -> None:  # fmt: skip
        self.boundary, self.owner, self.signals = boundary, owner, LoopHints(config)
        self.lockstep = config.max_version_gap is not None
        self.lands = config.max_version_gap == 0  # Whether a mix must be in the model before the next step.
        self.report_s, self.rest_s = report_s, 0.0 if self.lockstep else rest_s
        self.ahead = config.paired  # A pushed vector is copied when it is requested, with its mass.
        self.reported_at = self.looked_at = -math.inf

    def step(self, steps: int, now: float) -> None:
        """Visit the boundary if there is a reason, after ``steps`` steps in all."""
        due, late = steps >= self.signals.due_steps, now - self.reported_at > self.report_s
        if late or ((due or self.boundary.wanted) and now - self.looked_at >= self.rest_s):
            self.looked_at = now
            self.visit(now, due, due or late)

    def visit(self, now: float, due: bool = False, report: bool = True) -> None:
        """Fulfil the network's requests, and report, unless the visit only adds updates. ``due``: a mix begins here."""
        boundary, owner = self.boundary, self.owner
        ahead = due and self.ahead and self.signals.mix_at <= now
        whole = ahead and boundary.expected is None  # A snapshot of a part serves no newcomer.
        visit = boundary.visit(owner.replaced, ahead, report and not whole and owner.keeps())
        if visit.updates and not visit.adopted:
            owner.mixed(visit.updates)
        if visit.updates_alone and not report:
            owner.updated(visit)
        else:
            self.reported_at = now
            owner.report(visit)

    def waits(self, landing: bool) -> bool:
        """Return True if the loop must stay at this boundary.

        That is the case if a mix takes longer than ``max_version_gap`` allows. With ``landing``, a mix that the loop
        waited for must also have landed completely.
        """
        return self.signals.held or (landing and (self.boundary.owed > 0 or self.boundary.wanted))

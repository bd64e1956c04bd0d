"""The schedule by which a training loop visits its step boundary, and reports to the network thread.

At the *step boundary*, between two steps, the loop fulfils the network thread's requests: it copies its weights
(*snapshots*) and adds *updates*, the differences that exchanges have brought. In *lockstep*, which
``config.max_version_gap`` asks for, it also waits there for mixes that take too many steps.
"""

import math
from typing import Any, Protocol

from gossip.averaging.boundary import Boundary
from gossip.averaging.visit import Visit
from gossip.config import Config
from node.network.hints import LoopHints

VISIT_GAP_S = 0.002  # The least seconds between two visits, because a visit at each step would slow a tiny model.


class LoopOwner(Protocol):
    """The owner of a step loop, which can call the network thread."""

    def on_replaced(self, weights: Any) -> None:
        """Handle the replacement of the model's weights by these."""

    def is_copy_due(self) -> bool:
        """Return True if a copy of the weights for newcomers is due, and count it as taken."""

    def report_updates(self, visit: Visit) -> None:
        """Report a visit that only added updates to the network thread."""

    def report(self, visit: Visit) -> None:
        """Report a visit and the loop's progress to the network thread."""


class StepLoop:
    """The schedule of visits to the step boundary, and of reports. Times are those of the network's clock.

    The ``owner`` gets reports, at most ``report_s`` seconds apart. Visits are at least ``visit_gap_s`` apart, except in
    lockstep.
    """

    def __init__(
        self, config: Config, boundary: Boundary, owner: LoopOwner, report_s: float, visit_gap_s: float = VISIT_GAP_S
    ) -> None:
        self.boundary, self.owner, self.hints = boundary, owner, LoopHints(config)
        self.is_lockstep = config.max_version_gap is not None
        self.must_apply_mix = config.max_version_gap == 0  # A mix must be in the model before the next step.
        self.report_s, self.visit_gap_s = report_s, 0.0 if self.is_lockstep else visit_gap_s
        # A pair's snapshot may be copied before the network thread requests it. A pushed one carries away a part of the
        # model's push-sum mass (its weight in the mean), which only the request takes from the model.
        self.copies_early = config.paired
        self.reported_at = self.visited_at = -math.inf  # -inf: never.

    def step(self, steps: int, now: float) -> None:
        """Visit the boundary after ``steps`` steps in all, if a mix or a report is due or the network has a request.

        Every training step calls this. Without a reason it costs a few comparisons.
        """
        is_mix_due, is_report_due = steps >= self.hints.due_at_step, now - self.reported_at > self.report_s
        has_reason = is_mix_due or self.boundary.has_requests
        if is_report_due or (has_reason and now - self.visited_at >= self.visit_gap_s):
            self.visited_at = now
            self.visit(now, is_mix_due, is_mix_due or is_report_due)

    def visit(self, now: float, is_mix_due: bool = False, report: bool = True) -> None:
        """Fulfil the network's requests, and report.

        Args:
            now: Current time in seconds.
            is_mix_due: A mix begins here. Its snapshot is copied now, before the request for it comes.
            report: False to report only what the peer must be told, if the visit did nothing but add updates.
        """
        boundary, owner = self.boundary, self.owner
        copies_for_mix = is_mix_due and self.copies_early and self.hints.mix_at <= now
        # Newcomers need the whole model. A mix of a part (`next_cut`) copies that part alone.
        serves_newcomers = copies_for_mix and boundary.next_cut is None
        copies_for_newcomers = report and not serves_newcomers and owner.is_copy_due()
        visit = boundary.visit(owner.on_replaced, copies_for_mix, copies_for_newcomers)
        if visit.has_only_updates and not report:
            owner.report_updates(visit)
        else:
            self.reported_at = now
            owner.report(visit)

    def must_wait(self, until_applied: bool) -> bool:
        """Return True if the loop must stay at this boundary, because a mix exceeds ``max_version_gap``.

        With ``until_applied`` it must also stay until the update of that mix is in the weights.
        """
        return self.hints.must_wait or (
            until_applied and (self.boundary.pending_updates > 0 or self.boundary.has_requests)
        )

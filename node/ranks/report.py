"""Every rank's knowledge of the swarm. It is the same on all ranks at the same step, as rank 0 last reported it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossip.errors import LocalError
from gossip.ids import PeerId
from node.observe.members import Member, SwarmView
from node.observe.metrics import Metrics
from node.observe.reduced import Reduced
from node.ranks.plain import register
from node.ranks.ranks import Call, Ranks, StepSummary


@dataclass(frozen=True, slots=True)
class SwarmReport:
    """Rank 0's report at a boundary where all ranks stand; summaries between two reports update a part of it."""

    me: PeerId
    address: str
    view: SwarmView
    finished: bool
    run: Mapping[str, Any]  # The run's entry in a checkpoint.
    members: tuple[Member, ...]
    metrics: Mapping[str, Any]


register(SwarmReport, SwarmView, Member, Reduced)


class SwarmKnowledge:
    """One rank's knowledge of the swarm, and the counts that it contributes to the next all-reduce."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.steps = 0  # All ranks take their steps together.
        self.samples = 0  # The samples of all ranks that finished all-reduces have counted.
        self.swarm_samples = 0  # As HeldRun.swarm_samples: of all members, behind the run's weights.
        self.unsent_samples = 0  # Samples of this rank that no all-reduce contains yet.
        self.pending_samples = 0  # Samples of this rank in the all-reduce in progress.
        self.boundaries_left = 0  # Boundaries before the next all-reduce begins.
        self.last_report: SwarmReport | None = None  # None until the node has started.
        self.view = SwarmView()
        self.finished = False
        self.is_report_wanted = False  # Members or metrics were read since the last all-reduce.

    def count_step(self, samples: int) -> None:
        self.steps += 1
        self.unsent_samples += int(samples)

    def finish_summary(self) -> StepSummary | None:
        """Wait for the all-reduce in progress, if there is one, take over its summary, and return it."""
        summary = self.ranks.finish_summary()
        if summary is not None:
            self.samples += summary.samples
            self.pending_samples, self.boundaries_left = 0, summary.gap_steps - 1
            if self.last_report is not None:  # Before the first report the summary holds no view.
                self.finished = summary.finished
                self.view = dataclasses.replace(
                    self.view, swarm_samples=summary.swarm_samples, own_samples=summary.own_samples,
                    sharers=summary.sharers,
                )  # fmt: skip
            self.swarm_samples = max(self.swarm_samples, self.view.samples_at(self.samples))
        return summary

    def begin_summary(self, call: Call, announced: StepSummary | None = None) -> None:
        """Begin the next all-reduce; ``announced`` is rank 0's part."""
        self.ranks.begin_summary(call, self.unsent_samples, self.is_report_wanted, announced)
        self.pending_samples, self.unsent_samples, self.is_report_wanted = self.unsent_samples, 0, False

    def count_boundary(self) -> bool:
        """Count a boundary, and return True if the next all-reduce begins at it."""
        self.boundaries_left -= 1
        return self.boundaries_left < 0

    def wait_for_all(self, call: Call) -> None:
        """Wait until all ranks make this call."""
        self.finish_summary()
        self.begin_summary(call)
        self.finish_summary()
        self.boundaries_left = 0

    @property
    def uncounted_samples(self) -> int:
        """Return an estimate of the samples of all ranks that are not in ``samples`` yet, as if each had as many."""
        return (self.pending_samples + self.unsent_samples) * self.ranks.size

    def on_report(self, report: SwarmReport) -> None:
        """Take over a report of rank 0."""
        samples = report.view.samples_at(self.samples)
        self.swarm_samples = max(self.swarm_samples, samples) if report.view.continues(self.view) else samples
        self.last_report, self.view, self.finished = report, report.view, report.finished

    @property
    def report(self) -> SwarmReport:
        """Return the last report. Raises LocalError before the first."""
        if self.last_report is None:
            raise LocalError("This Node is not running: use it inside its with block.")
        return self.last_report

    def members(self) -> tuple[Member, ...]:
        self.is_report_wanted = True
        return self.report.members

    def metrics(self) -> Metrics:
        self.is_report_wanted = True
        return Metrics(self.report.metrics)

"""Every rank's knowledge of the swarm: the same at the same step, as rank 0 last reported it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossip.errors import LocalError
from gossip.ids import PeerId
from node.loop.ranks.plain import spoken
from node.loop.ranks.ranks import Call, Ranks, StepSummary
from node.observe.members import Member, SwarmView
from node.observe.metrics import Metrics
from node.observe.reduced import Reduced

__all__ = ["Known", "SwarmReport"]


@dataclass(frozen=True, slots=True)
class SwarmReport:
    """Rank 0's report at a boundary, in addition to the sums of each step."""

    me: PeerId
    address: str
    view: SwarmView
    finished: bool
    passes: int
    run: Mapping[str, Any]  # The run's entry in a checkpoint.
    members: tuple[Member, ...]
    metrics: Metrics


spoken(SwarmReport, SwarmView, Member, Metrics, Reduced)


class Known:
    """One rank's knowledge of the swarm, and the counts that it contributes to the next all-reduce.

    ``samples`` are those of all ranks, according to the finished all-reduces.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.steps = self.samples = 0
        self.swarm_samples = 0  # Samples behind the weights of the run, as HeldRun.swarm_samples explains.
        self.unsaid = self.said = 0  # Samples of this rank in no all-reduce yet, and those in the pending one.
        self.rest = 0  # Boundaries before the next all-reduce begins.
        self.latest: SwarmReport | None = None
        self.view = SwarmView()
        self.finished = False
        self.asking = False  # Members or metrics were read since the last all-reduce.

    def trained(self, samples: int) -> None:
        self.steps += 1
        self.unsaid += int(samples)

    def look(self) -> StepSummary | None:
        """Read the pending all-reduce, if there is one."""
        told = self.ranks.take()
        if told is not None:
            self.samples += told.samples
            self.said, self.rest = 0, told.gap - 1
            if self.latest is not None:  # At the start there is no report yet.
                self.finished = told.finished
                self.view = dataclasses.replace(
                    self.view, swarm_samples=told.swarm_samples, own_samples=told.own_samples, sharers=told.sharers
                )  # fmt: skip
            self.swarm_samples = max(self.swarm_samples, self.view.samples_at(self.samples))
        return told

    def say(self, call: Call, told: StepSummary | None = None) -> None:
        """Begin the next all-reduce; ``told`` is rank 0's part."""
        self.ranks.begin(call, self.unsaid, self.asking, told)
        self.said, self.unsaid, self.asking = self.unsaid, 0, False

    def rested(self) -> bool:
        """Count a boundary; return True if the next all-reduce begins at it."""
        self.rest -= 1
        return self.rest < 0

    def meet(self, call: Call) -> None:
        """Wait until all ranks are in this call."""
        self.look()
        self.say(call)
        self.look()
        self.rest = 0

    @property
    def ahead(self) -> int:
        """Return an estimate of the samples not yet summed, if the other ranks had as many as this one."""
        return (self.said + self.unsaid) * self.ranks.size

    def hear(self, news: SwarmReport) -> None:
        reached = news.view.samples_at(self.samples)
        self.swarm_samples = max(self.swarm_samples, reached) if news.view.continues(self.view) else reached
        self.latest, self.view, self.finished = news, news.view, news.finished

    @property
    def news(self) -> SwarmReport:
        if self.latest is None:
            raise LocalError("This Node is not running: use it inside its with block.")
        return self.latest

    def members(self) -> tuple[Member, ...]:
        self.asking = True
        return self.news.members

    def metrics(self) -> Metrics:
        self.asking = True
        return self.news.metrics

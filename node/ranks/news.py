"""What every rank of a node answers about the swarm: the same at the same step, as rank 0 last said."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossip.errors import LocalError
from gossip.ids import PeerId
from node.observe.members import Member, SwarmView
from node.observe.metrics import Metrics
from node.observe.reduced import Reduced
from node.ranks.plain import spoken
from node.ranks.ranks import Call, Ranks, Told

__all__ = ["Known", "News"]


@dataclass(frozen=True, slots=True)
class News:
    """What rank 0 says when all stand at a boundary, beside what it says at each step."""

    me: PeerId
    address: str
    view: SwarmView
    finished: bool
    passes: int
    run: Mapping[str, Any]  # what a checkpoint says of it
    members: tuple[Member, ...]
    metrics: Metrics


spoken(News, SwarmView, Member, Metrics, Reduced)


class Known:
    """Of one rank, and what it has to say to the others itself. ``samples`` are those that all ranks trained on, as far
    as their sums have come."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.steps = self.samples = 0
        self.swarm_samples = 0  # behind the weights of the run, as HeldRun.swarm_samples explains
        self.unsaid = self.said = 0  # samples of this rank: those in no sum yet, and those in the sum under way
        self.rest = 0  # boundaries before the next sum is begun
        self.latest: News | None = None
        self.view = SwarmView()
        self.finished = False
        self.asking = False  # for members or metrics, since the last sum

    def trained(self, samples: int) -> None:
        self.steps += 1
        self.unsaid += int(samples)

    def look(self) -> Told | None:
        """At the sum that is under way, if one is."""
        told = self.ranks.take()
        if told is not None:
            self.samples += told.samples
            self.said, self.rest = 0, told.gap - 1
            if self.latest is not None:  # at the start nothing is said yet
                self.finished = told.finished
                self.view = dataclasses.replace(
                    self.view, swarm_samples=told.swarm_samples, own_samples=told.own_samples, sharers=told.sharers
                )  # fmt: skip
            self.swarm_samples = max(self.swarm_samples, self.view.samples_at(self.samples))
        return told

    def say(self, call: Call, told: Told | None = None) -> None:
        """Begin the next sum; ``told`` is rank 0's part."""
        self.ranks.begin(call, self.unsaid, self.asking, told)
        self.said, self.unsaid, self.asking = self.unsaid, 0, False

    def rested(self) -> bool:
        """At the end of a boundary: whether the next sum is begun at it."""
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
        """Samples that all trained on beyond those, if the others had as many as this rank."""
        return (self.said + self.unsaid) * self.ranks.size

    def hear(self, news: News) -> None:
        reached = news.view.samples_at(self.samples)
        self.swarm_samples = max(self.swarm_samples, reached) if news.view.continues(self.view) else reached
        self.latest, self.view, self.finished = news, news.view, news.finished

    @property
    def news(self) -> News:
        if self.latest is None:
            raise LocalError("This Node is not running: use it inside its with block.")
        return self.latest

    def members(self) -> tuple[Member, ...]:
        self.asking = True
        return self.news.members

    def metrics(self) -> Metrics:
        self.asking = True
        return self.news.metrics

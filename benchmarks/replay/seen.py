"""Observations of a run, simulated or real, by the same instruments: a peer's effects, and snapshots of all models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.replay.plan import Plan, Separation
from gossip.effects import (
    Effect,
    Gather,
    MemberChanged,
    MemberState,
    Merge,
    Mix,
    Release,
    Rename,
    Snapshot,
    Transfer,
)
from gossip.ids import PeerId
from sim.report.measures import spread_of


@dataclass(frozen=True, slots=True)
class Change:
    """At ``at_s`` one node's view of another changed."""

    at_s: float
    observer: int
    subject: PeerId
    state: str  # A value of MemberState.


class Watch:
    """An observer of one peer's effects, as its driver performs them.

    It is the same for both drivers, so that their seconds compare: an exchange lasts from the request for its snapshot,
    a copy of the model, to the mix to which both sides have committed.
    """

    WATCHED = (Snapshot, Rename, Transfer, Gather, Mix, Merge, Release, MemberChanged)

    def __init__(self, node: int) -> None:
        self.node = node
        self.requested_at: dict[int, float] = {}  # By session in progress: when its snapshot was requested.
        self.streams_at: dict[int, float] = {}  # By session in progress: when its streams began.
        self.mixes: list[tuple[float, float]] = []  # The time of a mix, and the duration of its exchange.
        self.streams: list[float] = []  # The part of that taken by streams and commits.
        self.changes: list[Change] = []

    def see(self, effect: Effect, now: float) -> None:
        match effect:
            case Snapshot(session):
                self.requested_at[session] = now
            case Rename(session, to):
                if session in self.requested_at:
                    self.requested_at[to] = self.requested_at.pop(session)
            case Transfer(session) | Gather(session):
                self.streams_at[session] = now
            case Mix(session) | Merge(session):
                if session in self.streams_at:
                    self.streams.append(now - self.streams_at.pop(session))
                if (requested_at := self.requested_at.get(session)) is not None:
                    self.mixes.append((now, now - requested_at))
            case Release(session):
                self.requested_at.pop(session, None)
                self.streams_at.pop(session, None)
            case MemberChanged(peer, _, after):
                self.changes.append(Change(now, self.node, peer, after.value))
            case _:
                pass


@dataclass(slots=True)
class Seen:
    """The observations of one run. Times are seconds since its beginning, virtual or real."""

    plan: Plan
    # Of all nodes: the time, and the seconds from the request.
    mixes: list[tuple[float, float]] = field(default_factory=list)
    streams: list[float] = field(default_factory=list)  # Of all nodes: seconds from the agreement to the mix.
    changes: list[Change] = field(default_factory=list)
    ids: dict[PeerId, int] = field(default_factory=dict)  # The number of each node.
    joins: list[float] = field(default_factory=list)  # Seconds from a start to the swarm's weights.
    failed: int = 0  # Failed exchanges, counted by each side.
    sent_bytes: int = 0  # Streams and messages of all nodes, without overhead of TCP and TLS.
    accuracy: list[tuple[float, float]] = field(default_factory=list)  # Mean over the nodes that hold weights.
    distance: list[tuple[float, float]] = field(default_factory=list)  # Consensus distance.
    late_packets: float = 0.0  # The share of packets that came over 5 ms late.
    late_s_minute: float = 0.0  # Seconds per minute by which the worst node's training fell behind.

    def figures(self) -> dict[str, float]:
        """Return every line of the report; nan where a run has no value."""
        plan = self.plan
        seconds = np.array([took for _, took in self.mixes] or [np.nan])
        minutes = sum(min(life.until_s, plan.duration_s) - life.from_s for life in plan.lives) / 60
        mixes = len(self.mixes)
        figures = {
            "exchange s, median": float(np.median(seconds)),
            "exchange s, p90": float(np.percentile(seconds, 90)),
            "of it streams s, median": median(self.streams),
            "mixes a node a minute": mixes / minutes,
            "MB sent for a mix": self.sent_bytes / 1e6 / mixes if mixes else np.nan,
            "failed share": self.failed / (self.failed + mixes) if self.failed + mixes else np.nan,
            "join s, median": median(self.joins),
            "kill to dead s, median": median(self.deaths()),
        }
        for number, cut in enumerate(plan.cuts, start=1):
            which = f" of cut {number}" if len(plan.cuts) > 1 else ""
            figures[f"healing s{which}"] = healing_s = self.healing(cut)
            figures[f"suspicions after healing{which}"] = self.suspected(cut, healing_s)
        for target in plan.targets:
            figures[f"s to {target:.0%}"] = next((when for when, mean in self.accuracy if mean >= target), np.nan)
        for share in (0.25, 0.5, 0.75, 1.0):
            until_s = share * plan.duration_s
            distances = [value for when, value in self.distance if when <= until_s + 1e-6]
            figures[f"consensus distance at {until_s:g} s"] = distances[-1] if distances else np.nan
        return {name: float(value) for name, value in figures.items()}

    def deaths(self) -> list[float]:
        """Return, for each end without a farewell, the time until each remaining node held the node to be dead."""
        delays_s: list[float] = []
        for life in self.plan.lives:
            if life.farewell or life.until_s >= self.plan.duration_s:
                continue
            returns_at = min(
                (later.from_s for later in self.plan.lives if later.node == life.node and later.from_s > life.from_s),
                default=self.plan.duration_s,
            )
            first_delays: dict[int, float] = {}  # By observer.
            for change in self.changes:
                is_by_other = self.ids.get(change.subject) == life.node and change.observer != life.node
                is_dead = change.state == MemberState.DEAD.value
                if is_by_other and is_dead and life.until_s <= change.at_s < returns_at:
                    first_delays.setdefault(change.observer, change.at_s - life.until_s)
            delays_s += first_delays.values()
        return delays_s

    def healing(self, cut: Separation) -> float:
        """Return the seconds from a cut's end until no live node held another live node to be suspect or dead."""
        states: dict[tuple[int, int], str] = {}  # By observer and subject: the latest state in the observer's view.
        healed_at = cut.until_s  # Unless a node is still held to be gone.
        for change in self.between_those_up():
            if change.at_s > cut.until_s and not self.are_apart(states, healed_at):
                break
            states[change.observer, self.ids[change.subject]] = change.state
            healed_at = max(healed_at, change.at_s)
        return np.nan if self.are_apart(states, healed_at) else healed_at - cut.until_s

    def suspected(self, cut: Separation, healing_s: float) -> float:
        """Return how often a live node was suspected between the healing of a cut and the next cut.

        After a cut, TCP leaves a surviving link silent for as long again.
        """
        later_cuts_at = [other.at_s for other in self.plan.cuts if other.at_s >= cut.until_s]
        until_s = min(later_cuts_at, default=self.plan.duration_s)
        suspicions = [
            change for change in self.between_those_up()
            if change.state == MemberState.SUSPECT.value and cut.until_s + healing_s < change.at_s <= until_s
        ]  # fmt: skip
        return np.nan if math.isnan(healing_s) else float(len(suspicions))

    def between_those_up(self) -> list[Change]:
        """Return the changes between nodes that were up, in order of time."""
        changes = [
            change for change in self.changes
            if (subject := self.ids.get(change.subject)) is not None
            and self.plan.up(subject, change.at_s) and self.plan.up(change.observer, change.at_s)
        ]  # fmt: skip
        return sorted(changes, key=lambda change: change.at_s)

    def are_apart(self, states: Mapping[tuple[int, int], str], at_s: float) -> bool:
        """Return True if a live node holds another live node to be suspect or dead."""
        return any(
            state in (MemberState.SUSPECT.value, MemberState.DEAD.value)
            and self.plan.up(observer, at_s) and self.plan.up(subject, at_s)
            for (observer, subject), state in states.items()
        )  # fmt: skip

    def record_models(self, at_s: float, accuracies: Sequence[float], vectors: NDArray[np.float32]) -> None:
        """Record all models (nodes, elements) at one time."""
        if len(vectors):
            self.accuracy.append((at_s, float(np.mean(accuracies))))
            self.distance.append((at_s, spread_of(vectors, np.arange(len(vectors)))[1]))


def median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else np.nan

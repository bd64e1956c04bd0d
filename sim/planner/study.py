"""What came of the settings that were tried, and which of them to take: compared in pairs, seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gossip.codecs import AUTO
from gossip.errors import LocalError
from gossip.ids import quantity
from sim.planner.candidates import GIVEN, Candidate, played
from sim.planner.world import World
from sim.report.result import Result, plain
from sim.report.units import bytes_text, duration_text, number, share_text
from sim.scenario.scenario import Scenario
from sim.scenario.tables import toml_text

__all__ = ["Study", "Tried"]

POINT = 0.01  # of accuracy: what is as good as the best
SHY = 0.02  # below what the best comes to at the end, the accuracy whose time is told
NEVER = "–"  # noqa: RUF001  a dash, where it was not reached


@dataclass(slots=True)
class Tried:
    """One candidate's runs: a figure of each seed."""

    candidate: Candidate
    accuracy: list[float] = field(default_factory=list)  # at the end, mean of the peers
    curves: list[tuple[Any, Any]] = field(default_factory=list)  # (seconds, accuracies) of one run
    sent: list[float] = field(default_factory=list)  # bytes a node and a minute
    exchange_s: list[float] = field(default_factory=list)  # medians
    mixes: list[float] = field(default_factory=list)  # a node and a minute
    distance: list[float] = field(default_factory=list)  # consensus distance at the end
    intervals: list[int] = field(default_factory=list)  # local steps between two mixes at the end, where there are any

    def add(self, result: Result) -> None:
        summary = result.summary
        node_minutes = summary["virtual_s"] / 60 * result.scenario.peers
        self.accuracy.append(number(summary["accuracy"]["mean"]))
        self.curves.append((result.column("virtual_s"), result.column("accuracy_mean")))
        self.sent.append(summary["bytes_sent"] / node_minutes)
        self.mixes.append(float(result.column("mixes")[-1]) / (summary["virtual_s"] / 60))
        self.exchange_s.append(float(np.median(result.exchange_s)) if len(result.exchange_s) else math.nan)
        self.distance.append(number(summary["consensus_distance"]))
        if summary.get("interval_steps") is not None:
            self.intervals.append(summary["interval_steps"])

    @property
    def label(self) -> str:
        """Its name, with the interval that nodes chose where it leaves that to them."""
        chosen = self.candidate.changes.get("mix_every_steps") == AUTO and self.intervals
        steps = f" (every {quantity(statistics.median_low(self.intervals), 'step')})" if chosen else ""
        return self.candidate.name + steps

    @property
    def mean(self) -> float:
        """Accuracy at the end, of all seeds; one that came to no number is worth nothing."""
        return statistics.fmean(0.0 if math.isnan(each) else each for each in self.accuracy)

    def seconds_to(self, accuracy: float) -> float:
        """Median over the seeds of when the mean accuracy was there; infinity where most runs never were."""
        return statistics.median(first_at(*curve, accuracy) for curve in self.curves)

    def below(self, other: Tried) -> tuple[float, float]:
        """How much less accurate than the other it is, paired by seed: mean, and its standard error (NaN of one)."""
        gaps = [theirs - ours for theirs, ours in zip(other.accuracy, self.accuracy, strict=True)]
        error = float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
        return statistics.fmean(gaps), error


class Study:
    """Every candidate played with every seed; ``add`` notes what came of a run, and the rest is asked when all are."""

    def __init__(self, world: World, tried: Sequence[Candidate], seeds: int) -> None:
        self.world, self.seeds = world, seeds
        self.outcomes = [Tried(candidate) for candidate in tried]
        self.runs: list[tuple[Tried, Scenario]] = []
        for count in range(seeds):
            for outcome in self.outcomes:
                scenario = played(world.scenario, outcome.candidate)
                self.runs.append((outcome, scenario.replace(seed=scenario.seed + count)))

    def take(self, results: dict[int, Result]) -> None:
        """Of every run, by its number; the seeds of each candidate in their order."""
        for place, (outcome, _) in enumerate(self.runs):
            outcome.add(results[place])
        if all(math.isnan(each) for outcome in self.outcomes for each in outcome.accuracy):
            raise LocalError("Nothing was learned by any of the settings: check the task and its optimizer.")

    # -- what follows --------------------------------------------------------------------------------------------
    @property
    def given(self) -> Tried:
        return next(outcome for outcome in self.outcomes if outcome.candidate.name == GIVEN)

    @property
    def mixing(self) -> list[Tried]:
        """Those in which nodes mixed at all while they were watched: of the others nothing follows for longer runs."""
        return [outcome for outcome in self.outcomes if sum(outcome.mixes) > 0] or self.outcomes

    @property
    def best(self) -> Tried:
        return max(self.mixing, key=lambda outcome: outcome.mean)

    @property
    def choice(self) -> Tried:
        """The one that sends least of those within a point of the best."""
        best = self.best
        good = [outcome for outcome in self.mixing if best.mean - outcome.mean <= POINT]
        return min(good, key=lambda outcome: statistics.fmean(outcome.sent))

    @property
    def target(self) -> float:
        """The accuracy whose times are told, a whole per cent."""
        return math.floor(100 * (self.best.mean - SHY)) / 100

    @property
    def within(self) -> int:
        """In how many seeds the choice is within a point of the best."""
        best, choice = self.best.accuracy, self.choice.accuracy
        return sum(top - own <= POINT for top, own in zip(best, choice, strict=True))

    @property
    def sentences(self) -> list[str]:
        """What is advised, and how sure that is."""
        choice, best, given = self.choice, self.best, self.given
        length = duration_text(self.world.scenario.duration_s or 0.0)
        told = [f"Take {choice.label}: {share_text(choice.mean)} after {length}, {sending(choice)}."]
        if best is not choice:
            gap, error = choice.below(best)
            told.append(
                f"The best, {best.candidate.name}, is {points(gap, error)} better and sends "
                f"{ratio(best, choice)} as much."
            )
        if given is not choice and given is not best:
            gap, error = choice.below(given)
            if math.isnan(gap):
                return [*told, "What is given diverged.", self.sureness, *self.deadlines]
            better = "better" if gap < 0 else "worse"
            more = f"sends {ratio(given, choice)} as much"
            told.append(f"It is {points(abs(gap), error)} {better} than what is given, which {more}.")
        told.append(self.sureness)
        return told + self.deadlines

    @property
    def deadlines(self) -> list[str]:
        """Which preset the choice has its deadlines of, and why, where the file names none."""
        world = self.world
        if not world.suited:
            return []
        latency_s, rate_bytes_s, loss = world.links
        rate = "no limit" if math.isinf(rate_bytes_s) else f"{8e-6 * rate_bytes_s:.3g} Mbit/s"
        lossy = f" and {share_text(loss)} of packets lost" if loss else ""
        links = f"links of {rate} and {duration_text(latency_s)} one way{lossy} (medians)"
        if self.choice is self.given:
            return [f'What is given names no preset, which is "lan"; "{world.preset}" has deadlines for {links}.']
        if "preset" not in self.choice.candidate.changes:
            return []
        return [f'preset = "{world.preset}" has deadlines for {links}.']

    @property
    def sureness(self) -> str:
        if self.seeds == 1:
            return "How sure: one seed says little; repeat with --seeds 5."
        rivals = [one for one in self.mixing if one is not self.choice and one.mean >= self.best.mean - POINT]
        names = ", ".join(one.candidate.name for one in rivals)
        close = f"; so on average are {names}" if rivals else "; nothing else is"
        return f"How sure: within a point of the best in {self.within} of {quantity(self.seeds, 'seed')}{close}."

    # -- tables --------------------------------------------------------------------------------------------------
    def table(self) -> tuple[list[str], list[tuple[str, ...]]]:
        """Heads and a row for each candidate, the most accurate first."""
        heads = ["settings", "accuracy", f"to {100 * self.target:.0f} %", "sent/min", "exchange"]
        rows = list[tuple[str, ...]]()
        for outcome in sorted(self.outcomes, key=lambda one: -one.mean):
            spread = f" ±{100 * np.ptp(outcome.accuracy) / 2:.1f}" if self.seeds > 1 else ""
            to_s = outcome.seconds_to(self.target)
            mark = "> " if outcome is self.choice else "  "
            rows.append((
                mark + outcome.label, f"{100 * outcome.mean:.1f}{spread} %",
                duration_text(to_s) if math.isfinite(to_s) else NEVER, bytes_text(statistics.fmean(outcome.sent)),
                duration_text(statistics.median(outcome.exchange_s)),
            ))  # fmt: skip
        return heads, rows

    def settings(self) -> dict[str, Any]:
        """What the choice says under ``[gossip]``, beside what was given."""
        given, changes = self.world.scenario.to_mapping().get("gossip", {}), self.choice.candidate.changes
        return dict(changes) if "preset" in changes else {**given, **changes}

    def to_toml(self) -> str:
        """A file for ``gossip run --config``."""
        said = "".join(f"# {sentence}\n" for sentence in self.sentences)
        return said + toml_text({"gossip": self.settings()})

    def to_mapping(self) -> dict[str, Any]:
        """For JSON."""
        world = self.world.scenario
        return {
            "name": world.name, "nodes": world.peers, "seeds": self.seeds, "model_mb": world.task.model_mb,
            "virtual_s": world.duration_s, "target": self.target,
            "choice": self.choice.candidate.name, "best": self.best.candidate.name, "settings": self.settings(),
            "within_a_point": self.within, "sentences": self.sentences,
            "tried": [self.row_of(outcome) for outcome in self.outcomes],
        }  # fmt: skip

    def row_of(self, outcome: Tried) -> dict[str, Any]:
        gap, error = outcome.below(self.best)
        figures = {
            "accuracy": outcome.mean, "below_best": gap, "below_best_error": error,
            "seconds_to_target": outcome.seconds_to(self.target), "bytes_node_minute": statistics.fmean(outcome.sent),
            "exchange_s": statistics.median(outcome.exchange_s), "mixes_node_minute": statistics.fmean(outcome.mixes),
            "consensus_distance": statistics.fmean(outcome.distance),
        }  # fmt: skip
        return {"name": outcome.candidate.name, "settings": dict(outcome.candidate.changes), **plain(figures)}


def first_at(seconds: Any, accuracies: Any, wanted: float) -> float:
    """When a curve was there for the first time, between two of its points by a line; infinity for never."""
    there = np.flatnonzero(accuracies >= wanted)
    if not len(there):
        return math.inf
    first = int(there[0])
    if first == 0:
        return float(seconds[0])
    before, after = accuracies[first - 1], accuracies[first]
    share = (wanted - before) / (after - before) if after > before else 1.0
    return float(seconds[first - 1] + share * (seconds[first] - seconds[first - 1]))


def sending(outcome: Tried) -> str:
    return f"for {bytes_text(statistics.fmean(outcome.sent))} that each node sends in a minute"


def points(gap: float, error: float) -> str:
    return f"{100 * gap:.1f} points" if math.isnan(error) else f"{100 * gap:.1f} ± {100 * error:.1f} points"


def ratio(one: Tried, other: Tried) -> str:
    return f"{statistics.fmean(one.sent) / max(statistics.fmean(other.sent), 1.0):.2g} times"

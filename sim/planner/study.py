"""The evaluation of the candidates. Two of them are compared seed by seed, so that luck concerns both alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gossip.codecs import AUTO
from gossip.errors import LocalError
from gossip.ids import every, quantity
from sim.planner.candidates import GIVEN, Candidate, with_candidate
from sim.planner.world import World
from sim.report.result import Result, as_json_data
from sim.report.units import bytes_text, duration_text, figure_text, number, share_text
from sim.scenario.scenario import Scenario
from sim.scenario.tables import toml_text

POINT = 0.01  # A percentage point: an accuracy within it of the best one counts as equal to it.
BELOW_BEST = 0.02  # The reported time is that of an accuracy this far below the best final one.
NEVER = "–"  # noqa: RUF001  Shown where the accuracy was never reached.


@dataclass(slots=True)
class CandidateRuns:
    """One candidate's runs, with a figure for each seed."""

    candidate: Candidate
    accuracy: list[float] = field(default_factory=list)  # At the end, mean of the peers.
    curves: list[tuple[Any, Any]] = field(default_factory=list)  # Seconds and accuracies of one run, (rows,) each.
    sent: list[float] = field(default_factory=list)  # Bytes of a node in a minute.
    exchange_s: list[float] = field(default_factory=list)  # Median duration of an exchange; none where none finished.
    mixes: list[float] = field(default_factory=list)  # Mixes of a node in a minute.
    distance: list[float] = field(default_factory=list)  # Consensus distance at the end.
    intervals: list[int] = field(default_factory=list)  # Local steps between two mixes at the end, if counted so.

    def add(self, result: Result) -> None:
        summary = result.summary
        node_minutes = summary["virtual_s"] / 60 * max(1.0, float(result.column("alive").mean()))
        self.accuracy.append(number(summary["accuracy"]["mean"]))
        self.curves.append((result.column("virtual_s"), result.column("accuracy_mean")))
        self.sent.append(summary["bytes_sent"] / node_minutes)
        self.mixes.append(float(result.column("mixes")[-1]) / (summary["virtual_s"] / 60))
        if len(result.exchange_s):
            self.exchange_s.append(float(np.median(result.exchange_s)))
        self.distance.append(number(summary["consensus_distance"]))
        if summary.get("interval_steps") is not None:
            self.intervals.append(summary["interval_steps"])

    @property
    def label(self) -> str:
        """Return the candidate's name, with the interval that nodes chose if it leaves that to them."""
        chosen = self.candidate.changes.get("mix_every_steps") == AUTO and self.intervals
        steps = f" ({every(statistics.median_low(self.intervals))})" if chosen else ""
        return self.candidate.name + steps

    @property
    def mean(self) -> float:
        """Return the mean final accuracy over the seeds, counting NaN as 0."""
        return statistics.fmean(0.0 if math.isnan(accuracy) else accuracy for accuracy in self.accuracy)

    @property
    def median_exchange_s(self) -> float:
        return statistics.median(self.exchange_s or [math.nan])

    def seconds_to(self, accuracy: float) -> float:
        """Return the median over the seeds of the time to a mean accuracy; infinite if most runs never reached it."""
        return statistics.median(first_at(*curve, accuracy) for curve in self.curves)

    def deficit_to(self, other: CandidateRuns) -> tuple[float, float]:
        """Return how far its accuracy is below the other's, paired by seed: mean and standard error (NaN for one)."""
        gaps = [theirs - ours for theirs, ours in zip(other.accuracy, self.accuracy, strict=True)]
        error = float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
        return statistics.fmean(gaps), error


class Study:
    """All candidates with all seeds; the recommendation is available after :meth:`take`."""

    def __init__(self, world: World, tried: Sequence[Candidate], seeds: int) -> None:
        self.world, self.seeds = world, seeds
        self.outcomes = [CandidateRuns(candidate) for candidate in tried]  # They have no figures before `take`.
        # By the run's number: the outcome to which its result will be added, and its scenario.
        self.runs: list[tuple[CandidateRuns, Scenario]] = []
        for count in range(seeds):
            for outcome in self.outcomes:
                scenario = with_candidate(world.scenario, outcome.candidate)
                self.runs.append((outcome, scenario.replace(seed=scenario.seed + count)))

    def take(self, results: dict[int, Result]) -> None:
        """Take the results by run number; each candidate gets its seeds in order."""
        for place, (outcome, _) in enumerate(self.runs):
            outcome.add(results[place])
        if all(math.isnan(accuracy) for outcome in self.outcomes for accuracy in outcome.accuracy):
            raise LocalError("None of the settings learned anything: check the task and its optimizer.")
        if not self.mixing_runs:
            raise LocalError("No setting mixed even once: give duration_s more seconds, or a smaller --model-mb.")

    # -- conclusions ---------------------------------------------------------------------------------------------
    @property
    def given(self) -> CandidateRuns:
        """Return the candidate with the file's own settings."""
        return next(outcome for outcome in self.outcomes if outcome.candidate.name == GIVEN)

    @property
    def mixing_runs(self) -> list[CandidateRuns]:
        """Return the candidates that mixed at all, since the others say nothing about longer runs."""
        return [outcome for outcome in self.outcomes if sum(outcome.mixes) > 0]

    @property
    def best(self) -> CandidateRuns:
        return max(self.mixing_runs, key=lambda outcome: outcome.mean)

    @property
    def choice(self) -> CandidateRuns:
        """Return the candidate that sends least among the ones within a point of the best."""
        best = self.best
        as_good = [outcome for outcome in self.mixing_runs if best.mean - outcome.mean <= POINT]
        return min(as_good, key=lambda outcome: statistics.fmean(outcome.sent))

    @property
    def target(self) -> float:
        """Return the accuracy whose times are reported, in whole per cent."""
        return math.floor(100 * (self.best.mean - BELOW_BEST)) / 100

    @property
    def seeds_within_point(self) -> int:
        """Return the number of seeds in which the choice is within a point of the best."""
        best, choice = self.best.accuracy, self.choice.accuracy
        return sum(best_one - chosen_one <= POINT for best_one, chosen_one in zip(best, choice, strict=True))

    @property
    def sentences(self) -> list[str]:
        """Return the recommendation and its certainty as sentences."""
        choice, best, given = self.choice, self.best, self.given
        length = duration_text(self.world.scenario.duration_s or 0.0)
        traffic = f"for {bytes_text(statistics.fmean(choice.sent))} that each node sends in a minute"
        sentences = [f"Take {choice.label}: {share_text(choice.mean)} after {length}, {traffic}."]
        if best is not choice:
            gap, error = choice.deficit_to(best)
            sentences.append(
                f"The best, {best.candidate.name}, is {points_text(gap, error)} better and sends "
                f"{ratio_text(best, choice)}."
            )
        if given is not choice and given is not best:
            gap, error = choice.deficit_to(given)
            if math.isnan(gap):
                return [*sentences, "The given settings diverged.", self.certainty, *self.deadlines]
            better = "better" if gap < 0 else "worse"
            more = f"send {ratio_text(given, choice)}"
            sentences.append(f"It is {points_text(abs(gap), error)} {better} than the given settings, which {more}.")
        sentences.append(self.certainty)
        return sentences + self.deadlines

    @property
    def deadlines(self) -> list[str]:
        """Return which preset the choice takes its deadlines from, and why, if the file names none."""
        world = self.world
        if not world.base_settings:
            return []
        latency_s, rate_bytes_s, loss = world.links
        rate = "no limit" if math.isinf(rate_bytes_s) else f"{8e-6 * rate_bytes_s:.3g} Mbit/s"
        lossy = f" and {share_text(loss)} of packets lost" if loss else ""
        links = f"links of {rate} and {duration_text(latency_s)} one way{lossy} (medians)"
        if self.choice is self.given:
            return [
                f'The given settings name no preset, which means "lan"; "{world.preset}" has deadlines for {links}.'
            ]
        if "preset" not in self.choice.candidate.changes:
            return []
        return [f'preset = "{world.preset}" has deadlines for {links}.']

    @property
    def certainty(self) -> str:
        if self.seeds == 1:
            return "How sure: one seed says little; repeat with --seeds 5."
        least = self.best.mean - POINT
        rivals = [outcome for outcome in self.mixing_runs if outcome is not self.choice and outcome.mean >= least]
        names = ", ".join(outcome.candidate.name for outcome in rivals)
        close = f"; so on average are {names}" if rivals else "; nothing else is"
        seeds = f"{self.seeds_within_point} of {quantity(self.seeds, 'seed')}"
        return f"How sure: within a point of the best in {seeds}{close}."

    # -- tables --------------------------------------------------------------------------------------------------
    def table(self) -> tuple[list[str], list[tuple[str, ...]]]:
        """Return heads and a row for each candidate, the most accurate first."""
        heads = ["settings", "accuracy", f"to {100 * self.target:.0f} %", "sent/min", "exchange"]
        rows = list[tuple[str, ...]]()
        for outcome in sorted(self.outcomes, key=lambda outcome: -outcome.mean):
            spread = f" ±{100 * np.ptp(outcome.accuracy) / 2:.1f}" if self.seeds > 1 else ""
            to_s = outcome.seconds_to(self.target)
            mark = "> " if outcome is self.choice else "  "
            rows.append((
                mark + outcome.label, f"{100 * outcome.mean:.1f}{spread} %",
                duration_text(to_s) if math.isfinite(to_s) else NEVER, bytes_text(statistics.fmean(outcome.sent)),
                duration_text(outcome.median_exchange_s),
            ))  # fmt: skip
        return heads, rows

    def settings(self) -> dict[str, Any]:
        """Return the choice's section ``[gossip]``."""
        given, changes = self.world.scenario.to_mapping().get("gossip", {}), self.choice.candidate.changes
        return dict(changes) if "preset" in changes else {**given, **changes}

    def to_toml(self) -> str:
        """Return the text of a file for ``gossip run --config``."""
        comments = "".join(f"# {sentence}\n" for sentence in self.sentences)
        return comments + toml_text({"gossip": self.settings()})

    def to_mapping(self) -> dict[str, Any]:
        """Return the study as plain data for JSON."""
        world = self.world.scenario
        return {
            "name": world.name, "nodes": world.peers, "seeds": self.seeds, "model_mb": world.task.model_mb,
            "virtual_s": world.duration_s, "target": self.target,
            "choice": self.choice.candidate.name, "best": self.best.candidate.name, "settings": self.settings(),
            "within_a_point": self.seeds_within_point, "sentences": self.sentences,
            "tried": [self.row_of(outcome) for outcome in self.outcomes],
        }  # fmt: skip

    def row_of(self, outcome: CandidateRuns) -> dict[str, Any]:
        """Return the figures of one candidate for JSON."""
        gap, error = outcome.deficit_to(self.best)
        figures = {
            "accuracy": outcome.mean, "below_best": gap, "below_best_error": error,
            "seconds_to_target": outcome.seconds_to(self.target), "bytes_node_minute": statistics.fmean(outcome.sent),
            "exchange_s": outcome.median_exchange_s, "mixes_node_minute": statistics.fmean(outcome.mixes),
            "consensus_distance": statistics.fmean(outcome.distance),
        }  # fmt: skip
        return {"name": outcome.candidate.name, "settings": dict(outcome.candidate.changes), **as_json_data(figures)}


def first_at(seconds: Any, accuracies: Any, accuracy: float) -> float:
    """Return when a curve first reached a value, interpolated linearly; infinity for never."""
    reached = np.flatnonzero(accuracies >= accuracy)
    if not len(reached):
        return math.inf
    first = int(reached[0])
    if first == 0:
        return float(seconds[0])
    before, after = accuracies[first - 1], accuracies[first]
    share = (accuracy - before) / (after - before) if after > before else 1.0
    return float(seconds[first - 1] + share * (seconds[first] - seconds[first - 1]))


def points_text(gap: float, error: float) -> str:
    return f"{100 * gap:.1f} points" if math.isnan(error) else f"{100 * gap:.1f} ± {100 * error:.1f} points"


def ratio_text(outcome: CandidateRuns, reference: CandidateRuns) -> str:
    """Return how much an outcome sends, compared with the reference: ``1.5 times as much``, ``as much``."""
    times = figure_text(float(f"{statistics.fmean(outcome.sent) / max(statistics.fmean(reference.sent), 1.0):.2g}"))
    return "as much" if times == "1" else f"{times} times as much"

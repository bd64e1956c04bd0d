"""The comparison of the simulator's prediction with real processes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.replay.links import DISTURBED
from benchmarks.replay.seen import Seen
from gossip.ids import quantity

# Seconds per minute by which training may fall behind; beyond it a run measures this machine, not the swarm.
LATE_S_MINUTE = 1.0


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure on both sides; nan where there is none."""

    name: str
    predicted: float
    real: float

    @property
    def gap(self) -> float:
        """Return the prediction's deviation as a share of the real value."""
        return (self.predicted - self.real) / self.real if self.real else math.nan


@dataclass(slots=True)
class Report:
    """The report of one scenario."""

    name: str
    predictions: list[dict[str, float]] = field(default_factory=list)  # One per seed.
    runs: list[dict[str, float]] = field(default_factory=list)
    disturbances: list[str] = field(default_factory=list)  # One per run; "" if it was undisturbed.

    def add_run(self, seen: Seen) -> str:
        """Record a real run; return why it does not count, or ""."""
        self.runs.append(seen.figures())
        self.disturbances.append(disturbance(seen))
        return self.disturbances[-1]

    @property
    def counted(self) -> list[dict[str, float]]:
        return [run for run, why in zip(self.runs, self.disturbances, strict=True) if not why]

    def rows(self) -> list[Measure]:
        predicted, real = medians(self.predictions), medians(self.counted)
        return [Measure(name, value, real.get(name, math.nan)) for name, value in predicted.items()]

    def lines(self) -> list[str]:
        """Return the table for a terminal."""
        counted = f"{len(self.counted)} of {quantity(len(self.runs), 'run')}"
        heads = ("", f"simulated ({quantity(len(self.predictions), 'seed')})", f"real ({counted})", "gap")
        cells = [heads, *((row.name, text(row.predicted), text(row.real), percent(row.gap)) for row in self.rows())]
        widths = [max(len(row[column]) for row in cells) for column in range(4)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells
        ]  # fmt: skip
        notes = [
            f"Run {number}: disturbed, not counted: {why}."
            for number, why in enumerate(self.disturbances, start=1) if why
        ]  # fmt: skip
        return [self.name, *lines, *notes]

    def to_json(self) -> str:
        """Return everything as JSON, with each run and seed."""
        rows = [
            {"figure": row.name, "simulated": row.predicted, "real": row.real, "gap": row.gap} for row in self.rows()
        ]
        runs = [{"disturbed": why, "figures": run} for run, why in zip(self.runs, self.disturbances, strict=True)]
        whole = {"name": self.name, "rows": rows, "runs": runs, "predictions": self.predictions}
        return json.dumps(plain(whole), indent=2, allow_nan=False)


def disturbance(seen: Seen) -> str:
    """Return why a run measures this machine instead of the swarm; "" if it does not."""
    if seen.late_packets > DISTURBED:
        return f"{seen.late_packets:.0%} of packets came over 5 ms late"
    if seen.late_s_minute > LATE_S_MINUTE:
        return f"training fell behind by {seen.late_s_minute:.1f} s a minute"
    return ""


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the runs that have it; nan unless most do."""
    found = {}
    for name in runs[0] if runs else ():
        values = [run[name] for run in runs if math.isfinite(run[name])]
        found[name] = float(np.median(values)) if 2 * len(values) > len(runs) else math.nan
    return found


def gap_table(reports: Sequence[Report]) -> str:
    """Return the gaps of several scenarios as a Markdown table, with a row for each figure known on both sides."""
    names = list(dict.fromkeys(row.name for report in reports for row in report.rows()))
    lines = [f"| | {' | '.join(report.name for report in reports)} |", "|---" * (len(reports) + 1) + "|"]
    for name in names:
        cells = []
        for report in reports:
            row = next((each for each in report.rows() if each.name == name), None)
            both = row is not None and math.isfinite(row.predicted) and math.isfinite(row.real)
            cells.append(f"{text(row.predicted)} / {text(row.real)} ({percent(row.gap)})" if both and row else "-")
        if any(cell != "-" for cell in cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append(f"| runs counted | {' | '.join(f'{len(each.counted)} of {len(each.runs)}' for each in reports)} |")
    return "\n".join(lines)


def text(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "-"


def percent(share: float) -> str:
    return f"{share:+.0%}" if math.isfinite(share) else "-"


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

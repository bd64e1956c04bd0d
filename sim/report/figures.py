"""Every figure of a simulation, each declared once.

history.csv and the report's table of rows, summary.json, the closing table and docs/figures.md are made of these rows.
To add a figure, add its row here and compute what the row reads in :mod:`sim.report.measures`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gossip.codecs import AUTO
from gossip.ids import quantity
from sim.report.measures import End, Look
from sim.report.units import bytes_text, count_text, duration_text, figure_text, number, share_text
from sim.scenario.fidelity import Fidelity
from sim.scenario.scenario import Scenario

__all__ = ["COLUMNS", "HISTORY", "SHOWN", "SUMMARY", "Column", "Total", "page"]

ROUNDED = 1e-3  # Tolerance for sums of thirds and elevenths of groups: enough for up to 10^10 of them.
HEAD = """
## Of a simulation

A model is evaluated as it is at the end of its peer's current step. At most 1,000 held-out samples are used (128
windows of text). If some peers attack, losses, accuracies and the consensus distance are those of the honest peers.

A row of **history.csv** (and of `result.history`); empty where unknown:

| column | meaning |
|---|---|
"""
ALL = """
**summary.json**, which `--json` prints on one line; null for a value that is not a number:

| key | meaning |
|---|---|
"""


@dataclass(frozen=True, slots=True)
class Column:
    """A figure at one instant, nan where unknown.

    If it has a ``head`` it is in the report's table of rows, formatted by ``text``.
    """

    name: str
    meaning: str
    of: Callable[[Look], float]
    head: str = ""
    text: Callable[[float], str] = figure_text


@dataclass(frozen=True, slots=True)
class Total:
    """A figure of a whole run."""

    name: str
    meaning: str
    of: Callable[[End], Any]


HISTORY = (
    Column("virtual_s", "virtual time in seconds", lambda at: at.level.now, "virtual time", duration_text),
    Column("alive", "peers up", lambda at: at.level.alive, "alive", count_text),
    Column("ready", "peers up that hold a run's weights and train", lambda at: at.level.ready),
    Column(
        "steps", "steps so far, of all lives, divided by `peers`", lambda at: at.level.steps / at.scenario.peers
    ),
    Column(
        "mixes", "mixes so far, of all lives, divided by `peers`; each side of an exchange counts",
        lambda at: at.level.mixes / at.scenario.peers, "mixes", "{:.1f}".format,
    ),
    Column(
        "loss_mean", "loss of the evaluated peers' models on held-out samples: cross-entropy in nats, or as "
        "in `task.loss`; for `averaging` half the mean square", lambda at: at.losses.mean(), "loss",
    ),
    Column("loss_min", "the least loss", lambda at: at.losses.min()),
    Column("loss_max", "the greatest loss", lambda at: at.losses.max()),
    Column(
        "accuracy_mean", "their accuracy, 0 to 1; for text per predicted byte; empty where nothing is classified",
        lambda at: at.accuracies.mean(), "accuracy", share_text,
    ),
    Column("accuracy_min", "the least accuracy", lambda at: at.accuracies.min()),
    Column("accuracy_max", "the greatest accuracy", lambda at: at.accuracies.max()),
    Column("loss_average_model", "loss of the mean of all ready peers' weights", lambda at: at.average_loss),
    Column(
        "accuracy_average_model", "its accuracy, 0 to 1", lambda at: at.average_accuracy, "average model", share_text
    ),
    Column("metric_mean", "mean of `task.metric`, like the loss; empty without one", lambda at: at.metrics.mean()),
    Column("metric_min", "the least metric", lambda at: at.metrics.min()),
    Column("metric_max", "the greatest metric", lambda at: at.metrics.max()),
    Column("metric_average_model", "metric of the mean of all ready peers' weights", lambda at: at.average_metric),
    Column(
        "consensus_distance", "sqrt(mean |x_i - mean|^2) over all ready peers", lambda at: at.distance,
        "consensus distance",
    ),
    Column(
        "exchanges_done", "exchanges so far: pairs, groups or pushes, each counted once all its sides have mixed",
        lambda at: math.floor(at.level.exchanges + ROUNDED),
    ),
    Column(
        "exchanges_failed", "failed exchanges so far, as each peer counts them; both sides may count one",
        lambda at: at.level.failed,
    ),
    Column(
        "bytes_sent", "bytes so far, by all peers: streams in full, control messages estimated from every 61st",
        lambda at: at.level.bytes_sent, "sent", bytes_text,
    ),
    Column(
        "exchange_s_median", "median time from the request for a snapshot to the mix, over an even sample",
        lambda at: np.median(at.exchange_s),
    ),
    Column("exchange_s_p95", "the 95th percentile of the same", lambda at: np.percentile(at.exchange_s, 95)),
    Column("events", "events handled so far", lambda at: at.level.handled),
)  # fmt: skip
COLUMNS = tuple(column.name for column in HISTORY)
OF_ACCURACY = ("mean", "min", "max", "average_model")  # The same keys apply to a metric.

SUMMARY = (
    Total("name", "name of the scenario", lambda end: end.scenario.name),
    Total("seed", "seed of the scenario", lambda end: end.scenario.seed),
    Total("peers", "peers of the scenario", lambda end: end.scenario.peers),
    Total("virtual_s", "virtual time of the end", lambda end: end.last["virtual_s"]),
    Total("events", "handled events: messages, timers, boundaries, stream ends", lambda end: int(end.last["events"])),
    Total("node_updates", "mixes applied, each side counting", lambda end: end.level.mixes),
    Total("steps", "training steps of all peers", lambda end: end.level.steps),
    Total("loss", "`loss_mean` of the last row", lambda end: end.last["loss_mean"]),
    Total(
        "accuracy", "`mean`, `min`, `max`, `average_model` of the last row",
        lambda end: {key: end.last[f"accuracy_{key}"] for key in OF_ACCURACY},
    ),
    Total(
        "metric", "the same of `task.metric`",
        lambda end: {key: end.last[f"metric_{key}"] for key in OF_ACCURACY},
    ),
    Total(
        "interval_steps", "local steps between two mixes at the end, of the median peer; null if timed by the clock",
        lambda end: end.level.interval_steps,
    ),
    Total("consensus_distance", "of the last row", lambda end: end.last["consensus_distance"]),
    Total("exchanges_done", "of the last row", lambda end: int(end.last["exchanges_done"])),
    Total("exchanges_failed", "of the last row", lambda end: int(end.last["exchanges_failed"])),
    Total("refused", "refusals and clips by the honest peers that were up, by reason", lambda end: end.refused),
    Total("bytes_sent", "of the last row", lambda end: int(end.last["bytes_sent"])),
    Total("digest", "SHA-256 over the log of events and all final weights", lambda end: end.level.digest()),
    Total("done", "played share of the run, 0 to 1", lambda end: end.done),
    Total(
        "wall_s", "real seconds of the run with evaluations, without building the swarm",
        lambda end: round(end.wall_s, 3),
    ),
    Total("cpu_s", "processor seconds of the run", lambda end: round(end.cpu_s, 3)),
    Total("setup_s", "processor seconds of building the swarm", lambda end: round(end.setup_s, 3)),
    Total(
        "updates_per_cpu_s", "`node_updates / cpu_s`",
        lambda end: round(end.level.mixes / max(end.cpu_s, 1e-9), 1),
    ),
    Total("peak_rss_mb", "the most memory that the process ever held, MB", lambda end: round(end.peak_rss_mb, 1)),
    Total(
        "fidelity", "the level that played it: `whole`, message by message, or `exchange`, exchange by exchange",
        lambda end: end.fidelity.level,
    ),
    Total("fidelity_reason", "the reason if it was not the fast level; else empty", lambda end: end.fidelity.reason),
)  # fmt: skip


class PlayedRun(Protocol):
    """A run that was played, a :class:`sim.report.result.Result`."""

    @property
    def scenario(self) -> Scenario: ...
    @property
    def summary(self) -> Mapping[str, Any]: ...
    @property
    def history(self) -> Sequence[Mapping[str, float]]: ...
    @property
    def fidelity(self) -> Fidelity: ...


def accuracy(one: PlayedRun, key: str) -> float:
    return number(one.summary["accuracy"][key])


def learned(one: PlayedRun, text: str) -> str:
    """Return the text, or nothing if no model has an accuracy."""
    return "" if math.isnan(accuracy(one, "mean")) else text


def measured(one: PlayedRun) -> str:
    """Return the task's metric as text, if it has one."""
    mean, low, high = (number(one.summary["metric"][key]) for key in OF_ACCURACY[:3])
    return "" if math.isnan(mean) else f"{figure_text(mean)} ({figure_text(low)} to {figure_text(high)})"


def failed(one: PlayedRun) -> str:
    done, came_to_nothing = one.summary["exchanges_done"], one.summary["exchanges_failed"]
    share = came_to_nothing / (came_to_nothing + done) if came_to_nothing + done else 0.0
    return f"{count_text(came_to_nothing)} ({share_text(share)})"


def interval(one: PlayedRun) -> str:
    """How often, and in which codec."""
    steps = one.summary.get("interval_steps")
    codec = "each link's codec" if one.scenario.config.codec_name == AUTO else one.scenario.config.codec_name
    return "" if steps is None else f"every {quantity(steps, 'step')}, in {codec}"


# What matters of a result, in words and with units, in the order in which people ask; "" is left out.
SHOWN: tuple[tuple[str, Callable[[PlayedRun], str]], ...] = (
    ("accuracy, mean of peers", lambda one: learned(one, share_text(accuracy(one, "mean")))),
    ("least to greatest", lambda one: learned(
        one, f"{share_text(accuracy(one, 'min'))} to {share_text(accuracy(one, 'max'))}"
    )),
    ("average model", lambda one: learned(one, share_text(accuracy(one, "average_model")))),
    ("loss, mean of peers", lambda one: figure_text(number(one.summary["loss"]))),
    ("metric, mean of peers", measured),
    ("consensus distance", lambda one: figure_text(number(one.summary["consensus_distance"]))),
    ("alive at the end", lambda one: (
        f"{count_text(one.history[-1]['alive'] if one.history else math.nan)} of {count_text(one.summary['peers'])}"
    )),
    ("exchanges", lambda one: count_text(one.summary["exchanges_done"])),
    ("failed", failed),
    ("interval", interval),
    ("sent", lambda one: bytes_text(one.summary["bytes_sent"])),
    ("played", lambda one: "message by message" if one.fidelity.level == "whole" else "exchange by exchange"),
    ("virtual time", lambda one: duration_text(one.summary["virtual_s"])),
    ("real time", lambda one: duration_text(one.summary["wall_s"])),
)  # fmt: skip


def page() -> str:
    """Return the part of docs/figures.md that is about a simulation."""
    tables = ((HEAD, HISTORY), (ALL, SUMMARY))
    cells = [(head, [(f"`{row.name}`", row.meaning.replace("|", "\\|")) for row in rows]) for head, rows in tables]
    return "".join(head + "".join(f"| {name} | {meaning} |\n" for name, meaning in rows) for head, rows in cells)


if __name__ == "__main__":
    sys.stdout.write(page())

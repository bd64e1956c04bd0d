"""Every figure of a simulation, each declared once.

history.csv and the report's table of rows, summary.json, the closing table and docs/figures.md are made of these rows.
To add a figure, add its row here and compute what the row reads in :mod:`sim.report.measures`.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.report.measures import FinishedRun, Instant
from sim.report.units import bytes_text, count_text, duration_text, figure_text, share_text

# Each mix counts as its side's share of an exchange. Sums of shares like 1/3 are rounded, and may be just below a whole
# number. This is added before whole exchanges are counted; it is enough for up to 10^10 shares.
ROUNDING_ALLOWANCE = 1e-3
HISTORY_HEAD = """
## Of a simulation

A model is evaluated as it is at the end of its peer's current step. At most 1,000 held-out samples are used (128
windows of text). If some peers attack, losses, accuracies and the consensus distance are those of the honest peers.

A row of **history.csv** (and of `result.history`); empty where unknown:

| column | meaning |
|---|---|
"""
SUMMARY_HEAD = """
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
    measure: Callable[[Instant], float]
    head: str = ""
    text: Callable[[float], str] = figure_text


@dataclass(frozen=True, slots=True)
class Total:
    """A figure of a whole run."""

    name: str
    meaning: str
    compute: Callable[[FinishedRun], Any]


HISTORY = (
    Column("virtual_s", "virtual time in seconds", lambda swarm: swarm.now, "virtual time", duration_text),
    Column("alive", "peers up", lambda swarm: swarm.counts.live_peers, "alive", count_text),
    Column("ready", "peers up that hold a run's weights and train", lambda swarm: swarm.counts.ready_peers),
    Column(
        "steps", "steps so far, of all lives, divided by `peers`",
        lambda swarm: swarm.counts.steps / swarm.scenario.peers,
    ),
    Column(
        "mixes", "mixes so far, of all lives, divided by `peers`; each side of an exchange counts",
        lambda swarm: swarm.mixes / swarm.scenario.peers, "mixes", "{:.1f}".format,
    ),
    Column(
        "loss_mean", "loss of the evaluated peers' models on held-out samples: cross-entropy in nats, or as "
        "in `task.loss`; for `averaging` half the mean square", lambda swarm: swarm.losses.mean(), "loss",
    ),
    Column("loss_min", "the least loss", lambda swarm: swarm.losses.min()),
    Column("loss_max", "the greatest loss", lambda swarm: swarm.losses.max()),
    Column(
        "accuracy_mean", "their accuracy, 0 to 1; for text per predicted byte; empty where nothing is classified",
        lambda swarm: swarm.accuracies.mean(), "accuracy", share_text,
    ),
    Column("accuracy_min", "the least accuracy", lambda swarm: swarm.accuracies.min()),
    Column("accuracy_max", "the greatest accuracy", lambda swarm: swarm.accuracies.max()),
    Column("loss_average_model", "loss of the mean of all ready peers' weights", lambda swarm: swarm.average_loss),
    Column(
        "accuracy_average_model", "its accuracy, 0 to 1", lambda swarm: swarm.average_accuracy, "average model",
        share_text,
    ),
    Column(
        "metric_mean", "mean of `task.metric`, like the loss; empty without one", lambda swarm: swarm.metrics.mean()
    ),
    Column("metric_min", "the least metric", lambda swarm: swarm.metrics.min()),
    Column("metric_max", "the greatest metric", lambda swarm: swarm.metrics.max()),
    Column(
        "metric_average_model", "metric of the mean of all ready peers' weights", lambda swarm: swarm.average_metric
    ),
    Column(
        "consensus_distance", "sqrt(mean |x_i - mean|^2) over all ready peers", lambda swarm: swarm.distance,
        "consensus distance",
    ),
    Column(
        "exchanges_done", "exchanges so far: pairs, groups or pushes, each counted once all its sides have mixed",
        lambda swarm: math.floor(swarm.counts.exchanges + ROUNDING_ALLOWANCE),
    ),
    Column(
        "exchanges_failed", "failed exchanges so far, as each peer counts them; both sides may count one",
        lambda swarm: swarm.counts.failures,
    ),
    Column(
        "bytes_sent", "bytes so far, by all peers: streams in full, control messages estimated from every 61st",
        lambda swarm: swarm.counts.sent_bytes, "sent", bytes_text,
    ),
    Column(
        "exchange_s_median", "median time from the request for a snapshot to the mix, over an even sample",
        lambda swarm: np.median(swarm.exchange_s),
    ),
    Column("exchange_s_p95", "the 95th percentile of the same", lambda swarm: np.percentile(swarm.exchange_s, 95)),
    Column("events", "events handled so far", lambda swarm: swarm.handled_events),
)  # fmt: skip
COLUMNS = tuple(column.name for column in HISTORY)
OF_ACCURACY = ("mean", "min", "max", "average_model")  # The same keys apply to a metric.

SUMMARY = (
    Total("name", "name of the scenario", lambda run: run.scenario.name),
    Total("seed", "seed of the scenario", lambda run: run.scenario.seed),
    Total("peers", "peers of the scenario", lambda run: run.scenario.peers),
    Total("virtual_s", "virtual time of the end", lambda run: run.last["virtual_s"]),
    Total("events", "handled events: messages, timers, boundaries, stream ends", lambda run: int(run.last["events"])),
    Total("node_updates", "mixes applied, each side counting", lambda run: run.level.mixes),
    Total("steps", "training steps of all peers", lambda run: run.counts.steps),
    Total("loss", "`loss_mean` of the last row", lambda run: run.last["loss_mean"]),
    Total(
        "accuracy", "`mean`, `min`, `max`, `average_model` of the last row",
        lambda run: {key: run.last[f"accuracy_{key}"] for key in OF_ACCURACY},
    ),
    Total(
        "metric", "the same of `task.metric`",
        lambda run: {key: run.last[f"metric_{key}"] for key in OF_ACCURACY},
    ),
    Total(
        "interval_steps", "local steps between two mixes at the end, of the median peer; null if timed by the clock",
        lambda run: run.counts.interval_steps,
    ),
    Total("consensus_distance", "of the last row", lambda run: run.last["consensus_distance"]),
    Total("exchanges_done", "of the last row", lambda run: int(run.last["exchanges_done"])),
    Total("exchanges_failed", "of the last row", lambda run: int(run.last["exchanges_failed"])),
    Total("refused", "refusals and clips by the honest peers that were up, by reason", lambda run: run.refused),
    Total(
        "no_exchange", "a sentence with the likely reason if no exchange of several peers finished; else empty",
        lambda run: run.no_exchange,
    ),
    Total("bytes_sent", "of the last row", lambda run: int(run.last["bytes_sent"])),
    Total(
        "bytes_relayed", "bytes that members passed on between undialable ones: `total`, and `most` by one member",
        lambda run: {"total": run.counts.relayed_bytes, "most": run.counts.most_relayed_bytes},
    ),
    Total("digest", "SHA-256 over the log of events and all final weights", lambda run: run.level.digest()),
    Total("done", "played share of the run, 0 to 1", lambda run: run.done),
    Total(
        "wall_s", "real seconds of the run with evaluations, without building the swarm",
        lambda run: round(run.wall_s, 3),
    ),
    Total("cpu_s", "processor seconds of the run", lambda run: round(run.cpu_s, 3)),
    Total("setup_s", "processor seconds of building the swarm", lambda run: round(run.setup_s, 3)),
    Total(
        "updates_per_cpu_s", "`node_updates / cpu_s`",
        lambda run: round(run.level.mixes / max(run.cpu_s, 1e-9), 1),
    ),
    Total("peak_rss_mb", "the most memory that the process ever held, MB", lambda run: round(run.peak_rss_mb, 1)),
    Total(
        "fidelity", "the level that played it: `whole`, message by message, or `exchange`, exchange by exchange",
        lambda run: run.fidelity.level,
    ),
    Total("fidelity_reason", "the reason if it was not the fast level; else empty", lambda run: run.fidelity.reason),
)  # fmt: skip


def row_of(instant: Instant) -> dict[str, float]:
    """Return a row of the history."""
    return {column.name: float(column.measure(instant)) for column in HISTORY}


def summary_of(run: FinishedRun) -> dict[str, Any]:
    """Return the final figures of a run."""
    return {total.name: total.compute(run) for total in SUMMARY}


def page() -> str:
    """Return the part of docs/figures.md that is about a simulation."""
    tables = ((HISTORY_HEAD, HISTORY), (SUMMARY_HEAD, SUMMARY))
    cells = [(head, [(f"`{row.name}`", row.meaning.replace("|", "\\|")) for row in rows]) for head, rows in tables]
    return "".join(head + "".join(f"| {name} | {meaning} |\n" for name, meaning in rows) for head, rows in cells)


if __name__ == "__main__":
    sys.stdout.write(page())

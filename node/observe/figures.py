"""Every figure of a node, each declared once.

The live line, the log, the closing table, ``gossip status``, ``gossip local``'s table, ``node.metrics()`` and
docs/figures.md are made of these rows. A new figure is its row, and where it is computed what the row reads.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from typing import TYPE_CHECKING, Any

from gossip import kernel
from gossip.ids import quantity

if TYPE_CHECKING:  # a command that shows rows of a log starts without them
    from gossip.peer import Peer
    from node.links.pool import Links

__all__ = [
    "FIGURES", "HEADINGS", "MEASURED", "RATES", "STATUS", "VERSION", "Figure", "Reading", "Source", "columns_of",
    "known", "line_of", "page", "reading", "status_reading", "status_values", "table_of",
]  # fmt: skip

Reading = dict[str, Any]
"""One look at a node: its logged figures by name, None for what is not known."""

SHOWN = 16  # members that were refused, or misbehave
SHORTENED = ("clipped",)  # reasons for which a vector is taken in part
HEAD = """\
# Every figure

Written by `make reference` from `node/observe/figures.py` and `sim/report/figures.py`; tests hold that it is up to
date.

## Of a node

`log`: the `progress` rows of `--log` and the `final` one; `line`: the live line, alone or beside another
figure; `table`: the closing one; `status`: `gossip status`. What is not known yet is null, in `node.metrics()` None.

| figure | meaning | unit | where |
|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Source:
    """What figures are read from. The counts are those of whoever asks: a training loop is ahead of what its peer has
    been told."""

    peer: Peer
    links: Links
    steps: int
    samples: int
    swarm_samples: int
    exchange_s: Iterable[float] = ()  # late ones
    overhead_s: Iterable[float] = ()
    events_dropped: int = 0
    mixes: Iterable[tuple[str, str, float]] = ()  # late ones: with whom, in which codec, how many seconds ago
    faults: int = 0
    restarts: int = 0


def count(value: int | None) -> str:
    return f"{value or 0:,}"


def pace(row: Reading) -> str:
    """How often a node mixes, and in which codec, as the end of a sentence; nothing by the clock."""
    steps = row.get("interval_steps")
    return "" if steps is None else f", every {quantity(steps, 'step')} in {row.get('codec')}"


def megabytes(value: int | None) -> str:
    return f"{(value or 0) / 1e6:,.1f}"


def loss_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s (median)"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: its name in the log, what it means, its unit, how it is read (a rate is not: it follows from
    ``rate_of``), and how a person reads it, where None is one that is not there yet. Others of a reading stand in
    ``line`` and ``table`` by their names, as {samples}, since some figures are told together."""

    name: str
    meaning: str
    unit: str = ""
    of: Callable[[Source], Any] | None = None
    text: Callable[[Any], str] = str
    rate_of: str = ""  # MB/s of a figure in bytes
    logged: bool = True
    status: bool = False  # `gossip status` has it
    line: str | Callable[[Reading], str] = ""  # its part of the live line
    table: tuple[str, str | Callable[[Reading], str]] | None = None  # its row of the closing table
    column: str = ""  # the head of its column in the table of `gossip local`
    # Of a table of its own in `gossip status`: not one value, but rows of who, why and how often, or what `heads` say.
    heading: str = ""
    heads: tuple[str, str] = ("reason", "times")
    metric: str = ""  # its name in Prometheus's text, by the conventions there; one that only grows ends in _total


def median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def refused(at: Source) -> tuple[tuple[str, str, int], ...]:
    """Return who was refused most often, and why. A difference that a filter shortens is not refused: honest members
    with data of their own meet that all the time, and those that overdo it are told as misbehaving."""
    whole = [item for item in at.peer.refusals.items() if item[0][1] not in SHORTENED]
    counts = sorted(whole, key=lambda item: item[1], reverse=True)[:SHOWN]
    return tuple((partner.hex(), code, count) for (partner, code), count in counts)


def company(row: Reading) -> str:
    """Whether a node is ready is in no log, of which `gossip local` reads."""
    if not row.get("ready", True):
        return "joining"
    return "alone" if row["alone"] else quantity(row["members_alive"], "member")


def installed() -> str:
    """The version of this library; of a folder that nobody installed none is known."""
    try:
        return metadata.version("gossip-trainer")
    except metadata.PackageNotFoundError:
        return "unknown"


VERSION = installed()

# In the order of the line and of the table, what matters most first, since a narrow terminal cuts the line. Those of
# `gossip status` are told by their place: a new one stands behind the others.
FIGURES = (
    Figure(
        "steps", "steps of this node's training loop", "local steps", lambda at: at.steps, count,
        status=True, line="step {steps}", table=("steps", "{steps}"), column="steps",
        metric="gossip_steps_total",
    ),
    Figure(
        "samples", "that it has trained on", "samples", lambda at: at.samples, count,
        status=True, line="samples {samples} of {swarm_samples}",
        table=("samples", "{samples} of the swarm's {swarm_samples}"), column="samples",
        metric="gossip_samples_total",
    ),
    Figure(
        "swarm_samples", "behind the weights of its run: the whole swarm's, of members that left as well", "samples",
        lambda at: at.swarm_samples, count, status=True,
        metric="gossip_swarm_samples",
    ),
    Figure(
        "loss", "the last that it was given", "", lambda at: at.peer.record.loss, loss_text,
        status=True, line="loss {loss}", table=("loss", "{loss}"), column="loss",
        metric="gossip_loss",
    ),
    Figure(
        "members_alive", "members alive, this node included", "members", lambda at: at.peer.counts.alive, count,
        status=True, line=company,
        table=("members", lambda row: "alone" if row["alone"] else count(row["members_alive"])),
    ),
    Figure(
        "exchanges_done", "exchanges that it has mixed by", "exchanges", lambda at: at.peer.counts.done, count,
        status=True, line=lambda row: quantity(row["exchanges_done"], "exchange")
        + (f" ({row['exchanges_failed']:,} failed)" if row["exchanges_failed"] else "") + pace(row),
        table=("exchanges", "{exchanges_done} done, {exchanges_failed} failed"), column="exchanges",
        metric="gossip_exchanges_done_total",
    ),
    Figure(
        "exchanges_failed", "those that came to nothing, offers that nobody answered among them", "exchanges",
        lambda at: at.peer.counts.failed, count, status=True, column="failed",
    ),
    Figure(
        "exchange_seconds", "median of late exchanges, from the wish for a snapshot to the mix", "s",
        lambda at: median(at.exchange_s), seconds, table=("an exchange takes", "{exchange_seconds}"),
    ),
    Figure(
        "step_overhead_seconds", "median of late calls of `node.step`", "s", lambda at: median(at.overhead_s),
        logged=False, metric="gossip_step_overhead_seconds",
    ),
    Figure(
        "bytes_sent", "over all links", "bytes", lambda at: at.links.bytes_sent, megabytes,
        status=True, table=("sent, received", "{bytes_sent} MB, {bytes_received} MB"), column="MB sent",
        metric="gossip_sent_bytes_total",
    ),
    Figure(
        "bytes_received", "over all links", "bytes", lambda at: at.links.bytes_received, megabytes, status=True,
        metric="gossip_received_bytes_total",
    ),
    Figure(
        "consensus_distance", "sqrt(mean |x_i - mean|^2) over the swarm, estimated from late exchanges",
        "distance of weights", lambda at: at.peer.consensus_distance, logged=False, status=True,
        metric="gossip_consensus_distance",
    ),
    Figure(
        "partner", "the last that it mixed with: the first digits of its id", "",
        lambda at: at.peer.last_partner and at.peer.last_partner.hex()[:8],
        lambda last: f", last with {last}" if last else "",
    ),
    Figure(
        "ready", "whether it holds a run's weights", "", lambda at: at.peer.ready, logged=False, status=True,
        metric="gossip_ready",
    ),
    Figure(
        "alone", "whether nobody else is there", "", lambda at: at.peer.alone, status=True,
        metric="gossip_alone",
    ),
    Figure(
        "mb_s_sent", "over the last second or so", "MB/s", text="{:.1f}".format, rate_of="bytes_sent",
        line="{mb_s_sent}/{mb_s_received} MB/s{partner}",
    ),
    Figure("mb_s_received", "over the last second or so", "MB/s", text="{:.1f}".format, rate_of="bytes_received"),
    Figure(
        "refused", "what was refused most often: from whom, why, how often", "", refused,
        logged=False, status=True, heading="refused, from",
    ),
    Figure(
        "messages_ignored", "messages of kinds that this version does not know", "messages",
        lambda at: at.links.ignored, logged=False, status=True,
        metric="gossip_messages_ignored_total",
    ),
    Figure(
        "events_dropped", "of `node.on`, for which its callbacks were too slow", "events", lambda at: at.events_dropped,
        logged=False,
        metric="gossip_events_dropped_total",
    ),
    Figure(
        "suspicious", "members that misbehave: who, how, how often", "",
        lambda at: tuple(islice(at.peer.misconduct(), SHOWN)), logged=False, status=True, heading="misbehaves",
    ),
    Figure(
        "mixed", "members that it mixed with of late: who, in which codec, how many seconds ago", "",
        lambda at: tuple(at.mixes)[-SHOWN:], logged=False, status=True, heading="mixed with", heads=("codec", "s ago"),
    ),
    Figure(
        "failures", "exchanges that came to nothing, by the reason", "exchanges",
        lambda at: tuple((reason, "", count) for reason, count in at.peer.failed_by.items()), logged=False, status=True,
        heading="exchanges failed", heads=("", "times"),
    ),
    Figure("version", "of this library", "", lambda at: VERSION, logged=False, status=True),
    Figure(
        "kernel", "what codecs compute with: `compiled` passes, or `numpy` where none were built", "",
        lambda at: kernel.built(), logged=False, status=True,
    ),
    Figure(
        "shared_links", "those to members on this host whose vectors are read where they lie in its memory", "links",
        lambda at: at.links.shared, logged=False, status=True,
    ),
    Figure(
        "lossy_links", "those that lose packets under cubic, which takes that for a full path: bbr would not", "links",
        lambda at: at.links.lossy, logged=False, status=True,
    ),
    Figure(
        "wide_links", "those with several connections, since one does not fill their path", "links",
        lambda at: at.links.wide, logged=False, status=True,
    ),
    Figure(
        "faults", "of this library, each of which ended a link or an exchange and nothing else", "faults",
        lambda at: at.faults, logged=False, status=True,
        metric="gossip_faults_total",
    ),
    Figure(
        "network_restarts", "times that its network side began anew after a fault of this library", "restarts",
        lambda at: at.restarts, logged=False, status=True,
        metric="gossip_network_restarts_total",
    ),
    Figure(
        "interval_steps", "local steps between two mixes at present; null by the clock", "local steps",
        lambda at: at.peer.interval_steps, count, status=True,
    ),
    Figure(
        "codec", "the codec of the last exchange; of the configuration before the first", "",
        lambda at: next((codec for _, codec, _ in reversed(tuple(at.mixes))), at.peer.config.codec), status=True,
        table=("mixes", lambda row: pace(row).removeprefix(", ") or f"in {row.get('codec')}"),
    ),
)  # fmt: skip
MEASURED = tuple(figure for figure in FIGURES if figure.of is not None and not figure.heading)
RATES = tuple(figure for figure in FIGURES if figure.rate_of)
STATUS = tuple(figure for figure in FIGURES if figure.status)
HEADINGS = {figure.name: (figure.heading, *figure.heads) for figure in FIGURES if figure.heading}


def known(value: Any) -> Any:
    """None for what is no number yet."""
    return None if isinstance(value, float) and math.isnan(value) else value


def reading(at: Source) -> Reading:
    """The logged figures but for rates, which follow from two of these."""
    return {figure.name: known(figure.of(at)) for figure in FIGURES if figure.logged and figure.of is not None}


def status_reading(at: Source) -> Reading:
    """The figures of `gossip status`."""
    return {figure.name: known(figure.of(at)) for figure in STATUS if figure.of is not None}


def status_values(at: Source) -> tuple[Any, ...]:
    """What a page of `gossip status` holds, in the order of ``STATUS``."""
    return tuple(status_reading(at).values())


def told(templates: Iterable[str | Callable[[Reading], str]], row: Reading) -> list[str]:
    texts = {figure.name: figure.text(row[figure.name]) for figure in FIGURES if figure.name in row}
    return [one.format_map(texts) if isinstance(one, str) else one(row) for one in templates]


def line_of(row: Reading) -> str:
    """A reading with its rates as one line."""
    return "  ".join(told([figure.line for figure in FIGURES if figure.line], row))


def table_of(row: Reading) -> list[tuple[str, str]]:
    """A node's whole run: what, and how much."""
    tables = [figure.table for figure in FIGURES if figure.table is not None]
    return list(zip([what for what, _ in tables], told([text for _, text in tables], row), strict=True))


def columns_of(row: Reading) -> dict[str, str]:
    """A node among others: its figures by their heads; perhaps none is there yet."""
    return {figure.column: figure.text(row.get(figure.name)) for figure in FIGURES if figure.column}


def page() -> str:
    """The part of docs/figures.md that is about a node."""
    lines = []
    for figure in FIGURES:
        where = {
            "log": figure.logged, "line": bool(figure.line), "table": figure.table, "status": figure.status,
            "`node.metrics()`": figure in MEASURED,
        }  # fmt: skip
        cells = (f"`{figure.name}`", figure.meaning, figure.unit, ", ".join(name for name in where if where[name]))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join((*HEAD.splitlines(), *lines)) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())

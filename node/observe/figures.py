"""Every figure of a node, each declared once.

The live line, the log, the closing table, ``gossip status``, ``gossip local``'s table, ``node.metrics()`` and
docs/figures.md are made of these rows. To add a figure, add its row here and compute what the row reads.
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
from gossip.codecs import AUTO
from gossip.ids import every, quantity

if TYPE_CHECKING:  # A command that shows rows of a log starts without these modules.
    from gossip.peer import Peer
    from node.links.pool import Links

Reading = dict[str, Any]
"""A snapshot of a node: its logged figures by name, None where a value is not known."""

SHOWN_ROWS = 16  # Rows of a table in `gossip status`: refusals, misbehaviour or recent mixes.
# The reasons with which gossip.filters shortens a vector and mixes it.
SHORTENED = ("clipped", "direction", "budget")
HEAD = """\
# Every figure

Written by `make reference` from `node/observe/figures.py` and `sim/report/figures.py`; tests hold that it is up to
date.

## Of a node

`log`: the `progress` rows of `--log` and the `final` one; `line`: the live line, alone or together with another
figure; `table`: the closing one; `status`: `gossip status`. A figure that is not known yet is null, in
`node.metrics()` None.

| figure | meaning | unit | where |
|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Source:
    """The state from which figures are read.

    The caller passes the counts of steps and samples, because a training loop is ahead of what its peer has been told.
    """

    peer: Peer
    links: Links
    steps: int
    samples: int
    swarm_samples: int
    exchange_s: Iterable[float] = ()  # Durations of recent exchanges.
    overhead_s: Iterable[float] = ()  # Durations of recent calls of `node.step`.
    events_dropped: int = 0
    mixes: Iterable[tuple[str, str, float]] = ()  # Recent mixes: partner, codec, age in seconds.
    faults: int = 0
    restarts: int = 0
    run: bytes = b""  # The id of the run that ``swarm_samples`` counts; empty if it is not known.
    model_file: str = ""  # Where the user last wrote the model.


def count_text(value: int | None) -> str:
    return f"{value or 0:,}"


def interval_text(row: Reading) -> str:
    """Return the mixing interval and codec as the end of a sentence; empty text if mixes are timed by the clock."""
    steps, codec = row.get("interval_steps"), row.get("codec")
    codec_text = "each link's codec" if codec == AUTO else codec  # Before the first exchange.
    return "" if steps is None else f", {every(steps)} in {codec_text}"


def megabytes_text(value: int | None) -> str:
    return f"{(value or 0) / 1e6:,.1f}"


def loss_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def seconds_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s (median)"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure, and how it is shown.

    Attributes:
        name: Its name in the log.
        meaning: A description for users.
        unit: Its unit.
        read: A function that reads it from a :class:`Source`; None for a rate, which follows from ``rate_of``.
        text: A function that formats its value; the value None means unknown.
        is_text: Its value is a text and no number.
        rate_of: The figure in bytes of which this one is the rate in MB/s.
        logged: The log has it.
        status: ``gossip status`` has it.
        line: Its template in the live line, which may hold further figures by name, like {samples}.
        table: Its label and template in the closing table, which may hold further figures too.
        column: The head of its column in the table of ``gossip local``.
        heading: The title of its own table in ``gossip status``, if its value is rows of member, reason and count.
        heads: The heads of the last two columns of that table.
        metric: Its Prometheus name; by convention a counter ends in _total.
    """

    name: str
    meaning: str
    unit: str = ""
    read: Callable[[Source], Any] | None = None
    text: Callable[[Any], str] = str
    is_text: bool = False
    rate_of: str = ""
    logged: bool = True
    status: bool = False
    line: str | Callable[[Reading], str] = ""
    table: tuple[str, str | Callable[[Reading], str]] | None = None
    column: str = ""
    heading: str = ""
    heads: tuple[str, str] = ("reason", "times")
    metric: str = ""


def median(values: Iterable[float]) -> float | None:
    """Return the median, or None without values."""
    known = list(values)
    return statistics.median(known) if known else None


def refusals_of(source: Source) -> tuple[tuple[str, str, int], ...]:
    """Return the members that were refused most often, and the reasons.

    Vectors that a filter shortens do not count, since honest members with their own data often send such vectors.
    :class:`gossip.misbehaviour.MisbehaviourLog` reports members that send too many.
    """
    refusals = [item for item in source.peer.exchanges.refusals.counts.items() if item[0][1] not in SHORTENED]
    counts = sorted(refusals, key=lambda item: item[1], reverse=True)[:SHOWN_ROWS]
    return tuple((partner.hex(), code, count) for (partner, code), count in counts)


def members_text(row: Reading) -> str:
    """Return the number of members as text. Rows of a log, which `gossip local` reads, have no ``ready``."""
    if not row.get("ready", True):
        return "joining"
    return "alone" if row["alone"] else quantity(row["members_alive"], "member")


def installed_version() -> str:
    """Return the version of this library, or "unknown" for a folder that is not installed."""
    try:
        return metadata.version("gossip-trainer")
    except metadata.PackageNotFoundError:
        return "unknown"


VERSION = installed_version()

# In the order of the line and the table, the most important first, since a narrow terminal cuts the line. Readers of
# `gossip status` know figures by their position among those with `status`: append new ones behind the others.
FIGURES = (
    Figure(
        "steps", "steps of this node's training loop", "local steps", lambda source: source.steps, count_text,
        status=True, line="step {steps}", table=("steps", "{steps}"), column="steps",
        metric="gossip_steps_total",
    ),
    Figure(
        "samples", "samples that this node has trained on", "samples", lambda source: source.samples, count_text,
        status=True, line="samples {samples} of {swarm_samples}",
        table=("samples", "{samples} of the swarm's {swarm_samples}"), column="samples",
        metric="gossip_samples_total",
    ),
    Figure(
        "swarm_samples", "samples behind the weights of its run, including those of members that left", "samples",
        lambda source: source.swarm_samples, count_text, status=True,
        metric="gossip_swarm_samples",
    ),
    Figure(
        "loss", "the last loss that the loop reported", "", lambda source: source.peer.membership.me.loss, loss_text,
        status=True, line="loss {loss}", table=("loss", "{loss}"), column="loss",
        metric="gossip_loss",
    ),
    Figure(
        "members_alive", "members alive, this node included", "members", lambda source: source.peer.view.alive_count,
        count_text, status=True, line=members_text,
        table=("members", lambda row: "alone" if row["alone"] else count_text(row["members_alive"])),
    ),
    Figure(
        "exchanges_done", "finished exchanges", "exchanges", lambda source: source.peer.exchanges.done_count,
        count_text, status=True, line=lambda row: quantity(row["exchanges_done"], "exchange")
        + (f" ({row['exchanges_failed']:,} failed)" if row["exchanges_failed"] else "") + interval_text(row),
        table=("exchanges", "{exchanges_done} done, {exchanges_failed} failed"), column="exchanges",
        metric="gossip_exchanges_done_total",
    ),
    Figure(
        "exchanges_failed", "failed exchanges, including unanswered offers", "exchanges",
        lambda source: source.peer.exchanges.failures, count_text, status=True, column="failed",
    ),
    Figure(
        "exchange_seconds", "median of recent exchanges, from the request for a snapshot to the mix", "s",
        lambda source: median(source.exchange_s), seconds_text, table=("an exchange takes", "{exchange_seconds}"),
    ),
    Figure(
        "step_overhead_seconds", "median of recent calls of `node.step`", "s", lambda source: median(source.overhead_s),
        logged=False, metric="gossip_step_overhead_seconds",
    ),
    Figure(
        "bytes_sent", "bytes sent over all links", "bytes", lambda source: source.links.bytes_sent, megabytes_text,
        status=True, table=("sent, received", "{bytes_sent} MB, {bytes_received} MB"), column="MB sent",
        metric="gossip_sent_bytes_total",
    ),
    Figure(
        "bytes_received", "bytes received over all links", "bytes", lambda source: source.links.bytes_received,
        megabytes_text, status=True,
        metric="gossip_received_bytes_total",
    ),
    Figure(
        "consensus_distance", "sqrt(mean |x_i - mean|^2) over the swarm, estimated from recent exchanges",
        "distance of weights", lambda source: source.peer.exchanges.consensus_distance, logged=False, status=True,
        metric="gossip_consensus_distance",
    ),
    Figure(
        "partner", "the last partner: the first digits of its id", "",
        lambda source: source.peer.exchanges.last_partner and source.peer.exchanges.last_partner.hex()[:8],
        lambda partner: f", last with {partner}" if partner else "",
    ),
    Figure(
        "ready", "true if it holds a run's weights", "", lambda source: source.peer.view.ready, logged=False,
        status=True, metric="gossip_ready",
    ),
    Figure(
        "alone", "true if no other member is alive", "", lambda source: source.peer.run_choice.is_alone, status=True,
        metric="gossip_alone",
    ),
    Figure(
        "mb_s_sent", "rate over about the last second", "MB/s", text="{:.1f}".format, rate_of="bytes_sent",
        line="{mb_s_sent}/{mb_s_received} MB/s{partner}",
    ),
    Figure("mb_s_received", "rate over about the last second", "MB/s", text="{:.1f}".format, rate_of="bytes_received"),
    Figure(
        "refused", "the most frequent refusals: member, reason, count", "", refusals_of,
        logged=False, status=True, heading="refused, from",
    ),
    Figure(
        "messages_ignored", "messages of kinds that this version does not know", "messages",
        lambda source: source.links.ignored_messages, logged=False, status=True,
        metric="gossip_messages_ignored_total",
    ),
    Figure(
        "events_dropped", "events dropped because callbacks of `node.on` were too slow", "events",
        lambda source: source.events_dropped,
        logged=False,
        metric="gossip_events_dropped_total",
    ),
    Figure(
        "suspicious", "members that misbehave, or whose exchanges come to nothing: member, how, count", "",
        lambda source: tuple(islice(source.peer.misbehaviour.rows(), SHOWN_ROWS)), logged=False, status=True,
        heading="suspicious",
    ),
    Figure(
        "mixed", "recent partners: member, codec, seconds ago", "",
        lambda source: tuple(source.mixes)[-SHOWN_ROWS:], logged=False, status=True, heading="mixed with",
        heads=("codec", "s ago"),
    ),
    Figure(
        "failures", "failed exchanges by reason", "exchanges",
        lambda source: tuple((reason, "", count) for reason, count in source.peer.exchanges.failures_by_reason.items()),
        logged=False, status=True, heading="exchanges failed", heads=("", "times"),
    ),
    Figure(
        "version", "version of this library", "", lambda source: VERSION, is_text=True, logged=False, status=True
    ),
    Figure(
        "kernel", "the codecs' implementation: `compiled`, or `numpy` where nothing was built", "",
        lambda source: kernel.implementation(), is_text=True, logged=False, status=True,
    ),
    Figure(
        "lossy_links", "links on which packet loss limits cubic; bbr would not be limited", "links",
        lambda source: source.links.lossy_links, logged=False, status=True,
    ),
    Figure(
        "wide_links", "links with several connections, since one does not fill their path", "links",
        lambda source: source.links.striped_links, logged=False, status=True,
    ),
    Figure(
        "faults", "faults of this library that ended one link or one exchange", "faults",
        lambda source: source.faults, logged=False, status=True,
        metric="gossip_faults_total",
    ),
    Figure(
        "network_restarts", "restarts of its network side after a fault of this library", "restarts",
        lambda source: source.restarts, logged=False, status=True,
        metric="gossip_network_restarts_total",
    ),
    Figure(
        "interval_steps", "local steps between two mixes at present; null if timed by the clock", "local steps",
        lambda source: source.peer.schedule.every, count_text, status=True,
    ),
    Figure(
        "codec", "the codec of the last exchange; of the configuration before the first", "",
        lambda source: next((codec for _, codec, _ in reversed(tuple(source.mixes))), source.peer.config.codec_name),
        is_text=True, status=True,
        table=("mixes", lambda row: interval_text(row).removeprefix(", ") or f"in {row.get('codec')}"),
    ),
    Figure(
        "model_file", "where `node.save` or `node.export` last wrote the model; null before", "",
        lambda source: source.model_file or None,
        table=("model", lambda row: row.get("model_file") or 'not saved: node.export("model.safetensors") writes it'),
    ),
)  # fmt: skip
# The figures of `node.metrics()`, each of one value.
MEASURED = tuple(figure for figure in FIGURES if figure.read is not None and not figure.heading)
RATES = tuple(figure for figure in FIGURES if figure.rate_of)
STATUS = tuple(figure for figure in FIGURES if figure.status)
HEADINGS = {figure.name: (figure.heading, *figure.heads) for figure in FIGURES if figure.heading}


def none_if_nan(value: Any) -> Any:
    """Return the value, or None for NaN."""
    return None if isinstance(value, float) and math.isnan(value) else value


def reading(source: Source) -> Reading:
    """Return the logged figures except rates, which follow from two readings."""
    logged = [figure for figure in FIGURES if figure.logged]
    return {figure.name: none_if_nan(figure.read(source)) for figure in logged if figure.read is not None}


def status_reading(source: Source) -> Reading:
    """Return the figures of `gossip status`, in the order of ``STATUS``."""
    return {figure.name: none_if_nan(figure.read(source)) for figure in STATUS if figure.read is not None}


def fill_templates(templates: Iterable[str | Callable[[Reading], str]], row: Reading) -> list[str]:
    """Fill templates with the figures of a reading as text. A template may also be a function of the reading."""
    texts = {figure.name: figure.text(row[figure.name]) for figure in FIGURES if figure.name in row}
    return [template.format_map(texts) if isinstance(template, str) else template(row) for template in templates]


def line_of(row: Reading) -> str:
    """Return a reading with its rates as one line."""
    return "  ".join(fill_templates([figure.line for figure in FIGURES if figure.line], row))


def table_of(row: Reading) -> list[tuple[str, str]]:
    """Return a node's whole run as rows of name and value."""
    tables = [figure.table for figure in FIGURES if figure.table is not None]
    return list(zip([label for label, _ in tables], fill_templates([text for _, text in tables], row), strict=True))


def columns_of(row: Reading) -> dict[str, str]:
    """Return a node's figures by column head; a figure may be missing."""
    return {figure.column: figure.text(row.get(figure.name)) for figure in FIGURES if figure.column}


def reference_page() -> str:
    """Return the part of docs/figures.md that is about a node."""
    lines = []
    for figure in FIGURES:
        places = {
            "log": figure.logged, "line": bool(figure.line), "table": figure.table, "status": figure.status,
            "`node.metrics()`": figure in MEASURED,
        }  # fmt: skip
        cells = (f"`{figure.name}`", figure.meaning, figure.unit, ", ".join(place for place in places if places[place]))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join((*HEAD.splitlines(), *lines)) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference_page())

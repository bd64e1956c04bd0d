"""A node's metrics in Prometheus's text format.

They are the rows of :mod:`node.observe.figures`, a histogram of exchanges, counts of failures and members by label, and
the version.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from gossip.effects import MemberState
from gossip.exchange.session_table import REASONS
from node.observe.events import ExchangeEvent
from node.observe.figures import FIGURES, VERSION, Source, none_if_nan

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
# Upper bounds of the histogram's buckets in seconds, from small models to slow links.
BUCKET_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Exposition:
    """The metrics of one node, in a registry of its own, since a process may hold several nodes.

    Each value of a label is a series of its own, so labels hold only words of this library. Texts from other peers
    (ids, addresses, the reasons that they state) could make any number of series.
    """

    def __init__(self) -> None:
        self.source: Source | None = None  # Set only during a call of `render`.
        self.registry = prometheus_client.CollectorRegistry(auto_describe=False)
        self.seconds = prometheus_client.Histogram(
            "gossip_exchange_seconds",
            "Duration of finished exchanges, from the request for the snapshot to the mix, in seconds.",
            registry=self.registry, buckets=BUCKET_BOUNDS_S,
        )  # fmt: skip
        self.registry.register(self)  # The registry calls `describe` now, and `collect` for each text.

    def on_exchange(self, event: ExchangeEvent) -> None:
        """Count a finished exchange in the histogram."""
        if event.kind == "exchange.done":
            self.seconds.observe(event.seconds)

    def render(self, source: Source) -> bytes:
        """Return all metrics in Prometheus's text format."""
        self.source = source
        try:
            text: bytes = prometheus_client.generate_latest(self.registry)
            return text
        finally:
            self.source = None

    def describe(self) -> list[Any]:
        """Return no metrics. Their names would only let the registry refuse another collector with the same ones."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the metrics for the registry, and none outside :meth:`render`: no source is known there."""
        source = self.source
        if source is None:
            return
        for figure in FIGURES:
            if not figure.metric or figure.read is None:
                continue
            value = none_if_nan(figure.read(source))
            if value is None:
                continue
            family = CounterMetricFamily if figure.metric.endswith("_total") else GaugeMetricFamily
            yield family(figure.metric.removesuffix("_total"), figure.meaning + ".", value=float(value))
        failed = CounterMetricFamily("gossip_exchanges_failed", "Exchanges that failed, by reason.", labels=["reason"])
        for reason in (*sorted(REASONS), "other"):
            failed.add_metric([reason], source.peer.exchanges.failures_by_reason.get(reason, 0))
        yield failed
        counts = dict.fromkeys(MemberState, 0)
        counts[MemberState.ALIVE] = 1  # This node, which its table of members leaves out.
        for _, state in source.peer.membership.members():
            counts[state] += 1
        members = GaugeMetricFamily("gossip_members", "Known members by state, this node included.", labels=["state"])
        for state, count in counts.items():
            members.add_metric([state.value], count)
        yield members
        links = GaugeMetricFamily("gossip_links", "Open links by how they came about.", labels=["path"])
        paths = Counter(link.path.partition(" ")[0] for link in source.links.all())
        for path in ("direct", "punched", "relay"):
            links.add_metric([path], paths[path])
        yield links
        yield InfoMetricFamily("gossip_build", "The installed version of gossip.", value={"version": VERSION})

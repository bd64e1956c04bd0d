"""Metrics in Prometheus's text format, from the rows of :mod:`node.observe.figures`, and a histogram of exchanges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from gossip.effects import MemberState
from gossip.exchange.session_table import REASONS
from node.observe.events import ExchangeEvent
from node.observe.figures import FIGURES, VERSION, Source, none_if_nan

__all__ = ["CONTENT_TYPE", "Exposition"]

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
# Bounds of the histogram's buckets, from small models to slow links.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Exposition:
    """The metrics of one node, in a registry of its own, since a process may hold several nodes.

    Labels come from this library only: labels chosen by others (ids, codes, addresses) could make any number of series.
    """

    def __init__(self) -> None:
        self.source: Source | None = None
        self.registry = prometheus_client.CollectorRegistry(auto_describe=False)
        self.seconds = prometheus_client.Histogram(
            "gossip_exchange_seconds", "From the request for a snapshot to the mix, of finished exchanges.",
            registry=self.registry, buckets=SECONDS,
        )  # fmt: skip
        self.registry.register(self)

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
        """Return no names up front, since :meth:`collect` gives them."""
        return []

    def collect(self) -> Iterator[Any]:
        at = self.source
        if at is None:
            return
        for figure in FIGURES:
            if not figure.metric or figure.of is None:
                continue
            value = none_if_nan(figure.of(at))
            if value is None:
                continue
            of = CounterMetricFamily if figure.metric.endswith("_total") else GaugeMetricFamily
            yield of(figure.metric.removesuffix("_total"), figure.meaning + ".", value=float(value))
        failed = CounterMetricFamily("gossip_exchanges_failed", "Failed exchanges by reason.", labels=["reason"])
        for reason in (*sorted(REASONS), "other"):
            failed.add_metric([reason], at.peer.exchanges.failures_by_reason.get(reason, 0))
        yield failed
        states = dict.fromkeys(MemberState, 0)
        states[MemberState.ALIVE] = 1  # This node.
        for _, state in at.peer.membership.members():
            states[state] += 1
        members = GaugeMetricFamily("gossip_members", "Known members, this node included.", labels=["state"])
        for state, count in states.items():
            members.add_metric([state.value], count)
        yield members
        yield InfoMetricFamily("gossip_build", "The installed version.", value={"version": VERSION})

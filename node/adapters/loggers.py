"""Exporters of a node's figures to the usual loggers: TensorBoard, W&B and similar ones, OpenTelemetry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from node.node import Node
from node.observe.events import ExchangeEvent

__all__ = ["Exporter", "observe", "tensorboard", "wandb"]

Log = Callable[[Mapping[str, float], int], object]
"""Logs figures by name, at a step."""
PREFIX = "gossip/"


class Exporter:
    """A periodic export of the node's figures; call it in the loop, after ``node.step()``.

    Every ``every_s`` seconds it calls ``log({"gossip/loss": 0.5, ...}, step)``, with the duration and the distance of
    the last exchange. The loop's thread calls ``log``, so that the logger need not be thread-safe. :meth:`close` logs
    once more.

    Args:
        node: The node.
        log: Called with the figures and the step.
        every_s: The least seconds between two calls.
    """

    def __init__(self, node: Node, log: Log, every_s: float = 5.0) -> None:
        self.node, self.log, self.every_s = node, log, every_s
        self.logged_at = time.monotonic()
        # The last exchange that is not logged yet; the thread that runs callbacks replaces it whole.
        self.last_exchange: ExchangeEvent | None = None
        self.remove_callback = node.on("exchange.done", self.on_exchange)

    def on_exchange(self, event: ExchangeEvent) -> None:
        self.last_exchange = event

    def __call__(self) -> None:
        if time.monotonic() - self.logged_at >= self.every_s:
            self.write()

    def write(self) -> None:
        self.logged_at = time.monotonic()
        metrics = self.node.metrics()
        values = numbers(metrics)
        last, self.last_exchange = self.last_exchange, None  # Logged once, so that a chart shows where exchanges end.
        if last is not None:
            values["last_exchange_seconds"] = last.seconds
            if last.distance is not None:
                values["last_exchange_distance"] = last.distance
        self.log({PREFIX + name: value for name, value in values.items()}, metrics.steps)

    def close(self) -> None:
        """Log once more and stop; call it inside the node's block."""
        self.remove_callback()
        self.write()


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures that are known numbers."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, bool | int | float)}


def tensorboard(writer: Any) -> Log:
    """Return a log for TensorBoard.

    Args:
        writer: A ``torch.utils.tensorboard.SummaryWriter``, or an object with its ``add_scalar``.
    """

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log


def wandb(run: Any) -> Log:
    """Return a log for W&B.

    The step goes into the values, since a run refuses steps lower than the last one logged.

    Args:
        run: The result of ``wandb.init``, or an object with its ``log(values, step=...)``.
    """

    def log(values: Mapping[str, float], step: int) -> None:
        run.log({**values, f"{PREFIX}step": step})

    return log


def observe(node: Node, meter: Any) -> None:
    """Register an OpenTelemetry observable gauge for every numeric figure, named like ``gossip.loss``.

    A gauge is read when its reader collects.

    Args:
        node: The node.
        meter: The result of ``opentelemetry.metrics.get_meter``.

    Raises:
        ModuleNotFoundError: OpenTelemetry is not installed.
    """
    from opentelemetry.metrics import Observation

    def reader(name: str) -> Callable[[Any], Iterable[Any]]:
        def read(_options: Any) -> Iterable[Any]:
            value = numbers(node.metrics()).get(name)
            return [] if value is None else [Observation(value, {"node": node.id})]

        return read

    for name, value in node.metrics().items():
        if value is None or isinstance(value, bool | int | float):  # None may become a number.
            meter.create_observable_gauge(f"gossip.{name}", callbacks=[reader(name)])

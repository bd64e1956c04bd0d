"""A node's figures for what people already log with: TensorBoard, W&B and their like, OpenTelemetry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from node.node import Node
from node.observe.events import ExchangeEvent

__all__ = ["Exporter", "observe", "tensorboard", "wandb"]

Log = Callable[[Mapping[str, float], int], object]
PREFIX = "gossip/"


class Exporter:
    """Call it in the loop, after ``node.step()``: every ``every_s`` seconds it gives the node's figures to ``log``, as
    ``log({"gossip/loss": 0.5, ...}, step)``, with the seconds and the distance of the last exchange. It is the loop
    that logs, so that a logger needs to be no other thread's. :meth:`close` logs once more."""

    def __init__(self, node: Node, log: Log, every_s: float = 5.0) -> None:
        self.node, self.log, self.every_s = node, log, every_s
        self.logged_at = time.monotonic()
        self.last: ExchangeEvent | None = None  # set in the thread of callbacks, whole
        self.take_back = node.on("exchange.done", self.heard)

    def heard(self, event: ExchangeEvent) -> None:
        self.last = event

    def __call__(self) -> None:
        if time.monotonic() - self.logged_at >= self.every_s:
            self.write()

    def write(self) -> None:
        self.logged_at = time.monotonic()
        metrics = self.node.metrics()
        values = numbers(metrics)
        if self.last is not None:
            values["last_exchange_seconds"] = self.last.seconds
            if self.last.distance is not None:
                values["last_exchange_distance"] = self.last.distance
        self.log({PREFIX + name: value for name, value in values.items()}, metrics.steps)

    def close(self) -> None:
        """Inside the node's block."""
        self.take_back()
        self.write()


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those figures that are numbers, and known."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, bool | int | float)}


def tensorboard(writer: Any) -> Log:
    """``writer``: a ``torch.utils.tensorboard.SummaryWriter``, or what has its ``add_scalar``."""

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log


def wandb(run: Any) -> Log:
    """``run``: what ``wandb.init`` returns, or what has its ``log(values, step=...)``. A step of its own among the
    values, since a run refuses those that fall behind what the loop has logged already."""

    def log(values: Mapping[str, float], step: int) -> None:
        run.log({**values, f"{PREFIX}step": step})

    return log


def observe(node: Node, meter: Any) -> None:
    """OpenTelemetry: an observable gauge for every figure that is a number, as ``gossip.loss``, read when its reader
    collects. ``meter``: what ``opentelemetry.metrics.get_meter`` returns. Raises ModuleNotFoundError without it."""
    from opentelemetry.metrics import Observation

    def reader(name: str) -> Callable[[Any], Iterable[Any]]:
        def read(_options: Any) -> Iterable[Any]:
            value = numbers(node.metrics()).get(name)
            return [] if value is None else [Observation(value, {"node": node.id})]

        return read

    for name, value in node.metrics().items():
        if value is None or isinstance(value, bool | int | float):
            meter.create_observable_gauge(f"gossip.{name}", callbacks=[reader(name)])

"""The common part of the nodes of swarm_lab.py: their options, a diary and the training loop.

A node writes a row every ``--row-s`` seconds. Times are CLOCK_MONOTONIC, which all processes of one machine share. The
process ends on SIGTERM, or after ``--for`` seconds.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from gossip.config import Config
from node import Node


def options(description: str | None, row_s: float, step_ms: float) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--diary", type=Path, required=True)
    parser.add_argument("--seed", action="append", default=[])
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--advertise")
    parser.add_argument("--secret")
    parser.add_argument("--state-dir")
    parser.add_argument("--config", default="{}")
    parser.add_argument("--row-s", type=float, default=row_s)
    parser.add_argument("--step-ms", type=float, default=step_ms, help="pause after each step")
    parser.add_argument("--warm-steps", type=int, default=0, help="taken without a pause at the beginning")
    parser.add_argument("--for", dest="seconds", type=float, default=300.0)
    return parser


class LabNode:
    """A node, its training loop and its diary. Subclasses say what a row has, and what a step does."""

    def __init__(self, arguments: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.set_num_threads(1)
        self.arguments, self.model, self.optimizer = arguments, model, optimizer
        self.file = arguments.diary.open("w", buffering=1, encoding="utf-8")
        self.stopped = False
        self.steps = 0
        self.due = self.inside = self.gap = 0.0  # the next row; maxima since the last: a step(), the time between two
        self.last: float | None = None
        self.node = Node(
            model, optimizer, seeds=arguments.seed, listen=arguments.listen, advertise=arguments.advertise,
            secret=arguments.secret, state_dir=arguments.state_dir,
            config=Config.from_mapping(json.loads(arguments.config)),
        )  # fmt: skip

    # -- for subclasses ----------------------------------------------------------------------------------------------
    def batches(self) -> Iterable[Sequence[Any]]:
        raise NotImplementedError

    def loss(self, batch: Sequence[Any]) -> torch.Tensor:
        raise NotImplementedError

    def samples(self, batch: Sequence[Any]) -> int:
        return len(batch[0])

    def after_step(self, batch: Sequence[Any]) -> None:
        """Follow the optimizer's step."""

    def joined(self) -> dict[str, Any]:
        """Return further fields of the row of joining, after which mixes may come."""
        raise NotImplementedError

    def figures(self) -> dict[str, Any]:
        """Return the fields of a row."""
        raise NotImplementedError

    def left(self) -> dict[str, Any]:
        """Return further fields of the last row."""
        return {}

    # -- the loop ----------------------------------------------------------------------------------------------------
    def row(self, **fields: Any) -> None:
        self.file.write(json.dumps({"t": time.monotonic(), **fields}) + "\n")

    def stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self.stop)
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # for debugging a node that hangs
        node, entered = self.node, time.monotonic()
        with node:
            seconds = time.monotonic() - entered
            self.row(event="joined", id=node.id, address=node.address, seconds=seconds, **self.joined())
            until = time.monotonic() + self.arguments.seconds
            for batch in self.batches():
                if self.stopped or time.monotonic() > until:
                    break
                loss = self.loss(batch)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.after_step(batch)
                self.step(loss, self.samples(batch))
                if self.steps > self.arguments.warm_steps:
                    time.sleep(self.arguments.step_ms / 1000)
            node._training.settling.finish_exchanges(1.0)
            self.look()
            leaving = time.monotonic()
        self.row(event="left", seconds=time.monotonic() - leaving, steps=self.steps, **self.left())

    def step(self, loss: torch.Tensor, samples: int) -> None:
        begin = time.monotonic()
        self.node.step(loss=loss, samples=samples)
        end = time.monotonic()
        self.steps += 1
        self.inside = max(self.inside, end - begin)
        if self.last is not None:
            self.gap = max(self.gap, begin - self.last)
        self.last = begin
        if end >= self.due:
            self.due = end + self.arguments.row_s
            self.look()
            self.last = time.monotonic()  # do not count the diary's own work as a pause

    def look(self) -> None:
        metrics = self.node.metrics()
        self.row(
            steps=self.steps, counted=metrics.steps, done=metrics.exchanges_done, failed=metrics.exchanges_failed,
            alive=metrics.members_alive, swarm_samples=self.node.swarm_samples, inside=self.inside, gap=self.gap,
            **self.figures(),
        )  # fmt: skip
        self.inside = self.gap = 0.0

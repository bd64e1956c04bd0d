"""One node of a reliability run: it trains a problem with a known answer, and writes its state ten times a second.

The model is a point ``w`` that steps towards this node's own ``--target``. A swarm with different targets therefore
meets at their mean, and two partitioned halves visibly drift apart. The model also has a ledger: one number that every
step raises by exactly one, and that every exchange averages like any other parameter. Plain means preserve sums, so
over a whole swarm without an outer step and a correction

    sum of the ledgers at the end - sum of the ledgers adopted at the start = completed steps of all nodes

and a step that was lost, overwritten or counted twice shows as a difference of one.

Times are CLOCK_MONOTONIC, which all processes of one machine share. Ends on SIGTERM, or after ``--for`` seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch
from torch import nn

from gossip.config import Config
from node import Node

ROW_S = 0.1


class Point(nn.Module):
    """The model: ``w`` (elements,) is trained by gradients; ``ledger`` (1,) counts steps, as a parameter that mixes."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(elements))
        self.ledger = nn.Parameter(torch.zeros(1))


class Diary:
    """A file of JSON rows: one every tenth of a second, with the maxima since the last one, and events."""

    def __init__(self, path: Path) -> None:
        self.file: TextIO = path.open("w", buffering=1, encoding="utf-8")
        self.due = 0.0
        self.inside = self.gap = 0.0  # maxima since the last row: a step(), and the time between two
        self.given: list[int] = []
        self.last: float | None = None

    def row(self, **fields: Any) -> None:
        self.file.write(json.dumps({"t": time.monotonic(), **fields}) + "\n")

    def step(self, node: Node, model: Point, loss: torch.Tensor, samples: int, steps: int) -> None:
        begin = time.monotonic()
        node.step(loss=loss, samples=samples)
        end = time.monotonic()
        self.inside = max(self.inside, end - begin)
        if self.last is not None:
            self.gap = max(self.gap, begin - self.last)
        self.last = begin
        if end >= self.due:
            self.due = end + ROW_S
            self.look(node, model, steps)

    def look(self, node: Node, model: Point, steps: int) -> None:
        metrics = node.metrics()
        self.row(
            steps=steps, counted=metrics.steps, done=metrics.exchanges_done, failed=metrics.exchanges_failed,
            alive=metrics.members_alive, distance=metrics.consensus_distance, swarm_samples=node.swarm_samples,
            states={member.id: member.state for member in node.members}, w=float(model.w.detach().mean()),
            ledger=float(model.ledger.detach()), inside=self.inside, gap=self.gap, given=self.given,
        )  # fmt: skip
        self.inside = self.gap = 0.0
        self.given = []


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    model = Point(arguments.elements)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.rate)
    diary = Diary(arguments.diary)
    node = Node(
        model, optimizer, seeds=arguments.seed, listen=arguments.listen, advertise=arguments.advertise,
        secret=arguments.secret, state_dir=arguments.state_dir,
        config=Config.from_mapping(json.loads(arguments.config)),
    )  # fmt: skip
    entered = time.monotonic()
    with node:
        joined = time.monotonic() - entered
        began = float(model.ledger.detach())
        diary.row(event="joined", id=node.id, address=node.address, seconds=joined, ledger=began)
        until = time.monotonic() + arguments.seconds
        steps = 0
        for batch in batches(node, arguments.samples):
            if stopped or time.monotonic() > until:
                break
            loss = ((model.w - arguments.target) ** 2).sum() / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.ledger.add_(1)
            time.sleep(arguments.step_ms / 1000)
            steps += 1
            diary.given += batch
            diary.step(node, model, loss, max(1, len(batch)), steps)
        node._training.settling.finish_exchanges(1.0)
        diary.look(node, model, steps)
        leaving = time.monotonic()
    diary.row(
        event="left", seconds=time.monotonic() - leaving, steps=steps, ledger=float(model.ledger.detach()), began=began
    )


def batches(node: Node, samples: int) -> Iterator[list[int]]:
    """Yield batches of indices of this node's share in one pass over ``samples`` samples, and then empty batches."""
    if samples:
        yield from (batch.tolist() for batch in node.shard(torch.arange(samples), 8))
    yield from itertools.repeat([])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--diary", type=Path, required=True)
    parser.add_argument("--seed", action="append", default=[])
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--advertise")
    parser.add_argument("--secret")
    parser.add_argument("--state-dir")
    parser.add_argument("--config", default="{}")
    parser.add_argument("--elements", type=int, default=10_000)
    parser.add_argument("--target", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--for", dest="seconds", type=float, default=300.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()

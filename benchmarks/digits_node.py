"""One node of a siege, chaos or soak run: it learns handwritten digits like a user's loop, and keeps a diary.

It writes a row every ``--row-s`` seconds: steps, exchanges with their partners and times, pauses, accuracy on the test
images, the weights' norm and their component along (1, 1, ... 1), and memory. With ``--census`` a row also has the
length of every table. Times are CLOCK_MONOTONIC, which all processes of one machine share. The process ends on SIGTERM,
or after ``--for`` seconds.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).parent))

import torch
from census import process_figures, tables, tasks
from torch import nn
from torch.nn import functional as F

from gossip.codecs import self_test
from gossip.config import Config
from node import Node

RATE = 0.05
BATCH = 16
MIXES = 4_096  # limit of the exchanges that wait for the next row


class Diary:
    def __init__(self, arguments: argparse.Namespace, test: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.file: TextIO = arguments.diary.open("w", buffering=1, encoding="utf-8")
        self.row_s, self.census = arguments.row_s, arguments.census
        self.test = test
        self.due = 0.0
        self.inside = self.gap = 0.0  # maxima since the last row: a step(), and the time between two
        self.last: float | None = None
        self.mixes: deque[tuple[float, str]] = deque(maxlen=MIXES)

    def row(self, **fields: Any) -> None:
        self.file.write(json.dumps({"t": time.monotonic(), **fields}) + "\n")

    def watch(self, node: Node) -> None:
        """Record the partner of every finished exchange, which a node's metrics do not show."""
        partners = node._training.network.peer.partners
        succeeded = partners.note_success

        def mixed(partner: bytes) -> None:
            self.mixes.append((time.monotonic(), partner.hex()))
            succeeded(partner)  # type: ignore[arg-type]

        partners.note_success = mixed  # type: ignore[method-assign, assignment]

    def step(self, node: Node, model: nn.Module, loss: torch.Tensor, samples: int) -> None:
        begin = time.monotonic()
        node.step(loss=loss, samples=samples)
        end = time.monotonic()
        self.inside = max(self.inside, end - begin)
        if self.last is not None:
            self.gap = max(self.gap, begin - self.last)
        self.last = begin
        if end >= self.due:
            self.due = end + self.row_s
            self.look(node, model)
            self.last = time.monotonic()  # do not count the diary's own work as a pause

    @torch.no_grad()
    def look(self, node: Node, model: nn.Module) -> None:
        metrics, (images, labels), side = node.metrics(), self.test, node._training
        weights = torch.cat([value.flatten() for value in model.parameters()])
        mixes = [self.mixes.popleft() for _ in range(len(self.mixes))]
        self.row(
            steps=metrics.steps, done=metrics.exchanges_done, failed=metrics.exchanges_failed, mixes=mixes,
            alive=metrics.members_alive, members=len(node.members), owners=len(side.view.owners),
            swarm_samples=node.swarm_samples, run_id=side.network.peer.local.run_id.hex()[:8],
            ready=side.network.peer.view.ready, version=side.network.peer.local.version, finished=node.finished,
            inside=self.inside, gap=self.gap, links=len(side.network.runtime.links),
            accuracy=float((model(images).argmax(1) == labels).float().mean()), norm=float(weights.norm()),
            along=float(weights.sum() / weights.numel() ** 0.5), **process_figures(),
            **(self.tables(node) if self.census else {}),
        )  # fmt: skip
        self.inside = self.gap = 0.0

    def tables(self, node: Node) -> dict[str, Any]:
        """Count the tables in the network thread, which owns them."""
        answer: dict[str, Any] = {}
        side, done = node._training, threading.Event()

        def ask() -> None:
            runtime = side.network.runtime
            answer["tasks"] = tasks()
            answer["tables"] = tables({"peer": runtime.peer, "runtime": runtime, "pool": side.live.pool})
            done.set()

        side.network.call(ask)
        done.wait(5.0)
        return answer


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Load images and labels: for training (1437, 64) in 0..1, for testing (360, 64)."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images / 16).float(), torch.from_numpy(labels).long()
    train, test = map(torch.tensor, train_test_split(range(len(y)), test_size=0.2, random_state=0, stratify=labels))
    return x[train], y[train], x[test], y[test]


def warm_up() -> None:
    """Load what every node needs, before nodes are forked: data, the optimizer's imports (seconds of CPU), codecs.

    There is no backward pass, because its threads would not survive a fork.
    """
    torch.set_num_threads(1)
    digits()
    torch.optim.SGD(new_model().parameters(), lr=RATE)
    self_test()


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def batches(node: Node, images: torch.Tensor, labels: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
    """Yield batches of this node's share of the images, pass after pass; pause briefly if the share is empty."""
    while True:
        any_batch = False
        for batch in node.shard((images, labels), batch_size=BATCH):
            any_batch = True
            yield batch
        if not any_batch:
            time.sleep(0.05)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    torch.set_num_threads(1)
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # for debugging a node that hangs
    images, labels, *test = digits()
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-3)
    diary = Diary(arguments, (test[0], test[1]))
    node = Node(
        model, optimizer, seeds=arguments.seed, listen=arguments.listen, secret=arguments.secret,
        state_dir=arguments.state_dir, config=Config.from_mapping(json.loads(arguments.config)),
    )  # fmt: skip
    entered = time.monotonic()
    side = node._training
    with node:
        diary.watch(node)
        diary.row(
            event="joined", id=node.id, address=node.address, seconds=time.monotonic() - entered,
            fingerprint=side.live.state.layout.fingerprint, run_id=side.network.peer.local.run_id.hex(),
            elements=side.live.state.layout.size,
        )  # fmt: skip
        until = time.monotonic() + arguments.seconds
        for inputs, targets in batches(node, images, labels):
            if stopped or time.monotonic() > until or node.swarm_samples >= arguments.samples:
                break
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            diary.step(node, model, loss, len(inputs))
            if side.run.steps > arguments.warm_steps:
                time.sleep(arguments.step_ms / 1000)
        side.settling.finish_exchanges(1.0)
        diary.look(node, model)
        leaving = time.monotonic()
    diary.row(event="left", seconds=time.monotonic() - leaving, steps=side.run.steps)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--diary", type=Path, required=True)
    parser.add_argument("--seed", action="append", default=[])
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--secret")
    parser.add_argument("--state-dir")
    parser.add_argument("--config", default="{}")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--warm-steps", type=int, default=0, help="taken without a pause at the beginning")
    parser.add_argument("--samples", type=float, default=1e12, help="of the whole swarm: then training ends")
    parser.add_argument("--row-s", type=float, default=0.25)
    parser.add_argument("--census", action="store_true", help="count every table at each row")
    parser.add_argument("--for", dest="seconds", type=float, default=300.0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()

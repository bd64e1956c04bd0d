"""One node of a siege, chaos or soak run: it learns handwritten digits like a user's loop.

A row has the exchanges with their partners and times, accuracy on the test images, the weights' norm and their
component along (1, 1, ... 1), and memory. With ``--census`` a row also has the length of every table.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from census import process_figures, tables, tasks
from lab_node import LabNode, options
from torch import nn
from torch.nn import functional as F

from gossip.codecs import self_test
from sim.learning.corpora import Split, digits

RATE = 0.05
BATCH = 16
MIXES = 4_096  # limit of the exchanges that wait for the next row


class DigitsNode(LabNode):
    mixes: deque[tuple[float, str]]
    data: Split

    def batches(self) -> Iterator[Sequence[torch.Tensor]]:
        """Yield batches of this node's share of the images, pass after pass; pause briefly if the share is empty."""
        images, labels, *_ = self.data
        while True:
            any_batch = False
            for batch in self.node.shard((images, labels), batch_size=BATCH):
                any_batch = True
                yield batch
            if not any_batch:
                time.sleep(0.05)

    def loss(self, batch: Sequence[Any]) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def joined(self) -> dict[str, Any]:
        """Record the partner of every finished exchange from now on, which a node's metrics do not show."""
        self.mixes, self.data = deque(maxlen=MIXES), digits()
        side = self.node._training
        succeeded = side.network.peer.partners.note_success

        def mixed(partner: bytes) -> None:
            self.mixes.append((time.monotonic(), partner.hex()))
            succeeded(partner)  # type: ignore[arg-type]

        side.network.peer.partners.note_success = mixed  # type: ignore[method-assign, assignment]
        layout = side.live.state.layout
        run_id = side.network.peer.local.run_id.hex()
        return {"fingerprint": layout.fingerprint, "run_id": run_id, "elements": layout.size}

    @torch.no_grad()
    def figures(self) -> dict[str, Any]:
        (_, _, images, labels), side = self.data, self.node._training
        weights = torch.cat([value.flatten() for value in self.model.parameters()])
        return {
            "mixes": [self.mixes.popleft() for _ in range(len(self.mixes))],
            "members": len(self.node.members), "owners": len(side.view.owners),
            "run_id": side.network.peer.local.run_id.hex()[:8], "ready": side.network.peer.view.ready,
            "version": side.network.peer.local.version, "finished": self.node.finished,
            "links": len(side.network.runtime.links),
            "accuracy": float((self.model(images).argmax(1) == labels).float().mean()), "norm": float(weights.norm()),
            "along": float(weights.sum() / weights.numel() ** 0.5), **process_figures(),
            **(self.tables() if self.arguments.census else {}),
        }  # fmt: skip

    def tables(self) -> dict[str, Any]:
        """Count the tables in the network thread, which owns them."""
        answer: dict[str, Any] = {}
        side, done = self.node._training, threading.Event()

        def ask() -> None:
            runtime = side.network.runtime
            answer["tasks"] = tasks()
            roots = {"peer": runtime.peer, "runtime": runtime, "service": side.service, "pool": side.live.pool}
            answer["tables"] = tables(roots)
            done.set()

        side.network.call(ask)
        done.wait(5.0)
        return answer


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


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__, row_s=0.25, step_ms=20.0)
    parser.add_argument("--census", action="store_true", help="count every table at each row")
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-3)
    DigitsNode(parser.parse_args(argv), model, optimizer).run()


if __name__ == "__main__":
    main()

"""One node of a reliability run: it trains a problem with a known answer.

The model is a point ``w`` that steps towards this node's own ``--target``. A swarm with different targets therefore
meets at their mean, and two partitioned halves visibly drift apart. The model also has a ledger: one number that every
step raises by exactly one, and that every exchange averages like any other parameter. Plain means preserve sums, so
over a whole swarm without an outer step and a correction

    sum of the ledgers at the end - sum of the ledgers adopted at the start = completed steps of all nodes

and a step that was lost, overwritten or counted twice shows as a difference of one.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from lab_node import LabNode, options
from torch import nn


class Point(nn.Module):
    """The model: ``w`` (elements,) is trained by gradients; ``ledger`` (1,) counts steps, as a parameter that mixes."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(elements))
        self.ledger = nn.Parameter(torch.zeros(1))


class LedgerNode(LabNode):
    model: Point
    given: list[int]
    began: float

    def batches(self) -> Iterator[list[int]]:
        """Yield batches of indices of this node's share in one pass over ``--samples``, and then empty batches."""
        if self.arguments.samples:
            yield from (batch.tolist() for batch in self.node.shard(torch.arange(self.arguments.samples), 8))
        yield from itertools.repeat([])

    def loss(self, batch: Sequence[Any]) -> torch.Tensor:
        return ((self.model.w - self.arguments.target) ** 2).sum() / 2

    def samples(self, batch: Sequence[Any]) -> int:
        return max(1, len(batch))

    @torch.no_grad()
    def after_step(self, batch: Sequence[Any]) -> None:
        self.model.ledger.add_(1)
        self.given += batch

    def joined(self) -> dict[str, Any]:
        self.given, self.began = [], float(self.model.ledger.detach())
        return {"ledger": self.began}

    def figures(self) -> dict[str, Any]:
        given, self.given = self.given, []
        states = {member.id: member.state for member in self.node.members}
        w, ledger = float(self.model.w.detach().mean()), float(self.model.ledger.detach())
        return {"states": states, "w": w, "ledger": ledger, "given": given}

    def left(self) -> dict[str, Any]:
        return {"ledger": float(self.model.ledger.detach()), "began": self.began}


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__, row_s=0.1, step_ms=10.0)
    parser.add_argument("--elements", type=int, default=10_000)
    parser.add_argument("--target", type=float, default=0.0)
    parser.add_argument("--samples", type=int, default=0)
    arguments = parser.parse_args(argv)
    model = Point(arguments.elements)
    LedgerNode(arguments, model, torch.optim.SGD(model.parameters(), lr=0.02)).run()


if __name__ == "__main__":
    main()

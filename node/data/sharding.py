"""This node's share of a dataset, in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gossip.errors import ConfigError
from node.data.draws import DrawCount
from node.data.sampler import ShareBatchSampler

__all__ = ["Shard"]


class Shard:
    """This node's share of a dataset, in batches, divided again as members come and go.

    Iterating gives ``epochs`` passes; iterating again gives further passes, not the same ones. A pass covers this
    node's share. At the first batch after a change of members, a dead member's part is included and a newcomer's part
    left out. The pass ends when nothing owned is left. Its last batches may be smaller, and a share smaller than a
    batch is one short batch. An empty share (more members than samples) gives nothing: the loop body does not run, and
    a loop that trains until some condition must wait between passes by itself.

    Across the swarm a sample is seen at least once per pass, not exactly once. Samples that a member trained on before
    it died, or before a newcomer took them over, are trained on again, because members do not coordinate.

    Args:
        fetch: Returns the batch of some indices.
        batches: The indices of this node's batches, pass after pass.
        epochs: Passes per iteration.
        draws: The count of what the loop draws.

    Raises:
        ConfigError: ``epochs`` is below 1.
    """

    def __init__(self, fetch: Callable[[Any], Any], batches: ShareBatchSampler, epochs: int, draws: DrawCount) -> None:
        if epochs < 1:
            raise ConfigError(f"epochs is {epochs}; ask for at least 1 pass.")
        self.fetch, self.batches, self.epochs, self.draws = fetch, batches, epochs, draws

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.epochs):
            for batch in self.draws.passes(self.batches, self.batches.sampler.length):
                self.draws.give(len(batch))
                yield self.fetch(batch)

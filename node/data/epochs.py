"""Epochs that the whole swarm trains together, counted by its samples."""

import time
from collections.abc import Iterator

from gossip.errors import checked_whole
from node.data.division import Sharers

IDLE_S = 0.05  # Seconds that an epoch without a step waits, so that a node without a share does not spin.


class Epochs:
    """The epochs of a run. An epoch is ``length`` samples of the swarm, whichever members train them.

    A node takes the next number after each pass over its share, within half an epoch of the swarm's count. So nodes of
    one pace get each number once. A faster node gets a number again, a slower one skips some. The last epoch goes on
    until the swarm has all samples.

    Args:
        count: The number of epochs.
        length: The samples that one process would train in an epoch.
        sharers: The members that share the data.

    Raises:
        ConfigError: ``count`` is no whole number of at least 1.
    """

    def __init__(self, count: int, length: int, sharers: Sharers) -> None:
        count = checked_whole("The number of epochs", count, "give a whole number of at least 1.")
        self.count, self.length, self.sharers = count, length, sharers
        self.number = -1  # The epoch in which the loop is; -1 before the first.

    @property
    def total(self) -> int:
        """Return the samples of the whole run."""
        return self.count * self.length

    @property
    def is_over(self) -> bool:
        """Return True if the swarm has trained on all samples, or the run has finished."""
        return self.sharers.swarm_samples() >= self.total or self.sharers.finished()

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def numbers(self) -> Iterator[int]:
        """Yield the number of the swarm's epoch, again and again until the run is over."""
        while not self.is_over:
            trained, sharers = self.sharers.own_samples(), self.sharers
            samples = sharers.swarm_samples()
            earliest, latest = samples // self.length, (2 * samples + self.length) // (2 * self.length)
            self.number = max(self.number, min(max(self.number + 1, earliest), latest, self.count - 1))
            yield self.number
            if sharers.own_samples() == trained and not self.is_over:
                time.sleep(IDLE_S)

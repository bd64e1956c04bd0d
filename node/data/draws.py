"""The samples that a loop draws from its share, which `node.step` counts, and the end of a run inside a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from gossip.errors import ConfigError
from node.data.epochs import Epochs
from node.data.sampler import Samplers

__all__ = ["DrawCount"]

T = TypeVar("T")


class DrawCount:
    """What one loop has drawn from its share since its last step.

    Args:
        samplers: The samplers of the node.
    """

    def __init__(self, samplers: Samplers) -> None:
        self.samplers = samplers
        self.pending = 0  # Samples since the last step.
        self.steps = 0
        self.epochs: Epochs | None = None  # Those of the loop, while it is inside ``node.epochs``.
        self.last_total: int | None = None  # The samples of its last run of epochs.

    def give(self, samples: int) -> None:
        """Count samples that the loop gets."""
        self.pending += samples
        self.samplers.on_draw()

    def take(self, samples: int | None) -> int:
        """Return the samples of a step: those that the loop gave, or those drawn since the last step, or 1."""
        drawn, self.pending, self.steps = self.pending, 0, self.steps + 1
        return (drawn or 1) if samples is None else samples

    def total(self, samples: Any) -> Any:
        """Return the samples of the whole run, by default those of the last epochs; None if they are unknown.

        Raises:
            ConfigError: ``samples`` is no number above 0.
        """
        if samples is None:
            return self.last_total
        if isinstance(samples, bool) or not isinstance(samples, int | float) or not samples > 0:
            raise ConfigError(f"total is {samples!r}: give the samples of the whole run, of all members together.")
        return samples

    @property
    def is_over(self) -> bool:
        """Return True if the run of the running ``node.epochs`` has ended, so that nothing more is given."""
        return self.epochs is not None and self.epochs.is_over

    def passes(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches of a pass, up to the end of the run; in the last epoch pass after pass until that end."""
        goes_on = not self.is_over
        while goes_on:
            goes_on = False
            for batch in batches:
                yield batch
                if self.is_over:
                    return
                goes_on = self.epochs is not None and self.epochs.is_last

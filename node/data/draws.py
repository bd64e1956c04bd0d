"""The samples that a loop draws from its share, which `node.step` counts, and the end of a run inside a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from gossip.errors import ConfigError
from node.data.division import Sharers
from node.data.epochs import Epochs

__all__ = ["Draws"]

T = TypeVar("T")


class Draws:
    """What one loop has drawn from its share since its last step.

    Args:
        sharers: The members that share the data.
    """

    def __init__(self, sharers: Sharers) -> None:
        self.sharers = sharers
        self.pending = 0  # Samples since the last step.
        self.epochs: Epochs | None = None  # Those of the loop, while it is inside ``node.epochs``.

    def give(self, samples: int) -> None:
        """Count samples that the loop gets."""
        self.pending += samples

    def take(self, samples: Any) -> int:
        """Return the samples of a step: those given by the loop, or those drawn since the last step, or 1.

        Raises:
            ConfigError: ``samples`` is no whole number of at least 0.
        """
        drawn, self.pending = self.pending, 0
        if samples is None:
            return drawn or 1
        return samples if type(samples) is int and samples >= 0 else whole_number(samples)

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


def whole_number(samples: Any) -> int:
    """Return a step's samples as an int of its own. A tensor of a loop would change the count with its next value."""
    try:
        if isinstance(samples, bool | str) or shape_of(samples) not in ((), (1,)):
            raise TypeError
        count = int(samples)
        if count != samples or count < 0:  # A fraction, or below 0. NaN and infinities have raised.
            raise ValueError
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ConfigError(
            f"samples is {shown(samples)}: give the whole number of samples in this step, at least 0."
        ) from None
    return count


def shown(value: Any) -> str:
    """Return a short text of a value that fits nowhere."""
    shape = shape_of(value)
    return f"a {type(value).__name__} of shape {shape}" if shape else repr(value)[:80]


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor or array; () for a number."""
    return tuple(getattr(value, "shape", ()))

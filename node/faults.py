"""Faults of this library that one member's message, or one exchange, brought out: contained there, and told once."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from gossip.errors import LocalError

__all__ = ["Faults", "leaves"]

TOLD = 64  # places of faults told to people: who finds one fault can bring it out a thousand times a second


class Faults:
    """``on_event`` tells people. What a fault says of itself is not told: a stranger's bytes may stand in it."""

    def __init__(self, on_event: Callable[[str, str], None]) -> None:
        self.on_event = on_event
        self.told: set[str] = set()
        self.count = 0

    def contain(self, error: BaseException, what: str, end: str) -> None:
        """``what`` raised this, in a plain clause, and ``end`` is what became of it. A LocalError is the user's to
        hear, and whatever is no Exception (a cancellation, an interrupt) nobody's to stop: both are raised again."""
        for leaf in leaves(error):
            if isinstance(leaf, LocalError) or not isinstance(leaf, Exception):
                raise error
            self.count += 1
            where = place(leaf)
            if where not in self.told and len(self.told) < TOLD:
                self.told.add(where)
                self.on_event(
                    "fault", f"{what} raised {type(leaf).__name__} in {where}, a fault of this library; {end}."
                )


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors themselves, out of the groups that nurseries make."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from leaves(one)
    else:
        yield error


def place(error: BaseException) -> str:
    """The file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown place"

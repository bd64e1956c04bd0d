"""Samples of ours that should have counted for members of our run before we were in contact with them.

A step counts for the members that this node is in contact with. Links to the others of a large swarm take their time: a
node makes about two a second. So when a member is met that was heard of before, what this node trained since it heard
of it counts for that member as well. A name alone counts for nothing, and whoever held many names back gains at most
what was trained in the last two periods of ``PERIOD_S``.
"""

from __future__ import annotations

from collections.abc import Iterable

from gossip.effects import MemberState
from gossip.membership.entry import Entry

__all__ = ["Arrears"]

PERIOD_S = 60.0
NEVER = -1  # it is not awaited


class Arrears:
    """The arrears of one node. ``owed`` are samples that its progress lacks."""

    def __init__(self, now: float) -> None:
        self.owed = 0
        self._trained = 0  # samples of this node
        self._since = self._mark = 0  # of them, those before the last period but one, and before the last
        self._marked_s = now

    def train(self, samples: int, now: float) -> None:
        """The node has trained so many in this life."""
        self._trained = samples
        if now >= self._marked_s + PERIOD_S:
            self._since, self._mark, self._marked_s = self._mark, samples, now

    def look(self, entry: Entry, genesis: bytes) -> None:
        """The state or the record of this member is another; ``genesis`` is of our own run."""
        shares = entry.state is MemberState.ALIVE and entry.record.ready and entry.record.genesis == genesis
        if not shares:
            entry.awaited = NEVER
        elif not entry.met:
            entry.awaited = self._trained if entry.awaited == NEVER else entry.awaited
        elif entry.awaited != NEVER:
            self.owed += self._trained - max(entry.awaited, self._since)
            entry.awaited = NEVER

    def restart(self, entries: Iterable[Entry], genesis: bytes) -> None:
        """Our own run is another."""
        self.owed = 0
        for entry in entries:
            entry.awaited = NEVER
            self.look(entry, genesis)

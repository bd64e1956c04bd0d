"""Samples of ours that should have counted for members of our run before we had a link with them.

A training step counts for the members that this node has links with. In a large swarm links take time: a node makes
about two a second. When we first link with a known member, the samples since we heard of it count for that member as
well. A record without a link counts for nothing. A liar that holds back many ids therefore gains at most the samples of
the last two periods of ``PERIOD_S``.
"""

from __future__ import annotations

from collections.abc import Iterable

from gossip.effects import MemberState
from gossip.membership.entry import Entry

__all__ = ["Arrears"]

PERIOD_S = 60.0  # Samples of the current and the previous period count at most.
NEVER = -1  # the value of ``Entry.awaited`` for a member that is linked or not in our run


class Arrears:
    """The arrears of one node. ``owed`` counts samples that its progress lacks."""

    def __init__(self, now: float) -> None:
        self.owed = 0
        self._trained = 0  # samples of this node in this life
        self._since = self._mark = 0  # values of `_trained` at the start of the previous and of the current period
        self._marked_s = now

    def train(self, samples: int, now: float) -> None:
        """Note how many samples the node has trained in this life."""
        self._trained = samples
        if now >= self._marked_s + PERIOD_S:
            self._since, self._mark, self._marked_s = self._mark, samples, now

    def look(self, entry: Entry, run_id: bytes) -> None:
        """Update the arrears after the member's state or record changed. ``run_id`` is the id of our own run."""
        shares = entry.state is MemberState.ALIVE and entry.record.ready and entry.record.run_id == run_id
        if not shares:
            entry.awaited = NEVER
        elif not entry.contacted:
            entry.awaited = self._trained if entry.awaited == NEVER else entry.awaited
        elif entry.awaited != NEVER:
            self.owed += self._trained - max(entry.awaited, self._since)
            entry.awaited = NEVER

    def restart(self, entries: Iterable[Entry], run_id: bytes) -> None:
        """Start again after a switch to another run."""
        self.owed = 0
        for entry in entries:
            entry.awaited = NEVER
            self.look(entry, run_id)

"""Arrears: samples of ours that should have counted for members of our run before we had a link with them.

A training step counts for the members that this node has links with. In a large swarm links take time: a node makes
about two a second. When we first link with a known member, the samples since we heard of it count for that member as
well. A record without a link counts for nothing. A liar that holds back many ids therefore gains at most the samples of
the last two periods of ``PERIOD_S``.
"""

from collections.abc import Iterable

from gossip.effects import MemberState
from gossip.membership.entry import NOT_WAITING, Entry

PERIOD_S = 60.0  # Samples of the current and the previous period count at most.


class Arrears:
    """The arrears of one node."""

    def __init__(self, now: float) -> None:
        self._uncounted = 0  # Samples that our progress lacks.
        self._trained = 0  # Samples of this node in this life.
        self._previous_start = self._current_start = 0  # Samples at the start of the previous and the current period.
        self._current_start_at = now

    def note_samples(self, samples: int, now: float) -> None:
        """Note how many samples the node has trained in this life."""
        self._trained = samples
        if now >= self._current_start_at + PERIOD_S:
            self._previous_start, self._current_start, self._current_start_at = self._current_start, samples, now

    def update(self, entry: Entry, run_id: bytes) -> None:
        """Update the arrears after the member's state or record changed. ``run_id`` is the id of our own run."""
        is_in_run = entry.state is MemberState.ALIVE and entry.record.ready and entry.record.run_id == run_id
        if not is_in_run:
            entry.samples_when_heard = NOT_WAITING
        elif not entry.was_contacted:
            if entry.samples_when_heard == NOT_WAITING:
                entry.samples_when_heard = self._trained
        elif entry.samples_when_heard != NOT_WAITING:
            self._uncounted += self._trained - max(entry.samples_when_heard, self._previous_start)
            entry.samples_when_heard = NOT_WAITING

    def restart(self, entries: Iterable[Entry], run_id: bytes) -> None:
        """Start again after a switch to another run."""
        self._uncounted = 0
        for entry in entries:
            entry.samples_when_heard = NOT_WAITING
            self.update(entry, run_id)

    def take(self) -> int:
        """Return the samples to add to our progress now, once."""
        taken, self._uncounted = self._uncounted, 0
        return taken

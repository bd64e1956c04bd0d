"""The transfer of one session: all that one node holds for an exchange, or for a piece that a newcomer fetches."""

from __future__ import annotations

from gossip.averaging.all_reduce import GroupAverage
from gossip.averaging.pair import PairAverage
from gossip.averaging.vectors import Vector, Vectors


class VectorTransfer:
    """The vectors of one session. A driver adds its links or flows in a subclass.

    It exists from the first effect or message of its session until the session's Release.
    """

    def __init__(self, session: int) -> None:
        self.session = session
        self.requested_at: float | None = None  # The time at which an exchange asked for its snapshot.
        self.snapshot: Vector | None = None  # Our copy, until a mix takes it.
        self.pair: PairAverage | None = None  # The average of a pair or push, once its streams may begin.
        self.group: GroupAverage | None = None  # That of a group.
        self.moments: Vector | None = None  # A partner's moments, as far as they have arrived.

    @property
    def average(self) -> PairAverage | GroupAverage | None:
        return self.pair or self.group

    def take_snapshot(self) -> Vector | None:
        """Return the snapshot, which the caller owns from now on."""
        taken, self.snapshot = self.snapshot, None
        return taken

    def continue_from(self, other: VectorTransfer) -> None:
        """Take over the snapshot of an offer that goes to another partner, or that has given way to this exchange."""
        self.snapshot, self.requested_at = other.take_snapshot(), other.requested_at

    def give_vectors(self, vectors: Vectors) -> None:
        """Give the vectors back, except those that a link may still write to: a partner's moments always."""
        if self.average is not None:
            self.average.release()
        if self.snapshot is not None:
            vectors.give(self.snapshot)
        self.snapshot = self.moments = None

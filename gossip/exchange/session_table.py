"""The records of a peer's exchanges, pairs or groups: those in progress, and the outcomes of the others."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from gossip.codecs import Taken
from gossip.config import Config
from gossip.config.filters import FILTERS
from gossip.effects import Effect, Release
from gossip.exchange.durations import WAIT_PARTNERS, Durations
from gossip.exchange.session import Local, Session
from gossip.exchange.transitions import State
from gossip.ids import PeerId
from gossip.misbehaviour import MisbehaviourLog
from gossip.recent import Recent

__all__ = ["DOUBT_RETRY_S", "REASONS", "VERDICTS", "Ledger", "One", "Refusals"]

REFUSALS = 256  # Pairs of partner and reason that are counted, enough for any display.
VERDICTS = 4_096  # Outcomes remembered, 100 B each: enough for ``doubt_s`` of questions at 100 exchanges a second.
REASONS = frozenset({
    "unanswered", "unreached",  # Failures of an offer: no answer in time; the link broke or could not be made.
    "broken", "stalled", "deadline", "checksum", "overflow", "layout", "terms",  # Failures of a stream.
    "not-finite", "norm", *FILTERS,  # Rejected vectors; a filter gives its name.
    # In doubt to the end; known to have failed; the partner had given up, or joined a run.
    "doubt", "aborted", "late", "replaced",
})  # fmt: skip
DOUBT_RETRY_S = 1.0  # Seconds between two questions for the outcome of an exchange in doubt.


class Refusals:
    """The number of refusals by partner and reason."""

    def __init__(self) -> None:
        self.counts = Recent[tuple[PeerId, str], int](REFUSALS)

    def add(self, partner: PeerId, code: str) -> None:
        key = (partner, code)
        self.counts[key] = self.counts.get(key, 0) + 1

    @property
    def total(self) -> int:
        return sum(self.counts.values())


One = TypeVar("One", bound=Session)
# Key of an outcome: one partner and session, or a group's session for all that know it.
Key = tuple[PeerId, int] | int


class Ledger(Generic[One]):
    """The state of :class:`gossip.exchange.exchanges.Exchanges` that Peer and the drivers read."""

    def __init__(self, me: PeerId, local: Local, config: Config, new_session: Callable[[], int]) -> None:
        self.me, self.local, self.config, self.new_session = me, local, config, new_session
        self.table: dict[int, One] = {}
        self.outgoing: dict[int, One] = {}  # Exchanges of our own mix: one, or as many as it has partners.
        self.verdicts = Recent[Key, bool](VERDICTS)  # Outcomes, for partners that ask.
        self.durations = Durations()
        self.taken = Recent[PeerId, Taken](WAIT_PARTNERS)  # Cost of the last exchange with each partner that we chose.
        self.refusals = Refusals()
        self.misbehaviour = MisbehaviourLog()  # Replaced by Peer's own, once there is one.
        # |theirs - ours|^2 (for a group the equivalent of a pair's) and |ours|^2 of the last exchanges.
        self.seen: deque[tuple[float, float]] = deque(maxlen=8)
        self.done: int = 0
        self.failed_by: dict[str, int] = {}  # Number of failed exchanges by reason, one of REASONS.
        self.last_partner: PeerId | None = None
        self.mixed_at: list[PeerId] = []  # Partners of exchanges that finished since Peer last looked.
        self.own_mixed = False  # One of these exchanges was ours.
        self.began = self.freed = False  # Streams began, or a slot was freed, since Peer last looked.
        self.gave_up = False  # Our own mix ended without a partner since Peer last looked.

    @property
    def moving(self) -> int:
        """Return how many exchanges take a slot. Those in doubt and parked ones take none."""
        moving = 0
        for one in self.table.values():
            moving += not one.idle
        return moving

    @property
    def deadline(self) -> float:
        return min([one.deadline for one in self.table.values()], default=float("inf"))

    @property
    def consensus_distance(self) -> float:
        """Return an estimate of sqrt(mean |x_i - mean|^2) over the swarm, nan before the first exchange.

        For two random members the expectation of |x_i - x_j|^2 is twice that mean square (times n/(n-1)).
        """
        seen = self.seen
        return math.sqrt(0.5 * sum([square for square, _ in seen]) / len(seen)) if seen else math.nan

    def agreement(self) -> float:
        """Return the largest |theirs - ours| / |ours| of the last three exchanges, inf before the first."""
        last = list(self.seen)[-3:]
        return math.sqrt(max(square / own if own > 0 else square for square, own in last)) if last else math.inf

    def held(self, steps: int) -> bool:
        """Return True if the training loop must wait at its boundary after ``steps`` steps.

        It waits for a mix that began ``max_version_gap`` intervals ago (bounded staleness).
        """
        gap, every = self.config.max_version_gap, self.config.interval_steps
        if gap is None or every is None:
            return False
        return any(
            steps - one.steps >= gap * every and one.state is not State.IN_DOUBT
            for one in self.table.values() if one.initiator or one.state is not State.PREPARING
        )  # fmt: skip

    @property
    def failures(self) -> int:
        """Return how many exchanges failed, unanswered offers included."""
        return sum(self.failed_by.values())

    def count(self, code: str) -> None:
        """Count a failed exchange. A partner may send any text as its reason, so unknown ones count as "other"."""
        reason = code if code in REASONS else "other"
        self.failed_by[reason] = self.failed_by.get(reason, 0) + 1

    def remember(self, key: Key, committed: bool) -> None:
        self.verdicts[key] = committed

    def end(self, one: Session) -> list[Effect]:
        self.table.pop(one.session, None)
        self.outgoing.pop(one.session, None)
        self.freed = True
        return [Release(one.session)]

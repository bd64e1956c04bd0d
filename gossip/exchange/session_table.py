"""The records of a peer's exchanges, pairs or groups: those in progress, and the outcomes of the others."""

import math
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from gossip.codecs import ExchangeCost
from gossip.config import Config
from gossip.config.filters import FILTERS
from gossip.effects import Effect, Notice, Release
from gossip.exchange.durations import WAIT_PARTNERS, Durations, OwnResults
from gossip.exchange.session import Local, Session
from gossip.exchange.transitions import State
from gossip.filters.setbacks import Setbacks
from gossip.ids import PeerId
from gossip.misbehaviour import MisbehaviourLog
from gossip.recent import Recent

MAX_REFUSALS = 256  # Pairs of partner and reason that are counted, enough for any display.
# Outcomes that are remembered, 100 B each. A partner asks for one during ``doubt_s`` (30 s) after the exchange. At 100
# exchanges a second these are 3,000.
MAX_OUTCOMES = 4_096
REFUSALS = frozenset({"not-finite", "norm", *FILTERS})  # Codes of rejected vectors; a filter gives its name.
REASONS = REFUSALS | {
    "unanswered", "unreached",  # Failures of an offer: no answer in time; the link broke or could not be made.
    "broken", "stalled", "deadline", "checksum", "overflow", "layout", "terms",  # Failures of a stream.
    # No answer for the time of doubt; the partner has not committed; it had given up; it takes other weights.
    "doubt", "aborted", "late", "replaced",
}  # fmt: skip
INNOCENT_REASONS = ("replaced", "late", "overflow")  # Reasons for an abort that are not the partner's fault.
DOUBT_RETRY_S = 1.0  # Seconds between two questions for the outcome of an exchange in doubt.


class Refusals:
    """The number of refusals by partner and reason."""

    def __init__(self) -> None:
        self.counts = Recent[tuple[PeerId, str], int](MAX_REFUSALS)

    def add(self, partner: PeerId, code: str) -> None:
        key = (partner, code)
        self.counts[key] = self.counts.get(key, 0) + 1

    @property
    def total(self) -> int:
        return sum(self.counts.values())


AnySession = TypeVar("AnySession", bound=Session)
# Key of an outcome: the partner and the session number of a pair or push, the session number alone of a group.
OutcomeKey = tuple[PeerId, int] | int


class Ledger(Generic[AnySession]):
    """The state of :class:`gossip.exchange.exchanges.Exchanges` that Peer and the drivers read."""

    def __init__(self, me: PeerId, local: Local, config: Config, new_session: Callable[[], int]) -> None:
        self.me, self.local, self.config, self.new_session = me, local, config, new_session
        self.table: dict[int, AnySession] = {}  # By session number.
        self.outcomes = Recent[OutcomeKey, bool](MAX_OUTCOMES)  # For partners that ask: True if it has happened.
        self.durations = Durations()
        self.own_results = OwnResults()
        # The cost of the last exchange with each partner that we chose.
        self.last_costs = Recent[PeerId, ExchangeCost](WAIT_PARTNERS)
        self.refusals, self.setbacks = Refusals(), Setbacks()
        self.misbehaviour = MisbehaviourLog()  # Replaced by Peer's own, once there is one.
        # For each of the last exchanges the square of the distance between the partner's vector and ours, and the
        # square of our vector's norm. A group's distance is converted to that of a pair.
        self.last_squares: deque[tuple[float, float]] = deque(maxlen=8)
        self.done_count: int = 0  # Finished exchanges.
        # ``done_count`` at the first of our last settlements that all found both vectors equal; None if the last
        # exchange changed our weights.
        self.equal_since: int | None = None
        self.failures_by_reason: dict[str, int] = {}  # Number of failed exchanges by reason, one of REASONS or "other".
        self.last_partner: PeerId | None = None
        # The next five tell what has happened since Peer last looked.
        self.mixed_partners: list[PeerId] = []  # Partners of exchanges that finished.
        self.has_own_mixed = False  # One of these exchanges was ours.
        self.is_reservation_due = False  # Streams began, or several searches for a partner failed.
        self.has_freed_slot = False  # An exchange ended, was backgrounded or came into doubt.
        self.has_given_up = False  # Our own mix ended without a partner.

    @property
    def own_exchanges(self) -> list[AnySession]:
        """Return the exchanges of our own mix: one, or one for each partner."""
        return [session for session in self.table.values() if session.is_initiator and session.has_slot]

    @property
    def has_own(self) -> bool:
        """Return True if there are any. The initiator reads it after every decision."""
        return bool(self.table) and any([session.has_slot for session in self.table.values() if session.is_initiator])

    @property
    def used_slots(self) -> int:
        """Return how many exchanges take a slot. Those in doubt and backgrounded ones take none."""
        used = 0
        for session in self.table.values():
            used += session.has_slot
        return used

    @property
    def deadline(self) -> float:
        """Return the time to call :meth:`Exchanges.tick`."""
        return min([session.timer_at for session in self.table.values()], default=float("inf"))

    @property
    def consensus_distance(self) -> float:
        """Return an estimate of sqrt(mean |x_i - mean|^2) over the swarm, nan before the first exchange.

        For two random members the expectation of |x_i - x_j|^2 is twice that mean square (times n/(n-1)). Training
        threads read it while exchanges end in another.
        """
        squares = [difference_sq for difference_sq, _ in tuple(self.last_squares)]
        return math.sqrt(0.5 * sum(squares) / len(squares)) if squares else math.nan

    def is_held(self, steps: int) -> bool:
        """Return True if the training loop must wait at its boundary after ``steps`` steps.

        It waits for a mix that began ``max_version_gap`` intervals ago (bounded staleness).
        """
        max_intervals, interval_steps = self.config.max_version_gap, self.config.interval_steps
        if max_intervals is None or interval_steps is None:
            return False
        return any(
            steps - session.snapshot_steps >= max_intervals * interval_steps and session.state is not State.IN_DOUBT
            for session in self.table.values() if session.is_initiator or session.state is not State.PREPARING
        )  # fmt: skip

    def note_setback(self, session: int, partner: PeerId, is_setback: bool, now: float) -> list[Effect]:
        """Note whether the distance from a partner spoiled an exchange; tell the user if that is too often."""
        if not self.setbacks.note(partner, is_setback, now):
            return []
        return [Notice("apart", self.setbacks.sentence, session)]

    @property
    def failures(self) -> int:
        """Return how many exchanges failed, unanswered offers included."""
        return sum(self.failures_by_reason.values())

    def count_failure(self, code: str) -> None:
        """Count a failed exchange. A partner may send any text as its reason, so unknown ones count as "other"."""
        reason = code if code in REASONS else "other"
        self.failures_by_reason[reason] = self.failures_by_reason.get(reason, 0) + 1

    def remember_outcome(self, key: OutcomeKey, committed: bool) -> None:
        """Remember whether an exchange has happened, for partners that ask."""
        self.outcomes[key] = committed

    def remove(self, session: Session) -> list[Effect]:
        """Forget a session that has ended, and release what the driver holds for it."""
        self.table.pop(session.session, None)
        self.has_freed_slot = True
        return [Release(session.session)]

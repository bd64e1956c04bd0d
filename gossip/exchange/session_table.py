"""What a peer's exchanges keep, be they of pairs or of groups: those under way, and what became of the others."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from gossip.codecs import Taken
from gossip.conduct import Conduct
from gossip.config import Config
from gossip.config.filters import FILTERS
from gossip.effects import Effect, Release
from gossip.exchange.durations import PARTNERS, Durations
from gossip.exchange.session import Local, Session
from gossip.exchange.transitions import State
from gossip.ids import PeerId
from gossip.recent import Recent

__all__ = ["DOUBT_RETRY_S", "REASONS", "VERDICTS", "Ledger", "One", "Refusals"]

REFUSALS = 256  # partners and reasons counted apart: what one node ever needs to show
VERDICTS = 4_096  # ends remembered, 100 B each: doubt_s of asking after them at 100 exchanges a second
REASONS = frozenset({
    "unanswered", "unreached",  # an offer: nobody said a word in time; the link broke, or could not be made
    "broken", "stalled", "deadline", "checksum", "overflow", "layout", "terms",  # a stream
    "not-finite", "norm", *FILTERS,  # a vector; of a filter its name
    "doubt", "aborted", "late", "replaced",  # never known; known to have failed; the partner had given up, or joined
})  # fmt: skip
DOUBT_RETRY_S = 1.0  # between two questions how an exchange in doubt ended


class Refusals:
    """How often what was refused, from whom and why."""

    def __init__(self) -> None:
        self.counts = Recent[tuple[PeerId, str], int](REFUSALS)

    def add(self, partner: PeerId, code: str) -> None:
        key = (partner, code)
        self.counts[key] = self.counts.get(key, 0) + 1

    @property
    def total(self) -> int:
        return sum(self.counts.values())


One = TypeVar("One", bound=Session)
Key = tuple[PeerId, int] | int  # who may ask how it ended: one partner, or whoever knows a group's session


class Ledger(Generic[One]):
    """What Peer and the drivers read of :class:`gossip.exchange.exchanges.Exchanges`."""

    def __init__(self, me: PeerId, local: Local, config: Config, new_session: Callable[[], int]) -> None:
        self.me, self.local, self.config, self.new_session = me, local, config, new_session
        self.table: dict[int, One] = {}
        self.outgoing: dict[int, One] = {}  # those of our own mix: one, or as many as it has partners
        self.verdicts = Recent[Key, bool](VERDICTS)  # how they ended, for those who ask
        self.durations = Durations()
        self.taken = Recent[PeerId, Taken](PARTNERS)  # what the last exchange took with each that we chose
        self.refusals = Refusals()
        self.conduct = Conduct()  # Peer's own, once there is one
        # |theirs - ours|^2, for a group what a pair's would be, and |ours|^2 of the last exchanges
        self.seen: deque[tuple[float, float]] = deque(maxlen=8)
        self.done = 0
        self.failed_by: dict[str, int] = {}  # how many came to nothing, by the reason: one of REASONS
        self.last_partner: PeerId | None = None
        self.mixed_at: list[PeerId] = []  # partners of exchanges finished since Peer last looked
        self.own_mixed = False  # and one of them was ours
        self.began = self.freed = False  # streams have, and a slot is, since Peer last looked
        self.gave_up = False  # our own mix ended without a partner since Peer last looked

    @property
    def moving(self) -> int:
        """How many take a slot. One in doubt moves nothing any more, and one that is parked may never."""
        moving = 0
        for one in self.table.values():
            moving += not one.idle
        return moving

    @property
    def deadline(self) -> float:
        return min([one.deadline for one in self.table.values()], default=float("inf"))

    @property
    def consensus_distance(self) -> float:
        """sqrt(mean |x_i - mean|^2) over the swarm, estimated from the last exchanges: for two random members the
        expectation of |x_i - x_j|^2 is twice that mean square (times n/(n-1)). nan before the first exchange."""
        seen = self.seen
        return math.sqrt(0.5 * sum([square for square, _ in seen]) / len(seen)) if seen else math.nan

    def agreement(self) -> float:
        """The largest |theirs - ours| / |ours| of the last three exchanges; inf before the first."""
        last = list(self.seen)[-3:]
        return math.sqrt(max(square / own if own > 0 else square for square, own in last)) if last else math.inf

    def held(self, steps: int) -> bool:
        """Whether the training loop, so many steps into its life, must wait at its boundary: a mix began
        ``max_version_gap`` intervals ago."""
        gap, every = self.config.max_version_gap, self.config.interval_steps
        if gap is None or every is None:
            return False
        return any(
            steps - one.steps >= gap * every and one.state is not State.DOUBT
            for one in self.table.values() if one.initiator or one.state is not State.PREPARING
        )  # fmt: skip

    @property
    def failures(self) -> int:
        """How many exchanges came to nothing, offers that nobody answered among them."""
        return sum(self.failed_by.values())

    def count(self, code: str) -> None:
        """One came to nothing. What a partner gives for a reason is a text of its own choice."""
        reason = code if code in REASONS else "other"
        self.failed_by[reason] = self.failed_by.get(reason, 0) + 1

    def remember(self, key: Key, committed: bool) -> None:
        self.verdicts[key] = committed

    def end(self, one: Session) -> list[Effect]:
        self.table.pop(one.session, None)
        self.outgoing.pop(one.session, None)
        self.freed = True
        return [Release(one.session)]
